"""The clocks of one simulated machine: they run a little too fast or too slow, and can stand still.

What always holds: `monotonic` and `boottime` never go back while the machine is on; a suspended machine's boot time
goes on and its monotonic time does not; on a frozen one, as a virtual machine whose host holds it, everything stands.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum

__all__ = ["ClockMode", "MachineClock"]

_EPOCH_MS = 1_700_000_000_000.0


class ClockMode(Enum):
    RUNS = "runs"
    SUSPENDED = "suspended"  # the monotonic one stands
    FROZEN = "frozen"  # all stand


class MachineClock:
    """See `dmq.clock.Clock`.

    Parameters:
        true_time: seconds that have really passed.
        rng: draws how the clock runs.
    """

    def __init__(self, true_time: Callable[[], float], rng: random.Random) -> None:
        self._true = true_time
        self._rate = rng.uniform(0.98, 1.02)
        self._at = true_time()
        self._mode = ClockMode.RUNS
        self._monotonic = rng.uniform(10, 1e5)
        self._boot = self._monotonic
        self._wall_ms = _EPOCH_MS + self._at * 1000 + rng.uniform(-400, 400)

    def _passed(self) -> float:
        return (self._true() - self._at) * self._rate

    def monotonic(self) -> float:
        return self._monotonic + (self._passed() if self._mode is ClockMode.RUNS else 0.0)

    def boottime(self) -> float:
        return self._boot + (self._passed() if self._mode is not ClockMode.FROZEN else 0.0)

    def now_ms(self) -> int:
        return int(self._wall_ms + (self._passed() * 1000 if self._mode is not ClockMode.FROZEN else 0.0))

    def true_of(self, monotonic: float) -> float:
        """When, in true time, the monotonic clock will read so much."""
        if self._mode is not ClockMode.RUNS:
            return float("inf")
        return self._at + (monotonic - self._monotonic) / self._rate

    def set_mode(self, mode: ClockMode) -> None:
        self._fold()
        self._mode = mode

    def step_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self._wall_ms += seconds * 1000

    def reboot(self) -> None:
        """The machine was off: what counts from its start begins anew."""
        self._fold()
        self._mode = ClockMode.RUNS
        self._monotonic = self._boot = 5.0

    def _fold(self) -> None:
        self._monotonic, self._boot, self._wall_ms = self.monotonic(), self.boottime(), float(self.now_ms())
        self._at = self._true()
