"""The nouns every layer shares: messages, their ids, receipts, durability, topics, and the names of system topics.

Nothing here does I/O. What always holds: a `MessageId` is given once, at `send()`, and never changes afterwards; a
topic, group or app name that passed `check_name` fits its length byte in a record and is safe inside a file name;
a name that begins with `%` belongs to DMQ, and no user can create it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, NewType, Protocol, TypeAlias

import msgspec

from dmq.duration import parse_duration
from dmq.errors import InvalidMessage, InvalidName

__all__ = [
    "DEFAULT_PRIORITY",
    "DELAY_LEVELS",
    "DLQ_PREFIX",
    "DRAIN_GROUP",
    "DURABILITIES",
    "EVENT_TOPIC",
    "HALF_TOPIC",
    "PRIORITIES",
    "RESULT_PREFIX",
    "RETRY_PREFIX",
    "SCHEDULE_TOPIC",
    "SPOOL_TOPIC",
    "SYSTEM_PREFIX",
    "Body",
    "Durability",
    "DurabilityName",
    "JournalOffset",
    "Message",
    "MessageId",
    "QueueOffset",
    "Receipt",
    "TopicConfig",
    "broadcast_name",
    "check_name",
    "check_target",
    "dead_letter_topic_name",
    "delay_level",
    "parse_broadcast_name",
    "place_of",
    "place_queue",
    "place_shard",
    "result_topic_name",
    "retry_topic_name",
    "retry_topic_parts",
    "topic_of_results",
]

JournalOffset = NewType("JournalOffset", int)
QueueOffset = NewType("QueueOffset", int)

DEFAULT_PRIORITY = 4
PRIORITIES = 10  # 0 to 9; a topic that goes by priority has a queue for each
NAME_BYTES_MAX = 255
GROUP_BYTES_MAX = 230  # system topics are named after groups
QUEUES_MAX = 255  # of a topic in a shard: ids 0-254; 255 is kept free as "no queue"

SYSTEM_PREFIX: Final = "%"  # of every name that is DMQ's own
SCHEDULE_TOPIC: Final = "%SCHEDULE%"  # delayed messages and retries until they are due
HALF_TOPIC: Final = "%HALF%"  # prepared messages of transactions until these end
EVENT_TOPIC: Final = "%EVENT"  # what a record of an event has for a topic; no topic of that name exists
SPOOL_TOPIC: Final = "%SPOOL"  # a client's spool on its own disk
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
RESULT_PREFIX: Final = "%RESULT%"
DRAIN_GROUP: Final = "%DRAIN%"  # the group that takes dead letters from the journal into the database
_BROADCAST_PREFIX: Final = "%BROADCAST%"

_USER_NAME = re.compile(r"[\w.\-]+")
_SYSTEM_NAME = re.compile(r"%[A-Z]+%[\w.\-%]*|%[A-Z]+")


class MessageId(NamedTuple):
    """Who sent a message, and as their which one: 16 bytes that never change, whatever happens to the message."""

    producer_id: int
    sequence: int

    def to_bytes(self) -> bytes:
        return self.producer_id.to_bytes(8, "big") + self.sequence.to_bytes(8, "big")

    @classmethod
    def from_bytes(cls, raw: bytes) -> MessageId:
        if len(raw) != 16:
            raise ValueError(f"a message id has 16 bytes, not {len(raw)}")
        return cls(int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:], "big"))

    def __str__(self) -> str:
        # base32hex keeps the byte order under plain text sorting and needs no escaping in a URL.
        return base64.b32hexencode(self.to_bytes()).rstrip(b"=").decode("ascii").lower()

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Read the text form back.

        Raises:
            ValueError: the text is not a message id.
        """
        problem = f"{text[:40]!r} is not a message id: 26 characters 0-9 a-v are expected"
        try:
            parsed = cls.from_bytes(base64.b32hexdecode(text.upper() + "=" * (-len(text) % 8)))
        except (binascii.Error, ValueError) as error:
            raise ValueError(problem) from error
        # The last character has spare bits: one id has one spelling.
        if str(parsed) != text:
            raise ValueError(problem)
        return parsed


DELAY_LEVELS = (
    "1s", "5s", "10s", "30s", "1m", "2m", "3m", "4m", "5m", "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h",
)  # fmt: skip


def delay_level(level: int | str) -> float:
    """The seconds of one of RocketMQ's eighteen delays: by its number from 1 on, or by its name, "10s".

    Raises:
        InvalidMessage: there is no such level.
    """
    if isinstance(level, int) and 1 <= level <= len(DELAY_LEVELS):
        name = DELAY_LEVELS[level - 1]
    elif isinstance(level, str) and level in DELAY_LEVELS:
        name = level
    else:
        raise InvalidMessage(
            f"{level!r} is not a delay level: use 1 to {len(DELAY_LEVELS)}, or one of {', '.join(DELAY_LEVELS)}; any "
            "other delay is given in seconds"
        )
    return parse_duration(name) or 0.0


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _Model(Protocol):
    """What a Pydantic model has."""

    def model_dump_json(self) -> str: ...


