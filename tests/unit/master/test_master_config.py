"""The master's configuration: what is refused, and what the state gets of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import ConfigError
from cenote.master.__main__ import PROGRAM
from cenote.master.config import ENV_PREFIX, MasterConfig
from cenote.master.file_backend import FileBackend
from cenote.master.memory_backend import MemoryBackend
from cenote.master.metadata import open_backend
from cenote.rpc.address import host_and_port
from cenote.runtime.config import load_config
from cenote.store.__main__ import PROGRAM as STORE_PROGRAM


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:5110", ("127.0.0.1", 5110)),
        ("[::1]:0", ("::1", 0)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert host_and_port(address, "listen") == expected


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:65536", "host:²", "::1:5110"]
)
def test_wrong_addresses_are_named(address: str) -> None:
    with pytest.raises(ConfigError, match="--grpc"):
        host_and_port(address, "grpc")


def test_nothing_but_loopback_by_default() -> None:
    config = MasterConfig()
    assert {host_and_port(a, "x")[0] for a in (config.listen, config.grpc)} == {"127.0.0.1"}
    assert config.socket == config.metrics_listen == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"listen": "x"}, "--listen"),
        ({"grpc": "x"}, "--grpc"),
        ({"metrics_listen": "x"}, "--metrics-listen"),
        ({"socket": "here.sock"}, "no absolute path"),
        ({"lease_ttl_s": 11.0}, "above --lease-ttl-max-s"),
        ({"heartbeat_s": 3.0}, "less than two heartbeats"),
        ({"leased_share_max": 1.5}, "more than 1"),
        ({"sessions_max": 0}, "less than 1"),
    ],
)
def test_what_does_not_go_together_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(MasterConfig, env_prefix=ENV_PREFIX, env={}, overrides=fields)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "[::]", "master-1", "127.0.0.1.example"])
@pytest.mark.parametrize("port", ["listen", "grpc"])
def test_without_credentials_it_listens_on_loopback_alone(host: str, port: str) -> None:
    def load(**more: object) -> MasterConfig:
        given = {port: f"{host}:1", **more}
        return load_config(MasterConfig, env_prefix=ENV_PREFIX, env={}, overrides=given)

    with pytest.raises(ConfigError, match=f"--{port} .*open to the network.*--tokens.*--insecure"):
        load()
    assert load(insecure=True).insecure
    assert load(tokens="/tokens.json").has_credentials


def test_the_refusal_names_where_the_address_came_from() -> None:
    variables = {f"{ENV_PREFIX}LISTEN": "10.0.0.1:1"}
    with pytest.raises(ConfigError, match=f"{ENV_PREFIX}LISTEN 10.0.0.1:1 is open"):
        load_config(MasterConfig, env_prefix=ENV_PREFIX, env=variables)
    config = load_config(MasterConfig, env_prefix=ENV_PREFIX, env={}, overrides={"grpc": ""})
    assert not config.insecure


def test_a_rate_has_no_flag_that_cuts_its_unit_off() -> None:
    flags = {flag for action in PROGRAM.parser()._actions for flag in action.option_strings}
    assert {"--hot-bytes-per-s", "--lease-ttl"} <= flags
    assert "--hot-bytes-per" not in flags


def test_flags_reach_the_state() -> None:
    flags = ["--lease-ttl", "2s", "--lease-ttl-max-s", "8", "--session-ttl", "1m"]
    flags += ["--lane", "h:1", "--insecure"]
    options = vars(PROGRAM.parser().parse_args(flags))
    assert options.pop("config") is None
    config = load_config(MasterConfig, env_prefix=ENV_PREFIX, env={}, overrides=options)
    state = config.state_config()
    assert (config.listen, state.lease_ttl_default_s, state.lease_ttl_max_s) == ("h:1", 2.0, 8.0)
    assert state.session_ttl_s == 60.0


def test_metadata_urls(tmp_path: Path) -> None:
    assert isinstance(open_backend("memory:"), MemoryBackend)
    for url in (f"file:{tmp_path}", f"file://{tmp_path}"):
        backend = open_backend(url)
        assert isinstance(backend, FileBackend)
        assert backend.name == f"file:{tmp_path}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--log-json"], True),
        (["--log-json", "false"], "false"),
        (["--no-log-json"], False),
    ],
)
def test_boolean_flags_are_those_of_the_store(words: list[str], expected: object) -> None:
    assert PROGRAM.parser().parse_args(words).log_json == expected
    assert STORE_PROGRAM.parser().parse_args(words).log_json == expected


def test_a_file_where_a_directory_is_meant_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file' names is a file \(name a directory\)"):
        open_backend(f"file:{tmp_path / 'file'}")


@pytest.mark.parametrize(
    "url", ["", "memory", "memory:x", "file:", "file://", "etcd:h", "redis://h"]
)
def test_wrong_metadata_urls_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"names no metadata backend|is no etcd URL"):
        open_backend(url)
