"""What all tests share: the random seed, hypothesis's profiles."""

from __future__ import annotations

import os
import random
import signal

import pytest
from hypothesis import HealthCheck, settings

# Timing on a busy machine says nothing about a property, so examples have no deadline of their own
# (pytest-timeout bounds the test), and slow generation is no failure.
_DEFAULT = settings(
    derandomize=False,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("default", parent=_DEFAULT)
settings.register_profile("ci", parent=_DEFAULT, max_examples=50, stateful_step_count=30)
settings.register_profile("thorough", parent=_DEFAULT, max_examples=2_000, stateful_step_count=100)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
settings.load_profile(_PROFILE)

# A shell that starts a job in the background has it ignore SIGINT, and all that it starts: tests of
# Ctrl-C would test that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED_VARIABLE = "CENOTE_TEST_SEED"
# In the environment, too: processes that run a share of the tests (pytest -n 2) have the same seed.
_SEED = int(os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**32))))


def pytest_report_header() -> str:
    return f"cenote: {SEED_VARIABLE}={_SEED}, hypothesis profile {_PROFILE}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed: derived from the run's, which the report's header names."""
    return random.Random(f"{_SEED}:{request.node.nodeid}").randrange(2**32)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers that come again with the run's seed."""
    return random.Random(seed)
