"""A master that forgets must still be followed by daemons that remember its predecessor."""

from cenote.master.metadata import begin, open_backend


def test_a_memory_backend_begins_after_whatever_ran_before_it() -> None:
    first, second = open_backend("memory:"), open_backend("memory:")
    epochs = [begin(first).epoch, begin(second).epoch]
    assert epochs[1] >= epochs[0] > 1_700_000_000
