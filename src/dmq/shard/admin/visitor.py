"""The visitor: somebody who looks at a cluster through its registry without being a member, as a command does.

What always holds: a visitor has no journal and leads nothing; what only a member can do is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dmq.clock import SystemClock
from dmq.errors import NotInCluster
from dmq.protocol.cluster.member import MemberState
from dmq.protocol.cluster.replication import Standing, StandingReply
from dmq.registry.paths import Paths
from dmq.registry.registry import Registry
from dmq.registry.url import check_registry_url, open_registry
from dmq.shard.admin.operations import Operations
from dmq.shard.network import Network
from dmq.shard.record.shard_view import ShardView
from dmq.shard.repair.mender import Mended
from dmq.shard.report import MemberReport, Role

__all__ = ["Visitor", "visit"]

T = TypeVar("T")

_NAME: Final = "dmq-cli"
_NO_SHARD: Final = "-"


async def visit(url: str, work: Callable[[Operations], Awaitable[T]], shard: str = "") -> T:
    """Do something to the cluster whose registry is at a URL; a session is opened for it, and ended.

    Raises:
        InvalidSettings, RegistryDown: the registry is not reached.
    """
    paths = Paths(check_registry_url(url))
    registry = await open_registry(url, _NAME)
    try:
        visitor = Visitor(registry, paths, shard)
        return await work(Operations(visitor, Network(_NAME, port=0), SystemClock(), _NAME))
    finally:
        await registry.close()


class Visitor:
    """Stands in the place of the member in `Operations`.

    Parameters:
        shard: which is meant where none is named.
    """

    def __init__(self, registry: Registry, paths: Paths, shard: str = "") -> None:
        self.view = ShardView(registry, shard or _NO_SHARD, paths)

    def report(self) -> MemberReport:
        return MemberReport(broker="", shard=self.view.shard, role=Role.STOPPED)

    def standing(self, asked: Standing) -> StandingReply:
        raise self._refusal()

    async def hand_over(self, to: str | None = None) -> str:
        raise self._refusal()

    async def mend(self) -> Mended:
        raise self._refusal()

    async def state(self) -> MemberState:
        raise self._refusal()

    def _refusal(self) -> NotInCluster:
        return NotInCluster("this is not a member of a shard: ask one with --url")
