"""The journal read over a connection: everything once, in order, whatever happens to the broker meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import dmq
from dmq.errors import NotConnected, OffsetGone, UnknownCommand, UnknownTopic
from dmq.pipeline.decode.journal_reader import FETCH_BYTES, JournalReader
from dmq.pipeline.decode.rows import MESSAGE_COLUMNS, message_batch
from dmq.pipeline.decode.units import decode_units
from dmq.protocol import Command, Frame, Header
from dmq.protocol.consume import Point, PointKind
from dmq.protocol.read import QueuePoints, TopicPoints
from dmq.records.layout import JOURNAL_OFFSET_AT, U64
from dmq.testing.processes import free_port
from tests.integration.broker_thread import ServedBroker
from tests.integration.delivery.test_corrupt_records import GOOD, SPOILT, fill, spoil_bad


@pytest.fixture
def served() -> Iterator[ServedBroker]:
    with ServedBroker(port=free_port()) as broker:
        yield broker


def publish(served: ServedBroker, count: int, first: int = 0, topic: str = "orders", size: int = 300) -> None:
    with dmq.connect(served.url) as client:
        client.admin.create_topic(topic, queues=4, allow_existing=True)
        with client.producer(compression="none") as producer:
            for at in range(first, first + count, 100):
                numbers = range(at, min(at + 100, first + count))
                producer.send_many(topic, [dmq.Message(b"%07d" % n + b"." * size) for n in numbers])


def bodies_of(reader: JournalReader, start: int, end: int, max_bytes: int = FETCH_BYTES) -> list[int]:
    found: list[int] = []
    at = -1
    for fetched in reader.units(start, end, max_bytes=max_bytes):
        assert fetched.start >= at, "units come in order"
        at = fetched.end
        batch = message_batch(decode_units(fetched.body, columns=("body",)), ("body",))
        found += [int(body[:7]) for body in batch.column("body").to_pylist()]
    return found


def test_ranges_that_are_cut_anywhere_give_every_message_once(served: ServedBroker) -> None:
    publish(served, 2000)
    with JournalReader(served.url) as reader:
        offsets = reader.offsets("orders")
        assert sum(queue.next_offset - queue.first_offset for queue in offsets.queues) == 2000
        first, visible = offsets.first_journal_offset, offsets.visible_journal_offset
        assert sorted(bodies_of(reader, first, visible)) == [*range(2000)]
        size = (visible - first) // 7 + 1
        parts = [bodies_of(reader, at, min(at + size, visible), max_bytes=10_000) for at in range(first, visible, size)]
        assert sorted(body for part in parts for body in part) == [*range(2000)]
        assert sum(map(bool, parts)) > 3
        assert bodies_of(reader, visible, visible) == []


def test_what_a_broker_has_is_told(served: ServedBroker) -> None:
    publish(served, 10)
    publish(served, 3, topic="paid")
    with JournalReader(served.url.removeprefix("dmq://")) as reader:
        topics = {info.topic: info for info in reader.topics()}
        assert {name: info.config.queues for name, info in topics.items()} == {"orders": 4, "paid": 4}
        assert topics["orders"].topic_id != topics["paid"].topic_id
        assert any(info.topic.startswith("%") for info in reader.topics(system=True))
        assert all(queue.at == queue.next_offset for queue in reader.offsets("orders", "latest").queues)
        with pytest.raises(UnknownTopic):
            reader.offsets("nothing")


def points_of(queues: int) -> TopicPoints:
    """The ends, a moment in the middle, and for one queue an offset of its own and one that does not exist."""
    earliest, latest = Point(PointKind.EARLIEST), Point(PointKind.LATEST)
    own = [earliest, Point(PointKind.OFFSET, 3), Point(PointKind.OFFSET, 1 << 40)]
    return TopicPoints("orders", [earliest, latest, Point(PointKind.BACK, 60_000)], [QueuePoints(queues - 1, own)])


def place_of(reader: JournalReader, queue: int, offset: int, otherwise: int) -> tuple[int, int]:
    """Where a message stands in the journal, and its size."""
    if offset < 0 or not (peeked := reader.peek("orders", queue, offset, 1)).lengths:
        return otherwise, 0
    return U64.unpack_from(peeked.body, JOURNAL_OFFSET_AT)[0], peeked.lengths[0]


def test_locations_are_the_same_whether_a_broker_knows_locate_or_not(served: ServedBroker) -> None:
    publish(served, 700)
    publish(served, 70, topic="paid", size=3000)

    class Older(JournalReader):
        def _ask(self, command: Command, header: Header) -> Frame:
            if command == Command.LOCATE:
                raise UnknownCommand("command 0x0035 is not known")
            return super()._ask(command, header)

    asked = [points_of(4), TopicPoints("nothing", [Point()]), TopicPoints("paid")]
    with JournalReader(served.url) as reader, Older(served.url) as older:
        orders, nothing, paid = reader.locate(asked)
        ends = reader.offsets("orders")
        places = {row.queue: row for row in ends.queues}
        assert [row.queue for row in orders.queues] == [0, 1, 2, 3]
        for row in orders.queues:
            assert (row.first_offset, row.next_offset) == (
                places[row.queue].first_offset,
                places[row.queue].next_offset,
            )
            for at in row.locations:
                assert (at.start, at.start_bytes) == place_of(reader, row.queue, at.offset, ends.visible_journal_offset)
                assert (at.before, at.before_bytes) == place_of(reader, row.queue, at.offset - 1, 0)
        assert [location.offset for location in orders.queues[3].locations] == [0, 3, orders.queues[3].next_offset]
        assert (nothing.topic_id, nothing.queues) == (0, [])
        assert [row.locations for row in paid.queues] == [[], [], [], []]
        assert older.locate(asked) == [orders, nothing, paid]


def test_a_topic_among_others_comes_without_them(served: ServedBroker) -> None:
    for first in range(0, 2000, 500):
        publish(served, 500, first)
        publish(served, 500, first, topic="paid", size=900)
    with JournalReader(served.url) as reader:
        orders, paid = reader.locate([TopicPoints("orders"), TopicPoints("paid")])
        ends = reader.offsets("orders")
        first, visible = ends.first_journal_offset, ends.visible_journal_offset
        found, size = [], 0
        for fetched in reader.units(first, visible, max_bytes=100_000, topic_ids=[orders.topic_id]):
            size += len(fetched.body)
            rows = decode_units(fetched.body, wanted=[orders.topic_id], columns=("body",))
            found += [int(body[:7]) for body in message_batch(rows, ("body",)).column("body").to_pylist()]
        assert sorted(found) == [*range(2000)]
        assert size < 0.5 * (visible - first)
        everything = [*reader.units(first, visible, topic_ids=[orders.topic_id, paid.topic_id])]
        assert sum(len(part.body) for part in everything) > 0.95 * (visible - first)
        nothing = [*reader.units(first, visible, topic_ids=[99])]
        assert [len(part.body) for part in nothing] == [0] * len(nothing)
        assert nothing[-1].end == visible


def test_records_of_one_queue_come_with_their_ids(served: ServedBroker) -> None:
    with dmq.connect(served.url) as client:
        client.admin.create_topic("orders", queues=1)
        with client.producer() as producer:
            receipts = producer.send_many("orders", [dmq.Message(b"%d" % n) for n in range(20)])
    with JournalReader(served.url) as reader:
        peeked = reader.peek("orders", 0, 5, 10)
        assert (peeked.first_offset, peeked.end_offset, len(peeked.lengths)) == (5, 15, 10)
        assert sum(peeked.lengths) == len(peeked.body)
        assert peeked.ids == [(10, receipts[5].id.producer_id, receipts[5].id.sequence)]


def test_a_broker_that_restarts_is_waited_for_and_nothing_is_read_twice(served: ServedBroker) -> None:
    publish(served, 3000)
    with JournalReader(served.url) as reader:
        offsets = reader.offsets("orders")
        found: list[int] = []
        units = reader.units(offsets.first_journal_offset, offsets.visible_journal_offset, max_bytes=50_000)
        for number, fetched in enumerate(units):
            if number in (2, 5):
                served.restart()
            batch = message_batch(decode_units(fetched.body, columns=("body",)), ("body",))
            found += [int(body[:7]) for body in batch.column("body").to_pylist()]
        assert sorted(found) == [*range(3000)]


def test_what_the_journal_does_not_have_is_said(served: ServedBroker) -> None:
    publish(served, 10)
    with JournalReader(served.url) as reader:
        offsets = reader.offsets("orders")
        with pytest.raises(OffsetGone) as caught:
            reader.fetch(offsets.visible_journal_offset + 1)
        assert caught.value.detail["next"] == offsets.visible_journal_offset
        with pytest.raises(OffsetGone, match="lost"):
            list(reader.units(offsets.first_journal_offset, offsets.visible_journal_offset + 5))


def test_nobody_there_is_said_within_the_timeout() -> None:
    with pytest.raises(NotConnected):
        JournalReader(f"127.0.0.1:{free_port()}", timeout=0.3)


def longer_topic(raw: bytes) -> bytes:
    """The sizes of a record's parts do not add up."""
    return raw.replace(b"\x05plain", b"\xf5plain")


