from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cenote.api.errors import ConfigError, InvalidArgument
from cenote.runtime.config import help_of, load_config, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    capacity_bytes: int = field(
        default=1024, metadata=option(unit="size", minimum=1, help="how much to give")
    )
    heartbeat_s: float = field(default=1.0, metadata=option(unit="duration", maximum=10))
    port: int = 0
    ratio: float = 0.5
    verbose: bool = False
    hosts: tuple[str, ...] = ()
    verify: Literal["auto", "lease"] = "auto"
    directory: Path | None = None
    name: str = "node"
    token: str = field(default="", repr=False)
    pin: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("bad is no name")
        if self.name == "worse":
            raise InvalidArgument("worse is no name", remedy="choose another")


def load(
    file: Path | None = None, env: Mapping[str, str] | None = None, **overrides: Any
) -> Config:
    return load_config(
        Config, env_prefix="CENOTE_T_", file=file, env=env or {}, overrides=overrides
    )


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "cenote.toml"
    path.write_text('capacity_bytes = "4GiB"\nhosts = ["a", "b"]\nratio = 1\nport = 7\n')
    return path


def test_defaults() -> None:
    config = load()
    assert config == Config()
    with pytest.raises(FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


def test_flags_win_over_environment_over_file_over_default(toml: Path) -> None:
    env = {"CENOTE_T_PORT": "8", "CENOTE_T_RATIO": "0.25", "CENOTE_OTHER_PORT": "x", "PATH": "/bin"}
    config = load(toml, env, ratio=0.125, name=None)
    assert config.capacity_bytes == 4 << 30
    assert config.port == 8
    assert config.ratio == 0.125
    assert config.name == "node"


def test_the_environment_may_name_the_file(toml: Path) -> None:
    assert load(env={"CENOTE_T_CONFIG": str(toml)}).port == 7
    with pytest.raises(ConfigError, match="can't read"):
        load(Path("/nonexistent"), env={"CENOTE_T_CONFIG": str(toml)})


def test_os_environ_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CENOTE_T_PORT", "9")
    assert load_config(Config, env_prefix="CENOTE_T_").port == 9


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("capacity_bytes", "1.5KiB", 1536),
        ("heartbeat_s", "250ms", 0.25),
        ("heartbeat_s", "2", 2.0),
        ("port", "12", 12),
        ("ratio", "0.75", 0.75),
        ("verbose", "Yes", True),
        ("verbose", "0", False),
        ("hosts", "a, b,", ("a", "b")),
        ("hosts", "", ()),
        ("verify", "lease", "lease"),
        ("directory", "/tmp", Path("/tmp")),
        ("directory", "", None),
        ("name", "", ""),
    ],
)
def test_text_of_each_type(name: str, text: str, value: object) -> None:
    assert getattr(load(env={f"CENOTE_T_{name.upper()}": text}), name) == value
    assert getattr(load(None, None, **{name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hosts", ["a"]),
        ("hosts", ("a",)),
        ("directory", Path("/x")),
        ("verbose", True),
        ("port", 3),
    ],
)
def test_flags_may_have_values_of_the_type(name: str, value: Any) -> None:
    expected = tuple(value) if isinstance(value, list) else value
    assert getattr(load(None, None, **{name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("capacity_bytes", "4G", r"'4G' is no size \(write 4GiB"),
        ("capacity_bytes", "0", "'0' is less than 1"),
        ("heartbeat_s", "11", "'11' is more than 10"),
        ("heartbeat_s", "soon", "is no duration"),
        ("port", "1.5", "is no whole number"),
        ("port", True, "is no whole number"),
        ("ratio", "nan", "is no number"),
        ("ratio", True, "is no number"),
        ("verbose", "maybe", "is no boolean"),
        ("verbose", 1, "is no boolean"),
        ("hosts", [1], "is no list of strings"),
        ("verify", "never", "one of: auto, lease"),
        ("directory", 3, "is no path"),
        ("name", 3, "is no string"),
        ("name", "bad", "inconsistent: bad is no name"),
        ("name", "worse", r"worse is no name \(choose another\)"),
    ],
)
def test_wrong_values_are_named_with_a_remedy(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, None, **{name: value})


def test_errors_say_where_the_value_came_from(toml: Path) -> None:
    with pytest.raises(ConfigError, match="environment variable CENOTE_T_PORT: 'x'"):
        load(env={"CENOTE_T_PORT": "x"})
    with pytest.raises(ConfigError, match="--heartbeat-s: 'x'"):
        load(heartbeat_s="x")
    toml.write_text("port = 'x'")
    with pytest.raises(ConfigError, match=f"port in {toml}: 'x'"):
        load(toml)


def test_unknown_keys_are_refused_with_the_nearest_known(toml: Path) -> None:
    toml.write_text("capacty_bytes = 3")
    with pytest.raises(ConfigError, match=r"did you mean capacity_bytes\?"):
        load(toml)
    with pytest.raises(ConfigError, match=r"did you mean CENOTE_T_HEARTBEAT_S\?"):
        load(env={"CENOTE_T_HEARTBEET_S": "1"})
    with pytest.raises(ConfigError, match=r"--heart-beat is unknown.*did you mean --heartbeat-s\?"):
        load(heart_beat=1)
    with pytest.raises(ConfigError, match="known: --capacity-bytes, "):
        load(zzz=1)


def test_keywords_are_answered_as_keywords() -> None:
    def call(**keywords: object) -> Config:
        return load_config(
            Config, env_prefix="CENOTE_T_", env={}, overrides=keywords, overrides_are="keywords"
        )

    with pytest.raises(
        ConfigError, match=r"^the argument heartbeet_s is unknown \(did you mean heartbeat_s\?\)$"
    ):
        call(heartbeet_s=1)
    with pytest.raises(ConfigError, match=r"^the argument heartbeat_s: 11 is more than 10 s$"):
        call(heartbeat_s=11)


def test_what_a_class_says_of_a_flag_names_where_its_value_came_from(toml: Path) -> None:
    @dataclass(frozen=True)
    class Picky:
        listen: str
        listen_more: str = ""

        def __post_init__(self) -> None:
            raise ConfigError(f"--listen {self.listen} is no --listen-more")

    with pytest.raises(ConfigError, match=r"^--listen x is no --listen-more$"):
        load_config(Picky, env_prefix="X_", env={}, overrides={"listen": "x"})
    variables = {"X_LISTEN": "x"}
    with pytest.raises(ConfigError, match=r"^the environment variable X_LISTEN x is no --"):
        load_config(Picky, env_prefix="X_", env=variables)
    toml.write_text("listen_more = 'y'")
    with pytest.raises(ConfigError, match=f"^--listen x is no listen_more in {toml}$"):
        load_config(Picky, env_prefix="X_", env={}, file=toml, overrides={"listen": "x"})


def test_secrets_are_not_quoted() -> None:
    assert "hunter2" not in repr(load(token="hunter2"))
    with pytest.raises(ConfigError) as caught:
        load(pin="hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("content", [b"port = ", b"\xff", b"a = " + b"[" * 5000, b"#" * (2 << 20)])
def test_unreadable_files(toml: Path, content: bytes) -> None:
    toml.write_bytes(content)
    with pytest.raises(ConfigError, match=str(toml)):
        load(toml)


def test_a_missing_value_says_how_to_give_it() -> None:
    @dataclass(frozen=True)
    class Needy:
        node_id: str

    with pytest.raises(ConfigError, match="set --node-id or X_NODE_ID"):
        load_config(Needy, env_prefix="X_", env={})


def test_fields_of_other_types_are_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: dict[str, int] | None = None

    with pytest.raises(TypeError, match="can't have the type"):
        load_config(Odd, env_prefix="X_", env={"X_VALUE": "1"})
    with pytest.raises(TypeError, match="no dataclass"):
        load_config(int, env_prefix="X_", env={})


def test_help() -> None:
    assert help_of(Config, "capacity_bytes") == "how much to give"
    assert help_of(Config, "port") == ""
