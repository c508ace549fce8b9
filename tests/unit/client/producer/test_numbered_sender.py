"""Attempts to send a batch that has numbers, and how they end."""

from __future__ import annotations

import pytest

from dmq.client.connection.link import Link
from dmq.client.producer.numbered_sender import NumberedBatch, NumberedSender
from dmq.errors import Busy, DMQError, InvalidMessage, NotConnected, ServerError
from dmq.protocol import Flag
from dmq.protocol.produce import Produce, ProduceReply
from tests.unit.client.links import FakeLink

HEADER = Produce("orders", 2, 3, 0, producer_id=7, producer_epoch=0, first_sequence=40)


class Rig:
    """An owner that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.batch = NumberedBatch()
        self.batch.body = (b"records",)
        self.link = FakeLink()
        self.sender: NumberedSender[NumberedBatch] = NumberedSender(self)

    def stored(self, batch: NumberedBatch, reply: ProduceReply) -> None:
        self.told.append(("stored", reply.first_offset))

    def refused(self, batch: NumberedBatch, link: Link, error: DMQError) -> None:
        self.told.append(("refused", error.code))

    def unanswered(self, batch: NumberedBatch, error: DMQError) -> None:
        self.told.append(("unanswered", error.code))

    def send(self) -> int:
        """Begin an attempt; the flags it went out with."""
        self.sender.send(self.batch, HEADER, self.link)
        request = self.link.requests[-1]
        assert (request.header, request.body) == (HEADER, b"records")
        return request.flags


def test_a_batch_that_is_stored_is_told_once() -> None:
    rig = Rig()
    assert rig.send() == 0
    rig.link.requests[0].store(17)
    assert rig.told == [("stored", 17)]
    assert rig.batch.broker == rig.link.address


@pytest.mark.parametrize(
    ("error", "flags"), [(Busy("later"), 0), (InvalidMessage("no"), 0), (ServerError("oops"), Flag.RESEND)]
)
def test_a_refused_batch_is_resent_as_such_only_if_it_may_be_stored(error: DMQError, flags: int) -> None:
    rig = Rig()
    rig.send()
    rig.link.requests[0].refuse(error)
    assert rig.told == [("refused", error.code)]
    assert rig.batch.last_error is not None
    assert rig.send() == flags


def test_a_batch_whose_connection_broke_may_be_stored() -> None:
    rig = Rig()
    rig.send()
    rig.link.lose()
    assert rig.told == [("unanswered", NotConnected.code)]
    rig.link = FakeLink("two")
    assert rig.send() == Flag.RESEND


def test_a_batch_that_could_not_be_sent_is_nobodys_news() -> None:
    rig = Rig()
    rig.link.is_usable = False
    with pytest.raises(NotConnected):
        rig.send()
    assert rig.told == []
    assert not rig.batch.is_unanswered
    assert not rig.sender.take_back(rig.batch, rig.link)


def test_an_attempt_that_is_taken_back_may_have_stored_the_batch() -> None:
    rig = Rig()
    rig.send()
    assert rig.sender.take_back(rig.batch, rig.link)
    assert not rig.sender.take_back(rig.batch, rig.link), "it is taken back once"
    assert rig.send() == Flag.RESEND
