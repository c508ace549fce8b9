"""From rows to blocks: columns of fixed types, in blocks of as many rows whatever batches they came in. Pure.

What always holds: the same rows in the same order give the same blocks, in every process, whatever the sizes of the
Arrow batches; a row that cannot be sent raises before its block is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dmq.errors import InvalidMessage
from dmq.model import DEFAULT_PRIORITY

__all__ = ["BLOCK_ROWS", "Block", "blocks"]

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
                    raise InvalidMessage(f"column {name} has what is no {_TYPES[name]} in UTF-8 ({error})") from error
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
