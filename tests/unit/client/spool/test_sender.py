"""A producer's core with a spool, over links that do as a test says."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.core import ProducerOptions
from dmq.client.producer.future import SendFuture
from dmq.client.producer.routes import Route, Routes
from dmq.client.spool.drain import REFUSALS_MAX
from dmq.client.spool.sender import SpoolSender, make_core
from dmq.client.spool.spool import RefusedFolder, Spool
from dmq.errors import (
    BrokerStopping,
    Busy,
    DeadLettered,
    DiskFull,
    DMQError,
    InvalidMessage,
    NotConnected,
    UnknownTopic,
)
from dmq.model import Durability, Message, MessageId
from dmq.protocol import Flag
from dmq.protocol.produce import ProduceFlag
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import eventually
from tests.unit.client.drafts import draft_of
from tests.unit.client.links import FakeLink, FakeLinks, Request


class Rig:
    """A core with a spool in memory, and one link."""

    def __init__(self, files: MemoryFiles | None = None, *, bytes_max: int = 1 << 20, **options: Any) -> None:
        self.files = files or MemoryFiles()
        self.clock = FakeClock()
        self.link = FakeLink()
        self.lines = FakeLinks(self.clock, self.link)
        self.routes = Routes()
        self.route = Route(4, False, self.clock.monotonic())
        self.routes.put("orders", self.route)
        self.spool = Spool(self.files, bytes_max, self.clock)
        self.core = make_core(self.spool, "shop", ProducerOptions(**options), self.routes, self.lines, self.clock)
        assert isinstance(self.core.spooling, SpoolSender)
        self.sender = self.core.spooling
        self._seen = 0

    def send(self, body: bytes = b"x", *, ordered: bool = True, **message: Any) -> SendFuture:
        if ordered:
            message = {"business_id": "u-1", "ordered": True, **message}
        put = self.core.put(draft_of(self.core, self.route, "orders", body, **message), attended=True, deadline=None)
        assert put is not None, "there is no room"
        self.sender.pump(put[0].lane)
        return SendFuture(*put)

    def request(self) -> Request:
        """The next batch that is sent."""
        eventually(lambda: len(self.link.produced()) > self._seen)
        self._seen += 1
        return self.link.produced()[self._seen - 1]

    def go_away(self) -> None:
        self.link.lose()
        self.sender.lost()

    def come_back(self) -> None:
        self._seen = 0
        self.link = FakeLink()
        self.lines.links = [self.link]
        self.sender.connected(self.link)

    def idle(self) -> bool:
        """Whether nothing more is sent for now, all threads having had their turn."""
        self.spool.flush()
        time.sleep(0.05)
        return len(self.link.produced()) == self._seen

    def close(self) -> None:
        self.sender.close(NotConnected("closed"))
        self.sender.leave()


@contextmanager
def rigged(files: MemoryFiles | None = None, **options: Any) -> Iterator[Rig]:
    rig = Rig(files, **options)
    try:
        yield rig
    finally:
        rig.close()


def test_a_message_is_kept_before_it_is_sent_and_forgotten_after() -> None:
    with rigged() as rig:
        future = rig.send(b"hello")
        request = rig.request()
        assert rig.spool.used > 0
        assert not future.done()
        assert future.id == MessageId(rig.spool.producer_id, 0)
        assert request.header.flags == ProduceFlag.NAMED
        assert request.flags == 0
        assert request.numbers[0] == rig.spool.producer_id
        request.store(41)
        receipt = future.result(20)
        assert (receipt.offset, receipt.durability, receipt.id) == (41, "flushed", future.id)
        eventually(lambda: rig.spool.used == 0)


def test_without_a_broker_the_receipt_says_spooled() -> None:
    with rigged() as rig:
        rig.go_away()
        receipt = rig.send().result(20)
        assert (receipt.durability, receipt.offset) == ("spooled", -1)
        assert receipt.id == MessageId(rig.spool.producer_id, 0)
        rig.come_back()
        rig.request().store()
        eventually(lambda: rig.spool.used == 0)


def test_a_link_that_breaks_ends_the_waiting_but_not_the_sending() -> None:
    with rigged() as rig:
        future = rig.send()
        before = rig.request()
        rig.go_away()
        assert future.result(20).durability == "spooled"
        rig.come_back()
        again = rig.request()
        assert again.numbers == before.numbers
        assert again.flags & Flag.RESEND
        assert again.body == before.body


def test_a_queue_gets_one_batch_after_the_other() -> None:
    with rigged() as rig:
        futures = [rig.send(b"%d" % number) for number in range(20)]
        seen: list[int] = []
        while len(seen) < 20:
            request = rig.request()
            assert rig.idle()
            seen += range(request.header.first_sequence, request.header.first_sequence + request.header.count)
            request.store()
        ids = [future.result(20).id.sequence for future in futures]
        assert ids == sorted(ids) == seen


def test_what_was_left_goes_out_with_the_same_numbers_after_a_restart() -> None:
    rig = Rig()
    rig.send(b"first")
    before = rig.request()
    rig.go_away()
    rig.send(b"second").result(20)
    rig.close()
    with rigged(rig.files) as after:
        after.sender.connected(after.link)
        again = after.request()
        assert (again.numbers, again.body) == (before.numbers, before.body)
        assert again.flags & Flag.RESEND
        again.store()
        second = after.request()
        assert b"second" in second.body
        assert second.header.first_sequence > again.header.first_sequence
        new = after.send(b"third").result
        second.store()
        third = after.request()
        third.store(5)
        assert new(20).id.sequence == third.header.first_sequence > second.header.first_sequence


def test_a_refusal_that_passes_is_waited_for() -> None:
    with rigged() as rig:
        future = rig.send()
        first = rig.request()
        first.refuse(BrokerStopping("later"))
        assert rig.idle()
        rig.lines.advance(1.0)
        again = rig.request()
        assert again.numbers == first.numbers
        again.store()
        assert future.result(20).durability == "flushed"


def test_a_refusal_for_good_is_told_to_the_caller_that_waits_and_ends_it() -> None:
    with rigged() as rig:
        future = rig.send()
        rig.request().refuse(UnknownTopic("there is none"))
        with pytest.raises(UnknownTopic):
            future.result(20)
        eventually(lambda: rig.spool.used == 0)
        assert rig.routes.get("orders") is None


def test_what_was_told_to_be_spooled_is_kept_whatever_a_broker_says(caplog: pytest.LogCaptureFixture) -> None:
    with rigged() as rig:
        rig.go_away()
        rig.send().result(20)
        rig.come_back()
        first = rig.request()
        first.refuse(UnknownTopic("there is none"))
        assert rig.idle()
        assert rig.spool.used > 0
        assert "refused" in caplog.text
        rig.lines.advance(31.0)
        again = rig.request()
        assert again.numbers == first.numbers
        again.store()
        eventually(lambda: rig.spool.used == 0)


def refuse_until_set_aside(rig: Rig, error: DMQError) -> None:
    for _ in range(REFUSALS_MAX):
        rig.request().refuse(error)
        rig.lines.advance(10.0)


def test_what_is_refused_for_good_is_set_aside_and_those_behind_it_go() -> None:
    with rigged() as rig:
        told: list[DMQError] = []
        rig.spool.on_refused = told.append
        rig.go_away()
        rig.send(b"bad", key="k").result(20)
        rig.send(b"good").result(20)
        rig.come_back()
        refuse_until_set_aside(rig, UnknownTopic("there is none"))
        eventually(lambda: told)
        rig.lines.advance(1.0)
        behind = rig.request()
        assert behind.numbers[1] == rig.spool.first_sequence(1)
        behind.store()
        eventually(lambda: rig.spool.used == 0)
        assert rig.spool.refused == 1
        assert isinstance(told[0], UnknownTopic)
        assert "1 messages for topic 'orders'" in told[0].message
        assert "dmq spool list" in told[0].message
    (aside,) = RefusedFolder(rig.files, 1 << 20)
    assert (aside.number, aside.refusal.code, aside.refusal.message) == (0, "UNKNOWN_TOPIC", "there is none")
    assert (aside.kept.head.topic, aside.kept.head.count, aside.kept.head.keys) == ("orders", 1, 1)
    assert b"bad" in b"".join(map(bytes, aside.kept.body))


def test_what_cannot_be_set_aside_is_tried_on() -> None:
    with rigged() as rig:
        rig.go_away()
        rig.send(b"bad").result(20)
        rig.come_back()
        fault = rig.files.fail("create", lambda path, _: path.startswith("refused"), errno.ENOSPC)
        refuse_until_set_aside(rig, UnknownTopic("there is none"))
        eventually(lambda: fault.hits)
        assert rig.idle()
        rig.files.heal(fault)
        rig.lines.advance(31.0)
        again = rig.request()
        again.store()
        eventually(lambda: rig.spool.used == 0)
    assert RefusedFolder(rig.files, 1 << 20).numbers() == []


def test_a_dead_letter_is_settled() -> None:
    with rigged() as rig:
        rig.go_away()
        rig.send().result(20)
        rig.come_back()
        rig.request().refuse(DeadLettered("over the limit"))
        eventually(lambda: rig.spool.used == 0)


def test_an_unanswered_batch_is_sent_again() -> None:
    with rigged(resend_after=(2.0,)) as rig:
        future = rig.send()
        first = rig.request()
        rig.clock.advance(3.0)
        again = rig.request()
        assert again.numbers == first.numbers
        assert again.flags & Flag.RESEND
        assert future.result(20).durability == "spooled"
        again.store()
        eventually(lambda: rig.spool.used == 0)


def test_more_than_the_window_is_left_to_the_disk() -> None:
    with rigged(window_bytes=8000) as rig:
        first = rig.send(b"x" * 3000)
        request = rig.request()
        for _ in range(4):
            assert rig.send(b"x" * 3000).result(20).durability == "spooled"
        request.store()
        assert first.result(20).durability == "flushed"
        for _ in range(4):
            rig.request().store()
        eventually(lambda: rig.spool.used == 0)


def test_a_full_spool_has_no_room_until_something_is_settled() -> None:
    with rigged(bytes_max=256 << 10) as rig:
        rig.go_away()
        for _ in range(2):
            rig.send(random.Random(1).randbytes(100_000)).result(20)
        draft = draft_of(
            rig.core, rig.route, "orders", random.Random(1).randbytes(100_000), business_id="u", ordered=True
        )
        assert rig.core.put(draft, attended=True, deadline=None) is None
        error = rig.core.full("orders", Message(b""))
        assert isinstance(error, Busy)
        assert "spool_bytes_max" in error.message
        rig.come_back()
        rig.request().store()
        eventually(lambda: rig.core.accumulator.has_room(draft.size, 1))


def test_a_full_disk_is_told_and_nothing_is_sent() -> None:
    files = MemoryFiles(capacity_bytes=100_000)
    with rigged(files) as rig:
        future = rig.send(random.Random(1).randbytes(120_000))
        with pytest.raises(DiskFull):
            future.result(20)
        assert rig.idle()
        files.capacity_bytes = None
        rig.send(b"small")
        rig.request().store()


def test_callbacks_are_called_once_with_the_outcome() -> None:
    with rigged() as rig:
        told: list[str] = []
        future = rig.send()
        future.add_done_callback(lambda done: told.append(done.result().durability))
        rig.request()
        rig.go_away()
        rig.come_back()
        rig.request().store()
        eventually(lambda: rig.spool.used == 0)
        assert told == ["spooled"]
        assert rig.core.accumulator.messages == 0


def test_what_goes_together_shares_a_flush() -> None:
    with rigged() as rig:
        rig.go_away()
        threads = [threading.Thread(target=lambda: rig.send().result(20)) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        rig.come_back()
        total = 0
        while total < 50:
            request = rig.request()
            total += request.header.count
            request.store()
        eventually(lambda: rig.spool.used == 0)


@pytest.mark.parametrize("durability", ["none", "consumed"])
def test_what_cannot_be_kept_until_it_is_stored_is_refused(durability: str) -> None:
    with rigged() as rig:
        group = "billing" if durability == "consumed" else ""
        with pytest.raises(InvalidMessage, match="does not go with a spool"):
            draft_of(rig.core, rig.route, "orders", b"x", durability=durability, consumed_by=group)


def test_a_stored_send_is_flushed_since_the_spool_forgets_it() -> None:
    with rigged() as rig:
        rig.send(durability="stored")
        assert rig.request().header.durability == Durability.FLUSHED


def test_topics_are_known_after_a_restart() -> None:
    rig = Rig()
    rig.sender.remember("orders")
    rig.spool.flush()
    rig.close()
    files = rig.files
    spool = Spool(files, 1 << 20, rig.clock)
    routes = Routes()
    core = make_core(spool, "shop", ProducerOptions(), routes, rig.lines, rig.clock)
    route = routes.get("orders")
    assert route is not None
    assert route.queues == 4
    assert core.spooling is not None
    core.spooling.leave()


def test_what_is_closed_keeps_what_it_has() -> None:
    rig = Rig()
    future = rig.send()
    rig.request()
    rig.close()
    assert future.result(20).durability == "spooled"
    with pytest.raises(DMQError):
        rig.core.check_open()
    spool = Spool(rig.files, 1 << 20)
    assert spool.used > 0
    spool.close()


def test_a_batch_is_done_once() -> None:
    with rigged() as rig:
        future = rig.send()
        rig.request()
        batch = future._outcome
        assert isinstance(batch, SendBatch)
        rig.sender.give_up(batch, 5.0)
        rig.sender.give_up(batch, 5.0)
        assert future.result(0).durability == "spooled"
        rig.link.produced()[0].store(9)
        assert future.result(0).durability == "spooled"
