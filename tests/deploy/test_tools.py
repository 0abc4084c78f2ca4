"""What other programs than helm say of the files in deploy/, where those programs are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployment import DEPLOY, ROOT

UNITS = DEPLOY / "systemd"
DOCKER = DEPLOY / "docker"
INSTALL_TIMEOUT_S = 240
"""Of some 25 s on a machine that has nothing else to do."""


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {package}")
    return found


def run(*command: str | Path, timeout_s: float = 30.0, **options: object) -> str:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout
    output: str = done.stdout
    return output


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "systemd")
    # It looks whether what is started is there.
    for name in ("cenote-master", "cenote-store"):
        (tmp_path / name).symlink_to("/bin/true")
        text = (UNITS / f"{name}.service").read_text()
        (tmp_path / f"{name}.service").write_text(text.replace("/opt/cenote/bin", str(tmp_path)))
    said = run(analyze, "verify", *sorted(tmp_path.glob("*.service")))
    ours = [line for line in said.splitlines() if "cenote" in line]
    assert not ours, ours
    wrong = tmp_path / "cenote-wrong.service"
    wrong.write_text((tmp_path / "cenote-store.service").read_text() + "[Service]\nRestrat=no\n")
    done = subprocess.run(
        [analyze, "verify", wrong], capture_output=True, text=True, timeout=30, check=False
    )
    assert "Restrat" in done.stderr


def test_the_dockerfile_ends_as_nobody_and_runs_the_script() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    final = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", final, re.MULTILINE)
    assert text.count("\nFROM ") == 2
    assert "deploy/docker/install.sh /opt/cenote\n" in text
    assert "COPY --from=build /opt/cenote /opt/cenote" in final
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", image)


def sent_to_the_engine(target: Path) -> None:
    """Copy what Dockerfile.dockerignore leaves of the source tree."""
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    for name in (line[1:] for line in lines if line.startswith("!")):
        there = target / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, there)


def refuse_without_index(directory: Path) -> None:
    """Skip where pip can't get even a small package."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    try:
        done = subprocess.run(
            [*pip, "--timeout", "5", "--retries", "0", "--dest", directory, "mdurl"],
            capture_output=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("no package index answers")
    if done.returncode:
        pytest.skip("no package index is in reach")


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_images_steps_make_an_installation_that_works(tmp_path: Path) -> None:
    """What `docker build` would do, less the base image: the same files, by the same script."""
    refuse_without_index(tmp_path / "probe")
    source, target = tmp_path / "src", tmp_path / "opt" / "cenote"
    sent_to_the_engine(source)
    target.parent.mkdir()
    bare = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment = bare | {"PYTHON": sys.executable}
    script = source / "deploy" / "docker" / "install.sh"
    run(script, target, timeout_s=INSTALL_TIMEOUT_S, env=environment, cwd=tmp_path)
    # Nothing came that is not pinned, and nothing is pinned that is not used, but for build tools.
    said = run(target / "bin" / "pip", "list", "--format=json", env=environment)
    installed = {p["name"].lower(): p["version"] for p in json.loads(said.splitlines()[-1])}
    pinned = dict(
        line.lower().split("==")
        for line in (DOCKER / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert {n: v for n, v in installed.items() if n in pinned} == {
        n: v for n, v in pinned.items() if n in installed
    }
    assert set(installed) - set(pinned) <= {"cenote", "pip", "setuptools"}
    # Every part loads with these releases: both daemons, etcd's client, the command.
    code = (
        "import cenote.master.server, cenote.store.daemon, cenote.cli.main, ibverbs\n"
        "from cenote.kv.etcd import _import_etcd3\n"  # it is loaded by the first that needs it
        "_import_etcd3()\n"
    )
    run(target / "bin" / "python", "-c", code, env=environment, cwd=tmp_path)
