"""How a broker looks from here: does it answer, which version, how far is its clock off, what does it complain of.

What always holds: asking changes nothing on the broker.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from dmq.client.client import connect

__all__ = ["BrokerView", "look_at"]


class BrokerView(NamedTuple):
    """What was seen."""

    broker: str
    address: str
    software: str
    protocol: int
    round_trip_ms: float
    clock_skew_ms: int  # how far its clock is ahead of ours
    stats: dict[str, float]


def look_at(url: str, app: str = "dmq") -> BrokerView:
    """Connect to a broker and look at it.

    Raises:
        DMQError: it cannot be connected to; the message says why.
    """
    began_ms = time.time() * 1000
    with connect(url, app=app) as client:
        reply = client.transport.connection().reply
        # The broker read its clock some time between our first byte and its answer.
        skew = reply.now_ms - (began_ms + time.time() * 1000) / 2
        client.admin.stats("store_")
        began = time.perf_counter()
        stats = client.admin.stats("store_", "broker_")
        round_trip_ms = (time.perf_counter() - began) * 1000
    return BrokerView(reply.broker, reply.address, reply.software, reply.version, round_trip_ms, round(skew), stats)
