"""What users get wrong: a typed error that names it, and nothing is lost by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    ConfigError,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    InvalidBuffer,
    InvalidKey,
    NamespaceNotFound,
    ObjectTooLarge,
    ReplicasUnavailable,
)
from cenote.client import Client
from cluster import Cluster, run_module
from payloads import payload_of

pytestmark = pytest.mark.integration

MIB = 1 << 20
CANARIES = {f"canary{i}": 1 + 997 * i for i in range(40)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=1, dram_bytes=32 * MIB) as made:
        yield made


@pytest.fixture(scope="module", params=[("shm",), ("tcp",)], ids=["shm", "tcp"])
def shared_client(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Client]:
    with cluster.client(transports=request.param) as made:
        made.put_batch(list(CANARIES), [payload_of(k, n) for k, n in CANARIES.items()])
        yield made


@pytest.fixture
def client(shared_client: Client, cluster: Cluster) -> Iterator[Client]:
    """After each test everything that was put before is still there."""
    yield shared_client
    values = shared_client.get_batch(list(CANARIES))
    assert values == [payload_of(key, size) for key, size in CANARIES.items()]
    assert all(process.is_running for process in cluster.processes)


Call = Callable[[Client, Any], object]

KEY_CALLS: dict[str, Call] = {
    "put": lambda c, key: c.put(key, b"x"),
    "put_batch": lambda c, key: c.put_batch(["fine", key], [b"x", b"y"]),
    "get": lambda c, key: c.get(key),
    "get_batch": lambda c, key: c.get_batch(["fine", key]),
    "get_into": lambda c, key: c.get_into(key, bytearray(10)),
    "exists": lambda c, key: c.exists(key),
    "exists_batch": lambda c, key: c.exists_batch(["fine", key]),
    "match": lambda c, key: c.match(["fine", key]),
    "acquire": lambda c, key: c.acquire(["fine", key], 1.0),
    "remove": lambda c, key: c.remove(key),
    "pin": lambda c, key: c.pin(["fine", key]),
    "prefix": lambda c, key: c.put_batch(["fine"], [b"x"], prefix=["fine", key]),
}
BAD_KEYS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "empty"),
    "empty bytes": (b"", "empty"),
    "too long": ("k" * 513, "513 bytes"),
    "too long in bytes": ("ä" * 257, "514 bytes"),
    "int": (7, "int"),
    "None": (None, "NoneType"),
    "list": (["a"], "list"),
    "bytearray": (bytearray(b"a"), "bytearray"),
    "lone surrogate": ("\ud800", "Unicode"),
}


@pytest.mark.parametrize("call", KEY_CALLS.values(), ids=list(KEY_CALLS))
@pytest.mark.parametrize(("key", "named"), BAD_KEYS.values(), ids=list(BAD_KEYS))
def test_wrong_keys(client: Client, call: Call, key: Any, named: str) -> None:
    with pytest.raises(InvalidKey, match=named) as caught:
        call(client, key)
    assert caught.value.remedy
    # Nothing of the batch was done: it was refused before anything was sent.
    assert not client.exists("fine")


def test_keys_at_the_limits_work(client: Client) -> None:
    for key in ("k", "k" * 512, b"\x00", b"\xff" * 512, "ä" * 256, "\x00 \n"):
        client.put(key, b"value of it")
        assert client.get(key) == b"value of it"
        assert client.remove(key)


@pytest.mark.parametrize("keys", ["abc", b"abc", 7, None, [["a"]]])
def test_wrong_batches(client: Client, keys: Any) -> None:
    with pytest.raises(InvalidKey):
        client.exists_batch(keys)
    with pytest.raises(InvalidKey):
        client.put_batch(keys, [b"x"])


def read_only(size: int) -> memoryview:
    return memoryview(bytes(size))


VALUES: dict[str, tuple[Any, str]] = {
    "str": ("text", "str"),
    "int": (7, "int"),
    "None": (None, "NoneType"),
    "objects": (np.array([object()]), "object"),
    "strided": (np.zeros((8, 8), np.uint8)[:, ::2], "contiguous"),
    "strided bytes": (memoryview(bytes(100))[::3], "contiguous"),
    "nothing": (b"", "0 bytes|empty"),
    "a list with a str": ([b"x", "y"], "str"),
}


@pytest.mark.parametrize(("value", "named"), VALUES.values(), ids=list(VALUES))
def test_wrong_values(client: Client, value: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        client.put("wrong value", value)
    with pytest.raises(InvalidArgument, match=named) as caught:
        client.put_from_batch(["fine", "wrong value"], [b"x", value])
    assert "1" in str(caught.value), "the position in the batch is not named"
    assert not client.exists("wrong value")
    assert not client.exists("fine")


TARGETS: dict[str, tuple[Any, str]] = {
    "bytes": (bytes(CANARIES["canary3"]), "read-only|writable"),
    "read-only view": (read_only(CANARIES["canary3"]), "read-only|writable"),
    "strided": (np.zeros((4096, 2), np.uint8)[:, 0], "contiguous"),
    "str": ("x" * 5000, "str"),
    "None": (None, "NoneType"),
    "list with bytes": ([bytearray(1000), bytes(5000)], "read-only|writable"),
}


@pytest.mark.parametrize(("target", "named"), TARGETS.values(), ids=list(TARGETS))
def test_wrong_targets(client: Client, target: Any, named: str) -> None:
    with pytest.raises(InvalidBuffer, match=named):
        client.get_into("canary3", target)
    with pytest.raises(InvalidBuffer, match=named):
        client.get_into_batch(["canary3"], [target])


def test_a_read_only_array(client: Client) -> None:
    array = np.zeros(5000, np.uint8)
    array.flags.writeable = False
    with pytest.raises(InvalidBuffer, match=r"read-only|writable"):
        client.get_into("canary3", array)
    assert not array.any()


def test_too_small_a_buffer_fails_its_key_only(client: Client) -> None:
    size = CANARIES["canary3"]
    small = bytearray(b"\xee" * (size - 1))
    with pytest.raises(InvalidBuffer, match=rf"{size - 1} bytes.*{size}"):
        client.get_into("canary3", small)
    good = [bytearray(CANARIES[key]) for key in ("canary2", "canary4")]
    results = client.get_into_batch(["canary2", "canary3", "canary4"], [good[0], small, good[1]])
    assert [bytes(b) for b in good] == [
        payload_of(key, CANARIES[key]) for key in ("canary2", "canary4")
    ]
    assert results.failed_count == 1
    assert isinstance(results.error(1), InvalidBuffer)
    with pytest.raises(InvalidBuffer, match="canary3"):
        results.raise_for_errors()
    assert small == bytearray(b"\xee" * (size - 1)), "bytes were written into what was refused"


WRONG_CALLS: dict[str, tuple[Callable[[Client], object], type[CenoteError], str]] = {
    "more values than keys": (lambda c: c.put_batch(["a"], [b"x", b"y"]), InvalidArgument, "2"),
    "fewer buffers": (
        lambda c: c.get_into_batch(["a", "b"], [bytearray(1)]),
        InvalidArgument,
        "1",
    ),
    "neither buffers nor addresses": (
        lambda c: c.get_into_batch(["a"]),
        InvalidBuffer,
        "addresses",
    ),
    "addresses without lengths": (
        lambda c: c.put_from_batch(["a"], addresses=[4096]),
        InvalidBuffer,
        "length",
    ),
    "address 0": (
        lambda c: c.put_from_batch(["a"], addresses=[0], lengths=[10]),
        InvalidBuffer,
        "address",
    ),
    "length -1": (
        lambda c: c.put_from_batch(["a"], addresses=[4096], lengths=[-1]),
        InvalidBuffer,
        "length",
    ),
    "addresses of text": (
        lambda c: c.put_from_batch(["a"], addresses=["x"], lengths=[1]),
        InvalidBuffer,
        "address",
    ),
    "deadline of text": (lambda c: c.get("a", deadline_s="1"), InvalidArgument, "deadline_s"),  # type: ignore[arg-type]
    "deadline nan": (lambda c: c.get("a", deadline_s=float("nan")), InvalidArgument, "deadline_s"),
    "deadline 0": (lambda c: c.get("a", deadline_s=0), DeadlineExceeded, "deadline_s"),
    "deadline -1": (lambda c: c.put("a", b"x", deadline_s=-1), DeadlineExceeded, "deadline_s"),
    "replicas 0": (lambda c: c.put("a", b"x", replicas=0), InvalidArgument, "replicas"),
    "replicas 9": (lambda c: c.put("a", b"x", replicas=9), InvalidArgument, "replicas"),
    "replicas of text": (lambda c: c.put("a", b"x", replicas="2"), InvalidArgument, "replicas"),  # type: ignore[arg-type]
    "min above replicas": (
        lambda c: c.put("a", b"x", replicas=1, min_replicas=2),
        InvalidArgument,
        "min_replicas",
    ),
    "no such many domains": (
        lambda c: c.put("a", b"x", replicas=3, min_replicas=3),
        ReplicasUnavailable,
        "min_replicas",
    ),
    "durability": (lambda c: c.put("a", b"x", durability="never"), InvalidArgument, "never"),  # type: ignore[arg-type]
    "ttl -1": (lambda c: c.put("a", b"x", ttl_s=-1), InvalidArgument, "ttl_s"),
    "ttl of text": (lambda c: c.put("a", b"x", ttl_s="1"), InvalidArgument, "ttl_s"),  # type: ignore[arg-type]
    "lease of nothing": (lambda c: c.acquire(["a"], 0), InvalidArgument, "ttl_s"),
    "lease for ever": (lambda c: c.acquire(["a"], 1e9), InvalidArgument, "ttl_s"),
    "lease of text": (
        lambda c: c.get_into_batch(["a"], [bytearray(1)], lease="mine"),  # type: ignore[arg-type]
        InvalidArgument,
        "AcquiredLease",
    ),
    "larger than the pool": (
        lambda c: c.put("a", np.zeros(33 * MIB, np.uint8)),
        ObjectTooLarge,
        "larger than the pool",
    ),
}


@pytest.mark.parametrize(("call", "kind", "named"), WRONG_CALLS.values(), ids=list(WRONG_CALLS))
def test_wrong_calls(
    client: Client, call: Callable[[Client], object], kind: type[CenoteError], named: str
) -> None:
    with pytest.raises(kind, match=named):
        call(client)
    assert not client.exists("a")


def test_too_large_an_object_fails_its_key_only(client: Client) -> None:
    values = [b"before", np.zeros(33 * MIB, np.uint8), b"after"]
    results = client.put_batch(["l0", "l1", "l2"], values)
    assert [r.stored for r in results] == [True, False, True]
    assert isinstance(results[1].error, ObjectTooLarge)
    assert client.get_batch(["l0", "l1", "l2"]) == [b"before", None, b"after"]
    client.remove_batch(["l0", "l2"])


def test_another_fingerprint_is_refused_and_the_objects_stay(
    cluster: Cluster, client: Client
) -> None:
    mine = client.namespace("model", fingerprint=b"bf16;block=16")
    mine.put("block", b"sixteen tokens")
    for fingerprint in (b"fp8;block=16", b"", "bf16;block=32"):
        with pytest.raises(FingerprintMismatch, match="model") as caught:
            client.namespace("model", fingerprint=fingerprint)
        assert caught.value.remedy
        with pytest.raises(FingerprintMismatch, match="model"):
            cluster.client(namespace="model", fingerprint=fingerprint)
    with cluster.client(namespace="model", fingerprint=b"bf16;block=16") as other:
        assert other.get("block") == b"sixteen tokens"
    assert mine.get("block") == b"sixteen tokens"
    mine.remove("block")


@pytest.mark.parametrize("name", ["", "n" * 300, 7])
def test_wrong_namespace_names(client: Client, name: Any) -> None:
    with pytest.raises((InvalidArgument, NamespaceNotFound)):
        client.namespace(name)


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "transport": ({"transports": ("carrier pigeon",)}, "carrier pigeon"),
    "no transport": ({"transports": ()}, "transport"),
    "deadline": ({"deadline_s": -1}, "deadline"),
    "verify": ({"verify": "hope"}, "hope"),
    "min_replicas": ({"replicas": 1, "min_replicas": 2}, "min_replicas"),
    "unknown": ({"colour": "blue"}, "colour"),
}


@pytest.mark.parametrize(("options", "named"), WRONG_OPTIONS.values(), ids=list(WRONG_OPTIONS))
def test_wrong_client_options(
    cluster: Cluster, client: Client, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        cluster.client(**options)


@pytest.mark.parametrize("address", ["nowhere", "host:port", "127.0.0.1:99999", "unix://relative"])
def test_wrong_addresses(client: Client, address: str) -> None:
    with pytest.raises(InvalidArgument):
        Client(address, deadline_s=1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--listen", "nowhere"),
        ("--listen", "0.0.0.0:0"),
        ("--metadata", "paper:"),
        ("--lease-ttl-s", "soon"),
        ("--lease-ttl-s", "30", "--lease-ttl-max-s", "10"),
        ("--colour", "blue"),
        ("--socket", "relative/path"),
    ],
)
def test_wrong_flags_of_a_master(arguments: tuple[str, ...]) -> None:
    check_refused("cenote.master", arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dram", "lots"),
        ("--dram", "1KiB"),
        ("--dram", "4G"),
        ("--name", "no/slash"),
        ("--listen", "0.0.0.0:0"),
        ("--dram-dir", "/nowhere/at/all"),
        ("--colour", "blue"),
    ],
)
def test_wrong_flags_of_a_store(arguments: tuple[str, ...]) -> None:
    check_refused("cenote.store", arguments)


def check_refused(module: str, arguments: tuple[str, ...]) -> None:
    """It ends at once, with an exit code that says why, and one line that names what is wrong."""
    done = run_module(module, *arguments)
    said = done.stderr.decode()
    assert done.returncode in (2, 3), said
    assert "Traceback" not in said
    assert any(word.strip("-") in said for word in arguments), said


def test_more_memory_than_there_is(tmp_path: os.PathLike[str]) -> None:
    """A node that can't get the memory says so at start, with what it could get."""
    done = run_module("cenote.store", "--dram", "100TiB", "--socket-dir", str(tmp_path))
    said = done.stderr.decode()
    assert done.returncode == 3, said
    assert "100 TiB" in said
    assert "could be had" in said
    assert "Traceback" not in said
