import math
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.metrics import LATENCY_BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, Metrics
from cenote.runtime.metrics_http import MetricsServer


def test_the_same_name_and_labels_give_the_same_counter() -> None:
    metrics = Metrics()
    first = metrics.counter("cenote_calls_total", "calls", op="get")
    assert metrics.counter("cenote_calls_total", "calls", op="get") is first
    other = metrics.counter("cenote_calls_total", "calls", op="put")
    first.add()
    first.value += 2
    other.add(10)
    assert metrics.snapshot() == {
        'cenote_calls_total{op="get"}': 3,
        'cenote_calls_total{op="put"}': 10,
    }


def test_a_name_has_one_meaning() -> None:
    metrics = Metrics()
    metrics.counter("cenote_calls_total", "calls", op="get")
    with pytest.raises(ValueError, match="another kind, help or label names"):
        metrics.counter("cenote_calls_total", "calls", kind="get")
    with pytest.raises(ValueError, match="another kind, help or label names"):
        metrics.gauge("cenote_calls_total", "calls", lambda: 1, op="get")
    with pytest.raises(ValueError, match="_total"):
        metrics.counter("cenote_calls", "calls")


def test_series_are_bounded() -> None:
    metrics = Metrics()
    for i in range(4096):
        metrics.counter("cenote_x_total", "x", key=str(i))
    with pytest.raises(ValueError, match="a label of cenote_x_total is unbounded"):
        metrics.counter("cenote_x_total", "x", key="4096")
    assert metrics.counter("cenote_x_total", "x", key="7").value == 0
    with pytest.raises(ValueError, match="characters"):
        Metrics().counter("cenote_x_total", "x", key="k" * 1000)


def test_gauges_are_read_at_scrape() -> None:
    metrics = Metrics()
    sizes = [1, 2, 3]
    metrics.gauge("cenote_sizes", "sizes", lambda: len(sizes))
    sizes.append(4)
    assert metrics.snapshot() == {"cenote_sizes": 4}
    metrics.gauge("cenote_sizes", "sizes", lambda: 0)  # a new reader takes over
    assert metrics.snapshot() == {"cenote_sizes": 0}


def test_histogram_buckets_include_their_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe_many(2.0, 3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.count == 8
    assert histogram.total == 13.5


@pytest.mark.parametrize("bounds", [(), (2.0, 1.0), (1.0, 1.0)])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Histogram(bounds)


@given(
    st.lists(st.floats(min_value=0, max_value=20), min_size=1, max_size=50),
    st.floats(min_value=0, max_value=1),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    histogram = Histogram(LATENCY_BOUNDS_S)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    bounds = (0.0, *LATENCY_BOUNDS_S)
    index = next((i for i, bound in enumerate(bounds[1:], 1) if true <= bound), len(bounds) - 1)
    # At a border between two buckets the estimate may be the border itself.
    assert bounds[index - 1] * 0.999 <= histogram.quantile(q) <= bounds[index] * 1.001


def test_a_quantile_of_nothing_is_not_a_number() -> None:
    histogram = Histogram((1.0,))
    assert math.isnan(histogram.quantile(0.5))
    with pytest.raises(ValueError, match="within 0 and 1"):
        histogram.quantile(1.5)


def test_prometheus_reads_what_was_counted() -> None:
    metrics = Metrics()
    metrics.counter("cenote_calls_total", "calls", op="get").add(3)
    metrics.gauge("cenote_free_bytes", "free", lambda: 4096)
    histogram = metrics.histogram("cenote_size_bytes", "sizes", SIZE_BOUNDS_BYTES, tier="dram")
    for value in (100, 1000, 1 << 40):
        histogram.observe(value)
    server = MetricsServer(metrics, 0)
    try:
        assert server.host == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        with pytest.raises(ResourceUnavailable, match=f"127.0.0.1:{server.port}"):
            MetricsServer(metrics, server.port)
    finally:
        server.close()
    assert 'cenote_calls_total{op="get"} 3.0' in text
    assert "cenote_free_bytes 4096.0" in text
    assert 'cenote_size_bytes_bucket{le="256.0",tier="dram"} 1.0' in text
    assert 'cenote_size_bytes_bucket{le="1024.0",tier="dram"} 2.0' in text
    assert 'cenote_size_bytes_bucket{le="+Inf",tier="dram"} 3.0' in text
    assert 'cenote_size_bytes_count{tier="dram"} 3.0' in text


def test_a_table_has_the_rows_of_the_moment() -> None:
    metrics = Metrics()
    seen = {"a": 1}
    rows = lambda: [((name,), value) for name, value in seen.items()]  # noqa: E731
    metrics.table("cenote_x_total", "x", "counter", ("of",), rows)
    assert metrics.snapshot() == {'cenote_x_total{of="a"}': 1}
    seen["b"] = 2
    assert metrics.snapshot()['cenote_x_total{of="b"}'] == 2
    seen.clear()
    assert metrics.snapshot() == {}
    with pytest.raises(ValueError, match="exists already"):
        metrics.table("cenote_x_total", "x", "counter", ("of",), list)
    with pytest.raises(ValueError, match="another kind"):
        metrics.counter("cenote_x_total", "x", of="a")
    with pytest.raises(ValueError, match="_total"):
        metrics.table("cenote_x", "x", "counter", ("of",), list)


def test_a_table_is_bounded() -> None:
    metrics = Metrics()
    metrics.table("cenote_x", "x", "gauge", ("n",), lambda: (((str(i),), i) for i in range(10_000)))
    assert len(metrics.snapshot()) == 4096


def test_what_is_counted_elsewhere_is_read_at_scrape() -> None:
    metrics = Metrics()
    count = [0]
    metrics.counted("cenote_x_total", "x", lambda: count[0])
    count[0] = 3
    assert metrics.snapshot() == {"cenote_x_total": 3}
    with pytest.raises(ValueError, match="counted elsewhere"):
        metrics.counter("cenote_x_total", "x")
    metrics.counter("cenote_z_total", "z")
    with pytest.raises(ValueError, match="by a counter"):
        metrics.counted("cenote_z_total", "z", lambda: 0)
    with pytest.raises(ValueError, match="_total"):
        metrics.counted("cenote_y", "y", lambda: 0)


def test_one_look_is_taken_before_each_scrape() -> None:
    metrics = Metrics()
    looks: list[int] = []
    metrics.before_collect = lambda: looks.append(1)
    metrics.gauge("cenote_looks", "looks", lambda: len(looks))
    assert metrics.snapshot() == {"cenote_looks": 1}
    assert metrics.snapshot() == {"cenote_looks": 2}


def test_histograms_add_up() -> None:
    one, other = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    one.observe(0.5)
    other.observe_many(3.0, 2)
    one.add(other)
    assert one.counts == [1, 0, 2]
    assert one.total == 6.5
