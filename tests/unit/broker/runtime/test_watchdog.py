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

    watchdog = Watchdog(is_alive, lambda: told.append(1), look_seconds=0.001)
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


def test_one_that_was_not_started_can_be_stopped() -> None:
    asked: list[int] = []
    Watchdog(lambda: bool(asked.append(1)), look_seconds=0.001).stop()  # type: ignore[func-returns-value]
    assert not asked
