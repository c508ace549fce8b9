"""The watchdog sees an event loop that stands still, and says where."""

from __future__ import annotations

import logging
import threading

import pytest

from dmq.broker.shard_process import Watchdog
from tests.patience import eventually


def test_it_tells_once_each_time_that_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    alive, asked = True, threading.Event()
    told: list[int] = []

    def is_alive() -> bool:
        asked.set()
        return alive

    def looked() -> None:
        for _ in range(2):
            asked.clear()
            assert asked.wait(60)

    watchdog = Watchdog(is_alive, lambda: told.append(1), look_seconds=0.001, boottime=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        watchdog.start()
        looked()
        assert not told
        for times in (1, 2):
            alive = False
            looked()
            eventually(lambda: told)
            looked()
            assert len(told) == times
            alive = True
            looked()
        watchdog.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("stands still" in line and "test_it_tells" in line for line in lines) == 2, lines
    assert sum("goes on" in line for line in lines) == 2


def test_a_process_that_was_stopped_is_not_told_as_a_loop_that_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    now, alive, told = 100.0, True, threading.Event()
    watchdog = Watchdog(lambda: alive, told.set, look_seconds=0.001, boottime=lambda: now)

    def is_alive() -> bool:
        nonlocal now, alive
        if now == 100.0:
            now, alive = 119.0, False  # SIGCONT: nothing ran for 19 s, neither the loop nor this thread
        elif told.is_set():
            alive = True
        return alive

    watchdog._is_alive = is_alive
    with caplog.at_level(logging.WARNING):
        watchdog.start()
        assert told.wait(60), "who is to be told is told all the same"
        eventually(lambda: any("goes on" in line for line in caplog.messages))
        watchdog.stop()
    assert [line.split(":")[0] for line in caplog.messages] == [
        "this process stood still",
        "the event loop goes on seconds=19",
    ]
    assert caplog.messages[0].endswith("seconds=19")


def test_a_process_that_was_stopped_is_told_though_its_loop_is_the_first_to_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, looks = 100.0, threading.Semaphore(0)

    def is_alive() -> bool:
        nonlocal now
        now = 119.0
        looks.release()
        return True

    watchdog = Watchdog(is_alive, look_seconds=0.001, boottime=lambda: now)
    with caplog.at_level(logging.WARNING):
        watchdog.start()
        for _ in range(3):
            assert looks.acquire(timeout=60)
        watchdog.stop()
    (line,) = caplog.messages
    assert line.startswith("this process stood still")
    assert line.endswith("seconds=19")


def test_one_that_was_not_started_can_be_stopped() -> None:
    asked: list[int] = []
    Watchdog(lambda: bool(asked.append(1)), look_seconds=0.001).stop()  # type: ignore[func-returns-value]
    assert not asked
