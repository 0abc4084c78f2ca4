"""Messages between parties: late, reordered, lost, doubled, cut off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim.loop import Loop, Party

__all__ = ["Network", "Weather"]


@dataclass
class Weather:
    """How bad the network is. Shares are of messages; all 0: none is lost or late."""

    loss: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    broken: float = 0.0
    """Of requests to the master: their connection breaks, before or after they were executed."""


class Network:
    """Between endpoints with names; processes on one host are always in touch."""

    def __init__(self, loop: Loop, host_of: Callable[[str], str]) -> None:
        self.loop = loop
        self.weather = Weather()
        self._host_of = host_of
        self._cut: dict[tuple[str, str], float] = {}

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Nothing goes through between these two for so long."""
        until_s = self.loop.now_s + seconds
        for pair in ((one, other), (other, one)):
            self._cut[pair] = max(until_s, self._cut.get(pair, 0.0))

    def heal(self) -> None:
        self._cut.clear()
        self.weather = Weather()

    def is_cut(self, one: str, other: str) -> bool:
        if self._cut.get((one, other), 0.0) <= self.loop.now_s:
            return False
        return self._host_of(one) != self._host_of(other)

    def delay_s(self) -> float:
        dice, weather = self.loop.dice, self.weather
        delay_s = dice.expovariate(1 / 300e-6)
        if weather.late and dice.random() < weather.late:
            delay_s += dice.random() * weather.late_s
        return delay_s

    def send(
        self,
        source: str,
        target: str,
        party: Party,
        deliver: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        """`deliver` happens at the party; or, where the connection does not survive, `lost` at
        the latest a while after the two are in touch again."""
        loop, dice, weather = self.loop, self.loop.dice, self.weather
        wait_s = self._cut.get((source, target), 0.0) - loop.now_s
        if self.is_cut(source, target):
            if dice.random() < 0.5:
                loop.after(wait_s + self.delay_s(), deliver, party)
            else:
                loop.after(wait_s + dice.random(), lost)
        elif weather.loss and dice.random() < weather.loss:
            loop.after(dice.random() * dice.choice((0.01, 1.0)), lost)
        else:
            loop.after(self.delay_s(), deliver, party)
