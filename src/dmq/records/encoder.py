"""Messages to records: a whole batch at once, with the broker's fields left zero.

What always holds: the plain path and the numpy path give the same bytes; a batch is encoded whole or refused whole, and
the error names the index of the message that is at fault.

A `Shape` is what records have in common whatever their body, key and time. It is made once, and remembered. A shape
that was made fits every limit together with a key of its size; a shape comes from the memory only if every choice
behind it is the same, types included, so that what is refused once is refused always.

What makes it fast: all that messages of a batch share (names, tag, flags, times and the checksum over them) is made
once, as a `Template`: a `Shape` with its time. The key is the last attribute, so that the template covers all bytes
around body and key; and since a CRC is linear, the checksum of "template, then key" is the key's own CRC xor a number
that depends only on the template and the key's length. The key's CRC is needed for its hash anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from crc32c import crc32c

from dmq.compiled import find
from dmq.errors import InvalidMessage, MessageTooLarge
from dmq.model import DEFAULT_PRIORITY, Message
from dmq.offset_runs import offset_runs
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.assembler import (
    BLANK_POINTER,
    EncodedBatch,
    Template,
    assemble,
    assemble_even,
    attach_blocks,
    key_sizes_of,
    raw_keys_of,
)
from dmq.records.block import make_block
from dmq.records.builder import BLANK_STAMP, BLANK_TIMES, HEAD, name_bytes
from dmq.records.compression import TOGETHER_FROM_BYTES, TOGETHER_MAX, Compressor, Together, sizes_of
from dmq.records.hashes import tag_hash

__all__ = [
    "Alike",
    "EncodeOptions",
    "EncodedBatch",
    "LoneRecord",
    "encode_batch",
    "encode_lone",
    "encode_plain",
    "is_plain",
]

# From this many messages on the numpy path is the faster one (bench/records.py).
ENCODE_MANY_MIN: Final = 64

EVEN_KEY_MAX: Final = 32  # beyond, a call for each key is faster
_PLAIN_MESSAGE: Final = Message(b"")
_NO_BODIES: Final[list[bytes]] = []

# Bodies, keys, and how large the bodies are together.
PlainColumns: TypeAlias = tuple[list[bytes], list[str | None], int]

_REMEMBERED: Final = 4096
_TAG_MAX: Final = 255  # longer ones are not remembered: the memory stays small


class Shape(NamedTuple):
    """The bytes of a record that do not depend on its body, key and time."""

    front: bytes  # bytes 4..9
    front_crc: int  # CRC-32C of them
    tail: bytes  # everything between the body and the key


@lru_cache(1024)
def names_of(topic: str, app: str) -> bytes:
    """Topic and app, each behind its length byte."""
    return name_bytes("topic", topic) + name_bytes("app", app)


def make_shape(
    names: bytes, message: Message, key_size: int, codec: int = 0, flags: int = 0, extra: bytes = b""
) -> Shape:
    """The shape of a message.

    Parameters:
        names: from `names_of`.
        message: of which the body only gives its size, if it is compressed.
        key_size: in bytes; -1 without a key.
        codec: what the body is compressed with; 0 if it is not.
        flags: system flags, beside those that follow from the message.
        extra: attributes of our own.

    Raises:
        InvalidMessage: a value breaks a rule, or there is too much of them together.
    """
    tag, priority = message.tag, message.priority
    if type(priority) is not int or not 0 <= priority <= layout.PRIORITY_MAX:
        raise InvalidMessage(f"priority is 0 to {layout.PRIORITY_MAX}, not {priority!r}")
    user = b"" if tag is None else attrs.text_entry(attrs.TAG, "tag", tag)
    if message.properties:
        user += attrs.property_entries(message.properties)
    key_bytes = key_size + attrs.ENTRY.size if key_size >= 0 else 0
    if len(user) + key_bytes > layout.USER_ATTRIBUTES_BYTES_MAX:
        raise attrs.too_large_together(len(user) + key_bytes)
    if message.ordered:
        flags |= layout.ORDERED
    if codec:
        flags |= layout.COMPRESSED
        user += attrs.compression_entry(codec, len(message.body))
    user += extra
    size = len(user) + key_bytes
    if size > layout.CLIENT_ATTRIBUTES_BYTES_MAX:
        limit = layout.CLIENT_ATTRIBUTES_BYTES_MAX
        raise InvalidMessage(f"attributes take {size} bytes; at most {limit} may be sent")
    tail = names + name_bytes("business id", message.business_id or "") + layout.U16.pack(size) + user
    if key_size >= 0:
        tail += attrs.ENTRY.pack(attrs.KEY, key_size)
    front = layout.CLIENT_PART.pack(layout.MAGIC, flags, 0 if tag is None else tag_hash(tag), priority)
    return Shape(front, crc32c(front), tail)


_shapes: Final[dict[tuple[Any, ...], Shape]] = {}  # at most _REMEMBERED: then it starts anew


def remembered_shape(names: bytes, message: Message, key_size: int, codec: int = 0, flags: int = 0) -> Shape:
    """`make_shape` for what occurs again and again: no properties, nothing of our own.

    Raises:
        InvalidMessage: as `make_shape`.
    """
    tag, priority = message.tag, message.priority
    raw_size = len(message.body) if codec else 0
    key = (names, flags, tag, message.business_id, type(priority), priority, message.ordered, key_size, codec, raw_size)
    try:
        found = _shapes.get(key)
    except TypeError:  # something that cannot be remembered, nor sent: here is told why
        return make_shape(names, message, key_size, codec, flags=flags)
    if found is None:
        found = make_shape(names, message, key_size, codec, flags=flags)
        if tag is None or len(tag) <= _TAG_MAX:
            if len(_shapes) >= _REMEMBERED:
                _shapes.clear()
            _shapes[key] = found
    return found


class LoneRecord(NamedTuple):
    """One record in pieces, and what a broker needs to know of it without reading it."""

    parts: tuple[bytes, ...]
    length: int
    key_hash: int  # 0 without a key


class _Batch:
    """One call of `encode_batch`: what its messages share."""

    __slots__ = ("_sent", "_templates", "extras", "flags", "names")

    def __init__(self, topic: str, app: str, sent_at_ms: int, flags: int, extras: Sequence[bytes] | bytes) -> None:
        self.names = names_of(topic, app)
        self._sent = layout.U64.pack(sent_at_ms)
        self.flags = flags
        self.extras = extras
        self._templates: dict[tuple[Any, ...], Template] = {}

    def template(self, index: int, message: Message, key_size: int, codec: int) -> Template:
        """The template of this message; `key_size` is -1 without a key."""
        if message.properties or self.extras:
            extra = self.extras if isinstance(self.extras, bytes) else self.extras[index]
            shape = make_shape(self.names, message, key_size, codec, flags=self.flags, extra=extra)
            return self._timed(shape, key_size)
        priority = message.priority
        raw_size = len(message.body) if codec else 0
        key = (message.tag, message.business_id, type(priority), priority, message.ordered, key_size, codec, raw_size)
        made = self._templates.get(key)
        if made is None:
            shape = remembered_shape(self.names, message, key_size, codec, flags=self.flags)
            made = self._templates[key] = self._timed(shape, key_size)
        return made

    def _timed(self, shape: Shape, key_size: int) -> Template:
        mask = seed = crc32c(shape.tail, crc32c(self._sent, shape.front_crc))
        if key_size > 0:
            zeros = bytes(key_size)
            mask = crc32c(zeros, seed) ^ crc32c(zeros)
        return Template(shape.front + BLANK_STAMP + self._sent + BLANK_TIMES, shape.tail, mask)


def encode_lone(topic: str, app: str, message: Message, sent_at_ms: int, body: bytes, codec: int = 0) -> LoneRecord:
    """One message, encoded for its own sake: a fifth of the price of a batch of one.

    Parameters:
        body: the message's body as it goes out, compressed with this codec.

    Raises:
        InvalidMessage: the message breaks a rule.
    """
    key = message.key
    raw_key = b"" if key is None else attrs.utf8("key", key)
    names = names_of(topic, app)
    key_size = -1 if key is None else len(raw_key)
    make = make_shape if message.properties else remembered_shape
    shape = make(names, message, key_size, codec)
    return lone_record(shape, sent_at_ms, body, None if key is None else raw_key)


def plain_shape(topic: str, app: str, key_size: int) -> Shape:
    """The shape of a message that has a body and at most a key, of so many bytes; -1 without one.

    Raises:
        InvalidMessage: the key is too large.
    """
    return make_shape(names_of(topic, app), _PLAIN_MESSAGE, key_size)


def lone_record_compiled(shape: Shape, sent_at_ms: int, body: bytes, raw_key: bytes | None) -> LoneRecord:
    """The record of a shape, body and key, by the compiled loop."""
    if type(body) is not bytes:
        return lone_record_plain(shape, sent_at_ms, body, raw_key)
    record, key_hash = _lone_record(shape[0], shape[2], sent_at_ms, body, key=raw_key)
    return LoneRecord((record,), len(record), key_hash)


def lone_record_plain(shape: Shape, sent_at_ms: int, body: bytes, raw_key: bytes | None) -> LoneRecord:
    """The record of a shape, body and key, in plain Python."""
    front, front_crc, tail = shape
    sent = layout.U64.pack(sent_at_ms)
    crc = crc32c(tail, crc32c(sent, front_crc))
    key_hash, key, size = 0, raw_key or b"", len(body)
    if raw_key is not None:
        crc = crc32c(key, crc)
        key_hash = crc32c(key) << 32 | zlib.crc32(key) or 1
    length = HEAD.size + size + len(tail) + len(key)
    head = HEAD.pack(length, front + BLANK_STAMP + sent + BLANK_TIMES, crc << 32 | crc32c(body), size)
    return LoneRecord((head, body, tail, key), length, key_hash)


_lone_record: Final = find("lone_record")
lone_record: Final = lone_record_plain if _lone_record is None else lone_record_compiled


class EncodeOptions(msgspec.Struct, frozen=True, gc=False):
    """How the bodies of a batch are compressed, and their limits."""

    compressor: Compressor | None = None
    """Compresses bodies where it pays; None leaves all as they are."""

    body_bytes_max: int = layout.BODY_BYTES_MAX
    """The largest body, after compression."""

    raw_bytes_max: int = layout.RAW_BYTES_MAX
    """The largest body before compression: what readers expand."""

    blocks: bool = False
    """Bodies may be compressed together, in blocks behind the records."""

    flags: int = 0
    """System flags for all records, beside those that follow from a message."""

    def __post_init__(self) -> None:
        if self.flags & (layout.RESERVED_FLAGS | layout.COMPRESSED | layout.UNSIGNED_FLAGS):
            raise ValueError(f"flags {self.flags:#04x} are not for the caller to set")


_DEFAULTS: Final = EncodeOptions()


class Alike(NamedTuple):
    """Messages that differ in body and key only, as columns."""

    bodies: list[bytes]
    """Bytes, all of them."""

    keys: Sequence[str | None]
    """One for each body, None where there is none."""

    like: Message = _PLAIN_MESSAGE
    """What they have beside that; nothing if left out."""


def encode_batch(
    topic: str,
    app: str,
    messages: Sequence[Message],
    *,
    sent_at_ms: int,
    options: EncodeOptions = _DEFAULTS,
    extra: bytes | Sequence[bytes] = b"",
) -> EncodedBatch:
    """Encode messages for one topic.

    Parameters:
        topic: where they go.
        app: who sends them.
        messages: what to encode, in order.
        sent_at_ms: their send time.
        options: how.
        extra: attributes of our own from `encode_attributes`, without key, tag and properties: the same for all, or one
            for each message.

    Raises:
        InvalidMessage: a message breaks a rule; `detail["index"]` says which.
        MessageTooLarge: a body is over its limit.
    """
    compressor, body_bytes_max = options.compressor, options.body_bytes_max
    bodies = _checked_bodies(messages, options.raw_bytes_max)
    batch = _Batch(topic, app, sent_at_ms, options.flags, extras=extra)
    if options.blocks and compressor is not None:
        together = compressor.compress_together(topic, bodies, body_bytes_max)
        if together:
            swapped = _Swapped(bodies, together)
            packed = compressor.compress_many(topic, swapped.bodies, body_bytes_max=body_bytes_max)
            encoded = _encode_packed(batch, messages, packed, body_bytes_max, bodies=swapped.bodies, crcs=swapped.crcs)
            return attach_blocks(encoded, together, swapped.sizes)
    packed = None if compressor is None else compressor.compress_many(topic, bodies, body_bytes_max=body_bytes_max)
    return _encode_packed(batch, messages, packed, body_bytes_max, bodies=bodies)


class _Swapped:
    """The bodies of a batch, with blank pointers for those that go into blocks; and of all of them as they were sent
    the sizes and checksums."""

    __slots__ = ("bodies", "crcs", "sizes")

    def __init__(self, bodies: list[bytes], together: Sequence[Together]) -> None:
        self.sizes = [*map(len, bodies)]
        self.crcs = [*map(crc32c, bodies)]
        if len(together[0].indexes) == len(bodies):
            self.bodies = [BLANK_POINTER] * len(bodies)
            return
        self.bodies = bodies.copy()
        for run in together:
            for index in run.indexes:
                self.bodies[index] = BLANK_POINTER


def _encode_packed(
    batch: _Batch,
    messages: Sequence[Message],
    packed: list[tuple[int, bytes]] | None,
    body_bytes_max: int,
    bodies: list[bytes] = _NO_BODIES,
    crcs: list[int] | None = None,
) -> EncodedBatch:
    """`encode_batch` once its bodies are compressed; `bodies` are they if none is, with other checksums if so said."""
    codecs: list[int] | None = None
    if packed is not None:
        codecs = [codec for codec, _ in packed]
        bodies = [data for _, data in packed]
        if crcs is not None:
            crcs = [crc32c(data) if codec else crc for (codec, data), crc in zip(packed, crcs, strict=True)]
    if max(map(len, bodies), default=0) > body_bytes_max:
        index, size = next((index, len(body)) for index, body in enumerate(bodies) if len(body) > body_bytes_max)
        raise MessageTooLarge(
            f"message {index}: the body takes {size} bytes even compressed; at most {body_bytes_max} are allowed: "
            "send less at a time, or a reference to it",
            index=index,
            size=size,
            limit=body_bytes_max,
        )
    if len(messages) >= ALIKE_MIN:
        return _encode_many(batch, messages, bodies, codecs, crcs=crcs)
    return _encode_few(batch, messages, bodies, codecs, crcs=crcs)


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
    batch: _Batch,
    messages: Sequence[Message],
    bodies: Sequence[bytes],
    codecs: Sequence[int] | None,
    crcs: list[int] | None = None,
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
        crc = crc32c(body) if crcs is None else crcs[index]
        parts += (HEAD.pack(length, head, (key_crc ^ mask) << 32 | crc, size), body, tail, raw_key)
        lengths.append(length)
        if key is not None:
            hash_index.append(index)
            hashes.append(key_crc << 32 | zlib.crc32(raw_key) or 1)  # hashes.key_hash, of which we have one half
    return EncodedBatch(
        bytearray().join(parts),
        np.array(lengths, np.uint32),
        np.array(hash_index, np.uint32),
        np.array(hashes, np.uint64),
        count=len(messages),
    )


def encode_plain(
    topic: str, app: str, alike: Alike, *, sent_at_ms: int, options: EncodeOptions = _DEFAULTS
) -> EncodedBatch:
    """`encode_batch` for messages that differ in body and key only: what is sent most.

    Raises:
        InvalidMessage, MessageTooLarge: as `encode_batch`.
    """
    bodies, keys, like = alike
    compressor, body_bytes_max = options.compressor, options.body_bytes_max
    count = len(bodies)
    smallest, largest, total = sizes_of(bodies)
    batch = _Batch(topic, app, sent_at_ms, options.flags, extras=b"")
    packed = None
    is_small = largest <= min(body_bytes_max, options.raw_bytes_max)
    blocks = options.blocks and compressor is not None and total >= TOGETHER_FROM_BYTES
    if blocks and count >= ENCODE_MANY_MIN and largest <= min(TOGETHER_MAX, body_bytes_max) and compressor is not None:
        together = compressor.compress_together(topic, bodies, body_bytes_max)
        if together:
            return _encode_blocks(batch, like, bodies, keys, together=together)
        blocks = False
    if is_small and not blocks and compressor is not None and compressor.mode != "none" and count:
        if compressor.is_worth_trying(topic, smallest, largest, count):
            packed = compressor.try_many(topic, bodies, smallest, largest, body_bytes_max=body_bytes_max)
        compressor = None
    if is_small and not blocks and packed is None and count >= ALIKE_MIN:
        try:
            return _encode_alike(batch, like, bodies, keys)
        except (InvalidMessage, UnicodeEncodeError, AttributeError):
            pass  # told below, with the message's index
    _, _, tag, business_id, ordered, priority, properties = msgspec.structs.astuple(like)
    messages = [
        Message(body, key, tag, business_id, ordered=ordered, priority=priority, properties=properties)
        for body, key in zip(bodies, keys, strict=True)
    ]
    if packed is not None:
        return _encode_packed(batch, messages, packed, body_bytes_max)
    options = msgspec.structs.replace(options, compressor=compressor, blocks=blocks)
    return encode_batch(topic, app, messages, sent_at_ms=sent_at_ms, options=options)


def _encode_blocks(
    batch: _Batch, like: Message, bodies: list[bytes], keys: Sequence[str | None], *, together: Sequence[Together]
) -> EncodedBatch:
    """`encode_plain` for many bodies some of which were compressed together; the others, being small, stay."""
    if _assemble_alike is not None:
        try:
            found = encode_alike_compiled(_assemble_alike, batch, like, bodies, keys=keys, together=together)
            if found is not None:
                return found
        except (InvalidMessage, UnicodeEncodeError, AttributeError):
            pass  # told below
    swapped = _Swapped(bodies, together)
    sizes = [*map(len, swapped.bodies)]
    try:
        encoded = encode_alike_plain(batch, like, swapped.bodies, sizes, keys=keys, crcs=swapped.crcs)
    except (InvalidMessage, UnicodeEncodeError, AttributeError):
        beside = msgspec.structs.asdict(like)
        del beside["body"], beside["key"]
        messages = [Message(body, key, **beside) for body, key in zip(swapped.bodies, keys, strict=True)]
        encoded = _encode_few(batch, messages, swapped.bodies, None, crcs=swapped.crcs)  # says which is wrong
    return attach_blocks(encoded, together, swapped.sizes)


class _Even(NamedTuple):
    """Keys of one size, or none at all."""

    size: int  # -1 without keys
    joined: bytes | None


def _even_keys(keys: Sequence[str | None]) -> _Even | None:
    """The keys back to back if all are short ASCII texts of one size, or all are missing; None if they are not."""
    first = keys[0]
    if first is None:
        return _Even(-1, None) if keys.count(None) == len(keys) else None
    try:
        size = len(first)
        if size > EVEN_KEY_MAX or {*map(len, keys)} != {size}:  # type: ignore[arg-type]
            return None
        joined = "".join(keys)  # type: ignore[arg-type]
    except TypeError:  # one is missing, or no text
        return None
    return _Even(size, joined.encode()) if joined.isascii() else None


def _encode_many(
    batch: _Batch,
    messages: Sequence[Message],
    bodies: list[bytes],
    codecs: Sequence[int] | None,
    crcs: list[int] | None = None,
) -> EncodedBatch:
    keys, sizes = [message.key for message in messages], [*map(len, bodies)]
    try:
        if codecs is None and not batch.extras and len(_kinds(messages)) == 1:
            return _encode_alike(batch, messages[0], bodies, keys, crcs=crcs)
        if len(messages) < ENCODE_MANY_MIN:
            return _encode_few(batch, messages, bodies, codecs, crcs=crcs)
        raw_keys, has_key = raw_keys_of(keys)
        key_sizes = key_sizes_of(raw_keys, has_key)
        templates = [
            batch.template(index, message, key_sizes[index], codecs[index] if codecs else 0)
            for index, message in enumerate(messages)
        ]
    except (InvalidMessage, UnicodeEncodeError, AttributeError):
        return _encode_few(batch, messages, bodies, codecs, crcs=crcs)  # which says what is wrong with which message
    return assemble(bodies, sizes, raw_keys, has_key, templates=templates, crcs_of_bodies=crcs)


def _encode_alike(
    batch: _Batch,
    message: Message,
    bodies: list[bytes],
    keys: Sequence[str | None],
    crcs: list[int] | None = None,
) -> EncodedBatch:
    """Messages that differ from this one in body and key only."""
    if _assemble_alike is not None and crcs is None:
        encoded = encode_alike_compiled(_assemble_alike, batch, message, bodies, keys=keys)
        if encoded is not None:
            return encoded
    return encode_alike_plain(batch, message, bodies, [*map(len, bodies)], keys=keys, crcs=crcs)


_assemble_alike: Final = find("assemble_alike")
# From this many messages on those that are alike are encoded as such.
ALIKE_MIN: Final = ENCODE_MANY_MIN if _assemble_alike is None else 2


def encode_alike_compiled(
    loop: Callable[..., Any],
    batch: _Batch,
    message: Message,
    bodies: list[bytes],
    keys: Sequence[str | None],
    together: Sequence[Together] = (),
) -> EncodedBatch | None:
    """The records by the compiled loop, and behind them the blocks of bodies that were compressed together.

    None if it leaves them to the plain way.
    """
    head, tail, _ = batch.template(0, message, -1, 0)
    blocks = [make_block(codec, raw_size, packed) for _, codec, raw_size, packed in together]
    runs = _runs_of(together, blocks, len(bodies))
    made = loop(bodies, keys if type(keys) is list else [*keys], head, tail, runs=runs)
    if made is None:
        return None
    data, lengths, hash_index, hashes, columns = made
    for block in blocks:
        data += block
    return EncodedBatch(
        data,
        np.frombuffer(lengths, np.uint32),
        np.frombuffer(hash_index, np.uint32),
        np.frombuffer(hashes, np.uint64),
        count=len(bodies),
        block_bytes=sum(map(len, blocks)),
        columns=columns,
    )


def _runs_of(together: Sequence[Together], blocks: Sequence[bytes], count: int) -> list[tuple[int, int]]:
    """Which bodies are in which block, as the compiled loop takes it."""
    runs: list[tuple[int, int]] = []
    done = at = 0
    for one, block in zip(together, blocks, strict=True):
        for first, stop in offset_runs(one.indexes):
            if first > done:
                runs.append((first, -1))
            runs.append((stop, at))
            done = stop
        at += len(block)
    return [*runs, (count, -1)] if runs and done < count else runs


def encode_alike_plain(
    batch: _Batch,
    message: Message,
    bodies: list[bytes],
    sizes: list[int],
    keys: Sequence[str | None],
    crcs: list[int] | None = None,
) -> EncodedBatch:
    """The same column by column."""
    even = _even_keys(keys)
    if even is not None:
        template = batch.template(0, message, even.size, 0)
        return assemble_even(bodies, sizes, even.joined, template, crcs_of_bodies=crcs)
    raw_keys, has_key = raw_keys_of(keys)
    key_sizes = key_sizes_of(raw_keys, has_key)
    by_size = {size: batch.template(0, message, size, 0) for size in {*key_sizes}}
    templates = [*by_size.values()] if len(by_size) == 1 else [*map(by_size.__getitem__, key_sizes)]
    return assemble(bodies, sizes, raw_keys, has_key, templates=templates, crcs_of_bodies=crcs)


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether all messages have a body and at most a key: `encode_plain` is for them."""
    if _plain_columns is not None and type(messages) is list and _plain_columns(messages) is not None:
        return True
    # Attributes that the interpreter looks up by itself cost a third of what `_BESIDE` does.
    for message in messages:
        if (
            message.tag is not None
            or message.business_id is not None
            or message.properties is not None
            or message.ordered is not False
            or message.priority is not DEFAULT_PRIORITY  # one object; a number that equals it may be no int
        ):
            return False
    return bool(messages)


