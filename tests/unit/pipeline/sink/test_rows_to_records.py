"""Rows on their way into a topic: blocks, places, digests and records, without a broker."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from dmq.client.producer.routes import Route
from dmq.errors import InvalidMessage, LimitReached, StaleRoute
from dmq.model import place_of, place_shard
from dmq.pipeline.sink import data_writer
from dmq.pipeline.sink.data_writer import BATCH_ROWS_MAX, Course, Digest, Writer, courses, producer_id
from dmq.pipeline.sink.encoder import BLOCK_ROWS, PIECE_BYTES, Encoder, Place, blocks, divide, runs
from dmq.protocol.produce import ProducerState, QueueSequence
from dmq.records import RecordView

COUNT = 3 * BLOCK_ROWS + 100
WRITER = Writer("q", 1, 5 * BATCH_ROWS_MAX, True)
PLACE = Place("t", 2)


def rows_of(count: int = COUNT) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "value": pa.array([b"v%d" % number * (number % 5) for number in range(count)], pa.binary()),
            "key": pa.array([None if number % 3 == 0 else f"k{number}" for number in range(count)]),
            "priority": pa.array([number % 10 for number in range(count)], pa.int64()),
            "headers": pa.array(
                [[("a", str(number))] if number % 2 else [] for number in range(count)],
                pa.map_(pa.string(), pa.string()),
            ),
        }
    )


def pieces_of(rows: pa.RecordBatch, seed: int) -> list[pa.RecordBatch]:
    cuts = sorted(random.Random(seed).sample(range(1, rows.num_rows), 7))
    return [rows.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, rows.num_rows], strict=True)]


def route(queues: int, *, priority: bool = False) -> Callable[[str], Route]:
    return lambda _: Route(queues, priority, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_and_digests_do_not_depend_on_how_rows_come(seed: int) -> None:
    rows = rows_of()
    pieces = pieces_of(rows, seed)
    assert [block.rows.num_rows for block in blocks(pieces, None)] == [BLOCK_ROWS] * 3 + [100]
    assert [block.rows for block in blocks(pieces, None)] == [block.rows for block in blocks([rows], None)]
    whole, parts = Digest(), Digest()
    whole.add(rows)
    for piece in pieces:
        parts.add(piece)
    assert parts.value == whole.value


def test_a_digest_tells_rows_apart() -> None:
    def digest(*columns: list[object]) -> int:
        found = Digest()
        found.add(pa.record_batch([pa.array(column) for column in columns], names=["value", "key"][: len(columns)]))
        return found.value

    told = [
        digest([b"a", b"b"]), digest([b"b", b"a"]), digest([b"ab", b""]), digest([b"", b"ab"]), digest([b"a"]),
        digest([b"a"], ["x"]), digest([b"a"], [""]), digest([b"a", b"b"], ["x", None]), digest([b"a", b"b"], ["x", ""]),
    ]  # fmt: skip
    assert len({*told}) == len(told)


def test_plain_rows_go_to_the_queues_in_turn() -> None:
    found = [run.place for block in blocks([rows_of()], None) for run in runs(block, 1, "t", False, route(3))]
    assert found == [Place("t", 1), Place("t", 2), Place("t", 0), Place("t", 1)]


def test_other_rows_are_sorted_by_their_place_and_keep_their_order() -> None:
    count = 1000
    rows = pa.record_batch(
        {
            "value": pa.array([b"%d" % number for number in range(count)]),
            "topic": pa.array([("a", "b", "c")[number % 3] for number in range(count)]),
            "delay": pa.array([1.0 if number % 10 == 0 else None for number in range(count)]),
            "priority": pa.array([number % 10 for number in range(count)]),
        }
    )
    (block,) = blocks([rows], None)
    seen = []
    for place, mine in runs(block, 0, None, False, route(10, priority=True)):
        numbers = [int(body) for body in mine.column("value").to_pylist()]
        assert numbers == sorted(numbers)
        for number in numbers:
            topic = ("a", "b", "c")[number % 3]
            assert place == (Place(topic, 0, True) if number % 10 == 0 else Place(topic, number % 10))
        seen += numbers
    assert sorted(seen) == [*range(count)]


def test_the_topic_of_the_options_goes_before_the_column() -> None:
    rows = pa.record_batch({"value": pa.array([b"a", b"b"]), "topic": pa.array(["x", None])})
    (block,) = blocks([rows], "t")
    assert [place.topic for place, _ in runs(block, 0, "t", False, route(1))] == ["t"]
    with pytest.raises(InvalidMessage, match="topic is null"):
        [*blocks([rows], None)]


def test_rows_go_to_the_partition_that_they_name() -> None:
    def places(partitions: list[int | None], *, ordered: bool = False, **columns: pa.Array) -> list[tuple[int, bytes]]:
        values = [b"%d" % number for number in range(len(partitions))]
        made = {"value": pa.array(values), "partition": pa.array(partitions, pa.int32()), **columns}
        (block,) = blocks([pa.record_batch(made)], "t", ordered=ordered)
        found = runs(block, 0, "t", ordered, route(4))
        return [(place.queue, body) for place, rows in found for body in rows.column("value").to_pylist()]

    assert places([2, None, 3, 2]) == [(0, b"1"), (2, b"0"), (2, b"3"), (3, b"2")]
    assert places([None, None]) == [(0, b"0"), (0, b"1")]
    same = pa.array(["u", "u"])
    assert places([1, 3], ordered=True, business_id=same) == [(1, b"0"), (3, b"1")]
    for wrong in (4, -1):
        with pytest.raises(
            InvalidMessage, match=f"partition {wrong} takes no messages of its topic: there are 0, 1, 2"
        ):
            places([0, wrong])
    with pytest.raises(InvalidMessage, match="a delay and a partition"):
        places([0, None], delay=pa.array([1.0, 0.0]))
    assert [body for _, body in places([0, None], delay=pa.array([0.0, 1.0]))] == [b"0", b"1"]


def test_in_a_cluster_rows_go_to_the_places_of_all_shards() -> None:
    places = [place_of(queue, shard) for shard in (1, 3) for queue in range(2)]

    def spread(_: str) -> Route:
        return Route(2, False, 0.0, places)

    plain = [run.place.queue for block in blocks([rows_of()], None) for run in runs(block, 1, "t", False, spread)]
    assert plain == [places[1], places[2], places[3], places[0]]
    count = 400
    rows = rows_of(count).append_column("business_id", pa.array([f"u{number % 50}" for number in range(count)]))
    rows = rows.append_column("delay", pa.array([60.0 * (number % 2) for number in range(count)]))
    (block,) = blocks([rows], None, ordered=True)
    found = [run.place for run in runs(block, 2, "t", True, spread)]
    assert sorted(place.queue for place in found if not place.is_delayed) == places
    assert [place for place in found if place.is_delayed] == [Place("t", place_of(0, 3), True)], "one shard for all"
    ranked = [run.place.queue for run in runs(block, 1, "t", False, lambda _: Route(10, True, 0.0, [256, 257]))]
    assert {place_shard(place) for place in ranked} == {1}
    with pytest.raises(StaleRoute, match="no shard takes messages"):
        list(runs(block, 1, "t", False, lambda _: Route(2, False, 0.0, [])))


def test_large_rows_are_divided() -> None:
    sizes = [PIECE_BYTES // 3, 2 * PIECE_BYTES, 10, 10, PIECE_BYTES - 5, 5, 6]
    rows = pa.record_batch({"value": pa.array([bytes(size) for size in sizes])})
    found = [piece.column("value").to_pylist() for piece in divide(rows)]
    assert [[*map(len, piece)] for piece in found] == [sizes[:1], sizes[1:2], [10, 10], sizes[4:6], [6]]


@pytest.mark.parametrize("columns", [["value"], ["value", "key"], ["value", "key", "priority", "headers"]])
def test_records_say_what_rows_say_and_the_last_has_the_mark(columns: list[str]) -> None:
    rows = rows_of(500).select(columns)
    made, dues = Encoder("app", False, None).encode(Place("t", 0), rows, 0xABCD_EF01_2345_6789, 1000, 1 << 20)
    starts = np.concatenate(([0], np.cumsum(made.lengths, dtype=np.int64)))
    records = [RecordView(made.data, a, b) for a, b in pairwise(starts.tolist())]
    assert [record.body for record in records] == rows.column("value").to_pylist()
    assert [record.key for record in records] == (rows.column("key").to_pylist() if "key" in columns else [None] * 500)
    if "headers" in columns:
        assert [record.priority for record in records] == rows.column("priority").to_pylist()
        assert [record.attributes.properties for record in records] == [
            dict(pairs) for pairs in rows.column("headers").to_pylist()
        ]
    assert [record.attributes.mark for record in records] == [None] * 499 + [0xABCD_EF01_2345_6789]
    keyed = [number for number, record in enumerate(records) if record.key is not None]
    assert made.hash_index.tolist() == keyed
    assert dues == []
    for record in records:
        record.verify()


def encode(rows: pa.RecordBatch, *, ordered: bool) -> None:
    for block in blocks([rows], "t", ordered=ordered):
        for place, mine in runs(block, 0, "t", ordered, route(1)):
            Encoder("app", ordered, None).encode(place, mine, 0, 0, 100)


def test_a_row_that_cannot_be_sent_is_named() -> None:
    def fails(told: str, **columns: pa.Array) -> None:
        rows = pa.record_batch({"value": pa.array([b"a", b"b"]), **columns})
        with pytest.raises(InvalidMessage) as raised:
            encode(rows, ordered="business_id" in columns)
        assert told in raised.value.message

    fails("row 1 of the partition: value is null", value=pa.array([b"a", None]))
    fails("row 1 of the partition: delay is from 0 to", delay=pa.array([1.0, -2.0]))
    fails("row 0 of the partition: business_id is null", business_id=pa.array([None, "u"]))
    fails("column tag has what is not a string in UTF-8", tag=pa.array([b"\xff", b"k"]))


class Remembering:
    """A broker's memory of producers."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int, int | None]] = {}  # epoch, end, mark

    def states(self, topic: str, producer_ids: list[int], is_delayed: bool) -> list[ProducerState]:
        return [
            ProducerState(pid, self.known[pid][0], [QueueSequence(2, self.known[pid][1])])
            for pid in producer_ids
            if pid in self.known
        ]

    def mark(self, place: Place, producer_id: int, sequence: int) -> int | None:
        _, end, mark = self.known[producer_id]
        assert sequence == end - 1
        return mark

    def course(self, writer: Writer = WRITER) -> Course:
        return courses(writer, [PLACE], self)[PLACE]

    def write(self, course: Course, *batches: pa.RecordBatch) -> list[bytes]:
        """Let a course run; what it sends is remembered."""
        sent = []
        for numbered in [*(n for rows in batches for n in course.take(rows)), *course.ended()]:
            pid, epoch, first, rows, mark = numbered
            assert first >= self.known.get(pid, (0, 0, None))[1]
            self.known[pid] = epoch, first + rows.num_rows, mark
            sent += rows.column("value").to_pylist()
        return sent


