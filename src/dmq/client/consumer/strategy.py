"""Rebalance: which queues each member of a group serves, when the members divide them among themselves (R-08).

Pure. Every member computes the same answer from the same queues and members, in whatever order it learned of them, so
nobody has to tell anybody. Where the queues are at several brokers, all of them are divided at once, as places
(`dmq.model.place_of`), by the members that one broker names: that of the topic's first slot.

What always holds: every queue goes to exactly one member, if there is any; every member is in the answer. Two members
that go by the lists of two brokers may both take a queue or both leave it, so after `SETTLED_SECONDS` without change
all go by the first broker that they reach.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Final, Protocol

__all__ = ["SETTLED_SECONDS", "STRATEGIES", "Roll", "Strategy", "average", "circle", "consistent_hash", "diff"]

_POINTS: Final = 64  # places of one member on the ring: enough that shares differ little
SETTLED_SECONDS: Final = 5.0
"""So long after we subscribed at a broker, the others have done so too."""


class Strategy(Protocol):
    """Which queues each member serves."""

    def __call__(self, queues: Collection[int], members: Collection[str]) -> dict[str, list[int]]: ...


def average(queues: Collection[int], members: Collection[str]) -> dict[str, list[int]]:
    """Unbroken shares of the sorted queues; the first members get one more: 10 over 4 is 3, 3, 2, 2."""
    ordered, names = _sorted(queues, members)
    shares: dict[str, list[int]] = {}
    at = 0
    for index, name in enumerate(names):
        size = len(ordered) // len(names) + (1 if index < len(ordered) % len(names) else 0)
        shares[name] = ordered[at : at + size]
        at += size
    return shares


def circle(queues: Collection[int], members: Collection[str]) -> dict[str, list[int]]:
    """One queue after the other to one member after the other, round and round."""
    ordered, names = _sorted(queues, members)
    return {name: ordered[index :: len(names)] for index, name in enumerate(names)}


def consistent_hash(queues: Collection[int], members: Collection[str]) -> dict[str, list[int]]:
    """Each queue to the next member on a ring: a member that comes or goes moves only its own queues."""
    ordered, names = _sorted(queues, members)
    shares: dict[str, list[int]] = {name: [] for name in names}
    ring = sorted((_hash(f"{name}#{point}"), name) for name in names for point in range(_POINTS))
    places = [place for place, _ in ring]
    for queue in ordered if ring else []:
        shares[ring[bisect_right(places, _hash(str(queue))) % len(ring)][1]].append(queue)
    return shares


def diff(current: Iterable[int], wanted: Iterable[int]) -> tuple[list[int], list[int]]:
    """What to drop and what to add to come from one to the other, each sorted."""
    has, wants = set(current), set(wanted)
    return sorted(has - wants), sorted(wants - has)


STRATEGIES: Final[Mapping[str, Strategy]] = {"average": average, "circle": circle, "consistent-hash": consistent_hash}


class Roll:
    """The members of a group, as the brokers that have queues of the topic name them.

    After a failover the first member to come back is the only one that the new leader knows. Its list does not count
    while another broker's has more members, but for some seconds at most.
    """

    def __init__(self) -> None:
        self._lists: dict[int, tuple[list[str], float]] = {}  # by broker: the members, and since when we are one
        self._used: int | None = None  # whose list it is that counts

    def told(self, broker: int, members: list[str], now: float) -> None:
        """A broker names the members."""
        _, since = self._lists.get(broker, ([], now))
        self._lists[broker] = members, since

    def lost(self, broker: int) -> None:
        """There is no connection to a broker, and its list may be old."""
        self._lists.pop(broker, None)

    def members(self, brokers: Iterable[int], now: float) -> list[str] | None:
        """The members that count; None if no broker has named any.

        Parameters:
            brokers: in the order of the topic's slots.
        """
        used = None if self._used is None else self._lists.get(self._used)
        for broker in brokers:
            found = self._lists.get(broker)
            if found is not None and (
                used is None
                or broker == self._used
                or now - found[1] >= SETTLED_SECONDS
                or set(found[0]) >= set(used[0])
            ):
                self._used = broker
                return found[0]
        return None


def _sorted(queues: Collection[int], members: Collection[str]) -> tuple[list[int], list[str]]:
    return sorted(set(queues)), sorted(set(members))


def _hash(text: str) -> int:
    # Not Python's own: all members must come to the same answer in their own processes.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
