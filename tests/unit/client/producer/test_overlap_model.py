"""A producer's core against a broker that answers in any order, refuses at random, loses answers and connections.

What must hold whatever happens: a batch that is said to be stored is stored once, one that is said to have failed for
certain is not, the batches of a queue are stored in the order in which they were sent, and all come to an end.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dmq.client.producer.accumulator import OVERLAP_MAX, SendBatch
from dmq.client.producer.message import SendOptions
from dmq.errors import Busy, DiskFull, DMQError, OutOfOrder, RateLimited, SequenceConflict, ServerError
from dmq.model import Message
from dmq.protocol import Flag
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import OVERLAP
from dmq.storage.state.producers import Place, ProducerTable
from tests.sampling import sample_size
from tests.unit.client.links import FakeLink, Request
from tests.unit.client.producer.test_sender import Rig

REFUSALS = (Busy("full", retry_after_ms=20), DiskFull("no space"), RateLimited("too fast"), ServerError("odd"))


class FakeBroker:
    """What a broker keeps, with the broker's own table of producers."""

    def __init__(self, has_overlap: bool) -> None:
        self.has_overlap = has_overlap
        self.table = ProducerTable(100, 1 << 40)
        self.queues: dict[int, list[tuple[int, int]]] = {}  # producer and sequence of each message

    def store(self, asked: Produce) -> ProduceReply:
        """Raises what a broker answers to a batch that it does not take."""
        numbers = asked.producer_id, asked.producer_epoch, asked.queue
        place = self.table.look(*numbers, asked.first_sequence, count=asked.count)
        if place is not None:
            return ProduceReply(asked.queue, place.first_queue_offset, 0, asked.durability, is_duplicate=True)
        previous = asked.previous_sequence
        if self.has_overlap and previous is not None and previous != self.table.last_sequence(*numbers):
            raise OutOfOrder("not behind the last one")
        messages = self.queues.setdefault(asked.queue, [])
        place = Place(asked.first_sequence, asked.count, len(messages), 0, unit_end=1)
        messages += [(asked.producer_id, asked.first_sequence + at) for at in range(asked.count)]
        self.table.remember(*numbers[:2], False, asked.queue, place=place, used_at_ms=0)
        return ProduceReply(asked.queue, place.first_queue_offset, 0, asked.durability)


class OverlapMachine(RuleBasedStateMachine):
    """One producer, two queues, one broker."""

    @initialize(has_overlap=st.booleans(), pinned=st.booleans())
    def begin(self, has_overlap: bool, pinned: bool) -> None:
        self.rig = Rig(queues=2, resend_after=(1.0, 2.0, 3.0))
        self.broker = FakeBroker(has_overlap)
        self.pinned = pinned
        self.rig.link.features = frozenset({OVERLAP} if has_overlap else ())
        self.sent: list[SendBatch] = []
        self.arrived = 0  # requests of the link that the broker has read
        self.answers: list[tuple[Request, ProduceReply | DMQError]] = []

    @property
    def link(self) -> FakeLink:
        return self.rig.link

    # --- what happens -----------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), calls=st.integers(1, 4), business_id=st.sampled_from(["a", "b"]))
    def send(self, count: int, calls: int, business_id: str) -> None:
        for _ in range(calls):
            message = Message(b"x", business_id=business_id, ordered=True) if self.pinned else Message(b"x")
            for batch, _ in self.rig.core.many(self.rig.route, [message] * count, SendOptions("orders")):
                with self.rig.core.lock:
                    self.rig.core.accumulator.add(batch)
                self.rig.core.sender.pump(batch.lane)
                self.sent.append(batch)

    @rule(count=st.integers(1, 6), refusal=st.sampled_from([None, None, None, *REFUSALS]), after=st.booleans())
    def read(self, count: int, refusal: DMQError | None, after: bool) -> None:
        """The broker reads some requests, and refuses the first; or the first fails when it is stored."""
        for at in range(count):
            if self.arrived >= len(self.link.requests):
                return
            request = self.link.requests[self.arrived]
            self.arrived += 1
            answer: ProduceReply | DMQError
            try:
                if at == 0 and refusal is not None and not (after and isinstance(refusal, ServerError)):
                    raise refusal
                answer = self.broker.store(request.header)
                if at == 0 and refusal is not None:
                    raise refusal
            except DMQError as error:
                answer = error
            self.answers.append((request, answer))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.answers:
            self._answer(*self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    @rule()
    def answer_all(self) -> None:
        while self.answers:
            self._answer(*self.answers.pop(0))

    def _answer(self, request: Request, answer: ProduceReply | DMQError) -> None:
        if request not in self.link._pending.values():
            return  # the client has given up on it
        self.link._pending = {number: one for number, one in self.link._pending.items() if one is not request}
        if isinstance(answer, DMQError):
            request.refuse(answer)
        else:
            request.answer(answer)

    @rule()
    def lose_an_answer(self) -> None:
        if self.answers:
            self.answers.pop(0)

    @rule(read_more=st.integers(0, 3))
    def lose_the_connection(self, read_more: int) -> None:
        self.read(read_more, None, after=False)
        self.answers.clear()
        self.link.lose()
        self.link._pending.clear()
        self.arrived = len(self.link.requests)

    @rule()
    def connect(self) -> None:
        if not self.link.is_usable:
            self.rig.reconnect(self.link)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.5]))
    def wait(self, seconds: float) -> None:
        self.rig.lines.advance(seconds)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def stored_messages_stand_in_order_and_once(self) -> None:
        if not hasattr(self, "broker"):
            return
        for messages in self.broker.queues.values():
            assert messages == sorted({*messages})

    @invariant()
    def few_are_under_way(self) -> None:
        if not hasattr(self, "broker"):
            return
        queues: dict[int, set[int]] = {}
        for request in self.link._pending.values():
            queues.setdefault(request.header.queue, set()).add(request.header.first_sequence)
            assert not request.flags & Flag.RESEND or request.header.previous_sequence is None
        limit = OVERLAP_MAX if self.broker.has_overlap else 1
        assert all(len(sequences) <= limit for sequences in queues.values())

    def teardown(self) -> None:
        if not hasattr(self, "broker"):
            return
        for _ in range(100):
            self.connect()
            self.read(100, None, after=False)
            self.answer_all()
            self.rig.lines.advance(0.5)
        stored = {message for messages in self.broker.queues.values() for message in messages}
        for batch in self.sent:
            assert batch.is_done
            ids = {(batch.producer_id, batch.first_sequence + at) for at in range(batch.count)}
            if batch.error is None:
                assert ids <= stored
            else:
                assert not isinstance(batch.error, OutOfOrder | SequenceConflict)
                assert batch.is_unknown or not ids & stored
        lanes = {id(batch.lane): batch.lane for batch in self.sent}
        assert all(lane.under_way == 0 and not lane.stream.under_way for lane in lanes.values())
        self.stored_messages_stand_in_order_and_once()


OverlapMachine.TestCase.settings = settings(max_examples=sample_size(share=60, whole=5000), stateful_step_count=40)
test_a_producer_keeps_its_promises_whatever_the_broker_does = pytest.mark.sampled(OverlapMachine.TestCase)
