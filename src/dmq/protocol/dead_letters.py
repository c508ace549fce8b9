"""Headers about dead letters: list them, resend them, delete them.

A letter is named by its number, which its database gave it: one message may be a dead letter of several groups, and
again after it was resent.

What always holds: a list comes in pages that fit a frame; texts in it may be cut, visibly; the bodies of a page follow
its header, each as long as the frame's lengths say (see `dmq.protocol.batch.pack_records`), and are whole.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dmq.protocol.header import U16, U32, Amount, Header, Id, Name, OptionalName, Queue, Text

__all__ = [
    "DeadLetterDelete",
    "DeadLetterFilter",
    "DeadLetterInfo",
    "DeadLetterList",
    "DeadLetterListReply",
    "DeadLetterOutcome",
    "DeadLetterReply",
    "DeadLetterResend",
]

PAGE_MAX = 1000
Numbers = Annotated[list[Amount], Meta(max_length=PAGE_MAX)]


class DeadLetterFilter(Header, frozen=True):
    """Which dead letters; everything that is given must hold."""

    topic: OptionalName = ""
    group: OptionalName = ""
    reason: OptionalName = ""
    since_ms: Amount = 0  # by the time they became dead letters
    until_ms: Amount = 0
    state: OptionalName = "waiting"  # or resent, or deleted; empty for any
    message_ids: Annotated[list[Id], Meta(max_length=PAGE_MAX)] = []
    numbers: Numbers = []


class DeadLetterList(Header, frozen=True):
    """Ask for dead letters by rising number, after one of them."""

    filter: DeadLetterFilter = DeadLetterFilter()
    after: Amount = 0
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX
    bodies: bool = True  # without them, all bodies of the answer are empty


class DeadLetterInfo(Header, frozen=True):
    """One dead letter. `group` is empty for a message that was never stored, and `queue` is 255 then."""

    number: Amount
    message_id: Id
    topic: Name
    reason: Name
    group: OptionalName = ""
    attempts: U32 = 0
    queue: Queue = 255
    offset: Amount = 0
    key: Text | None = None
    tag: Text | None = None
    business_id: Text | None = None
    app: OptionalName = ""
    priority: Annotated[int, Meta(ge=0, le=255)] = 4
    properties: dict[str, str] = {}
    first_error: Text = ""
    last_error: Text = ""
    body_bytes: Amount = 0  # as it was sent
    codec: Annotated[int, Meta(ge=0, le=255)] = 0  # how the body in this answer is compressed; 0: it is not
    sent_at_ms: Amount = 0
    dead_at_ms: Amount = 0
    state: Name = "waiting"
    changed_by: Text = ""
    changed_at_ms: Amount = 0
    broker: OptionalName = ""


class DeadLetterListReply(Header, frozen=True):
    """One page, its bodies behind it. `more` says that another follows after the last one here."""

    letters: Annotated[list[DeadLetterInfo], Meta(max_length=PAGE_MAX)]
    more: bool = False


class DeadLetterResend(Header, frozen=True):
    """Send letters again, each under its own id: to its group alone, or to its topic if it never was stored."""

    numbers: Numbers


class DeadLetterDelete(Header, frozen=True):
    """Mark letters deleted, and forget what they held."""

    numbers: Numbers


class DeadLetterOutcome(Header, frozen=True):
    """What became of one: status 0 is done."""

    number: Amount
    status: U16 = 0
    message: Text = ""


class DeadLetterReply(Header, frozen=True):
    """An outcome for each, in the order asked."""

    outcomes: Annotated[list[DeadLetterOutcome], Meta(max_length=PAGE_MAX)]
