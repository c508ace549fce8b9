"""From blocks to records: which row goes to which queue, and its bytes. Pure.

Rows that may go anywhere stay as they are, a block to a queue, the queues in turn. Others (with topics of their own,
ordered, due later, or for a topic whose queues are priorities) are sorted within their block by where they go.

What always holds: rows of one queue keep their order; the same rows in the same order go to the same queues as long as
topics keep theirs.

From rows to blocks: columns of fixed types, in blocks of as many rows whatever batches they came in. Pure.

What always holds: the same rows in the same order give the same blocks, in every process, whatever the sizes of the
Arrow batches; a row that cannot be sent raises before its block is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dmq.client.producer.routes import Route
from dmq.errors import InvalidMessage, StaleRoute
from dmq.model import DEFAULT_PRIORITY, Message, place_of, place_shard
from dmq.pipeline.binary_values import KEY_MARK, as_key, as_properties
from dmq.records import (
    Alike,
    Attributes,
    Compressor,
    EncodedBatch,
    EncodeOptions,
    business_hash,
    encode_attributes,
    encode_batch,
    encode_plain,
)

__all__ = ["BLOCK_ROWS", "Encoder", "Place", "RowRun", "blocks", "divide", "runs"]

PIECE_BYTES: Final = 1 << 20
_PLACE_BITS: Final = 40
_NAMED: Final = 20  # partitions in an error message

_Numbers = npt.NDArray[np.int64]


class Place(NamedTuple):
    """Where rows go."""

    topic: str
    queue: int  # a place, which in a cluster names the shard, too
    is_delayed: bool = False  # they wait elsewhere, all of a shard together, and the broker finds a queue later


class RowRun(NamedTuple):
    """Rows that go to one place."""

    place: Place
    rows: pa.RecordBatch


def runs(
    block: Block, partition: int, topic: str | None, ordered: bool, route_of: Callable[[str], Route]
) -> Iterator[RowRun]:
    """Divide a block by where its rows go.

    Parameters:
        topic: of all rows, if they have no column.
        ordered: rows of one business id stay in order.
        route_of: what is known of a topic.

    Raises:
        UnknownTopic: a topic does not exist.
    """
    rows = block.rows
    is_delayed = _later(rows)
    turn = partition + block.number
    is_chosen = "partition" in rows.schema.names and rows.column("partition").null_count < rows.num_rows
    if "topic" not in rows.schema.names:
        assert topic is not None
        route = route_of(topic)
        if is_delayed is None and not ordered and not route.is_priority and not is_chosen:
            yield RowRun(Place(topic, _in_turn(route, turn)), rows)
            return
        topics, codes = [topic], np.zeros(rows.num_rows, np.int64)
    else:
        coded = rows.column("topic").dictionary_encode()
        topics, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    queues = np.empty(rows.num_rows, np.int64)
    for code, name in enumerate(topics):
        mine = np.flatnonzero(codes == code)
        queues[mine] = _queues(rows, mine, route_of(name), ordered, turn=turn)
        if is_delayed is not None:
            # One shard for the whole partition, since each has a number of its own to go on with.
            queues[mine[is_delayed[mine]]] = place_of(0, place_shard(_in_turn(route_of(name), partition)))
        if is_chosen:
            _choose(rows.column("partition"), mine, route_of(name), queues, is_delayed=is_delayed)
    later = np.zeros(rows.num_rows, np.int64) if is_delayed is None else is_delayed.astype(np.int64)
    yield from _sorted(rows, codes << _PLACE_BITS + 1 | later << _PLACE_BITS | queues, topics)


def _choose(
    partitions: pa.Array, mine: _Numbers, route: Route, queues: _Numbers, *, is_delayed: npt.NDArray[np.bool_] | None
) -> None:
    """Put rows of a topic where their column `partition` says.

    Raises:
        InvalidMessage: there is no such partition, or the row is due later.
    """
    valid = partitions.is_valid().to_numpy(zero_copy_only=False)
    chosen = mine[valid[mine]]
    wanted = partitions.fill_null(-1).to_numpy(zero_copy_only=False)[chosen]
    absent = set(wanted.tolist()) - set(route.all_places)
    if absent:
        there = ", ".join(map(str, route.all_places[:_NAMED]))
        raise InvalidMessage(f"partition {min(absent)} takes no messages of its topic: there are {there}")
    if is_delayed is not None and is_delayed[chosen].any():
        raise InvalidMessage("a row has a delay and a partition, and a delayed message gets its queue when it is due")
    queues[chosen] = wanted


def _in_turn(route: Route, turn: int) -> int:
    """Any place, one after the other.

    Raises:
        StaleRoute: none takes messages.
    """
    places = route.all_places
    if not places:
        raise StaleRoute("no shard takes messages of the topic now: open one, or add one to the topic")
    return places[turn % len(places)]


def _later(rows: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
    """Which rows are due later; None if none is."""
    if "delay" not in rows.schema.names:
        return None
    is_delayed = rows.column("delay").to_numpy(zero_copy_only=False) > 0
    return is_delayed if is_delayed.any() else None


def _queues(rows: pa.RecordBatch, mine: _Numbers, route: Route, ordered: bool, turn: int) -> _Numbers | int:
    """Where these rows of one topic go, as `dmq.client.producer.routes.choose_queue` says, but any queue is one in
    turn."""
    if route.is_priority:
        first = place_of(0, place_shard(_in_turn(route, turn)))
        if "priority" not in rows.schema.names:
            return first + min(DEFAULT_PRIORITY, route.queues - 1)
        priorities: _Numbers = rows.column("priority").to_numpy(zero_copy_only=False)[mine]
        return first + np.minimum(priorities, route.queues - 1)
    if not ordered:
        return _in_turn(route, turn)
    coded = rows.column("business_id").take(pa.array(mine)).dictionary_encode()
    names = coded.dictionary.to_pylist()
    by_code = np.array([_in_turn(route, business_hash(name)) for name in names], np.int64)
    queues: _Numbers = by_code[coded.indices.to_numpy(zero_copy_only=False)]
    return queues


def _sorted(rows: pa.RecordBatch, places: _Numbers, topics: list[str]) -> Iterator[RowRun]:
    order = np.argsort(places, kind="stable")
    places = places[order]
    rows = rows.take(pa.array(order))
    starts = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(places)]
    for start, stop in pairwise(starts):
        place = int(places[start])
        topic, is_delayed = topics[place >> _PLACE_BITS + 1], bool(place >> _PLACE_BITS & 1)
        yield RowRun(Place(topic, place & (1 << _PLACE_BITS) - 1, is_delayed), rows.slice(start, stop - start))


def divide(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide rows that are too large for one request. Where they are divided does not matter to anybody."""
    values = rows.column("value")
    if values.nbytes <= PIECE_BYTES:
        yield rows
        return
    ends = np.cumsum(pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64))
    start = 0
    while start < rows.num_rows:
        taken = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, taken + PIECE_BYTES, side="right")))
        yield rows.slice(start, stop - start)
        start = stop


