"""Turns: which thread reads, and what becomes of the lead while a thread runs a handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import pytest

from dmq.client.connection.connection import WATCH_SECONDS, Turns
from dmq.client.connection.threads import Waiter
from tests.patience import eventually

PATIENCE = 60.0


class Wire:
    """Words that are read, each by whichever thread leads, and those who wait for them."""

    def __init__(self) -> None:
        self._words: SimpleQueue[str] = SimpleQueue()
        self.read: list[tuple[str, str]] = []  # the word, and the thread that read it
        self.is_over = False
        self.is_polled = threading.Event()
        self.waiters: dict[str, Waiter] = {}
        self.turns = Turns(
            "background", self._receive, is_over=lambda: self.is_over, has_output=lambda: 0, on_left=lambda: None
        )
        self._threads: list[threading.Thread] = []
        self.ends: list[threading.Event] = []  # what threads wait for that are not here

    def _receive(self, seconds: float) -> None:
        self.is_polled.set()
        try:
            word = self._words.get(timeout=min(seconds, PATIENCE))
        except Empty:
            return
        self.read.append((word, threading.current_thread().name))
        waiter = self.waiters.get(word)
        if waiter is not None:
            waiter.wake()

    def send(self, word: str) -> None:
        self._words.put(word)

    def has(self, word: str) -> bool:
        return any(read == word for read, _ in self.read)

    def await_word(self, word: str, *, is_patient: bool = False, is_lender: bool = False) -> None:
        waiter = self.waiters[word] = Waiter()
        deadline = time.monotonic() + PATIENCE
        self.turns.until(
            waiter, lambda: self.is_over or self.has(word), deadline, is_patient=is_patient, is_lender=is_lender
        )

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def reader_of(self, word: str) -> str:
        eventually(lambda: self.has(word))
        return dict(self.read)[word]

    def end(self) -> None:
        self.is_over = True
        for event in self.ends:
            event.set()
        for word in [*self.waiters, "end"]:
            self.send(word)
        self.turns.wake_all()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.end()


class Handler:
    """A thread that reads words and then has something to do, for as long as it is told."""

    def __init__(self, wire: Wire, *, is_lender: bool = True) -> None:
        self.is_called, self.may_return = threading.Event(), threading.Event()
        wire.ends.append(self.may_return)
        self._wire = wire
        self._is_lender = is_lender
        wire.thread("handler", self._work)

    def _work(self) -> None:
        wire = self._wire
        wire.await_word("first", is_patient=True, is_lender=self._is_lender)
        self.is_called.set()
        self.may_return.wait(PATIENCE)
        wire.await_word("second", is_patient=True)


def follow(wire: Wire, word: str) -> threading.Thread:
    """Another thread that waits for a word, patiently, and does not read."""
    known = len(wire.turns._followers)
    thread = wire.thread(f"follower of {word}", lambda: wire.await_word(word, is_patient=True))
    eventually(lambda: len(wire.turns._followers) > known)
    return thread


def test_a_thread_that_is_back_in_a_moment_reads_on_itself(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmq.client.connection.connection.WATCH_SECONDS", PATIENCE)
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    follow(wire, "third")
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    eventually(lambda: wire.turns._watcher is not None)
    assert not wire.turns.is_taken
    handler.may_return.set()
    wire.send("second")
    assert wire.reader_of("second") == "handler"


def test_a_thread_that_does_not_come_back_is_replaced_by_one_that_waits(wire: Wire) -> None:
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    follow(wire, "third")
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    wire.send("third")
    assert wire.reader_of("third") == "follower of third"


def test_a_thread_that_does_not_come_back_is_replaced_also_for_what_nobody_waits_for(wire: Wire) -> None:
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    wire.turns.attend()
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    wire.send("third")
    assert wire.reader_of("third") == "background"
    wire.turns.attention -= 1


def test_what_is_attended_while_a_handler_runs_is_read(wire: Wire) -> None:
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    wire.turns.attend()
    wire.send("third")
    assert wire.reader_of("third") == "background"
    wire.turns.attention -= 1


def test_who_waits_for_an_answer_reads_at_once_while_a_handler_runs(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmq.client.connection.connection.WATCH_SECONDS", PATIENCE)
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    follow(wire, "third")
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    wire.send("answer")
    asking = wire.thread("asking", lambda: wire.await_word("answer"))
    asking.join(PATIENCE)
    assert wire.reader_of("answer") == "asking"
    handler.may_return.set()
    wire.send("second")
    assert wire.reader_of("second") == "handler"  # and it still has the lead


def test_nothing_is_lent_while_somebody_waits_for_an_answer(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmq.client.connection.connection.WATCH_SECONDS", PATIENCE)
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    wire.thread("asking", lambda: wire.await_word("answer"))
    eventually(lambda: len(wire.turns._followers) == 2)
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    wire.send("answer")
    assert wire.reader_of("answer") == "asking"


def test_a_watcher_that_leaves_is_replaced(wire: Wire) -> None:
    handler = Handler(wire)
    assert wire.is_polled.wait(PATIENCE)
    first = follow(wire, "third")
    follow(wire, "fourth")
    wire.send("first")
    assert handler.is_called.wait(PATIENCE)
    wire.send("third")
    first.join(PATIENCE)
    assert not first.is_alive()
    wire.send("fourth")
    assert wire.reader_of("fourth") == "follower of fourth"


def test_the_background_thread_makes_room_for_one_that_waits(wire: Wire) -> None:
    wire.turns.attend()
    eventually(lambda: wire.turns.is_taken)
    follow(wire, "third")
    wire.send("other")
    assert wire.reader_of("other") == "background"
    wire.send("third")
    assert wire.reader_of("third") == "follower of third"
    wire.turns.attention -= 1


def test_a_lender_that_is_back_before_anybody_looked_wakes_nobody_again(wire: Wire) -> None:
    turns, follower, lender = wire.turns, Waiter(), Waiter()

    def lend() -> None:
        turns.join(lender, is_patient=True)
        assert turns.take()
        turns.release()
        turns.part(lender, is_patient=True, is_lent=True)

    turns.join(follower, is_patient=True)
    lend()
    assert follower.wait(0), "the first time it is woken"
    turns.join(lender, is_patient=True)
    assert turns.take()
    assert turns.patience(follower) == WATCH_SECONDS
    turns.release()
    turns.part(lender, is_patient=True, is_lent=True)
    lend()
    assert not follower.wait(0), "it watches"
    assert turns.patience(follower) == WATCH_SECONDS
    assert turns.patience(follower) == 0.0, "nothing was lent since"
    assert turns.take()
    turns.release()
    turns.part(follower, is_patient=True, is_lent=False)


def test_a_thread_that_watches_reads_at_once_when_nobody_does_and_nobody_is_back_soon(wire: Wire) -> None:
    turns, watcher, other = wire.turns, Waiter(), Waiter()
    turns.join(watcher, is_patient=True)
    turns.join(other, is_patient=True)
    assert turns.take()
    turns.release()
    turns.part(other, is_patient=True, is_lent=True)
    assert turns.patience(watcher) == WATCH_SECONDS
    turns.join(other, is_patient=True)
    turns.part(other, is_patient=True, is_lent=False)
    assert turns.patience(watcher) == 0.0
    turns.part(watcher, is_patient=True, is_lent=False)


def lent(wire: Wire, other: Waiter | None = None) -> Turns:
    """The turns of a wire that this thread has read and lent.

    Parameters:
        other: of a thread that waits as well and never gets to look; left out, the background thread watches.
    """
    if other is None:
        wire.turns.attention = 1
    else:
        wire.turns.join(other, is_patient=True)
    wire.send("first")
    wire.await_word("first", is_patient=True, is_lender=True)
    return wire.turns


def test_a_thread_that_lent_the_lead_takes_it_up_again_where_nobody_else_has(wire: Wire) -> None:
    turns = lent(wire, Waiter())
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(turns.resume()))
    thread.start()
    thread.join(PATIENCE)
    assert elsewhere == [False]
    assert turns.resume()
    assert not turns.resume()  # it leads already
    turns.lend(is_lent=True)
    assert not turns.is_mine
    assert turns.take()  # for an answer, as any other thread might
    assert not turns.resume()
    turns.leave()
    assert turns.resume()
    turns.lend(is_lent=False)
    assert not turns.is_taken
    assert turns.resume()  # nobody else wants it
    turns.lend(is_lent=False)


def test_a_lender_whose_lead_the_watcher_took_waits_as_any_other(wire: Wire) -> None:
    turns = lent(wire)
    eventually(lambda: turns.is_taken)  # nobody came back
    assert not turns.resume()
    wire.send("other")
    assert wire.reader_of("other") == "background"


def test_a_lead_is_not_lent_while_somebody_waits_for_an_answer(wire: Wire) -> None:
    other = Waiter()
    turns = lent(wire, other)
    assert turns.resume()
    wire.thread("asker", lambda: wire.await_word("answer"))
    eventually(lambda: len(turns._followers) == 2)
    turns.part(other, is_patient=True, is_lent=False)
    turns.lend(is_lent=True)
    wire.send("answer")
    assert wire.reader_of("answer") == "asker"