def test_a_course_goes_on_where_one_before_has_ended_whatever_its_batches() -> None:
    broker, rows = Remembering(), rows_of()
    values = rows.column("value").to_pylist()
    assert broker.write(broker.course(), rows.slice(0, 1000)) == values[:1000]
    course = broker.course()
    assert broker.write(course, rows.slice(0, 300), rows.slice(300, 1500)) == values[1000:1800]
    assert course.skipped == 1000
    assert broker.write(broker.course(), rows) == values[1800:]
    assert broker.write(broker.course(), rows) == []
    ((epoch, end, _),) = broker.known.values()
    assert (epoch, end) == (2, WRITER.base + COUNT)


def test_a_course_with_other_rows_sends_them_all_under_another_id() -> None:
    broker, rows = Remembering(), rows_of()
    values = rows.column("value").to_pylist()
    broker.write(broker.course(), rows)
    other = rows.take(pa.array([1, 0, *range(2, COUNT)]))
    assert broker.write(broker.course(), other) == other.column("value").to_pylist()
    assert broker.write(broker.course(), other) == []
    assert broker.write(broker.course(), rows.slice(0, 10)) == values[:10], "fewer are others, too"
    assert [*broker.known] == [producer_id(WRITER, PLACE, generation) for generation in range(3)]


