"""Log lines with facts, and lines that repeat."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

import dmq
from dmq.cli.process.server_process import JsonLines, TextLines
from dmq.event_log import EventLine, EventLog, LineLimiter
from dmq.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> EventLog:
    caplog.set_level(logging.INFO, "dmq.events")
    return EventLog("dmq.events", LineLimiter(clock, kinds_max=2))


def test_facts_stand_in_the_message_and_in_the_record(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.info("topic created", topic="orders", queues=4, priority=False, retention=None, seconds=0.25)
    (record,) = caplog.records
    assert record.getMessage() == "topic created topic=orders queues=4 priority=false retention=none seconds=0.25"
    assert (record.__dict__["topic"], record.__dict__["queues"]) == ("orders", 4)
    assert (record.funcName, record.name) == ("test_facts_stand_in_the_message_and_in_the_record", "dmq.events")


def test_a_fact_never_breaks_a_line(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.warning("refused", client="x\nERROR forged", address="a b", text='say "it"', empty="", long="x" * 5000)
    text = caplog.messages[0]
    assert "\n" not in text
    assert len(text) < 1200
    assert r"client='x\nERROR forged' address='a b'" in text
    assert "empty=''" in text


def test_a_fact_may_have_the_name_of_an_attribute_of_records(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.info("member expired", name="m1", message="gone", args=3)
    (record,) = caplog.records
    assert record.getMessage() == "member expired name=m1 message=gone args=3"
    assert record.__dict__["name_"] == "m1"


def test_a_line_that_repeats_is_written_every_ten_seconds_with_a_count(
    log: EventLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(25):
        log.warning("a handler failed", once_for="orders", offset=at)
        clock.advance(seconds=1)
    log.warning("a handler failed", once_for="other", offset=25)
    assert caplog.messages == [
        "a handler failed offset=0",
        "a handler failed offset=10 suppressed=9",
        "a handler failed offset=20 suppressed=9",
        "a handler failed offset=25",
    ]


def test_what_was_left_out_is_told_when_its_time_is_over(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    limiter = LineLimiter(clock)
    log = EventLog("dmq.events", limiter)
    for at in range(4):
        log.error("the database is gone", once_for="sql", attempt=at)
    clock.advance(seconds=9)
    limiter.settle()
    assert caplog.messages == ["the database is gone attempt=0"]
    clock.advance(seconds=2)
    limiter.settle()
    limiter.settle()
    assert caplog.messages[1:] == ["the database is gone attempt=3 suppressed=2 seconds_ago=11"]
    log.error("the database is gone", once_for="sql", attempt=4)
    assert len(caplog.messages) == 2
    clock.advance(seconds=10)
    log.error("something else", once_for="x")
    assert caplog.messages[2:] == ["the database is gone attempt=4 seconds_ago=10", "something else"]


def test_the_memory_for_repeated_lines_is_bounded(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.warning("refused", once_for=0, client=0)
    log.warning("refused", once_for=0, client=0)
    for at in range(1, 4):
        log.warning("refused", once_for=at, client=at)
    # The first kind was forgotten, and what had been left out of it was told.
    assert caplog.messages == [f"refused client={at}" for at in (0, 1, 0, 2, 3)]


def test_a_line_below_the_level_is_not_counted(
    log: EventLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        log.debug("connection closed", once_for="a")
    caplog.set_level(logging.DEBUG, "dmq.events")
    log.debug("connection closed", once_for="a")
    assert caplog.messages == ["connection closed"]


def record_of(event: str, **facts: str | int) -> logging.LogRecord:
    return logging.LogRecord("dmq.broker", logging.WARNING, "f.py", 1, EventLine(event, facts), None, None)


def test_nobody_logs_past_it() -> None:
    source = Path(dmq.__file__).parent
    plain = re.compile(r"^\s*(import logging|from logging)|getLogger", re.MULTILINE)
    found = {str(file.relative_to(source)) for file in source.rglob("*.py") if plain.search(file.read_text())}
    assert found == {"event_log.py", "cli/process/server_process.py"}, "use dmq.event_log.EventLog"


def test_lines_are_text_or_json() -> None:
    record = record_of("topic created", topic="or ders", queues=4, level="mine")
    assert TextLines().format(record).endswith("Z WARNING topic created topic='or ders' queues=4 level=mine")
    fields = json.loads(JsonLines().format(record))
    assert fields.pop("at_ms") == int(record.created * 1000)
    assert fields == {
        "event": "topic created",
        "topic": "or ders",
        "queues": 4,
        "level": "warning",
        "logger": "dmq.broker",
    }


def test_lines_of_other_libraries_keep_their_fields() -> None:
    record = logging.LogRecord("sqlalchemy", logging.ERROR, "f.py", 1, "pool %s", ("full",), None)
    record.__dict__["pool"] = object
    assert TextLines().format(record).endswith("ERROR   pool full pool=\"<class 'object'>\"")
    assert json.loads(JsonLines().format(record))["event"] == "pool full"
