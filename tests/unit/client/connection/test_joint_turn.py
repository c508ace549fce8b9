"""A turn at several connections: one thread reads what any of them brings, and other threads get their turns."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dmq.client.connection.connection import Turns
from dmq.client.connection.joint_turn import JointTurn
from dmq.client.connection.threads import FOREVER, Waiter
from tests.patience import eventually

PATIENCE = 60.0


class Line:
    """A connection that brings one byte a word, and remembers which thread read it."""

    def __init__(self, name: str) -> None:
        self.is_closed = False
        self.readers: list[str] = []
        self.is_polled = threading.Event()
        self._words, self._write = os.pipe()
        self._wakes, self._wake = os.pipe()
        self.turns = Turns(
            f"background of {name}",
            self._receive,
            is_over=lambda: self.is_closed,
            has_output=lambda: 0,
            on_left=lambda: None,
        )

    def send(self) -> None:
        os.write(self._write, b"w")

    def nudge(self) -> None:
        os.write(self._wake, b"\0")

    def register(self, poll: select.poll) -> tuple[int, int]:
        self.is_polled.set()
        for descriptor in (self._words, self._wakes):
            poll.register(descriptor, select.POLLIN)
        return self._words, self._wakes

    def happened(self, descriptor: int, events: int) -> None:
        assert events == select.POLLIN
        os.read(descriptor, 1)
        if descriptor == self._words:
            self.readers.append(threading.current_thread().name)

    def _receive(self, seconds: float) -> None:
        poll = select.poll()
        self.register(poll)
        for descriptor, events in poll.poll(min(seconds, PATIENCE) * 1000):
            self.happened(descriptor, events)

    def close(self) -> None:
        self.is_closed = True
        self.nudge()
        self.turns.wake_all()

    def dispose(self) -> None:
        for descriptor in (self._words, self._write, self._wakes, self._wake):
            os.close(descriptor)


class Field:
    """Three such connections, and threads that wait at them."""

    def __init__(self) -> None:
        self.lines = [Line(name) for name in "abc"]
        self._threads: list[threading.Thread] = []

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def wait_at_all(self, name: str, is_done: Callable[[], object]) -> JointTurn:
        turn = JointTurn(self.lines)
        deadline = time.monotonic() + PATIENCE
        self.thread(name, lambda: turn.until(is_done, deadline))
        return turn

    @property
    def words(self) -> list[str]:
        return [reader for line in self.lines for reader in line.readers]

    def end(self) -> None:
        for line in self.lines:
            line.close()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for line in self.lines:
            if line.turns._thread is not None:
                line.turns._thread.join(PATIENCE)
            line.dispose()


@pytest.fixture
def field() -> Iterator[Field]:
    made = Field()
    yield made
    made.end()


def test_the_background_threads_make_room_for_one_that_waits_at_all(field: Field) -> None:
    for line in field.lines:
        line.turns.attend()
    eventually(lambda: all(line.turns.is_taken for line in field.lines))
    field.wait_at_all("reader", lambda: len(field.words) == 6)
    eventually(lambda: all(line.turns._followers for line in field.lines))
    for _ in range(2):
        eventually(lambda: all(line.turns.is_taken for line in field.lines))
        count = len(field.words) + 3
        for line in field.lines:
            line.send()
        eventually(lambda count=count: len(field.words) == count)  # type: ignore[misc]
    assert [line.readers[1] for line in field.lines] == ["reader"] * 3
    for line in field.lines:
        line.turns.attention = 0


def test_who_waits_reads_all_and_leaves_when_it_has_what_it_waits_for(field: Field) -> None:
    field.wait_at_all("reader", lambda: field.lines[2].readers)
    assert field.lines[2].is_polled.wait(PATIENCE)
    field.lines[0].send()
    eventually(lambda: field.lines[0].readers == ["reader"])
    field.lines[2].send()
    eventually(lambda: field.lines[2].readers == ["reader"])
    eventually(lambda: not any(line.turns.is_taken for line in field.lines))


def test_a_connection_that_another_thread_reads_is_read_once_that_one_leaves(field: Field) -> None:
    second = field.lines[1]
    answer = Waiter()
    field.thread("asker", lambda: second.turns.until(answer, lambda: second.readers, time.monotonic() + PATIENCE))
    assert second.is_polled.wait(PATIENCE)
    field.wait_at_all("reader", lambda: len(field.words) == 3)
    eventually(lambda: field.lines[0].turns.is_taken and field.lines[2].turns.is_taken)
    field.lines[0].send()
    second.send()
    eventually(lambda: second.readers == ["asker"])
    second.send()
    eventually(lambda: second.readers == ["asker", "reader"])
    assert field.lines[0].readers == ["reader"]


def test_a_thread_that_polls_is_woken(field: Field) -> None:
    is_done = threading.Event()
    turn = field.wait_at_all("reader", is_done.is_set)
    assert field.lines[2].is_polled.wait(PATIENCE)
    eventually(lambda: turn.waiter.nudge is not None)
    is_done.set()
    turn.waiter.wake()
    eventually(lambda: not any(line.turns.is_taken for line in field.lines))


def test_a_connection_that_ends_ends_the_wait(field: Field) -> None:
    has_ended = threading.Event()

    def wait() -> None:
        JointTurn(field.lines).until(lambda: False, FOREVER)
        has_ended.set()

    field.thread("reader", wait)
    assert field.lines[2].is_polled.wait(PATIENCE)
    field.lines[1].close()
    assert has_ended.wait(PATIENCE)
    assert not any(line.turns.is_taken for line in field.lines)


def test_where_nothing_is_connected_it_waits_to_be_woken() -> None:
    turn, looks = JointTurn([]), [False, False, True]
    turn.waiter.wake()
    turn.waiter.wake()

    def is_done() -> bool:
        if not looks[0]:
            turn.waiter.wake()
        return looks.pop(0)

    turn.until(is_done, time.monotonic() + PATIENCE)
    assert not looks


def test_a_reader_that_is_back_in_a_moment_lends_all_that_it_read(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmq.client.connection.connection.WATCH_SECONDS", PATIENCE)
    is_called, may_return = threading.Event(), threading.Event()

    def work() -> None:
        deadline = time.monotonic() + PATIENCE
        JointTurn(field.lines).until(lambda: field.words, deadline, is_lender=True)
        is_called.set()
        may_return.wait(PATIENCE)
        JointTurn(field.lines).until(lambda: len(field.words) == 2, deadline)

    field.thread("handler", work)
    assert field.lines[2].is_polled.wait(PATIENCE)
    other = field.wait_at_all("other", lambda: len(field.words) == 2)
    eventually(lambda: all(len(line.turns._followers) == 2 for line in field.lines))
    field.lines[0].send()
    assert is_called.wait(PATIENCE)
    eventually(lambda: all(line.turns._watcher is other.waiter for line in field.lines))
    assert not any(line.turns.is_taken for line in field.lines)
    may_return.set()
    eventually(lambda: all(line.turns.is_taken for line in field.lines))
    field.lines[1].send()
    eventually(lambda: field.lines[1].readers == ["handler"])
    other.waiter.wake()
