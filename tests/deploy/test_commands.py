"""Every command line in deploy/ and in its documentation is one that the daemons take."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cenote.api.errors import CenoteError
from cenote.master.__main__ import PROGRAM as MASTER
from cenote.runtime.config import load_config
from cenote.runtime.harness import STOP_TIMEOUT_S
from cenote.store.__main__ import PROGRAM as STORE
from deployment import CHART, COMPOSE, DEPLOY, ROOT, image_is_short, refuse_wrong_flags

PAGES = ("README.md", "docs/operating.md", "docs/operating/install.md", "docs/rdma.md")


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def options_of(program: Any) -> set[str]:
    """Its flags, as its parser has them."""
    return {flag for action in program.parser()._actions for flag in action.option_strings}


def test_a_wrong_flag_is_found() -> None:
    refuse_wrong_flags(["cenote-store", "--name=$(NODE_NAME)", "--dram=64GiB", "--log-json"])
    with pytest.raises(pytest.fail.Exception, match="--dramm"):
        refuse_wrong_flags(["cenote-store", "--dramm=64GiB"])
    with pytest.raises(CenoteError):
        refuse_wrong_flags(["cenote-store", "--dram=much"])
    with pytest.raises(CenoteError):
        refuse_wrong_flags(["cenote-store", "--listen=0.0.0.0:5120"])  # no address for clients
    for program in ("cenote-master", "cenote-store"):
        with pytest.raises(CenoteError, match="open to the network"):
            refuse_wrong_flags([program, "--listen=10.0.0.1:5120"])


def test_why_pods_are_kept_from_the_variables_of_services() -> None:
    """Kubernetes gives them to pods of the same namespace unless enableServiceLinks is false."""
    variables = {"CENOTE_MASTER_SERVICE_HOST": "10.0.0.1", "CENOTE_MASTER_PORT": "tcp://10.0.0.1:1"}
    for name, value in variables.items():
        with pytest.raises(CenoteError, match=name):
            load_config(MASTER.config, env_prefix=MASTER.env_prefix, env={name: value})


def test_the_commands_of_the_compose_file() -> None:
    services = compose()["services"]
    ours = {n: s for n, s in services.items() if n.startswith(("master", "store"))}
    assert sorted(ours) == ["master1", "master2", "store1", "store2"]
    for service in ours.values():
        refuse_wrong_flags(service["command"])


def test_the_compose_file_is_what_it_says() -> None:
    services = compose()["services"]
    etcd = [s for n, s in services.items() if n.startswith("etcd")]
    assert len(etcd) == 3
    assert all("--snapshot-count=5000" in service["command"] for service in etcd)
    for name, service in services.items():
        image = re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"])
        assert image_is_short(image), image
        assert ":" in image, f"{image} names no release"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the world"
    for name in ("master1", "store1"):
        assert float(services[name]["stop_grace_period"].removesuffix("s")) > STOP_TIMEOUT_S + 1


def test_prometheus_scrapes_where_the_daemons_of_the_compose_file_serve() -> None:
    scraped = set()
    for job in yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())["scrape_configs"]:
        scraped |= {target for c in job["static_configs"] for target in c["targets"]}
    served = set()
    for name, service in compose()["services"].items():
        command = " ".join(service.get("command", []))
        if found := re.search(r"--metrics-listen=\S+:(\d+)", command):
            served.add(f"{name}:{found[1]}")
        elif name.startswith("etcd"):
            served.add(f"{name}:2379")
    assert scraped == served


@pytest.mark.parametrize("program", [MASTER, STORE], ids=lambda p: p.name)
def test_the_units_start_what_there_is(program: Any) -> None:
    unit = (DEPLOY / "systemd" / f"{program.name}.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    refuse_wrong_flags(shlex.split(command))
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)s$", unit, re.MULTILINE)
    assert int(stop_s) > STOP_TIMEOUT_S + 1
    # No user of the moment: its end would remove what lies in /dev/shm.
    assert "User=cenote" in unit
    assert not re.search(r"^DynamicUser=", unit, re.MULTILINE)


@pytest.mark.parametrize("program", [MASTER, STORE], ids=lambda p: p.name)
def test_what_is_commented_out_in_the_units_settings_may_be_used(
    program: Any, tmp_path: Path
) -> None:
    name = program.name.removeprefix("cenote-")
    text = (DEPLOY / "systemd" / f"{name}.toml").read_text()
    used = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert used != text
    file = tmp_path / f"{name}.toml"
    file.write_text(used)
    secrets = {f"{program.env_prefix}ETCD_PASSWORD": "of etcd_user"}
    config = load_config(program.config, env_prefix=program.env_prefix, file=file, env=secrets)
    assert set(tomllib.loads(used)) <= {f.name for f in dataclasses.fields(config)}
    # Variables that its comments name are settings, too.
    for variable in re.findall(rf"\b{program.env_prefix}(\w+)", text):
        assert variable.lower() in {f.name for f in dataclasses.fields(config)}


def test_flags_in_the_charts_sources_exist() -> None:
    """Also those that no values of another test bring out."""
    both = options_of(MASTER) & options_of(STORE)
    for template, known in (
        ("master.yaml", options_of(MASTER)),
        ("store.yaml", options_of(STORE)),
        ("_helpers.tpl", both),
    ):
        text = (CHART / "templates" / template).read_text()
        flags = set(re.findall(r"^\s*- (--[a-z-]+)", text, re.MULTILINE))
        assert len(flags) >= 3
        assert flags <= known, flags - known


def test_flags_in_the_values_comments_exist() -> None:
    text = (CHART / "values.yaml").read_text()
    for name, program in (("cenote-master", MASTER), ("cenote-store", STORE)):
        (example,) = re.findall(rf"flags of {name}, such as (\[.*\])", text)
        refuse_wrong_flags([program.name, *yaml.safe_load(example)])


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_documentation_exist(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    for name, known in (("master", options_of(MASTER)), ("store", options_of(STORE))):
        for line in re.findall(rf"\bcenote-{name} (--[a-z][^`\n]*)", text):
            flags = set(re.findall(r"(?<!\S)--[a-z-]+", line.partition("#")[0]))
            assert flags <= known, f"{page}: cenote-{name} has no {flags - known}"
