"""Keys, shards and namespaces: equal for equal bytes, and never otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import ConfigError
from cenote.connectors.vllm.identity import space_of
from cenote.connectors.vllm.keys import RankShard, object_keys, shards_of
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.weights import weights_digest


def test_each_rank_has_a_shard() -> None:
    assert shards_of(2, 1, 1) == [RankShard(0, 0, 1), RankShard(1, 0, 1)]
    assert [rank.shard for rank in shards_of(2, 2, 1)] == [0, 1, 2, 3]


def test_ranks_with_equal_bytes_share_a_shard_and_its_saving() -> None:
    ranks = shards_of(4, 1, 4)
    assert {rank.shard for rank in ranks} == {0}
    for position in range(8):
        assert sum(rank.saves(position) for rank in ranks) == 1
    assert [rank.shard for rank in shards_of(4, 1, 2)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="do not divide"):
        shards_of(4, 1, 3)


def test_keys_differ_by_hash_group_and_shard() -> None:
    keys = object_keys([b"a" * 32, b"b" * 32, b"a" * 32], [0, 0, 1], [0, 1])
    assert len(set(keys)) == 6
    assert keys[0][:32] == b"a" * 32
    assert keys[:2] == object_keys([b"a" * 32], [0], [0, 1])


def test_whatever_the_bytes_depend_on_makes_another_namespace() -> None:
    facts: dict[str, object] = {"model": {"layers": 4}, "weights": ["w"], "kv_dtype": "auto"}
    one = space_of("vllm", facts)
    assert space_of("vllm", dict(reversed(facts.items()))) == one
    assert one.name.startswith("vllm/")
    for name, value in [("weights", ["x"]), ("kv_dtype", "fp8"), ("model", {"layers": 5})]:
        other = space_of("vllm", {**facts, name: value})
        assert other.name != one.name
        assert other.fingerprint != one.fingerprint


def model(directory: Path, *contents: bytes) -> Path:
    directory.mkdir(parents=True)
    for number, content in enumerate(contents):
        (directory / f"model-{number}.safetensors").write_bytes(content)
    return directory


def test_weights_are_known_by_their_contents_not_by_their_path(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = weights_digest(model(tmp_path / "a" / "ckpt", b"1" * 100, b"2" * 100), cache)
    assert one is not None
    assert weights_digest(model(tmp_path / "b" / "ckpt", b"1" * 100, b"2" * 100), cache) == one
    for number, contents in enumerate([(b"1" * 100, b"2" * 99 + b"3"), (b"1" * 100,)]):
        directory = model(tmp_path / str(number) / "ckpt", *contents)
        assert weights_digest(directory, cache) != one


def test_digests_are_kept_and_made_anew_when_a_file_changes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    directory = model(tmp_path / "ckpt", b"1" * 100)
    one = weights_digest(directory, cache)
    (kept,) = cache.iterdir()
    kept.write_text("f" * 32)
    assert weights_digest(directory, cache) != one, "it is read from the cache"
    (directory / "model-0.safetensors").unlink()
    (directory / "model-0.safetensors").write_bytes(b"1" * 101)
    changed = weights_digest(directory, cache)
    assert changed not in (one, None)
    kept.write_text("not a digest")
    assert weights_digest(directory, cache) == changed


def test_without_files_nothing_is_said_of_weights(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None
    assert weights_digest(tmp_path / "none") is None


def test_options_have_units_and_misspelt_ones_are_refused() -> None:
    options = make_options({"master": "h:1", "staging_bytes": "2GiB", "lookup_deadline_s": "20ms"})
    assert options.staging_bytes == 2 << 30
    assert options.lookup_deadline_s == 0.02
    with pytest.raises(ConfigError, match="lookup_deadline_s"):
        make_options({"lookup_deadline": 1})
