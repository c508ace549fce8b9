"""The encoder: from a Python object to the bytes of a message, and from a batch of messages to those of its request.

A body that is bytes stays as it is; text becomes UTF-8; msgspec structs, dataclasses and Pydantic models become JSON,
because any consumer in any language can read it and a person can too. `decode_body` is the way back, for consumers.

What always holds: what cannot become a body raises `InvalidMessage` that names its type, before anything is sent; what
was encoded from a type is decoded to an equal object of that type. A batch is encoded once; its messages are let go
then, since the records hold everything. Pydantic is imported only where one of its models is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar, get_args

import msgspec
import numpy as np

from dmq.client.producer.accumulator import SendBatch
from dmq.clock import Clock
from dmq.errors import InvalidMessage, InvalidSettings
from dmq.model import DEFAULT_PRIORITY, Durability, Message, place_queue
from dmq.protocol import pack_batch, pack_lone
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.records import Alike, Compressor, EncodeOptions, encode_batch, encode_lone, encode_plain
from dmq.records.attributes import utf8
from dmq.records.compression import COMPRESS_OVER_BYTES
from dmq.records.encoder import Shape, lone_record, plain_shape

__all__ = ["BatchEncoder", "check_type", "decode_body", "encode_body", "header_of"]

ANSWER_SECONDS: Final = 0.5

T = TypeVar("T")

_KEPT_BYTES: Final = 4 << 20
_SHAPES_MAX: Final = 1024

_encode_json: Final = msgspec.json.Encoder().encode


def encode_body(body: object) -> bytes:
    """The bytes of a body.

    Raises:
        InvalidMessage: the object is of a type that has no form as a body, or holds something that has none.
    """
    if type(body) is bytes:
        return body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    if isinstance(body, str):
        try:
            return body.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"a text body cannot be written as UTF-8: {error.reason} at {error.start}") from error
    kind = type(body)
    try:
        dump = getattr(kind, "model_dump_json", None)
        if dump is not None:
            text: str = dump(body)
            return text.encode()
        if isinstance(body, msgspec.Struct | dict | list) or (
            dataclasses.is_dataclass(body) and not isinstance(body, type)
        ):
            encoded = _encode_json(body)
            if b"null" in encoded and _holds_no_number(body):  # written as null, which a consumer would take for None
                raise ValueError("it holds NaN or infinity, for which JSON has no form: send None or text instead")
            return encoded
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessage(f"a {kind.__qualname__} cannot be written as JSON: {error}", type=kind.__name__) from error
    raise InvalidMessage(
        f"a body is bytes, text, a dict or list, a msgspec struct, a dataclass or a Pydantic model, not "
        f"{kind.__qualname__}: encode it first, for example with msgspec.json.encode",
        type=kind.__name__,
    )


def _holds_no_number(body: object) -> bool:
    """Whether a body that can be written as JSON holds a float that is not finite."""
    left: list[Any] = [body]
    while left:
        value = left.pop()
        if isinstance(value, float):
            if not math.isfinite(value):
                return True
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
        elif isinstance(value, msgspec.Struct):
            left += msgspec.structs.astuple(value)
        elif dataclasses.is_dataclass(value):
            left += [getattr(value, field.name) for field in dataclasses.fields(value)]
    return False


def decode_body(type_: type[T], body: bytes) -> T:
    """The object that a body holds, of the type asked for.

    Raises:
        InvalidMessage: the body does not hold one.
    """
    try:
        if type_ is bytes:
            return body  # type: ignore[return-value]
        if type_ is str:
            return body.decode()  # type: ignore[return-value]
        validate = getattr(type_, "model_validate_json", None)
        if validate is not None:
            made: T = validate(body)
            return made
        decoded: T = _decoder(type_)(body)  # type: ignore[arg-type]
        return decoded
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(
            f"the body is not of type {_name(type_)}: {_in_words(error)}", type=_name(type_)
        ) from error


def check_type(type_: Any) -> Any:
    """The type, if bodies can be of it; None is bytes.

    Raises:
        InvalidSettings: there is no way to make one from a body.
    """
    if type_ is None or type_ in (bytes, str) or hasattr(type_, "model_validate_json"):
        return type_
    try:
        is_known = _has_model(type_) or not isinstance(msgspec.inspect.type_info(type_), msgspec.inspect.CustomType)
        _decoder(type_)
    except (TypeError, NameError):  # a name in an annotation may be nobody's
        is_known = False
    if not is_known:
        raise InvalidSettings(
            f"type is a msgspec struct, a dataclass, a Pydantic model, or made of them as in list[Order], not {type_!r}"
        )
    return type_


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> Callable[[bytes], Any]:
    if _has_model(type_):
        from pydantic import TypeAdapter  # a program that has a model has it

        validate: Callable[[bytes], Any] = TypeAdapter(type_).validate_json
        return validate
    return msgspec.json.Decoder(type_).decode


def _has_model(type_: Any) -> bool:
    """Whether a Pydantic model stands within it, as in list[Order] or Order | Refund."""
    return any(hasattr(part, "model_validate_json") or _has_model(part) for part in get_args(type_))


def _name(type_: Any) -> str:
    return str(type_) if get_args(type_) else getattr(type_, "__qualname__", str(type_))


def _in_words(error: Exception) -> str:
    """What is wrong, on one line: Pydantic says it in many, and in a list as well."""
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    first = details()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])


class BatchEncoder:
    """Encodes for one producer.

    Parameters:
        app: who sends.
        clock: for the send times.
        compressor: compresses bodies where it pays; None leaves all as they are.

    Attributes:
        whole_up_to: so large a body may be that is not worth compressing by itself.
        shapes: of plain messages, by topic and size of the key, -1 without one.
    """

    def __init__(self, app: str, clock: Clock, compressor: Compressor | None) -> None:
        self._app = app
        self._clock = clock
        self._compressor = compressor
        self.whole_up_to: Final = sys.maxsize if compressor is None else compressor.whole_up_to
        self.shapes: Final[dict[tuple[str, int], Shape]] = {}
        self._encoding = threading.Lock()  # a compressor serves one thread at a time
        # The C library gives large blocks back to the system when they are freed, and asks anew for each batch, which
        # then costs a fault for each of its pages: a quarter of all. It keeps blocks up to the size of the largest that
        # was freed. This one is never touched.
        np.empty(_KEPT_BYTES, np.uint8)

    def encode(self, batch: SendBatch, body_bytes_max: int, *, blocks: bool = False) -> None:
        """Turn a batch's messages into the body of its request.

        Parameters:
            body_bytes_max: the largest body, after compression.
            blocks: bodies may be compressed together; those of messages that wait somewhere first are not.

        Raises:
            InvalidMessage, MessageTooLarge: a message cannot be sent.
        """
        if batch.count == 1 and not batch.dues and not batch.has_extras:
            message = Message(batch.bodies[0], batch.keys[0]) if batch.is_plain else batch.messages[0]
            if type(message.body) is bytes and len(message.body) <= body_bytes_max:
                body, batch.key_count = self.encode_lone(batch.topic, message)
                batch.body = (body,)
                batch.drop_messages()
                return
        now_ms = self._clock.now_ms()
        blocks = blocks and not batch.dues and not batch.lane.key.is_half
        options = EncodeOptions(self._compressor, body_bytes_max, blocks=blocks)
        with self._encoding:
            if batch.is_plain:
                alike = Alike(batch.bodies, batch.keys)
                encoded = encode_plain(batch.topic, self._app, alike, sent_at_ms=now_ms, options=options)
            else:
                encoded = encode_batch(
                    batch.topic,
                    self._app,
                    batch.messages,
                    sent_at_ms=now_ms,
                    options=options,
                    extra=batch.extras if batch.has_extras else b"",
                )
        batch.key_count, batch.block_bytes = len(encoded.hashes), encoded.block_bytes
        batch.body = pack_batch(encoded, batch.dues)
        batch.drop_messages()  # the records hold everything; the objects may go

    def encode_lone(self, topic: str, message: Message) -> tuple[bytes, int]:
        """The body of a request with one message that is not too large, and how many keys it has.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        shaped = self.shape_lone(topic, message)
        if shaped is None:
            return self._encode_special(topic, message)
        shape, raw_key = shaped
        return pack_lone(lone_record(shape, self._clock.now_ms(), message.body, raw_key)), 0 if raw_key is None else 1

    def shape_lone(self, topic: str, message: Message) -> tuple[Shape, bytes | None] | None:
        """The shape of a message with a body, which stays as it is, and at most a key; and the key. None for others.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        if (
            len(message.body) > self.whole_up_to or message.tag is not None or message.business_id is not None
            or message.properties is not None or message.priority is not DEFAULT_PRIORITY or message.ordered
        ):  # fmt: skip
            return None
        raw_key = None if message.key is None else utf8("key", message.key)
        key_size = -1 if raw_key is None else len(raw_key)
        return self.shapes.get((topic, key_size)) or self._plain_shape(topic, key_size), raw_key

    def _plain_shape(self, topic: str, key_size: int) -> Shape:
        if len(self.shapes) >= _SHAPES_MAX:
            self.shapes.clear()
        shape = self.shapes[topic, key_size] = plain_shape(topic, self._app, key_size)
        return shape

    def _encode_special(self, topic: str, message: Message) -> tuple[bytes, int]:
        """`encode_lone` for a message with more than a body and a key, or one that may be worth compressing."""
        body, codec = message.body, 0
        if self._compressor is not None and len(body) > COMPRESS_OVER_BYTES:
            with self._encoding:
                codec, body = self._compressor.compress(topic, body)
        record = encode_lone(topic, self._app, message, self._clock.now_ms(), body=body, codec=codec)
        return pack_lone(record), 1 if record.key_hash else 0


def header_of(batch: SendBatch, now: float) -> Produce:
    """The header under which a batch goes out now."""
    key = batch.lane.key
    timeout_ms = 0
    if key.durability == Durability.CONSUMED and batch.deadline is not None:
        # The broker's time is over a little sooner, so that its answer, which says where the message is, arrives.
        left = batch.deadline - now
        timeout_ms = max(1, int((left - min(ANSWER_SECONDS, left / 4)) * 1000))
    return Produce(
        key.topic,
        place_queue(batch.queue),
        batch.count,
        batch.key_count,
        producer_id=batch.producer_id,
        producer_epoch=0,
        first_sequence=batch.first_sequence,
        durability=key.durability,
        flags=(ProduceFlag.DUES if key.is_delayed else 0)
        | (ProduceFlag.HALF if key.is_half else 0)
        | (ProduceFlag.JOINED if key.is_half and batch.has_extras else 0)
        | (ProduceFlag.EXPIRING if batch.has_extras else 0)
        | (ProduceFlag.BLOCKS if batch.block_bytes else 0),
        group=key.group,
        timeout_ms=timeout_ms,
        previous_sequence=batch.previous_sequence,
        slots_version=key.slots_version,
    )
