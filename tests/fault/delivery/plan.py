"""What the long run of all delivery features is made of: names, contents, and what becomes of which message. Pure.

Producers, consumers and the checker can tell from a message's name alone what is to be done with it: nothing is
decided by chance that has to be known later.
"""

from __future__ import annotations

import hashlib
from typing import Final

from tests.fault.broker.torture import content, name_of

__all__ = ["GROUPS", "Group", "chance", "content", "fate_of", "name_of", "outcome_of"]

TOPIC: Final = "life"
URGENT: Final = "urgent"  # a topic whose queues are priorities
QUEUES: Final = 4
PRODUCERS: Final = "payments"  # the producer group of transactions

LEASE_S: Final = 3.0
TABLE_S: Final = (0.2, 0.4, 0.8)  # the retry table
AFTER_S: Final = 0.5  # of a handler that says when
CHECKS_MAX: Final = 6
SETTINGS: Final = (
    "broker.retry_table=0.2,0.4,0.8",
    "broker.grace_seconds=1",
    "broker.transaction_first_check_seconds=1",
    "broker.transaction_check_seconds=0.7",
    f"broker.transaction_checks_max={CHECKS_MAX}",
    "store.checkpoint_seconds=1",
    "store.segment_bytes=8MiB",
)

TAGS: Final = ("red", "blue", "green", None)
TAGS_BEFORE: Final = "red || blue"
TAGS_AFTER: Final = "red || blue || green"

Name = tuple[str, int]


class Group:
    """A group of consumers, and what is expected of it."""

    def __init__(
        self,
        name: str,
        members: int,
        prefetch: int,
        *,
        topic: str = TOPIC,
        attempts_max: int = 4,
        in_place: bool = False,
        is_replayed: bool = False,
    ) -> None:
        self.name: Final = name
        self.members: Final = members
        self.prefetch: Final = prefetch
        self.topic: Final = topic
        self.attempts_max: Final = attempts_max
        self.in_place: Final = in_place  # what fails is not moved
        self.is_replayed: Final = is_replayed  # its position is set back now and then


GROUPS: Final = {
    group.name: group
    for group in (
        Group("push", 2, 40),
        Group("pull", 2, 20),
        Group("ledger", 2, 20, in_place=True),
        Group("picky", 2, 40),
        Group("all", 2, 40, attempts_max=3, in_place=True),
        Group("urgent", 2, 20, topic=URGENT),
        Group("replay", 1, 100, is_replayed=True),
    )
}


def chance(*words: object) -> float:
    """A number from 0 to 1 that follows from some words."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / (1 << 48)


def fate_of(group: str, name: Name) -> str:
    """What the handlers of a group do with a message: done, fail (once or twice), later, slow, reject, poison."""
    if group == "replay":
        return "done"
    at = chance("fate", group, name)
    # In order everything behind a failure waits for it, so that there are fewer.
    scale = 0.3 if group == "ledger" else 1.0
    for fate, share in (("fail", 0.06), ("later", 0.04), ("slow", 0.004), ("reject", 0.03), ("poison", 0.02)):
        at -= share * scale
        if at < 0:
            return fate
    return "done"


def word_of(group: str, name: Name, attempt: int) -> str:
    """What one call of a handler ends with: ack, raise, retry or reject."""
    match fate_of(group, name):
        case "fail":
            return "raise" if attempt <= 1 + (chance("twice", name) < 0.3) else "ack"
        case "later":
            return "retry" if attempt == 1 else "ack"
        case "reject":
            return "reject"
        case "poison":
            return "raise"
    return "ack"


def outcome_of(key: str) -> str:
    """What becomes of a transaction: commit, rollback, or nobody knows."""
    at = chance("outcome", key)
    return "commit" if at < 0.6 else "rollback" if at < 0.9 else "unknown"
