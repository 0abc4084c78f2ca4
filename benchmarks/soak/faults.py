"""What a soak does to its processes, and when: random, from one seed."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from board import Board
from processes import READY_TIMEOUT_S, Party, Pool

__all__ = ["Chaos", "Quiet"]

GAP_S = (0.2, 8.0)
"""Between two faults, whether the one before has ended or not."""
DISTURBED_MAX = 4
AWAY_S = (0.0, 5.0)
STOPPED_S = {
    "master": (0.1, 8.0),
    "store": (0.1, 12.0),
    "client": (0.1, 15.0),
    "etcd": (0.1, 8.0),
}
ROLES = {"master": 2, "store": 4, "client": 4, "etcd": 1}
"""And how often each is disturbed, in relation to the others."""
KINDS = {
    "master": ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP", "SIGSTOP"),
    "store": ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP", "SIGSTOP"),
    "client": ("SIGKILL", "SIGKILL", "SIGSTOP"),
    "etcd": ("SIGKILL", "SIGTERM", "SIGSTOP"),
}
IN_CALL_SHARE = 0.7
"""Of faults that wait until a client is in the middle of a call."""
IN_CALL_WAIT_S = 2.0
INTO_CALL_MAX_S = 0.001
WELL_AFTER_S = 13.0
"""The longest lease of before a restart of the master is over, and a session without its client."""
CHECK_TIMEOUT_S = 60.0


@dataclass
class Quiet:
    """One time in which nothing is disturbed, so that all must be well."""

    number: int
    recovered: bool
    checked: bool
    took_s: float


@dataclass
class Chaos:
    """Disturbs a pool from `began_s` on; call `step` often."""

    pool: Pool
    board: Board
    rng: random.Random
    began_s: float
    run_s: float
    say: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)
    in_call: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    quiets: list[Quiet] = field(default_factory=list)
    _next_s: float = 0.0

    # ---- one step --------------------------------------------------------------------------------

    def step(self) -> None:
        """End what is due, begin again what ended, disturb somebody where it is time."""
        now_s = time.monotonic()
        for party in self.pool.parties:
            if party.disturbed and now_s >= party.until_s:
                self._mend(party)
            elif not party.disturbed and not party.running:
                self._ended_by_itself(party)
        if now_s >= self._next_s:
            self._next_s = now_s + self.rng.uniform(*GAP_S)
            self._disturb()

    def _mend(self, party: Party) -> None:
        if party.stopped:
            party.send(signal.SIGCONT)
            party.stopped = False
        if party.down:
            party.start()

    def _ended_by_itself(self, party: Party) -> None:
        self.problems.append(
            f"{party.name} {party.daemon.how_it_ended()}: {party.daemon.last_line()}"
        )
        self.say(self.problems[-1])
        party.start()

    def _spared(self, party: Party, kind: str) -> bool:
        """So that somebody of each role lives long: what leaks slowly shows in them.

        The last client, store and member of etcd are stopped only, until 90 % of the run are over;
        a master is not killed between 40 % and 75 % of it.
        """
        if kind == "SIGSTOP":
            return False
        share = (time.monotonic() - self.began_s) / self.run_s
        if party.role == "master":
            return 0.4 <= share < 0.75
        return party is self.pool.of(party.role)[-1] and share < 0.9

    def _disturb(self) -> None:
        rng = self.rng
        roles = [role for role in ROLES if self.pool.of(role)]
        (role,) = rng.choices(roles, [ROLES[role] for role in roles])
        party = rng.choice(self.pool.of(role))
        kind = rng.choice(KINDS[role])
        in_call, into_s = (
            rng.random() < IN_CALL_SHARE,
            rng.choice((0.0, rng.uniform(0.0, INTO_CALL_MAX_S))),
        )
        stopped_s, away_s = rng.uniform(*STOPPED_S[role]), rng.uniform(*AWAY_S)
        busy = sum(other.disturbed for other in self.pool.parties)
        if party.disturbed or not party.running or busy >= DISTURBED_MAX:
            return
        if role == "etcd" and any(other.disturbed for other in self.pool.of(role)):
            return  # most of its members are there, always
        if self._spared(party, kind):
            kind = "SIGSTOP"
        if in_call:
            self._wait_for_a_call(party.client, into_s)
        if party.client >= 0:
            self.board.add(party.client, "stops")
            if self.board.get(party.client, "in_call"):
                self.in_call[kind] += 1
        now_s = time.monotonic()
        party.send(signal.Signals[kind])
        self.counts[f"{role} {kind}"] += 1
        if kind == "SIGSTOP":
            party.stopped, party.until_s = True, now_s + stopped_s
        else:
            party.down, party.until_s = True, now_s + away_s
            if party.daemon.wait(10.0) is None:
                self.problems.append(f"{party.name} did not end within 10 s of {kind}")
                party.daemon.kill()
            if party.client >= 0:
                self.board.set(party.client, "in_call", 0)
        length_s = party.until_s - now_s
        self.say(f"{now_s - self.began_s:8.1f} s  {party.name} {kind}, for {length_s:.1f} s")

    def _wait_for_a_call(self, client: int, into_s: float) -> None:
        """Until that client (-1: any) is in the middle of one."""
        clients = range(self.board.clients) if client < 0 else (client,)
        end_s = time.monotonic() + IN_CALL_WAIT_S
        while time.monotonic() < end_s:
            if any(self.board.get(number, "in_call") for number in clients):
                if into_s:
                    time.sleep(into_s)
                return
            time.sleep(0.0001)

    # ---- quiet -----------------------------------------------------------------------------------

    def quiet(self, meanwhile: Callable[[], None]) -> None:
        """Mend everything, wait until the pool has recovered, and have every client look whether
        all that must be there is there. `meanwhile` is called now and then."""
        began_s = time.monotonic()
        for party in self.pool.parties:
            if party.disturbed:
                self._mend(party)

        def wait_for(what: Callable[[], bool], timeout_s: float) -> bool:
            end_s = time.monotonic() + timeout_s
            while not what():
                if time.monotonic() > end_s:
                    return False
                meanwhile()
                time.sleep(0.05)
            return True

        stores = len(self.pool.of("store"))
        for party in (*self.pool.of("master"), *self.pool.of("store")):
            party.daemon.wait_ready(READY_TIMEOUT_S)

        def alive() -> bool:
            status = self.pool.status()
            return status is not None and status.nodes_alive == stores

        recovered = wait_for(alive, READY_TIMEOUT_S)
        well_s = time.monotonic() + WELL_AFTER_S
        wait_for(lambda: time.monotonic() >= well_s, WELL_AFTER_S + 1)
        number = len(self.quiets) + 1
        self.board.give("healthy", number)

        def checked() -> bool:
            for party in self.pool.parties:
                if not party.running:
                    self._ended_by_itself(party)
            seen = (self.board.get(c, "checked") for c in range(self.board.clients))
            return all(value == number for value in seen)

        done = wait_for(checked, CHECK_TIMEOUT_S)
        until_s = time.monotonic() + 3.0  # some more calls while all is well
        wait_for(lambda: time.monotonic() >= until_s, 4.0)
        self.board.give("healthy", 0)
        time.sleep(0.05)
        quiet = Quiet(number, recovered, done, time.monotonic() - began_s)
        self.quiets.append(quiet)
        self.say(f"{time.monotonic() - self.began_s:8.1f} s  quiet {quiet}")
        self._next_s = time.monotonic()
