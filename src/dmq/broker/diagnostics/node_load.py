"""The load of a broker, as its entry in the registry tells it to the rest of the cluster, every 30 seconds.

What always holds: rates are means over the time since the last ones were taken; a member that does not lead has none of
messages, since followers serve no producers and no consumers.
"""

from __future__ import annotations

import time

from dmq.broker.broker import Broker
from dmq.broker.maintenance import Audience
from dmq.clock import Clock

__all__ = ["NodeLoad"]


class NodeLoad:
    """The load of one process. Messages and bytes are a second; `cpu` is in cores, `disk_used` a share.

    Parameters:
        audience: its clients.
    """

    def __init__(self, audience: Audience, clock: Clock) -> None:
        self._audience = audience
        self._clock = clock
        self._taken_at = clock.monotonic()
        self._cpu = time.process_time()
        self._counts: dict[str, int] = {}

    def take(self, broker: Broker | None) -> dict[str, float]:
        """The load since it was taken last.

        Parameters:
            broker: what serves the clients, if there is one; one that was made meanwhile counts from its start.
        """
        now, cpu = self._clock.monotonic(), time.process_time()
        seconds = max(now - self._taken_at, 0.001)
        found = {"cpu": round((cpu - self._cpu) / seconds, 3), "connections": float(len(self._audience))}
        counts = {} if broker is None else _counts(broker)
        for name, count in counts.items():
            before = self._counts.get(name, 0)
            found[name] = round((count - before if count >= before else count) / seconds, 1)
        if broker is not None:
            found["disk_used"] = round(broker.store.space.usage.share, 3)
        self._taken_at, self._cpu, self._counts = now, cpu, counts
        return found


def _counts(broker: Broker) -> dict[str, int]:
    publisher, traffic = broker.publisher, broker.channels.traffic
    return {
        "messages_in": publisher.messages_in,
        "bytes_in": publisher.bytes_in,
        "messages_out": traffic.delivered,
        "bytes_out": traffic.delivered_bytes,
    }
