"""What a consumer asks for, checked, and as the protocol says it. Pure.

What always holds: options that were made can be sent; a value that makes no sense raises when the consumer is made, not
when its first message is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypedDict

from dmq.client.admin.calls import parse_point
from dmq.client.arguments import check_tags, check_whole
from dmq.client.consumer.strategy import STRATEGIES
from dmq.client.producer.encoder import check_type
from dmq.errors import InvalidSettings
from dmq.model import check_name
from dmq.protocol.consume import Credit, LeaseRef, Point, Pull, Subscribe, SubscribeFlag
from dmq.protocol.header import LIST_MAX

__all__ = ["ConsumerOptions", "Strategy", "SubscribeOptions", "parse_tags"]

PREFETCH_MAX: Final = 1 << 20
LEASES_MIN: Final = 4  # that a prefetch is parted into at least, so that acks return credit in good time
_SECONDS_MAX: Final = 86_400.0 * 30


def parse_tags(tags: Any) -> frozenset[str | None] | None:
    """The tags that "a || b" lets through; None where everything passes.

    Raises:
        InvalidSettings: it is not a filter.
    """
    found = check_tags(tags)
    return None if not found or "*" in found else frozenset(found)


Strategy: TypeAlias = Literal["average", "circle", "consistent-hash"]


class SubscribeOptions(TypedDict, total=False):
    """Options of `Client.consumer` beside topic, group and type; see there."""

    tags: str | None
    ordered: bool
    broadcast: bool
    start_from: str | int | float | datetime | timedelta
    prefetch: int
    batch: int
    parallel: int | None
    lease: float
    max_attempts: int | None
    auto_ack: bool
    version: int
    prefetch_bytes: int | None
    strategy: Strategy | None


_DEFAULTS: Final[SubscribeOptions] = {
    "tags": "",
    "ordered": False,
    "broadcast": False,
    "start_from": "earliest",
    "prefetch": 1000,
    "batch": 10,
    "parallel": None,
    "lease": 30.0,
    "max_attempts": 16,
    "auto_ack": False,
    "version": 0,
    "prefetch_bytes": None,
    "strategy": None,
}


class ConsumerOptions:
    """What `Client.consumer` was given; see there.

    Raises:
        InvalidSettings, InvalidName: a value makes no sense; the message says which.
    """

    def __init__(self, topic: str, group: str, options: SubscribeOptions = _DEFAULTS, *, type: Any = None) -> None:
        given: SubscribeOptions = {**_DEFAULTS, **options}
        prefetch, parallel = given["prefetch"], given["parallel"]
        lease: Any = given["lease"]  # unchecked, as all of them
        max_attempts, prefetch_bytes = given["max_attempts"], given["prefetch_bytes"]
        self.topic: Final = check_name(topic, "topic", system=True)
        self.group: Final = check_name(group, "group")
        tags = given["tags"]
        self.tags: Final[str] = "" if tags is None else tags
        self.tag_set: Final = parse_tags(self.tags)
        self.ordered: Final = given["ordered"]
        self.broadcast: Final = given["broadcast"]
        self.start_from: Point = parse_point(given["start_from"])
        self.prefetch: Final = check_whole("prefetch", prefetch, 1, PREFETCH_MAX)
        self.parallel: Final = 0 if parallel is None else check_whole("parallel", parallel, 1, PREFETCH_MAX)
        batch = check_whole("batch", given["batch"], 1, LIST_MAX)
        if not parallel and not self.ordered:
            # Nobody counts leases then, and larger ones cost the broker less.
            batch = max(batch, min(prefetch // LEASES_MIN, LIST_MAX))
        self.batch: Final = min(batch, prefetch)
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0.1 <= lease <= _SECONDS_MAX:
            raise InvalidSettings(f"lease is a time of 0.1 s to 30 days in seconds, not {lease!r}")
        self.lease: Final = float(lease)
        self.max_attempts: Final = 0 if max_attempts is None else check_whole("max_attempts", max_attempts, 1, 1 << 31)
        self.auto_ack: Final = given["auto_ack"]
        self.version: Final = check_whole("version", given["version"], 0, (1 << 32) - 1)
        self.type: Final = check_type(type)
        size = 0 if prefetch_bytes is None else check_whole("prefetch_bytes", prefetch_bytes, 1, (1 << 32) - 1)
        self.prefetch_bytes: Final = size
        self.strategy: Final = _strategy(given["strategy"], self.broadcast)

    @property
    def flags(self) -> int:
        flags = SubscribeFlag.ORDERED if self.ordered else SubscribeFlag(0)
        return int(flags | SubscribeFlag.BROADCAST if self.broadcast else flags)

    @property
    def lease_ms(self) -> int:
        return round(self.lease * 1000)

    def subscribe(
        self,
        member: str,
        holding: Sequence[LeaseRef],
        queues: Sequence[int],
        *,
        start_from: Point,
        credit: Credit,
        share: int,
    ) -> Subscribe:
        """The header that subscribes at a broker, for the first time or again.

        Parameters:
            holding: leases that are in hand.
            queues: that it takes by its strategy.
            start_from: where the group begins if it is new there.
            credit: how much the broker may have out with us now.
            share: how much of the prefetch is the broker's: the credit may become as large.
        """
        return Subscribe(
            credit.subscription,
            self.topic,
            self.group,
            member,
            tags=self.tags,
            version=self.version,
            prefetch_messages=credit.messages,
            prefetch_bytes=credit.bytes,
            lease_ms=self.lease_ms,
            batch=self._batch_of(share),
            parallel=self.parallel,
            flags=self.flags,
            start_from=start_from,
            max_attempts=self.max_attempts,
            queues=[*queues],
            holding=[*holding[:LIST_MAX]],
            strategy=self.strategy,
        )

    def _batch_of(self, share: int) -> int:
        """How many messages one push of a broker has at most that has a share of the prefetch."""
        # A share that is not twice a batch would come as a batch and a rest of it, and cost as much as two batches.
        is_free = not self.parallel and not self.ordered
        return share if is_free and self.batch < share < 2 * self.batch else min(self.batch, share)

    def pull(
        self,
        member: str,
        max_messages: int,
        wait: float,
        *,
        queue: int,
        start_from: Point,
        holding: list[LeaseRef] | None,
    ) -> Pull:
        """The header that pulls."""
        return Pull(
            self.topic,
            self.group,
            member,
            queue,
            max_messages=max_messages,
            max_bytes=self.prefetch_bytes,
            wait_ms=max(0, round(wait * 1000)),
            lease_ms=self.lease_ms,
            tags=self.tags,
            version=self.version,
            flags=self.flags,
            start_from=start_from,
            parallel=self.parallel,
            max_attempts=self.max_attempts,
            holding=holding,
        )


def _strategy(strategy: Any, broadcast: bool) -> str:
    if strategy is None:
        return ""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise InvalidSettings(f"strategy is {', '.join(map(repr, STRATEGIES))} or None, not {strategy!r}")
    if broadcast:
        raise InvalidSettings("every member of a broadcast group gets all queues: leave strategy or broadcast out")
    return strategy
