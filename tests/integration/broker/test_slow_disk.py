"""A broker on a disk that stands still: requests that need the disk wait for it, and no others do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dmq
from dmq.protocol import Command, Header, decode_response
from dmq.protocol.admin import GroupCreate, GroupDelete, TopicCreate, TopicDelete, TopicUpdate
from dmq.protocol.consume import Point, PointKind, Pull, Seek, Subscribe, Unsubscribe
from dmq.protocol.read import Fetch, FetchReply, Find, FindReply, Locate, Offsets, Peek, PeekReply, TopicPoints
from dmq.protocol.session import Heartbeat
from dmq.settings import StoreSettings
from dmq.testing import MemoryFiles
from tests.integration.broker.slow_disk import SlowFiles
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, port_of, produce
from tests.patience import eventually


@contextmanager
def slow_broker(disk: SlowFiles, **settings: Any) -> Iterator[ServedBroker]:
    """A broker on it, whose disk goes on before it ends."""
    with ServedBroker(disk, **settings) as broker:
        try:
            yield broker
        finally:
            disk.reads.open()
            disk.flushes.open()


# --- flushing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (Command.TOPIC_CREATE, TopicCreate("new")),
        (Command.TOPIC_UPDATE, TopicUpdate("orders", {"queues": 7})),
        (Command.TOPIC_DELETE, TopicDelete("orders")),
        (Command.GROUP_CREATE, GroupCreate("new", "orders")),
        (Command.GROUP_DELETE, GroupDelete("billing")),
        (Command.SEEK, Seek("orders", "billing", Point(PointKind.LATEST))),
        (Command.PULL, Pull("orders", "new", "member")),
        (Command.SUBSCRIBE, Subscribe(1, "orders", "new", "member")),
    ],
    ids=lambda value: value.name if isinstance(value, Command) else "",
)
def test_a_change_waits_for_its_flush_and_others_do_not(command: Command, asked: Header) -> None:
    disk = SlowFiles()
    with slow_broker(disk, auto_create=True) as broker:
        with dmq.connect(broker.url) as client:
            client.producer().send("orders", b"x")
            client.producer().send("others", b"x")
            client.admin.create_group("billing", "orders")
            client.admin.create_group("known", "others")
        with RawClient(port_of(broker.url)) as one, RawClient(port_of(broker.url)) as other:
            disk.flushes.close()
            correlation = one.request(command, asked)
            eventually(lambda: disk.flushes.waiting)
            assert other.ask(Command.HEARTBEAT, Heartbeat()).status == 0
            assert len(decode_response(other.ask(Command.PULL, Pull("others", "known"))).leases) == 1
            disk.flushes.open()
            answer = one.read()
            assert answer is not None
            assert (answer.correlation, answer.status) == (correlation, 0)


def test_a_topic_that_two_create_at_once_is_created_once() -> None:
    disk = SlowFiles()
    with slow_broker(disk) as broker, RawClient(port_of(broker.url)) as one, RawClient(port_of(broker.url)) as other:
        disk.flushes.close()
        one.request(Command.TOPIC_CREATE, TopicCreate("orders"))
        eventually(lambda: disk.flushes.waiting)
        again = other.request(Command.TOPIC_CREATE, TopicCreate("orders"))
        allowed = other.request(Command.TOPIC_CREATE, TopicCreate("orders", allow_existing=True))
        eventually(lambda: broker.broker.changes.waiting == 2)
        disk.flushes.open()
        first = one.read()
        assert first is not None
        answers = {frame.correlation: frame for _ in range(2) if (frame := other.read()) is not None}
        with pytest.raises(dmq.TopicExists):
            decode_response(answers[again])
        assert decode_response(answers[allowed]).topic_id == decode_response(first).topic_id


def test_two_topics_that_are_created_at_once_have_ids_of_their_own() -> None:
    disk = SlowFiles()
    with slow_broker(disk) as broker, RawClient(port_of(broker.url)) as peer:
        disk.flushes.close()
        for name in ("a", "b", "c"):
            peer.request(Command.TOPIC_CREATE, TopicCreate(name))
        disk.flushes.open()
        ids = set()
        for _ in range(3):
            answer = peer.read()
            assert answer is not None
            ids.add(decode_response(answer).topic_id)
        assert len(ids) == 3


@pytest.mark.parametrize("auto_create", [False, True])
def test_messages_sent_right_behind_the_creation_of_their_topic_are_stored_in_order(auto_create: bool) -> None:
    disk = SlowFiles()
    with slow_broker(disk, auto_create=auto_create) as broker, RawClient(port_of(broker.url)) as peer:
        disk.flushes.close()
        if not auto_create:
            peer.request(Command.TOPIC_CREATE, TopicCreate("orders"))
        asked = [peer.request(Command.PRODUCE, *produce("orders", b"%d" % i, sequence=i)) for i in range(5)]
        eventually(lambda: broker.broker.changes.waiting == 5)
        disk.flushes.open()
        offsets: dict[int, int] = {}
        while len(offsets) < 5:
            answer = peer.read()
            assert answer is not None
            reply = decode_response(answer)
            if answer.command == Command.PRODUCE:
                offsets[answer.correlation] = reply.first_offset
        assert [offsets[correlation] for correlation in asked] == [0, 1, 2, 3, 4]


def test_what_waits_for_a_change_is_bounded() -> None:
    disk = SlowFiles()
    with slow_broker(disk, auto_create=True, pulls_waiting_max=3) as broker, RawClient(port_of(broker.url)) as peer:
        disk.flushes.close()
        for i in range(4):
            refused = peer.request(Command.PRODUCE, *produce("orders", b"x", sequence=i))
        answer = peer.read()
        assert answer is not None
        assert answer.correlation == refused
        with pytest.raises(dmq.Busy) as caught:
            decode_response(answer)
        assert caught.value.retry_after


def test_a_topic_that_could_not_be_made_is_an_error_for_those_who_waited_for_it() -> None:
    files = MemoryFiles()
    with ServedBroker(files, auto_create=True) as broker, RawClient(port_of(broker.url)) as peer:
        full = files.fail("write", lambda path, _: path.startswith("journal"), errno.ENOSPC)
        with pytest.raises(dmq.DiskFull):
            decode_response(peer.ask(Command.PRODUCE, *produce("orders", b"x")))
        files.heal(full)
        assert peer.ask(Command.PRODUCE, *produce("orders", b"x")).status == 0


def test_a_member_that_joins_during_a_seek_gets_what_the_seek_says() -> None:
    disk = SlowFiles()
    with slow_broker(disk, auto_create=True) as broker, RawClient(port_of(broker.url)) as peer:
        peer.ask(Command.PRODUCE, *produce("orders", b"a", b"b", b"c"))
        peer.ask(Command.GROUP_CREATE, GroupCreate("billing", "orders"))
        disk.flushes.close()
        peer.request(Command.SEEK, Seek("orders", "billing", Point(PointKind.OFFSET, 2)))
        eventually(lambda: disk.flushes.waiting)
        peer.request(Command.PULL, Pull("orders", "billing", "member"))
        eventually(lambda: broker.broker.changes.waiting == 1)
        disk.flushes.open()
        moved, pulled = peer.read(), peer.read()
        assert moved is not None
        assert pulled is not None
        assert {moved.command, pulled.command} == {Command.SEEK, Command.PULL}
        (lease,) = decode_response(pulled if pulled.command == Command.PULL else moved).leases
        assert (lease.first_offset, lease.count) == (2, 1)


def test_a_subscription_that_is_given_up_while_it_waits_is_none() -> None:
    disk = SlowFiles()
    with slow_broker(disk, auto_create=True) as broker, RawClient(port_of(broker.url)) as peer:
        disk.flushes.close()
        peer.request(Command.SUBSCRIBE, Subscribe(1, "orders", "billing", "member"))
        peer.request(Command.UNSUBSCRIBE, Unsubscribe(1))
        eventually(lambda: broker.broker.changes.waiting == 2)
        disk.flushes.open()
        answers = [peer.read(), peer.read()]
        assert [answer.command for answer in answers if answer] == [Command.SUBSCRIBE, Command.UNSUBSCRIBE]
        assert not broker.broker.channels.open["orders", "billing"].subscribers


def test_a_client_that_hangs_up_while_it_waits_does_not_join() -> None:
    disk = SlowFiles()
    with slow_broker(disk, auto_create=True) as broker:
        with RawClient(port_of(broker.url)) as peer:
            disk.flushes.close()
            peer.request(Command.SUBSCRIBE, Subscribe(1, "orders", "billing", "member"))
            eventually(lambda: broker.broker.changes.waiting == 1)
        eventually(lambda: not broker.server.dispatcher.sessions)
        disk.flushes.open()
        eventually(lambda: not broker.broker.changes.under_way)
        assert not broker.broker.channels.open


# --- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def cold_broker(disk: SlowFiles, count: int = 200) -> Iterator[ServedBroker]:
    """A broker that has messages on disk and none of them in memory."""
    store = StoreSettings(read_cache_bytes=0, segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10)
    with slow_broker(disk, store=store, auto_create=True) as broker:
        with dmq.connect(broker.url) as client:
            client.admin.create_topic("orders", queues=1)
            producer = client.producer()
            for i in range(count):
                producer.send("orders", b"%d" % i * 300, key=f"k{i % 10}")
        broker.restart()
        yield broker


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (Command.PEEK, Peek("orders", 0)),
        (Command.FIND, Find("orders", "k3")),
        (Command.FETCH, Fetch(0)),
        (Command.LOCATE, Locate([TopicPoints("orders", [Point(), Point(PointKind.OFFSET, 150)])])),
        (Command.OFFSETS, Offsets("orders", 0, Point(PointKind.BACK, 3_600_000))),
        (Command.SEEK, Seek("orders", "billing", Point(PointKind.BACK, 3_600_000))),
    ],
    ids=lambda value: value.name if isinstance(value, Command) else "",
)
def test_a_read_waits_for_the_disk_and_others_do_not(command: Command, asked: Header) -> None:
    disk = SlowFiles()
    with (
        cold_broker(disk) as broker,
        RawClient(port_of(broker.url)) as one,
        RawClient(port_of(broker.url)) as other,
    ):
        other.ask(Command.GROUP_CREATE, GroupCreate("billing", "orders"))
        disk.reads.close()
        correlation = one.request(command, asked)
        eventually(lambda: disk.reads.waiting)
        assert other.ask(Command.HEARTBEAT, Heartbeat()).status == 0
        assert other.ask(Command.PRODUCE, *produce("orders", b"y")).status == 0
        disk.reads.open()
        answer = one.read()
        assert answer is not None
        assert (answer.correlation, answer.status) == (correlation, 0)


def test_what_is_read_past_memory_is_what_was_sent() -> None:
    disk = SlowFiles()
    with cold_broker(disk) as broker, RawClient(port_of(broker.url)) as peer:
        reply: PeekReply = decode_response(peer.ask(Command.PEEK, Peek("orders", 0, max_messages=1000)))
        assert sum(span.count for span in reply.spans) == 200
        assert sum(count for span in reply.spans for count, _, _ in span.ids) == 200
        found: FindReply = decode_response(peer.ask(Command.FIND, Find("orders", "k3", max_messages=15)))
        assert [row.offset for row in found.found] == [3 + 10 * i for i in range(15)]
        assert not found.is_complete
        found = decode_response(peer.ask(Command.FIND, Find("orders", "k3")))
        assert len(found.found) == 20
        assert found.is_complete
        at, size = 0, 0
        while at < broker.broker.store.queries.visible:
            fetched: FetchReply = decode_response(peer.ask(Command.FETCH, Fetch(at)))
            assert fetched.end > at
            size += fetched.end - fetched.start
            at = fetched.end
        assert size >= 200 * 200  # bodies are compressed
        assert broker.broker.reads.reads


def test_questions_that_wait_for_the_disk_are_bounded() -> None:
    disk = SlowFiles()
    with cold_broker(disk, 20) as broker, RawClient(port_of(broker.url)) as peer:
        broker.broker.reads._asked_max = 16  # of which one client gets two
        disk.reads.close()
        for _ in range(3):
            refused = peer.request(Command.FIND, Find("orders", "k3"))
        answer = peer.read()
        assert answer is not None
        assert answer.correlation == refused
        with pytest.raises(dmq.Busy):
            decode_response(answer)
        disk.reads.open()
        for _ in range(2):
            answer = peer.read()
            assert answer is not None
            assert len(decode_response(answer).found) == 2
