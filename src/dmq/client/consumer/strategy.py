"""Rebalance: which queues each member of a group serves, when the members divide them among themselves (R-08).

Pure functions. Every member computes the same answer from the same queues and members, in whatever order it learned of
them, so nobody has to tell anybody.

What always holds: every queue goes to exactly one member, if there is any; every member is in the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

__all__ = ["STRATEGIES", "Queue", "Strategy", "average", "circle", "consistent_hash", "diff"]

_POINTS: Final = 64  # places of one member on the ring: enough that shares differ little


Queue = tuple[str, int]  # broker and queue id
Q = TypeVar("Q", int, Queue)


class Strategy(Protocol):
    """Which queues each member serves."""

    def __call__(self, queues: Collection[Q], members: Collection[str]) -> dict[str, list[Q]]: ...


def average(queues: Collection[Q], members: Collection[str]) -> dict[str, list[Q]]:
    """Unbroken shares of the sorted queues; the first members get one more: 10 over 4 is 3, 3, 2, 2."""
    ordered, names = _sorted(queues, members)
    shares: dict[str, list[Q]] = {}
    at = 0
    for index, name in enumerate(names):
        size = len(ordered) // len(names) + (1 if index < len(ordered) % len(names) else 0)
        shares[name] = ordered[at : at + size]
        at += size
    return shares


def circle(queues: Collection[Q], members: Collection[str]) -> dict[str, list[Q]]:
    """One queue after the other to one member after the other, round and round."""
    ordered, names = _sorted(queues, members)
    return {name: ordered[index :: len(names)] for index, name in enumerate(names)}


def consistent_hash(queues: Collection[Q], members: Collection[str]) -> dict[str, list[Q]]:
    """Each queue to the next member on a ring: a member that comes or goes moves only its own queues."""
    ordered, names = _sorted(queues, members)
    shares: dict[str, list[Q]] = {name: [] for name in names}
    ring = sorted((_hash(f"{name}#{point}"), name) for name in names for point in range(_POINTS))
    places = [place for place, _ in ring]
    for queue in ordered if ring else []:
        shares[ring[bisect_right(places, _hash(str(queue))) % len(ring)][1]].append(queue)
    return shares


def diff(current: Iterable[Q], wanted: Iterable[Q]) -> tuple[list[Q], list[Q]]:
    """What to drop and what to add to come from one to the other, each sorted."""
    has, wants = set(current), set(wanted)
    return sorted(has - wants), sorted(wants - has)


STRATEGIES: Final[Mapping[str, Strategy]] = {"average": average, "circle": circle, "consistent-hash": consistent_hash}


def _sorted(queues: Collection[Q], members: Collection[str]) -> tuple[list[Q], list[str]]:
    return sorted(set(queues)), sorted(set(members))


def _hash(text: str) -> int:
    # Not Python's own: all members must come to the same answer in their own processes.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
