"""docs/operating/config.md names every setting, and says of each what is so."""

from __future__ import annotations

import pytest

from cenote.client.config import ENV_PREFIX as CLIENT_PREFIX
from cenote.client.config import ClientConfig
from cenote.runtime.config import load_config
from settings import PAGE, PARTS, Part, Setting, settings_of, with_tables

by_part = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)


def setting(part: Part, name: str) -> Setting:
    return next(one for one in settings_of(part) if one.name == name)


def test_the_page_has_the_settings_of_today() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "write it anew: python tests/settings.py"


@by_part
def test_every_setting_says_what_it_is(part: Part) -> None:
    assert [one.name for one in settings_of(part) if not one.help.strip("; ")] == []


@by_part
def test_a_default_as_it_is_shown_is_the_default(part: Part) -> None:
    shown = {
        one.variable: one.default.strip("`")
        for one in settings_of(part)
        if one.default not in ("none", "found out")
    }
    assert len(shown) > 10
    default = load_config(part.config, env_prefix=part.env_prefix, env={})
    assert load_config(part.config, env_prefix=part.env_prefix, env=shown) == default


def test_rows_of_each_kind() -> None:
    master, store, client = PARTS
    assert setting(master, "tenure_s").row() == (
        "| `tenure_s` | `--tenure-s`, `--tenure` | `CENOTE_MASTER_TENURE_S` | duration | 1.5s |"
        " 300ms to 60s | with etcd: how long a master leads after etcd last confirmed it, and how"
        " long a standby waits before it takes over |"
    )
    repair = setting(master, "repair_after_s")
    assert (repair.default, repair.range) == ("30s", "200ms to 10000000s")
    assert "cenote config set" in repair.help
    token = setting(store, "token")
    assert (token.spellings, token.default) == ([], "none")
    assert token.help.endswith("a secret")
    assert setting(store, "name").default == "found out"
    assert setting(store, "dram").kind == "size"
    assert setting(client, "verify").range == "`auto`, `lease`, `checksum`"
    assert setting(client, "replicas").spellings == ["replicas="]
    assert load_config(ClientConfig, env_prefix=CLIENT_PREFIX, env={}).replicas == 1