class Encoder:
    """From rows to records.

    Parameters:
        app: who sends.
        ordered: whether the records say so.
        compressor: compresses bodies where it pays; None leaves all as they are.
    """

    def __init__(self, app: str, ordered: bool, compressor: Compressor | None) -> None:
        self._app = app
        self._ordered = ordered
        self._compressor = compressor

    def encode(
        self, place: Place, rows: pa.RecordBatch, mark: int, now_ms: int, body_bytes_max: int
    ) -> tuple[EncodedBatch, list[int]]:
        """The records, the last of which carries the mark, and when each is due, if they are due later.

        Raises:
            InvalidMessage, MessageTooLarge: a row cannot be sent.
        """
        topic, last = place.topic, rows.num_rows - 1
        options = EncodeOptions(self._compressor, body_bytes_max)
        extra = encode_attributes(Attributes(mark=mark))
        try:
            message = self._messages(rows.slice(last))
            made = encode_batch(topic, self._app, message, sent_at_ms=now_ms, options=options, extra=extra)
            if last:
                made = _join(self._most(topic, rows.slice(0, last), now_ms, options), made)
        except InvalidMessage as error:
            raise type(error)(f"{error.message}, of those to topic {topic!r}", **error.detail) from error
        dues: list[int] = []
        if place.is_delayed:
            delays = rows.column("delay").to_numpy(zero_copy_only=False)
            dues = (now_ms + np.maximum(1, np.round(delays * 1000)).astype(np.int64)).tolist()
        return made, dues

    def _most(self, topic: str, rows: pa.RecordBatch, now_ms: int, options: EncodeOptions) -> EncodedBatch:
        like = self._like(rows)
        if like is None:
            return encode_batch(topic, self._app, self._messages(rows), sent_at_ms=now_ms, options=options)
        keys = rows.column("key").to_pylist() if "key" in rows.schema.names else [None] * rows.num_rows
        alike = Alike(rows.column("value").to_pylist(), keys, like)
        return encode_plain(topic, self._app, alike, sent_at_ms=now_ms, options=options)

    def _like(self, rows: pa.RecordBatch) -> Message | None:
        """What all rows have beside body and key; None if they differ in it."""
        same: dict[str, Any] = {}
        if "key" in rows.schema.names and pa.types.is_binary(rows.schema.field("key").type):
            return None
        for name in ("tag", "business_id", "priority", "headers"):
            if name in rows.schema.names:
                column = rows.column(name)
                if column.null_count == len(column):
                    continue
                if name == "headers" or column.null_count or len(pc.unique(column)) > 1:
                    return None
                same[name] = column[0].as_py()
        return Message(b"", ordered=self._ordered, **same)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        count = rows.num_rows
        columns = {name: column.to_pylist() for name, column in zip(rows.schema.names, rows.columns, strict=True)}
        nothing = [None] * count
        columns.setdefault("priority", [DEFAULT_PRIORITY] * count)
        headers = [*map(_properties, columns.get("headers", nothing))]
        if "key" in columns and pa.types.is_binary(rows.schema.field("key").type):  # not all of them are texts
            for number, raw in enumerate(columns["key"]):
                if raw is not None:
                    columns["key"][number], is_binary = as_key(raw)
                    if is_binary:
                        headers[number][KEY_MARK] = "base64"
        return [
            Message(
                body, key, tag, business_id, ordered=self._ordered, priority=priority, properties=properties or None
            )
            for body, key, tag, business_id, priority, properties in zip(
                columns["value"],
                *(columns.get(name, nothing) for name in ("key", "tag", "business_id")),
                columns["priority"],
                headers,
                strict=True,
            )
        ]


