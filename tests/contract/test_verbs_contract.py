"""Every verbs library passes the seam's contract: the fake anywhere, the real ones on a device."""

from __future__ import annotations

import functools

import pytest

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.transport.verbs import load_verbs
from cenote.transport.verbs.base import PortState, Verbs, VerbsError
from cenote.transport.verbs.fake import FakeFabric, FakeVerbs
from cenote.transport.verbs.testing import VerbsContract


class TestFakeVerbs(VerbsContract):
    @functools.cached_property
    def _verbs(self) -> Verbs:
        return FakeVerbs(FakeFabric())

    def verbs(self) -> Verbs:
        return self._verbs

    def device_name(self) -> str:
        return "fake0"


@functools.cache
def usable(library: str) -> tuple[Verbs, str]:
    """The library, and a device of it whose port is up; skips where there is none."""
    try:
        verbs = load_verbs(library)
        names = verbs.device_names()
    except (ResourceUnavailable, VerbsError) as error:
        pytest.skip(f"no {library} here: {error}")
    for name in names:
        device = verbs.open(name)
        is_up = device.port(1).state == PortState.ACTIVE
        device.close()
        if is_up:
            return verbs, name
    pytest.skip(f"{library} sees no RDMA device whose port is up (see make test-rdma)")


class OnDevice(VerbsContract):
    library = ""

    def verbs(self) -> Verbs:
        return usable(self.library)[0]

    def device_name(self) -> str:
        return usable(self.library)[1]


@pytest.mark.rdma
class TestIbverbs(OnDevice):
    library = "ibverbs"


@pytest.mark.rdma
class TestPyverbs(OnDevice):
    library = "pyverbs"


def test_a_library_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="rdma-core"):
        load_verbs("rdma-core")
