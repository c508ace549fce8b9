"""Spans: where the bodies and keys of many records stand, found with a few array operations.

For a caller that looks at most of them, one after another. What always holds: a span lies within its record; what
has no span (a body that is compressed, a key that is missing or not in its usual place, a record that is none) is read
through a `RecordView`, which also says what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dmq.records import layout
from dmq.records.attributes import KEY
from dmq.records.layout import Buffer

__all__ = ["NOTHING", "NO_SPAN", "Spans", "find_spans", "key_in_place"]

NO_SPAN: Final = 0  # as an end: no body or key ends at a buffer's first byte
NOTHING: Final = -1  # as a key's start: there is certainly none
_KEY_HEAD: Final = struct.Struct(">BH")
_KEY_HEAD_BYTES: Final = _KEY_HEAD.size


class Spans(NamedTuple):
    """One entry for each record. A body begins `layout.BODY_AT` bytes after its record."""

    body_ends: Sequence[int]
    key_starts: Sequence[int]
    key_ends: Sequence[int]


def find_spans(buffer: Buffer, bounds: Sequence[int] | npt.NDArray[np.int64]) -> Spans:
    """The spans of records that stand one behind the other.

    Parameters:
        buffer: contiguous bytes.
        bounds: where each record begins, rising, and where the last one ends.
    """
    edges = np.asarray(bounds, np.int64)
    starts, ends = edges[:-1], edges[1:]
    octets = np.frombuffer(buffer, np.uint8)
    try:
        head = layout.gather(buffer, starts, layout.LENGTH_AT, ">u4")
        body_ends = starts + layout.gather(buffer, starts, layout.BODY_SIZE_AT, ">u4")
        body_ends += layout.BODY_AT
        # Positions only ever grow on the way, so it is enough that the last of them meets the record's end.
        at = body_ends + octets[body_ends]  # the topic
        at += 1
        at += octets[at]  # the app
        at += 1
        at += octets[at]  # the business id
        at += 1
        sizes = layout.gather(buffer, at, 0, ">u2").astype(np.int64)
        at += 2
        if (at + sizes != ends).any() or (head != ends - starts).any():
            return _none(len(starts))
        has_some = sizes >= _KEY_HEAD_BYTES
        if not has_some.all():
            at = np.where(has_some, at, starts)  # somewhere inside
        has_key = has_some & (octets[at] == KEY)
        key_starts = at + _KEY_HEAD_BYTES
        key_ends = key_starts + layout.gather(buffer, at, 1, ">u2")
        has_key &= key_ends <= ends
    except IndexError:
        return _none(len(starts))
    is_plain = layout.gather(buffer, starts, layout.MAGIC_AT, ">u2") == layout.MAGIC
    is_plain &= (octets[starts + layout.FLAGS_AT] & layout.COMPRESSED) == 0
    body_ends *= is_plain
    key_ends *= has_key
    key_starts[~has_some] = NOTHING
    return Spans(body_ends.tolist(), key_starts.tolist(), key_ends.tolist())


def key_in_place(buffer: Buffer, start: int, stop: int) -> str | None:
    """The key of a record, if it stands where it usually does; None if there is none there, or the record is none.

    Parameters:
        start, stop: where the record begins and ends.
    """
    try:
        at: int = start + layout.BODY_AT + layout.U32.unpack_from(buffer, start + layout.BODY_SIZE_AT)[0]
        at += buffer[at] + 1  # the topic
        at += buffer[at] + 1  # the app
        at += buffer[at] + 1  # the business id
        kind, size = _KEY_HEAD.unpack_from(buffer, at + 2)
        end = at + 2 + _KEY_HEAD_BYTES + size
        if kind != KEY or end > stop:
            return None
        return str(buffer[end - size : end], "utf-8")
    except (IndexError, struct.error, UnicodeDecodeError):
        return None


def _none(count: int) -> Spans:
    nothing = [NO_SPAN] * count
    return Spans(nothing, nothing, nothing)
