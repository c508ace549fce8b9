"""The place of a member: who it is, where its data lie, and by what it goes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from dmq.clock import Clock
from dmq.registry.paths import DEFAULT_ROOT
from dmq.settings import StoreSettings
from dmq.shard.in_sync import LAG_SECONDS
from dmq.shard.serving_right import PROMISE_SECONDS
from dmq.storage.files import Files

__all__ = ["Directory", "MemberSettings", "OnDisk", "Place", "draw_id", "in_thread"]

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Who a member is.

    Attributes:
        broker: its name, one for each data directory.
        address: where clients reach it.
        replication_address: where other members do.
        weight: its shard gets this share, in percent, of the messages that may go to any shard, while it leads.
        root: the path in the registry below which the cluster is.
    """

    broker: str
    shard: str
    address: str
    replication_address: str
    zone: str = ""
    weight: int = 100
    root: str = DEFAULT_ROOT


class MemberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a member goes by.

    Attributes:
        replicas, min_in_sync: of a shard that it creates; one that is there has its own in its record.
        lag_seconds: after so long a member that does not keep up leaves the in-sync set.
        uncommitted_bytes_max: a leader takes no more writes while so much is not committed.
    """

    replicas: int = 3
    min_in_sync: int = 2
    promise_seconds: float = PROMISE_SECONDS
    lag_seconds: float = LAG_SECONDS
    uncommitted_bytes_max: int = 64 << 20


class OnDisk(Protocol):
    """Runs blocking work of the disk, so that the event loop goes on meanwhile."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def in_thread(work: Callable[[], T], /) -> T:
    """The `OnDisk` of a real process."""
    return await asyncio.to_thread(work)


def draw_id() -> int:
    """The id source of a real process."""
    return secrets.randbits(64)


class Directory(NamedTuple):
    """The data directory of a member.

    Attributes:
        server: this broker's IPv4 address and port, six bytes, stamped into records while it leads.
        draw: a number of 64 bits that nobody has drawn before.
    """

    files: Files
    settings: StoreSettings
    clock: Clock
    on_disk: OnDisk = in_thread
    server: bytes = bytes(6)
    draw: Callable[[], int] = draw_id
