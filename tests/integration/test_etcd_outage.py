"""etcd is slow, gone, or out of one master's reach: what clients see, and what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, DeadlineExceeded
from cenote.client import Client
from cluster import Cluster
from etcd import EtcdCluster
from link import Link
from loads import summary
from promptness import stopwatch
from waiting import wait_until
from workers import Load, pass_time, reads, shared_pool, writes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

VALUE = b"v" * 3000


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def put_all(client: Client, prefix: str, count: int) -> list[str]:
    keys = [f"{prefix}{i}" for i in range(count)]
    for key in keys:
        assert client.put(key, VALUE).stored
    return keys


def check(cluster: Cluster, present: list[str], absent: list[str]) -> None:
    with cluster.client(deadline_s=15.0) as client:
        values = client.get_batch(present)
        lost = [key for key, value in zip(present, values, strict=True) if value != VALUE]
        assert not lost, f"{len(lost)} of {len(present)} are lost or wrong: {lost[:5]}"
        assert not client.exists_batch(absent).any()


@pytest.mark.parametrize("durability", ["relaxed", "journaled"])
def test_what_was_acknowledged_and_not_journaled_is_adopted(
    etcd: EtcdCluster, durability: str
) -> None:
    """etcd stands still, puts go on within the tenure, the leader dies: the slot tables tell."""
    with shared_pool(etcd.url, masters=2, stores=2, tenure_s=6.0) as cluster:
        with cluster.client(deadline_s=10.0) as client:
            early = put_all(client, "early", 30)
            gone = put_all(client, "gone", 10)
            assert client.remove_batch(gone).all()
            leader = cluster.leader()
            etcd.members[0].pause()
            late: list[str] = []
            if durability == "relaxed":
                late = put_all(client, "late", 50)
            else:
                with pytest.raises(CenoteError):
                    client.put("journaled", VALUE, durability="journaled", deadline_s=0.5)
            with pytest.raises(CenoteError):
                client.remove("early0", deadline_s=0.3)
            leader.kill()
            etcd.members[0].resume()
            cluster.leader()
            cluster.wait_alive(2)
        # The remove was not acknowledged: it may or may not have been carried out.
        check(cluster, early[1:] + late, gone)


def test_past_its_tenure_a_leader_answers_lookups_alone(etcd: EtcdCluster) -> None:
    with shared_pool(etcd.url, masters=2, stores=2, tenure_s=1.0) as cluster:
        with cluster.client() as client:
            keys = put_all(client, "k", 30)
            etcd.members[0].pause()

            def is_refused() -> bool:
                try:
                    client.put(f"late{time.monotonic()}", VALUE, deadline_s=0.3)
                except DeadlineExceeded as error:
                    return "can't prove" in str(error) or "does not confirm" in str(error)
                return False

            wait_until(is_refused, what="writes to be refused")
            with pytest.raises(CenoteError):
                client.remove(keys[0], deadline_s=0.3)
            for transports in (("shm", "tcp"), ("tcp",)):  # ... which know nothing yet
                with cluster.client(transports=transports) as fresh:
                    assert fresh.get_batch(keys) == [VALUE] * len(keys)
                    assert fresh.get(keys[0]) == VALUE
                    assert fresh.exists_batch(keys).all()
                    assert fresh.match(keys).prefix_keys == len(keys)
            pass_time(6.0)  # node_dead_s: the daemons could not be heard, and are not hidden
            assert client.get_batch(keys) == [VALUE] * len(keys)
            etcd.members[0].resume()
            assert client.put("again", VALUE, deadline_s=8.0).stored
        check(cluster, [*keys, "again"], [])


def put_until_refused(client: Client) -> tuple[list[str], CenoteError]:
    """The keys that were acknowledged."""
    stored: list[str] = []
    for first in range(0, 400_000, 128):
        keys = [f"small{i}" for i in range(first, first + 128)]
        try:
            results = client.put_batch(keys, [b"s" * 64] * 128, deadline_s=2.0)
        except CenoteError as error:
            return stored, error
        stored += [key for key, result in zip(keys, results, strict=True) if result.stored]
        for result in results:
            if result.error is not None:
                return stored, result.error
    raise AssertionError("etcd was never full")


def test_etcd_without_room_refuses_writes_and_loses_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        extra = [f"--quota-backend-bytes={4 << 20}"]
        etcd = stack.enter_context(EtcdCluster(tmp_path / "etcd", extra=extra))
        cluster = stack.enter_context(shared_pool(etcd.url, masters=2, stores=1))
        client = stack.enter_context(cluster.client())
        gone = put_all(client, "gone", 10)
        assert client.remove_batch(gone).all()
        stored, error = put_until_refused(client)
        assert "space exceeded" in str(error)
        pass_time(3.0)  # past the tenure; the standby has tried to be elected
        with pytest.raises(CenoteError, match="space exceeded"):
            client.remove(stored[0], deadline_s=1.0)
        assert client.exists_batch(stored).all()
        assert "alarm list" in cluster.cli("status").stdout.decode()
        judged = cluster.cli("doctor", "--etcd", etcd.url)
        assert judged.returncode == 1
        assert b"no alarm" in judged.stdout
        member = etcd.members[0]
        member.kill()
        member.start(f"--quota-backend-bytes={1 << 30}")
        etcd.wait_healthy()
        etcd.ctl("alarm", "disarm")
        assert client.put("again", VALUE, deadline_s=15.0).stored
        cluster.leader().kill()
        assert client.remove(stored[0], deadline_s=15.0)
        cluster.wait_alive(1)
        assert client.exists_batch(stored[1:]).all()
        assert client.get("again") == VALUE
        assert not client.exists_batch([stored[0], *gone]).any()


def test_a_leader_that_is_cut_off_from_etcd_is_replaced(etcd: EtcdCluster) -> None:
    port = etcd.members[0].port
    with Link(port) as one, Link(port) as two:
        links = (one, two)
        urls = [f"etcd://127.0.0.1:{link.port}" for link in links]
        with (
            shared_pool(urls, masters=2, stores=2) as cluster,
            cluster.client(deadline_s=8.0) as client,
            cluster.client(deadline_s=8.0, transports=("tcp",)) as reader,
        ):
            keys = put_all(client, "k", 30)
            assert reader.get_batch(keys) == [VALUE] * 30
            for round_ in range(2):
                leader = cluster.leader()
                link = links[cluster.masters.index(leader)]
                with stopwatch() as watch:
                    link.cut()
                    assert reader.get(keys[0]) == VALUE
                    assert client.put(f"cut{round_}", VALUE).stored
                print(f"written again after {watch.took_s:.2f} s")
                watch.check(6.0, "to write again", late_s=0)
                keys.append(f"cut{round_}")
                client.remove(keys[round_])  # by two masters, perhaps: what it counted is open
                # Who only reads finds the new leader, too, and with it what was removed.
                wait_until(
                    lambda key=keys[round_]: not reader.exists(key),  # type: ignore[misc]
                    what="the reader to follow",
                )
                cluster.wait_alive(2)
                link.heal()
                wait_until(
                    lambda old=leader: cluster.role_of(old) == "standby",  # type: ignore[misc]
                    what="the old leader to stand by",
                )
            check(cluster, keys[2:], keys[:2])


def restart(etcd: EtcdCluster, index: int) -> None:
    etcd.members[index].kill()
    pass_time(1.0)
    etcd.members[index].start()
    etcd.wait_healthy()


def pause_leading_member(etcd: EtcdCluster) -> None:
    member = etcd.leading_member()
    member.pause()
    pass_time(4.0)
    member.resume()
    etcd.wait_healthy()


def test_a_member_of_etcd_dies_or_stands_still(tmp_path: Path, seed: int) -> None:
    """No read fails, and every put within its deadline."""
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdCluster(tmp_path / "etcd", members=3))
        cluster = stack.enter_context(shared_pool(etcd.url, masters=2, stores=2))
        load = Load(stack, cluster, seed, replicas=1, deadline_s=8.0, misses_are_legal=True)
        pass_time(1.0)
        faults: list[Callable[[], None]] = [
            lambda: restart(etcd, 0),
            lambda: restart(etcd, 1),
            lambda: restart(etcd, 2),
            lambda: pause_leading_member(etcd),
        ]
        for fault in faults:
            fault_s = time.monotonic()
            fault()
            pass_time(1.0)
            print(f"{time.monotonic() - fault_s:.1f} s")
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == []
        for name, some in (("reads", reads), ("writes", writes)):
            print(name, summary(some(load.samples(0, end_s))))
        with cluster.client(deadline_s=15.0) as client:
            stored = list(load.stored())
            assert client.exists_batch(stored).all()
            assert not client.exists_batch(load.removed()).any()