def test_a_message_that_is_gone_cannot_be_compared_so_its_rows_are_sent() -> None:
    broker, rows = Remembering(), rows_of(10)
    broker.known[producer_id(WRITER, PLACE, 0)] = 0, WRITER.base + 5, None
    assert len(broker.write(broker.course(), rows)) == 10


def test_micro_batches_follow_each_other_and_an_older_one_begins_anew() -> None:
    broker, rows = Remembering(), rows_of(10)
    for base in (0, 1, 2, 0, 1):
        assert len(broker.write(broker.course(WRITER._replace(base=base * BATCH_ROWS_MAX)), rows)) == 10
    assert len(broker.known) == 2


def test_many_generations_are_found() -> None:
    broker, rows = Remembering(), rows_of(10)
    for generation in range(2 * data_writer._GENERATIONS + 1):
        broker.known[producer_id(WRITER, PLACE, generation)] = 0, WRITER.base + 5, None
    assert len(broker.write(broker.course(), rows)) == 10
    assert len(broker.write(broker.course(), rows)) == 0


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, rows = Remembering(), rows_of()
    broker.write(broker.course(), rows)
    monkeypatch.setattr(data_writer, "HELD_BYTES_MAX", 1000)
    with pytest.raises(LimitReached, match=r"dmq\.producer\.id"):
        broker.write(broker.course(), rows)
