"""Replayed messages: they were stored before, and come back under the ids they had.

A replayed record is a moved one whose first attribute is the message's id, so that a broker finds the ids of a whole
batch with a few array operations. It says the topic it is sent to as its original one, since that is where it is
retried and where its dead letters belong; where it stood before is for the archive to tell.

What always holds: a broker takes such a record from nobody but a replay; a batch is replayed whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import InvalidMessage
from dmq.model import Message
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.records.columns import decode_columns
from dmq.records.hashes import id_hashes, tag_hash
from dmq.records.layout import Buffer

__all__ = ["ReplayTarget", "ids_of_replayed", "merged_hashes"]

_ID_HEAD: Final = attrs.ENTRY.pack(attrs.MESSAGE_ID, 16)
_ENTRY_BYTES: Final = len(_ID_HEAD) + 16
_MARKS: Final = layout.MOVED | layout.REPLAYED


class ReplayTarget:
    """Makes records for one topic and one replay.

    Parameters:
        topic: where they go.
        replay_id: what they are marked with.
        sent_at_ms: their send time; the one they had first is kept beside it.
    """

    __slots__ = ("_said", "_sent_at_ms", "_topic")

    def __init__(self, topic: str, replay_id: str, sent_at_ms: int) -> None:
        self._topic = name_bytes("topic", topic)
        self._sent_at_ms = sent_at_ms
        self._said = attrs.text_entry(attrs.ORIGINAL_TOPIC, "topic", topic) + attrs.text_entry(
            attrs.REPLAY, "replay id", replay_id
        )

    def record(
        self,
        message_id: bytes,
        message: Message,
        *,
        app: str,
        first_sent_at_ms: int,
        codec: int = 0,
        raw_size: int = 0,
    ) -> bytes:
        """The record of one message.

        Parameters:
            message_id: its id, 16 bytes.
            message: with the body as it goes out, compressed with the codec.
            app: who sent it first.
            first_sent_at_ms: when.

        Raises:
            InvalidMessage: a text has no UTF-8 form, or there is too much of them.
        """
        flags = _MARKS | (layout.ORDERED if message.ordered else 0) | (layout.COMPRESSED if codec else 0)
        sent = attrs.entry(attrs.ORIGINAL_SEND_TIME, layout.U64.pack(first_sent_at_ms))
        said = [_ID_HEAD + message_id, self._said, sent]
        hashed = 0
        if message.tag is not None:
            entry, hashed = _tag(message.tag)
            said.append(entry)
        if message.properties:
            said.append(attrs.property_entries(message.properties))
        if codec:
            said.append(attrs.compression_entry(codec, raw_size))
        if message.key is not None:
            said.append(attrs.text_entry(attrs.KEY, "key", message.key))
        return build_record(
            record_head(flags, hashed, message.priority),
            sent_at_ms=self._sent_at_ms,
            body=message.body,
            body_crc=crc32c(message.body),
            names=self._topic + _name("app", app) + name_bytes("business id", message.business_id or ""),
            attributes=b"".join(said),
        )


@lru_cache(1024)
def _name(what: str, name: str) -> bytes:
    return name_bytes(what, name)


@lru_cache(1024)
def _tag(tag: str) -> tuple[bytes, int]:
    return attrs.text_entry(attrs.TAG, "tag", tag), tag_hash(tag)


def ids_of_replayed(buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
    """The ids of records that stand one behind the other, as rows of producer id and sequence.

    Raises:
        InvalidMessage: a record is not marked as replayed, or its id is not its first attribute.
    """
    sizes = np.asarray(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    columns = decode_columns(buffer, starts, sizes)
    is_marked = columns.flags & np.uint8(_MARKS) == _MARKS
    has_room = columns.attributes_size >= _ENTRY_BYTES
    bad = ~(is_marked & has_room)
    if not bad.any():
        heads = layout.gather(buffer, columns.attributes_at, 0, f"V{len(_ID_HEAD)}")
        bad = heads != np.void(_ID_HEAD)
    if bad.any():
        raise InvalidMessage(
            f"record {int(bad.argmax())} of the batch: a replayed message has the flags moved and replayed, and its id "
            "as its first attribute",
            index=int(bad.argmax()),
        )
    raw = layout.gather(buffer, columns.attributes_at, len(_ID_HEAD), "V16")
    ids: npt.NDArray[np.uint64] = np.frombuffer(raw.tobytes(), ">u8").reshape(-1, 2).astype(np.uint64)
    return ids


def merged_hashes(
    ids: npt.NDArray[np.uint64],
    key_index: Sequence[int] | npt.NDArray[Any],
    key_hashes: Sequence[int] | npt.NDArray[Any],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """What moved records are found by: the hashes of their ids and those of their keys, by rising index."""
    count = len(ids)
    hashes = np.empty(count + len(key_hashes), np.uint64)
    producers = ids[:, 0]
    for producer in np.unique(producers).tolist():
        mine = np.flatnonzero(producers == np.uint64(producer))
        hashes[mine] = id_hashes(producer, ids[mine, 1])
    hashes[count:] = key_hashes
    index = np.concatenate([np.arange(count, dtype=np.uint32), np.asarray(key_index, np.uint32)])
    order = np.argsort(index, kind="stable")
    return index[order], hashes[order]