def plain_columns(messages: Sequence[Message], *, are_plain: bool = False) -> PlainColumns | None:
    """What `encode_plain` takes of messages; None if one of them is not plain, or a body is not bytes.

    Parameters:
        are_plain: that they are was looked at before.
    """
    if _plain_columns is not None and type(messages) is list:
        found: PlainColumns | None = _plain_columns(messages)
        if found is not None:
            return found
    return plain_columns_plain(messages, are_plain=are_plain)


def plain_columns_plain(messages: Sequence[Message], *, are_plain: bool = False) -> PlainColumns | None:
    """The same message by message."""
    if not are_plain and not is_plain(messages):
        return None
    bodies = [message.body for message in messages]
    if {*map(type, bodies)} != {bytes}:
        return None
    return bodies, [message.key for message in messages], sum(map(len, bodies))


_bind_message: Final = find("bind_message")
_is_bound: Final = _bind_message is not None and _bind_message(Message, DEFAULT_PRIORITY)
_plain_columns: Final = find("plain_columns") if _is_bound else None

_BESIDE: Final = attrgetter("tag", "business_id", "ordered", "priority", "properties")


def _kinds(messages: Sequence[Message]) -> set[tuple[Any, ...]]:
    """What messages have beside body and key, each combination once; empty if that cannot be told."""
    try:
        # No tuple stays alive for a message: many that do would set the garbage collector off.
        kinds = {*map(_BESIDE, messages)}
    except TypeError:  # properties
        return set()
    # Of equal numbers only one is in the set, and some of them are not priorities.
    return kinds if all(type(kind[3]) is int for kind in kinds) else set()
