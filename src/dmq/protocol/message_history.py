"""Headers of TRACE and WHY: the life of one message, and why it is not consumed.

What always holds: an answer fits a header, however long the life was: its steps and groups are bounded, texts are cut.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import U32, Amount, Header, Name, OptionalName, Queue, Text

__all__ = ["STEPS_MAX", "TEXT_BYTES_MAX", "GroupReason", "TraceReply", "TraceStep", "WhyReply", "shortened"]

STEPS_MAX: Final = 500
NOTE_BYTES_MAX: Final = 512
TEXT_BYTES_MAX: Final = 4096
_ELLIPSIS: Final = "…"

Note = Annotated[str, Meta(max_length=NOTE_BYTES_MAX)]
Word = Annotated[str, Meta(max_length=32)]


class TraceStep(Header, frozen=True):
    """One thing that happened to a message."""

    at_ms: Amount
    what: Word  # sent, stored, delayed, prepared, delivered, acked, failed, …
    topic: OptionalName = ""
    queue: Queue = 255  # 255: it has none
    offset: Amount = 0
    group: OptionalName = ""
    member: OptionalName = ""
    attempt: U32 = 0
    note: Note = ""


class TraceReply(Header, frozen=True):
    """The life of a message in the order it happened."""

    steps: Annotated[list[TraceStep], Meta(max_length=STEPS_MAX)]
    notes: Annotated[list[Note], Meta(max_length=100)] = []  # what the journal does not hold
    is_complete: bool = True  # the journal was searched to its end


class GroupReason(Header, frozen=True):
    """Why one group has not consumed a message, or that it has."""

    group: Name
    state: Word  # consumed, waiting, leased, retrying, dead, filtered, …
    text: Note


class WhyReply(Header, frozen=True):
    """One paragraph for a person, and the same by group for a program."""

    state: Word  # of the message itself: stored, delayed, prepared, …
    text: Text
    groups: Annotated[list[GroupReason], Meta(max_length=STEPS_MAX)] = []
    is_complete: bool = True  # the journal was searched to its end


def shortened(text: str, bytes_max: int = NOTE_BYTES_MAX) -> str:
    """A text that fits its field, however long the error it quotes."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return text
    return raw[: bytes_max - len(_ELLIPSIS.encode())].decode("utf-8", "ignore") + _ELLIPSIS
