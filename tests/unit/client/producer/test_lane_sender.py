"""Ready-made batches, each sent until it is stored, one of a lane at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from dmq.client.connection.router import Router
from dmq.client.producer.numbered_sender import LaneBatch, LaneSender
from dmq.errors import Busy, DMQError, InvalidMessage, NotConnected, SequenceConflict, TimedOut
from dmq.model import Durability
from dmq.protocol import Flag
from dmq.protocol.produce import Produce, ProduceReply
from tests.patience import eventually
from tests.unit.client.links import FakeLink, Request


class FakePool:
    """The pool of every queue, over one link that is there or not."""

    def __init__(self) -> None:
        self.link = FakeLink()

    def pool_for(self, topic: str, queue: int) -> FakePool:
        return self

    def connection(self, deadline: float) -> FakeLink:
        if not self.link.is_usable:
            raise NotConnected("no broker answers")
        return self.link


class Rig:
    def __init__(self, timeout: float = 20.0, answer_seconds: float = 30.0) -> None:
        self.pool = FakePool()
        self.counts: list[int] = []
        self.stop = threading.Event()
        router: Any = self.pool
        self.sender = LaneSender(
            cast(Router, router), timeout, self.stored, self.late, self.stop, answer_seconds=answer_seconds
        )

    def stored(self, batch: LaneBatch, reply: ProduceReply) -> None:
        if reply.is_duplicate:
            raise SequenceConflict("somebody else was there")
        self.counts.append(batch.header.count)

    def late(self, batch: LaneBatch) -> DMQError:
        return batch.last_error or TimedOut("too late")

    def send(self, sequence: int, queue: int = 0) -> None:
        header = Produce("orders", queue, 2, 0, producer_id=7, producer_epoch=0, first_sequence=sequence)
        self.sender.send(header, [b"records"])

    def request(self, index: int) -> Request:
        eventually(lambda: len(self.pool.link.requests) > index)
        return self.pool.link.requests[index]


@contextmanager
def in_a_thread(function: Any, *arguments: Any) -> Iterator[None]:
    """Meanwhile, `function` runs and comes to its end."""
    failed: list[DMQError] = []

    def run() -> None:
        try:
            function(*arguments)
        except DMQError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_the_next_of_a_lane_leaves_when_the_one_before_is_stored() -> None:
    rig = Rig()
    rig.send(0)
    rig.send(0, queue=1)
    with in_a_thread(rig.send, 2):
        assert len(rig.pool.link.requests) == 2, "another lane does not wait"
        rig.request(0).store()
        assert rig.request(2).header.first_sequence == 2
    with in_a_thread(rig.sender.drain):
        rig.request(1).store()
        rig.request(2).store()
    assert rig.counts == [2, 2, 2]


def test_a_batch_goes_out_again_after_a_refusal_and_as_resend_after_a_break() -> None:
    rig = Rig()
    rig.send(0)
    with in_a_thread(rig.sender.drain):
        rig.request(0).refuse(Busy("later"))
        assert rig.request(1).flags == 0
        before = rig.pool.link
        rig.pool.link = FakeLink("two")
        before.lose()
        again = rig.request(0)
        assert again.flags == Flag.RESEND
        assert again.numbers == before.requests[0].numbers
        again.store()


def test_a_batch_that_stays_unanswered_is_sent_again() -> None:
    rig = Rig(answer_seconds=0.05)
    rig.send(0)
    with in_a_thread(rig.sender.drain):
        again = rig.request(1)
        assert again.flags == Flag.RESEND
        again.store()


def test_what_cannot_be_stored_fails_the_sender() -> None:
    rig = Rig()
    rig.send(0)
    with pytest.raises(InvalidMessage), in_a_thread(rig.sender.drain):
        rig.request(0).refuse(InvalidMessage("no"))
    with pytest.raises(InvalidMessage):
        rig.send(2, queue=1)


def test_its_owner_can_refuse_what_is_stored() -> None:
    rig = Rig()
    rig.send(0)
    with pytest.raises(SequenceConflict), in_a_thread(rig.sender.drain):
        rig.request(0).answer(ProduceReply(0, 0, 0, Durability.FLUSHED, is_duplicate=True))


def test_a_batch_has_its_time() -> None:
    rig = Rig(timeout=0.1)
    rig.pool.link.is_usable = False
    rig.send(0)
    with pytest.raises(NotConnected):
        rig.sender.drain()


def test_nothing_is_sent_again_once_it_is_to_stop() -> None:
    rig = Rig()
    rig.send(0)
    rig.stop.set()
    with pytest.raises(Busy), in_a_thread(rig.sender.drain):
        rig.request(0).refuse(Busy("later"))
    assert len(rig.pool.link.requests) == 1
