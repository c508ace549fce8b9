"""Messages to records: a whole batch at once, with the broker's fields left zero.

What always holds: the plain path and the numpy path give the same bytes; a batch is encoded whole or refused whole, and
the error names the index of the message that is at fault.

What makes it fast: all that messages of a batch share (names, tag, flags, times and the checksum over them) is made
once, as a `_Template`. The key is the last attribute, so that the template covers all bytes around body and key; and
since a CRC is linear, the checksum of "template, then key" is the key's own CRC xor a number that depends only on the
template and the key's length. The key's CRC is needed for its hash anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import InvalidMessage, MessageTooLarge
from dmq.model import Message
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.building import BLANK_STAMP, BLANK_TIMES, HEAD, name_bytes, others_crc
from dmq.records.compression import Compressor
from dmq.records.hashes import tag_hash

__all__ = ["EncodedBatch", "encode_batch"]

# From this many messages on the numpy path is the faster one (bench/records.py).
ENCODE_MANY_MIN: Final = 64

_HEAD_DTYPE: Final = np.dtype([("length", ">u4"), ("template", "V51"), ("crc", ">u8"), ("body_size", ">u4")])
_HEAD_BYTES: Final = np.dtype(f"V{HEAD.size}")
_HEAD_BLANK: Final = bytes(HEAD.size)


class EncodedBatch(msgspec.Struct, frozen=True, gc=False):
    """Records one after another, and what a broker needs to know of them without reading them.

    `hash_index[i]` is the index within the batch of the record whose key has the hash `hashes[i]`; records without a
    key do not occur.
    """

    data: bytearray
    lengths: npt.NDArray[np.uint32]
    hash_index: npt.NDArray[np.uint32]
    hashes: npt.NDArray[np.uint64]
    count: int


class _Template(NamedTuple):
    head: bytes  # bytes 4..54 of the record
    tail: bytes  # everything between the body and the key
    crc_mask: int  # xor the key's CRC-32C = the high half of the record's CRC


class _Batch:
    """One call of `encode_batch`: what its messages share."""

    __slots__ = ("extras", "flags", "names", "sent_at_ms", "templates")

    def __init__(self, topic: str, app: str, sent_at_ms: int, flags: int, extras: Sequence[bytes] | bytes) -> None:
        self.names = name_bytes("topic", topic) + name_bytes("app", app)
        self.sent_at_ms = sent_at_ms
        self.flags = flags
        self.extras = extras
        self.templates: dict[tuple[Any, ...], _Template] = {}

    def template(self, index: int, message: Message, key_size: int, codec: int) -> _Template:
        """The template of this message; `key_size` is -1 without a key."""
        if codec or message.properties or not isinstance(self.extras, bytes):
            return self._make(index, message, key_size, codec)
        shape = (message.tag, message.business_id, message.priority, message.ordered, key_size)
        made = self.templates.get(shape)
        if made is None:
            made = self.templates[shape] = self._make(index, message, key_size, codec)
        return made

    def _make(self, index: int, message: Message, key_size: int, codec: int) -> _Template:
        priority = message.priority
        if type(priority) is not int or not 0 <= priority <= layout.PRIORITY_MAX:
            raise InvalidMessage(f"priority is 0 to {layout.PRIORITY_MAX}, not {priority!r}")
        tag = message.tag
        user = b"" if tag is None else attrs.text_entry(attrs.TAG, "tag", tag)
        if message.properties:
            user += attrs.property_entries(message.properties)
        key_bytes = key_size + attrs.ENTRY.size if key_size >= 0 else 0
        if len(user) + key_bytes > layout.USER_ATTRIBUTES_BYTES_MAX:
            raise attrs.too_large_together(len(user) + key_bytes)
        flags = self.flags | (layout.ORDERED if message.ordered else 0)
        if codec:
            flags |= layout.COMPRESSED
            user += attrs.compression_entry(codec, len(message.body))
        user += self.extras if isinstance(self.extras, bytes) else self.extras[index]
        size = len(user) + key_bytes
        if size > layout.CLIENT_ATTRIBUTES_BYTES_MAX:
            limit = layout.CLIENT_ATTRIBUTES_BYTES_MAX
            raise InvalidMessage(f"attributes take {size} bytes; at most {limit} may be sent")
        tail = self.names + name_bytes("business id", message.business_id or "") + layout.U16.pack(size) + user
        if key_size >= 0:
            tail += attrs.ENTRY.pack(attrs.KEY, key_size)
        head = layout.CLIENT_PART.pack(layout.MAGIC, flags, 0 if tag is None else tag_hash(tag), priority)
        sent = layout.U64.pack(self.sent_at_ms)
        mask = seed = others_crc(head, sent, tail)
        if key_size > 0:
            zeros = bytes(key_size)
            mask = crc32c(zeros, seed) ^ crc32c(zeros)
        return _Template(head + BLANK_STAMP + sent + BLANK_TIMES, tail, mask)


def encode_batch(
    topic: str,
    app: str,
    messages: Sequence[Message],
    *,
    sent_at_ms: int,
    compressor: Compressor | None = None,
    flags: int = 0,
    extra: bytes | Sequence[bytes] = b"",
    body_bytes_max: int = layout.BODY_BYTES_MAX,
    raw_bytes_max: int = layout.RAW_BYTES_MAX,
) -> EncodedBatch:
    """Encode messages for one topic.

    Parameters:
        topic: where they go.
        app: who sends them.
        messages: what to encode, in order.
        sent_at_ms: their send time.
        compressor: compresses bodies where it pays; None leaves all as they are.
        flags: system flags for all of them, beside those that follow from a message.
        extra: attributes of our own from `encode_attributes`, without key, tag and properties: the same for all, or one
            for each message.
        body_bytes_max: the largest body, after compression.
        raw_bytes_max: the largest body before compression: what readers expand.

    Raises:
        InvalidMessage: a message breaks a rule; `detail["index"]` says which.
        MessageTooLarge: a body is over its limit.
    """
    if flags & (layout.RESERVED_FLAGS | layout.COMPRESSED | layout.IPV6):
        raise ValueError(f"flags {flags:#04x} are not for the caller to set")
    bodies = _checked_bodies(messages, raw_bytes_max)
    packed = None if compressor is None else compressor.compress_many(topic, bodies, body_bytes_max=body_bytes_max)
    codecs: list[int] | None = None
    if packed is not None:
        codecs = [codec for codec, _ in packed]
        bodies = [data for _, data in packed]
    if max(map(len, bodies), default=0) > body_bytes_max:
        index, size = next((index, len(body)) for index, body in enumerate(bodies) if len(body) > body_bytes_max)
        raise MessageTooLarge(
            f"message {index}: the body takes {size} bytes after compression; the limit is {body_bytes_max}",
            index=index,
            size=size,
            limit=body_bytes_max,
        )
    batch = _Batch(topic, app, sent_at_ms, flags, extra)
    if len(messages) >= ENCODE_MANY_MIN:
        return _encode_many(batch, messages, bodies, codecs)
    return _encode_few(batch, messages, bodies, codecs)


def _checked_bodies(messages: Sequence[Message], raw_bytes_max: int) -> list[bytes]:
    bodies = [message.body for message in messages]
    if {*map(type, bodies)} == {bytes} and max(map(len, bodies)) <= raw_bytes_max:
        return bodies
    for index, body in enumerate(bodies):
        if type(body) is not bytes:
            if not isinstance(body, bytes | bytearray | memoryview):
                raise InvalidMessage(f"message {index}: body must be bytes, not {type(body).__name__}", index=index)
            bodies[index] = body = bytes(body)
        if len(body) > raw_bytes_max:
            raise MessageTooLarge(
                f"message {index}: the body has {len(body)} bytes before compression; the limit is {raw_bytes_max}",
                index=index,
                size=len(body),
                limit=raw_bytes_max,
            )
    return bodies


def _encode_few(
    batch: _Batch, messages: Sequence[Message], bodies: Sequence[bytes], codecs: Sequence[int] | None
) -> EncodedBatch:
    parts: list[bytes] = []
    lengths, hash_index, hashes = [], [], []
    for index, message in enumerate(messages):
        key, body = message.key, bodies[index]
        try:
            raw_key = b"" if key is None else attrs.utf8("key", key)
            head, tail, mask = batch.template(
                index, message, -1 if key is None else len(raw_key), codecs[index] if codecs else 0
            )
        except InvalidMessage as error:
            raise type(error)(f"message {index}: {error.message}", index=index, **error.detail) from error
        key_crc = crc32c(raw_key)
        size = len(body)
        length = HEAD.size + size + len(tail) + len(raw_key)
        parts += (HEAD.pack(length, head, (key_crc ^ mask) << 32 | crc32c(body), size), body, tail, raw_key)
        lengths.append(length)
        if key is not None:
            hash_index.append(index)
            hashes.append(key_crc << 32 | zlib.crc32(raw_key) or 1)  # hashes.key_hash, of which we have one half
    return EncodedBatch(
        bytearray().join(parts),
        np.array(lengths, np.uint32),
        np.array(hash_index, np.uint32),
        np.array(hashes, np.uint64),
        len(messages),
    )


def _encode_many(
    batch: _Batch, messages: Sequence[Message], bodies: list[bytes], codecs: Sequence[int] | None
) -> EncodedBatch:
    count = len(messages)
    keys: list[bytes] = []
    templates: list[_Template] = []
    missing: list[int] = []
    shared = codecs is None and isinstance(batch.extras, bytes)
    known = batch.templates.get
    try:
        for index, message in enumerate(messages):
            key = message.key
            if key is None:
                raw_key, size = b"", -1
                missing.append(index)
            else:
                raw_key = key.encode()
                size = len(raw_key)
            keys.append(raw_key)
            template = None
            if shared and not message.properties:  # the common case of `batch.template`, without the call
                template = known((message.tag, message.business_id, message.priority, message.ordered, size))
            templates.append(template or batch.template(index, message, size, codecs[index] if codecs else 0))
    except (InvalidMessage, UnicodeEncodeError, AttributeError):
        return _encode_few(batch, messages, bodies, codecs)  # which says what is wrong with which message
    heads, tails, masks = zip(*templates, strict=True)

    parts = [_HEAD_BLANK] * (4 * count)
    parts[1::4] = bodies
    parts[2::4] = tails
    parts[3::4] = keys
    body_sizes = np.fromiter(map(len, bodies), np.int64, count)
    lengths = body_sizes + np.fromiter(map(len, tails), np.int64, count) + np.fromiter(map(len, keys), np.int64, count)
    lengths += HEAD.size
    starts = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])

    shift = np.uint64(32)
    key_crcs = np.fromiter(map(crc32c, keys), np.uint64, count)
    crcs = (key_crcs ^ np.array(masks, np.uint64)) << shift
    crcs |= np.fromiter(map(crc32c, bodies), np.uint64, count)
    columns = np.empty(count, _HEAD_DTYPE)
    columns["length"] = lengths
    columns["template"] = np.frombuffer(b"".join(heads), "V51")
    columns["crc"] = crcs
    columns["body_size"] = body_sizes
    data = bytearray().join(parts)
    layout.scatter(data, starts, 0, columns.view(_HEAD_BYTES))

    hashes = key_crcs << shift | np.fromiter(map(zlib.crc32, keys), np.uint64, count)
    np.maximum(hashes, np.uint64(1), out=hashes)
    hash_index = np.arange(count, dtype=np.uint32)
    if missing:
        hashes, hash_index = np.delete(hashes, missing), np.delete(hash_index, missing)
    return EncodedBatch(data, lengths.astype(np.uint32), hash_index, hashes, count)
