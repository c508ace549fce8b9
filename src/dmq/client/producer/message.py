"""What a user hands to a producer, made into messages: bodies encoded, times resolved, limits checked. Pure.

What always holds: a message that comes out of here can be encoded; what breaks a rule raises at the `send` that
brought it (D-05), never later from a batch that others share.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from dmq.client.producer.encoder import encode_body
from dmq.errors import InvalidMessage, MessageTooLarge
from dmq.model import DURABILITIES, Durability, DurabilityName, Message, MessageId
from dmq.records import Attributes, Compressor, EncodeOptions, encode_attributes, encode_batch

__all__ = [
    "SendOptions",
    "check_message",
    "due_ms",
    "expiry",
    "own_message",
    "parse_durability",
    "parse_id",
    "with_bytes",
]

# What passes these needs no closer look: far below every limit of the format.
TEXT_MAX: Final = 1024
ID_MAX: Final = 255
_DELAY_MAX: Final = 2 * 366 * 86_400.0


class SendOptions(msgspec.Struct, frozen=True, gc=False):
    """Where messages go and how, beside what they are; by the names of `Producer.send`."""

    topic: str
    durability: DurabilityName = "flushed"
    consumed_by: str = ""
    delay: float = 0.0
    deliver_at: float | datetime | None = None
    ttl: float | None = None


def with_bytes(message: Message) -> Message:
    """The message with its body as bytes.

    Raises:
        InvalidMessage: the body has no form as bytes.
    """
    body = message.body
    return message if type(body) is bytes else msgspec.structs.replace(message, body=encode_body(body))


def own_message(message: Message) -> Message:
    """The message that a user gave as a whole, in the place of a body.

    Raises:
        InvalidMessage: more was given beside it.
    """
    own: object = message.body
    if not isinstance(own, Message):
        return message
    if message != Message(own):
        raise InvalidMessage("a dmq.Message has a key, a tag and so on of its own: set them there, not beside it")
    return own


def parse_id(given: str | MessageId | None) -> str | None:
    """What a user gave as `id`.

    Raises:
        InvalidMessage: it is not an id.
    """
    if given is None:
        return None
    name: object = str(given) if isinstance(given, MessageId) else given
    if not isinstance(name, str) or not 0 < len(name) <= ID_MAX:
        raise InvalidMessage(f"id is text of 1 to {ID_MAX} characters, not {given!r:.80}")
    return name


def check_message(topic: str, message: Message, body_bytes_max: int) -> None:
    """Refuse what cannot be sent.

    Raises:
        InvalidMessage: a rule of the record format is broken.
        MessageTooLarge: the body is over the limit, also when compressed.
    """
    key, tag, business_id, priority = message.key, message.tag, message.business_id, message.priority
    if (
        type(message.body) is bytes
        and len(message.body) <= body_bytes_max
        and message.properties is None
        and (key is None or (type(key) is str and key.isascii() and len(key) <= TEXT_MAX))
        and (tag is None or (type(tag) is str and tag.isascii() and len(tag) <= TEXT_MAX))
        and (business_id is None or (type(business_id) is str and business_id.isascii() and len(business_id) <= 255))
        and type(priority) is int
        and 0 <= priority <= 9
    ):
        return
    # Rare enough to be tried out whole; a large body is compressed only here, where that decides.
    compressor = Compressor("zstd") if len(message.body) > body_bytes_max else None
    try:
        encode_batch(topic, "x", (message,), sent_at_ms=0, options=EncodeOptions(compressor, body_bytes_max))
    except MessageTooLarge as error:
        raise MessageTooLarge(
            f"the body takes {error.detail.get('size')} bytes even compressed; at most {error.detail.get('limit')} "
            "are allowed: send less at a time, or a reference to it",
            **error.detail,
        ) from None
    except InvalidMessage as error:
        raise InvalidMessage(error.message.removeprefix("message 0: "), **error.detail) from None


def parse_durability(name: str) -> Durability:
    """The level a user named.

    Raises:
        InvalidMessage: there is none of that name.
    """
    level = DURABILITIES.get(name)
    if level is None:
        raise InvalidMessage(f"durability {name!r} is unknown: use {', '.join(DURABILITIES)}")
    return level


def due_ms(delay: float, deliver_at: float | datetime | None, now_ms: int) -> int:
    """When a message is due, ms since 1970; 0 is at once.

    Parameters:
        delay: seconds from now.
        deliver_at: seconds since 1970, or a datetime with its time zone.

    Raises:
        InvalidMessage: both are given, or the time is none.
    """
    if deliver_at is None:
        if not delay:
            return 0
        seconds = _number("delay", delay, "a time in seconds")
    elif delay:
        raise InvalidMessage("give delay or deliver_at, not both")
    else:
        if isinstance(deliver_at, datetime):
            if deliver_at.tzinfo is None:
                raise InvalidMessage("deliver_at needs a time zone: datetime.now(timezone.utc), for example")
            deliver_at = deliver_at.timestamp()
        deliver_at = _number("deliver_at", deliver_at, "a datetime with a time zone, or seconds since 1970")
        seconds = deliver_at - now_ms / 1000
        if seconds <= 0:
            # Past by our clock; whether it is by the broker's, the broker says.
            return max(1, round(deliver_at * 1000)) if deliver_at > 0 else 1
    if not 0 <= seconds <= _DELAY_MAX:
        raise InvalidMessage(
            f"a message can be delayed by up to two years, not by {seconds / 86_400:,.0f} days"
            if seconds > 0
            else f"a delay is a time in seconds from 0 on, not {seconds:g}"
        )
    return now_ms + round(seconds * 1000)


def _number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidMessage(f"{name} is {expected}, not {value!r}")
    return float(value)


def expiry(ttl: float | None, now_ms: int) -> bytes:
    """The attribute that says when a message expires; empty without a `ttl` in seconds.

    Raises:
        InvalidMessage: the time is not above zero.
    """
    if ttl is None:
        return b""
    if not 0 < _number("ttl", ttl, "a time in seconds above 0") <= _DELAY_MAX * 50:
        raise InvalidMessage(f"ttl is a time in seconds above 0, not {ttl!r}")
    return encode_attributes(Attributes(expires_at_ms=now_ms + round(ttl * 1000)))