@pytest.mark.parametrize("spoilt", [*SPOILT, "the size of a name"])
def test_records_that_nobody_can_read_are_rows_as_far_as_they_go(served: ServedBroker, spoilt: str) -> None:
    with dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("plain", queues=1)
        fill(client, "plain")
    spoil_bad(served, SPOILT.get(spoilt, longer_topic))
    with JournalReader(served.url) as reader:
        offsets = reader.offsets("plain")
        first, visible = offsets.first_journal_offset, offsets.visible_journal_offset
        for columns in (("body",), MESSAGE_COLUMNS):
            rows = [
                row
                for fetched in reader.units(first, visible)
                for row in message_batch(decode_units(fetched.body, columns=columns), columns).to_pylist()
            ]
            assert len(rows) == 5
            assert [row["body"] for row in rows[::2]] == [b"body"] * 3
            assert [row.get("key") for row in rows[::2]] in (GOOD, [None] * 3)


def test_a_store_that_closes_under_a_request_ends_the_connection_instead_of_failing_it(served: ServedBroker) -> None:
    publish(served, 10)
    with JournalReader(served.url) as reader:
        offsets = reader.offsets("orders")
        served.loop.call_soon_threadsafe(served.broker.store.queries.close)
        back = threading.Timer(0.3, served.restart)
        back.start()
        try:
            fetched = reader.fetch(offsets.first_journal_offset)
        finally:
            back.join()
        assert fetched.end > fetched.start
