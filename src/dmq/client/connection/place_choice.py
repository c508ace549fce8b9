"""The choice of a place for messages that may go to any: weighted, at random. Pure.

Senders walk around a wheel: the places of a topic, each shard as often as its weight says, in an order that each client
has for itself. So shares are exact after one turn of the wheel, and no two clients hit the same shard in step (J-01).

What always holds: only places that take messages are on a wheel; a shard of weight 0 is on it only if all are of weight
0; at most `WHEELS_MAX` wheels are kept, of at most `WHEEL_MAX` places.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Final

from dmq.model import place_of
from dmq.protocol.cluster.route import SlotRoute

__all__ = ["ANY", "PlaceChoice", "any_shard", "priority_queue"]

ANY: Final = -1  # whichever queue
WHEELS_MAX: Final = 1024
WHEEL_MAX: Final = 4096
_UNITS: Final = 64  # so fine are weights


def any_shard(queue: int) -> int:
    """What stands for this queue of whichever shard: of a topic that goes by priorities."""
    return -2 - queue


def priority_queue(wanted: int) -> int:
    """The queue that is wanted in whichever shard; -1 if any is."""
    return -1 if wanted == ANY else -2 - wanted


class PlaceChoice:
    """The wheels of one client."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._wheels: dict[tuple[tuple[SlotRoute, ...], int, tuple[tuple[int, int], ...]], tuple[int, ...]] = {}

    def wheel(self, slots: Sequence[SlotRoute], wanted: int, weights: Mapping[int, int]) -> Sequence[int]:
        """The places of a topic, each shard as often as its weight says.

        Parameters:
            wanted: ANY, or `any_shard` of a queue.
            weights: of the shards that may be chosen now, by number.
        """
        key = (tuple(slots), wanted, tuple(weights.items()))
        found = self._wheels.get(key)
        if found is None:
            if len(self._wheels) >= WHEELS_MAX:
                self._wheels.clear()
            found = self._wheels[key] = self._made(slots, priority_queue(wanted), weights)
        return found

    def _made(self, slots: Sequence[SlotRoute], queue: int, weights: Mapping[int, int]) -> tuple[int, ...]:
        taking = [slot for slot in slots if slot.is_writable and slot.shard in weights and slot.queues > queue]
        if not taking:
            return ()
        most = max(weights[slot.shard] for slot in taking)
        chosen = [(slot, weights[slot.shard]) for slot in taking if weights[slot.shard] or not most]
        units = [max(1, round(weight * _UNITS / most)) if most else 1 for _, weight in chosen]
        common = gcd(*units)
        queues = max(slot.queues for slot, _ in chosen) if queue < 0 else 1
        places: list[int] = []
        for (slot, _), unit in zip(chosen, units, strict=True):
            count = unit // common * queues
            first = self._random.randrange(slot.queues)
            places += [place_of((first + at) % slot.queues if queue < 0 else queue, slot.shard) for at in range(count)]
        self._random.shuffle(places)
        return tuple(places[:WHEEL_MAX])
