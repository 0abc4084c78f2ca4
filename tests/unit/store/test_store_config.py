"""What a store daemon can be told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.rpc.address import host_and_port, joined
from cenote.runtime.config import load_config
from cenote.store.__main__ import PROGRAM, main
from cenote.store.config import (
    ENV_PREFIX,
    StoreConfig,
    advertised_address,
    socket_path,
)


def config(**values: object) -> StoreConfig:
    return load_config(
        StoreConfig, env_prefix=ENV_PREFIX, env={}, overrides={"name": "n1"} | values
    )


def test_flags_variables_and_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text('dram = "2GiB"\nname = "from-file"\nmaster = ["a:1", "b:2"]\n')
    made = load_config(
        StoreConfig,
        env_prefix=ENV_PREFIX,
        file=path,
        env={"CENOTE_STORE_NAME": "from-env", "CENOTE_STORE_WIPE_ON_EXIT": "yes"},
        overrides={"dram": "3GiB", "dram_allow_less": True},
    )
    assert (made.dram, made.name, made.master) == (3 << 30, "from-env", ("a:1", "b:2"))
    assert made.wipe_on_exit
    assert made.dram_allow_less


def test_the_default_name_is_the_hosts_and_it_listens_on_loopback() -> None:
    made = load_config(StoreConfig, env_prefix=ENV_PREFIX, env={})
    assert made.name
    assert host_and_port(made.listen, "listen") == ("127.0.0.1", 0)
    assert host_and_port(made.grpc, "grpc")[0] == "127.0.0.1"
    assert made.metrics_listen == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dram": "100KiB"}, r"--dram: '100KiB' is less than 1 MiB$"),
        ({"dram": "64"}, r"--dram: '64' is less than 1 MiB \(.*bytes; write 64MiB or 64GiB"),
        ({"dram": "4G"}, r"--dram: '4G' is no size"),
        ({"name": "a/b"}, r"--name 'a/b' can't stand in a file name"),
        ({"master": ""}, "--master names no address"),
        ({"master": "x"}, r"--master: address 'x' has no host or no port"),
        ({"master": "a:1,::1:2"}, r"--master: address '::1:2' is ambiguous"),
        ({"listen": "nowhere"}, "--listen 'nowhere' is no address"),
        ({"listen": "::1:5"}, "--listen '::1:5' is no address"),
        ({"listen": "h:70000"}, "--listen 'h:70000' is no address"),
        ({"listen": "0.0.0.0:1"}, "--advertise"),
        ({"listen": "[::]:1"}, "--advertise"),
        ({"grpc": "x"}, "--grpc 'x' is no address"),
        ({"metrics_listen": "x"}, "--metrics-listen 'x' is no address"),
        ({"socket": "a/b.sock"}, "--socket 'a/b.sock' is no absolute path"),
        ({"socket_dir": "a"}, "--socket-dir 'a' is no absolute path"),
        ({"dramm": "1GiB"}, "did you mean --dram"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


@pytest.mark.parametrize("host", ["10.0.0.1", "[fd00::1]", "node-1"])
@pytest.mark.parametrize("port", ["listen", "grpc"])
def test_without_a_token_it_listens_on_loopback_alone(host: str, port: str) -> None:
    given = {port: f"{host}:1"}
    with pytest.raises(ConfigError, match=f"--{port} .*open to the network.*--token-file"):
        config(**given)
    assert config(insecure=True, **given).insecure
    for credentials in ({"token": "cenote_a_b"}, {"token_file": "/store.token"}):
        assert config(**given, **credentials).has_credentials


def test_a_token_is_not_shown() -> None:
    assert "hunter2" not in repr(config(token="hunter2"))


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("", "127.0.0.1:4000"),
        ("node7", "node7:4000"),
        ("node7:0", "node7:4000"),
        ("node7:99", "node7:99"),
        ("[fd00::1]", "[fd00::1]:4000"),
        ("[fd00::1]:99", "[fd00::1]:99"),
    ],
)
def test_the_advertised_address_has_the_bound_port_unless_told(
    advertise: str, expected: str
) -> None:
    assert advertised_address(config(advertise=advertise), ("127.0.0.1", 4000)) == expected


def test_addresses_are_split_and_joined() -> None:
    for address in ("[::1]:5", "127.0.0.1:0"):
        assert joined(*host_and_port(address, "listen")) == address


def test_the_socket_lies_where_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_path(config(socket=str(tmp_path / "x" / "s"))) == str(tmp_path / "x" / "s")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700
    assert socket_path(config(socket_dir=str(tmp_path))) == str(tmp_path / "cenote-n1.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_path(config()) == str(tmp_path / "cenote-n1.sock")


def test_without_a_runtime_directory_it_lies_in_one_of_this_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"cenote-{os.getuid()}"
    assert socket_path(config()) == str(directory / "cenote-n1.sock")
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(ResourceUnavailable, match="not a directory of this user alone"):
        socket_path(config())
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(ResourceUnavailable):
        socket_path(config())


def test_sockets_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 107 bytes"):
        socket_path(config(socket="/tmp/" + "x" * 120))
    with pytest.raises(ConfigError, match="has a space"):
        socket_path(config(socket="/tmp/a b"))
    (tmp_path / "file").touch()
    with pytest.raises(ResourceUnavailable, match="can't make the directory"):
        socket_path(config(socket=str(tmp_path / "file" / "s")))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--wipe-on-exit"], True),
        (["--wipe-on-exit", "false"], "false"),
        (["--wipe-on-exit=yes"], "yes"),
        (["--no-wipe-on-exit"], False),
    ],
)
def test_switches_may_have_a_value(words: list[str], expected: object) -> None:
    assert PROGRAM.parser().parse_args([*words, "--name", "n1"]).wipe_on_exit == expected


def test_the_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CENOTE_STORE_CONFIG", raising=False)
    assert main(["--dram", "many"]) == 2
    assert "cenote-store: --dram: 'many' is no size" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--dram-allow-less", "--wipe-on-exit", "--socket-dir", "--metrics", "--config"):
        assert flag in text
