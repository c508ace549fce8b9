"""Clocks for tests: one that moves only when told to, and one that runs and jumps when told to."""

from __future__ import annotations

from dmq.clock import SystemClock

__all__ = ["ClientClock", "FakeClock", "RunningClock"]


class FakeClock:
    """The readings of `dmq.clock.Clock`, held still.

    What always holds: `monotonic()` never runs backwards; `advance` moves it, and moves the others along;
    `set_wall_ms` moves the wall alone, either way; `suspend` moves all but the monotonic.
    """

    def __init__(self, wall_ms: int = 1_700_000_000_000, monotonic: float = 1000.0) -> None:
        self._wall_ms = float(wall_ms)
        self._monotonic = monotonic
        self._suspended = 0.0

    def now_ms(self) -> int:
        return int(self._wall_ms)

    def monotonic(self) -> float:
        return self._monotonic

    def boottime(self) -> float:
        return self._monotonic + self._suspended

    def advance(self, seconds: float) -> None:
        """Let time pass, by all clocks."""
        if seconds < 0:
            raise ValueError("time passes forwards only; set_wall_ms turns the wall clock back")
        self._monotonic += seconds
        self._wall_ms += seconds * 1000

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep for so long, as a virtual machine that is suspended does."""
        self._suspended += seconds
        self._wall_ms += seconds * 1000

    def set_wall_ms(self, ms: int) -> None:
        """Jump the wall clock, forwards or back, as an operator or a time server would."""
        self._wall_ms = float(ms)


class ClientClock:
    """The clock of a client beside a broker whose time is moved: its wall clock is the broker's, its waits are real."""

    def __init__(self, broker: FakeClock) -> None:
        self._broker = broker
        self._machine = SystemClock()

    def now_ms(self) -> int:
        return self._broker.now_ms()

    def monotonic(self) -> float:
        return self._machine.monotonic()

    def boottime(self) -> float:
        return self._machine.boottime()


class RunningClock(FakeClock):
    """The machine's clock, and beyond it by as much as a test said: waits end as ever, and hours pass in no time.

    What always holds: as for `FakeClock`, but that time passes by itself too.
    """

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self._machine = SystemClock()

    def now_ms(self) -> int:
        return self._machine.now_ms() + super().now_ms()

    def monotonic(self) -> float:
        return self._machine.monotonic() + super().monotonic()

    def boottime(self) -> float:
        return self._machine.boottime() + super().boottime()

    def set_wall_ms(self, ms: int) -> None:
        super().set_wall_ms(ms - self._machine.now_ms())
