"""A broker as a client sees it: whether it answers, its version, how far its clock is off, its counters.

What always holds: looking changes nothing on the broker.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from dmq.client.admin import calls
from dmq.client.admin.shards import ShardReport
from dmq.client.client import connect

__all__ = ["BrokerView", "look_at"]


class BrokerView(NamedTuple):
    """What a client saw of a broker."""

    broker: str
    address: str
    software: str
    protocol: int
    round_trip_ms: float
    clock_skew_ms: int  # how far its clock is ahead of ours
    stats: dict[str, float]
    warnings: list[str]  # what its operator should know
    state: str  # running, drained or stopping
    shard: ShardReport | None = None  # that it is a member of


def look_at(url: str, app: str = "dmq") -> BrokerView:
    """Connect to a broker and look at it.

    Raises:
        DMQError: no connection to it can be made; the message says why.
    """
    began_ms = time.time() * 1000
    with connect(url, app=app, any_member=True) as client:
        reply = client._router.home.connection().reply
        # The broker read its clock some time between our first byte and its answer.
        skew = reply.now_ms - (began_ms + time.time() * 1000) / 2
        client.admin.stats("store_")
        began = time.perf_counter()
        stats = client.admin.stats("store_", "broker_", "disk_")
        round_trip_ms = (time.perf_counter() - began) * 1000
        warnings = client.admin._converse(calls.warnings())
        state = client.admin.cluster()[0].state
        shard = None if reply.shard is None else client.admin.shard()
    return BrokerView(
        reply.broker,
        reply.address,
        reply.software,
        reply.version,
        round_trip_ms=round_trip_ms,
        clock_skew_ms=round(skew),
        stats=stats,
        warnings=warnings,
        state=state,
        shard=shard,
    )