Body: TypeAlias = (
    bytes | bytearray | memoryview | str | dict[str, Any] | list[Any] | msgspec.Struct | _Dataclass | _Model
)
"""What a producer takes for a body: bytes as they are, text as UTF-8, everything else as JSON."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message on its way in. A producer encodes its body; from then on it is bytes."""

    body: bytes
    key: str | None = None
    tag: str | None = None
    business_id: str | None = None
    ordered: bool = False
    priority: int = DEFAULT_PRIORITY
    properties: Mapping[str, str] | None = None

    if TYPE_CHECKING:  # what a user may give for a body is more than what the rest of the code finds there

        def __init__(
            self,
            body: Body,
            key: str | None = None,
            tag: str | None = None,
            business_id: str | None = None,
            ordered: bool = False,
            priority: int = DEFAULT_PRIORITY,
            properties: Mapping[str, str] | None = None,
        ) -> None: ...


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What a producer gets back once its message is safe."""

    id: MessageId
    topic: str
    queue: int
    offset: int
    durability: str
    shard: int = 0  # its number; 0 of a lone broker


class Durability(IntEnum):
    """What must be true of a batch before its producer gets an answer. Ordered: more is safer.

    The numbers go over the wire. The journal knows STORED, FLUSHED and REPLICATED: a unit is visible once its level
    is reached.
    """

    NONE = 0  # nothing: PRODUCE goes one-way and has no answer
    STORED = 1  # in the journal, in the page cache: survives the process
    FLUSHED = 2  # fsynced: survives the machine
    REPLICATED = 3  # fsynced by every in-sync replica
    CONSUMED = 4  # the named group acked it


DurabilityName: TypeAlias = Literal["none", "stored", "flushed", "replicated", "consumed"]

DURABILITIES: Final[dict[str, Durability]] = {level.name.lower(): level for level in Durability}
"""By the names users write."""


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is fixed about a topic beside its name."""

    queues: int = 4
    priority: bool = False
    ttl_ms: int | None = None
    carry_for: str | None = None  # what this group has not settled outlives retention
    properties: dict[str, str] = {}
    can_produce: bool = True  # takes messages from producers
    can_consume: bool = True  # hands messages out to consumers


def check_name(name: str, what: str, *, system: bool = False) -> str:
    """Return the name if it may be used for a topic, group or app.

    Parameters:
        name: the name.
        what: what it is the name of, for the error message.
        system: allow our own names, which begin with a percent sign.

    Raises:
        InvalidName: with a sentence that says what is allowed.
    """
    if not isinstance(name, str):
        raise InvalidName(f"{what} name is text, not {type(name).__name__}: {name!r}")
    bytes_max = GROUP_BYTES_MAX if what == "group" else NAME_BYTES_MAX
    if len(name.encode("utf-8", "surrogatepass")) > bytes_max:
        raise InvalidName(f"{what} name is too long: at most {bytes_max} bytes of UTF-8; shorten it", name=name)
    # A name of dots only would be a path.
    if (name.strip(".") and _USER_NAME.fullmatch(name)) or (system and _SYSTEM_NAME.fullmatch(name)):
        return name
    raise InvalidName(
        f"{what} name {name!r} is not allowed: use letters, digits, '.', '_' and '-' (names with % are DMQ's own)",
        name=name,
    )


def place_of(queue: int, shard: int) -> int:
    """The one number that stands for a queue of a shard: its place. A lone broker is shard 0, so that there a queue is
    its own place."""
    return shard << 8 | queue


def place_queue(place: int) -> int:
    """The queue within its shard."""
    return place & 0xFF


def place_shard(place: int) -> int:
    """The number of the shard."""
    return place >> 8


def retry_topic_name(group: str, topic_id: int) -> str:
    """Where a group gets messages of a topic again. By the topic's id: one created anew is another topic."""
    return f"{RETRY_PREFIX}{group}%{topic_id}"


def retry_topic_parts(name: str) -> tuple[str, int] | None:
    """Group and topic id of a retry topic's name; None if it is another kind of name."""
    if not name.startswith(RETRY_PREFIX):
        return None
    group, _, topic_id = name[len(RETRY_PREFIX) :].rpartition("%")
    return (group, int(topic_id)) if group and topic_id.isdecimal() else None


def dead_letter_topic_name(group: str) -> str:
    """Where the dead letters of a group go."""
    return DLQ_PREFIX + group


def broadcast_name(group: str, client_id: str) -> str:
    """The group name under which the positions of one member of a broadcast group are kept."""
    return f"{_BROADCAST_PREFIX}{group}%{client_id}"


def parse_broadcast_name(name: str) -> tuple[str, str] | None:
    """Group and client id of such a name; None if it is another kind of name."""
    if not name.startswith(_BROADCAST_PREFIX):
        return None
    group, percent, client_id = name[len(_BROADCAST_PREFIX) :].partition("%")
    return (group, client_id) if percent else None


def check_target(name: str) -> str:
    """Return the name if a producer may send to a topic of that name: a user's, or where results go.

    Raises:
        InvalidName: with a sentence that says what is allowed.
    """
    given: object = name
    is_result = isinstance(given, str) and given.startswith(RESULT_PREFIX)
    if is_result:
        check_name(name[len(RESULT_PREFIX) :], "topic")
    return check_name(name, "topic", system=is_result)


def result_topic_name(topic: str) -> str:
    """Where the results of a topic's messages go (T-04); there with every topic.

    Raises:
        InvalidName: the topic is none of a user's, or its name leaves no room.
    """
    return check_target(RESULT_PREFIX + topic)


def topic_of_results(name: str) -> str | None:
    """Whose results a topic of this name carries; None if it is another kind of topic."""
    return name[len(RESULT_PREFIX) :] if name.startswith(RESULT_PREFIX) else None