def _properties(headers: Any) -> dict[str, str]:
    pairs = [(pair["key"], pair["value"]) if isinstance(pair, dict) else pair for pair in headers or ()]
    return as_properties([(name, value.encode() if isinstance(value, str) else value) for name, value in pairs])


def _join(most: EncodedBatch, end: EncodedBatch) -> EncodedBatch:
    most.data.extend(end.data)
    return EncodedBatch(
        most.data,
        np.concatenate((most.lengths, end.lengths)),
        np.concatenate((most.hash_index, end.hash_index + np.uint32(most.count))),
        np.concatenate((most.hashes, end.hashes)),
        count=most.count + end.count,
    )


BLOCK_ROWS: Final = 2048
_DELAY_MAX: Final = 2 * 366 * 86_400.0
_TYPES: Final = {
    "value": pa.binary(),
    "key": pa.string(),
    "topic": pa.string(),
    "tag": pa.string(),
    "business_id": pa.string(),
    "partition": pa.int64(),
    "priority": pa.int64(),
    "delay": pa.float64(),
}


class Block(NamedTuple):
    """Rows of a partition that follow each other: as many in all but the last."""

    number: int
    rows: pa.RecordBatch


def blocks(batches: Iterable[pa.RecordBatch], topic: str | None, *, ordered: bool = False) -> Iterator[Block]:
    """Divide the rows of a partition.

    Parameters:
        topic: of all rows, whatever topics they name; None leaves each its own.
        ordered: every row needs a business id.

    Raises:
        InvalidMessage: a row cannot be sent; the message says which, and why.
    """
    for number, rows in enumerate(_divided(batches)):
        first_row = number * BLOCK_ROWS
        columns = _columns(rows, first_row, topic)
        if ordered:
            _refuse_nulls(columns["business_id"], "business_id", first_row, "which ordered rows need")
        yield Block(number, pa.RecordBatch.from_arrays([*columns.values()], names=[*columns]))


def _divided(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    pieces: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            piece = batch.slice(at, BLOCK_ROWS - count)
            at += piece.num_rows
            count += piece.num_rows
            pieces.append(piece)
            if count == BLOCK_ROWS:
                yield _joined(pieces)
                pieces, count = [], 0
    if pieces:
        yield _joined(pieces)


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)


def _columns(rows: pa.RecordBatch, first_row: int, topic: str | None) -> dict[str, pa.Array]:
    found: dict[str, pa.Array] = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        name = name.lower()
        if name in _TYPES and column.type != _TYPES[name]:
            try:
                column = column.cast(_TYPES[name])
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                if name != "key":  # keys may be any bytes
                    raise InvalidMessage(
                        f"column {name} has what is not a {_TYPES[name]} in UTF-8 ({error})"
                    ) from error
        found[name] = column
    _refuse_nulls(found["value"], "value", first_row, "which becomes the body")
    if "topic" in found:
        if topic is None:
            _refuse_nulls(found["topic"], "topic", first_row, "and there is no option 'topic'")
        else:
            del found["topic"]
    if "priority" in found:
        found["priority"] = _within(
            found["priority"].fill_null(DEFAULT_PRIORITY), 0, 9, "priority", first_row=first_row
        )
    if "delay" in found:
        found["delay"] = _within(found["delay"].fill_null(0.0), 0.0, _DELAY_MAX, "delay", first_row=first_row)
    return found


def _refuse_nulls(column: pa.Array, name: str, first_row: int, why: str) -> None:
    if column.null_count:
        row = first_row + int(pc.index(column.is_null(), True).as_py())
        raise InvalidMessage(f"row {row} of the partition: {name} is null, {why}: fill it in, or filter the row out")


def _within(column: pa.Array, low: Any, high: Any, name: str, first_row: int) -> pa.Array:
    fits = pc.and_(pc.greater_equal(column, low), pc.less_equal(column, high))
    wrong = pc.index(fits, False).as_py()
    if wrong >= 0:
        value = column[wrong].as_py()
        raise InvalidMessage(
            f"row {first_row + wrong} of the partition: {name} is from {low:g} to {high:g}, not {value:g}"
        )
    return column
