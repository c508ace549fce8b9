"""The check of a cluster: what a command sees of it, and everything in that which is not as it should be.

What always holds: what could not be seen is told, and the rest is told all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from dmq.cli.options import connected
from dmq.errors import DMQError
from dmq.event_log import keep_quiet

if TYPE_CHECKING:
    from dmq.client.admin.cluster import ClusterReport
    from dmq.client.admin.shards import ShardReport
    from dmq.shard.admin.cluster_operations import ClusterOperations
    from dmq.shard.admin.operations import Operations

__all__ = ["ClusterCheck", "ClusterFinding", "look_at_cluster", "visited"]

T = TypeVar("T")

_REACH_SECONDS: Final = 2.0
_REACHED_AT_A_TIME: Final = 16
_OK: Final = "ok"


class ClusterFinding(NamedTuple):
    """Something that is not as it should be, and what to do about it.

    Attributes:
        severity: warning or problem.
        about: the cluster, a shard or a broker.
    """

    severity: str
    about: str
    what: str
    advice: str


class ClusterCheck(NamedTuple):
    """A cluster as a command saw it.

    Attributes:
        report: None if the registry did not answer.
        errors: why something could not be seen.
    """

    report: ClusterReport | None
    shards: Sequence[ShardReport]
    errors: Sequence[DMQError] = ()

    def wrong(self) -> Iterator[ClusterFinding]:
        """Everything that is not as it should be; tries whether brokers are reached from here where they say."""
        for error in self.errors:
            yield ClusterFinding("problem", "cluster", error.message, "")
        if self.report is not None:
            for found in self.report.findings:
                if found.severity != _OK:
                    yield ClusterFinding(found.severity, "cluster", found.what, found.advice)
        for shard in self.shards:
            for found in shard.findings:
                if found.severity != _OK:
                    yield ClusterFinding(found.severity, f"shard {shard.name}", found.what, found.advice)
        if self.report is not None:
            yield from _unreached(self.report)


def _unreached(report: ClusterReport) -> Iterator[ClusterFinding]:
    """Brokers that say where they are, and are not reached there from here."""
    with ThreadPoolExecutor(_REACHED_AT_A_TIME) as threads:
        reached = [*threads.map(lambda broker: _is_reached(broker.address), report.brokers)]
    for broker, is_reached in zip(report.brokers, reached, strict=True):
        if not is_reached:
            yield ClusterFinding(
                "problem",
                f"broker {broker.name}",
                f"it says that clients reach it at {broker.address}, and it is not reached there from here",
                "check the network; shard.address says where clients reach a broker",
            )


def _is_reached(address: str) -> bool:
    from dmq.net.address import parse_address

    with contextlib.suppress(OSError, DMQError):
        where = parse_address(address)
        socket.create_connection((where.host, where.port), _REACH_SECONDS).close()
        return True
    return False


def look_at_cluster(registry: str | None, url: str) -> ClusterCheck:
    """Look at a cluster through its registry, or by any member.

    Raises:
        DMQError: neither answers.
    """
    if registry is not None:
        return visited(registry, lambda operations: _seen_in(operations, registry))
    with connected(url, any_member=True) as client:
        report: ClusterReport | None = None
        errors: list[DMQError] = []
        try:
            report = client.admin.cluster_report()
        except DMQError as error:
            errors.append(error)
        return ClusterCheck(report, client.admin.shards(), errors)


async def _seen_in(operations: ClusterOperations, registry: str) -> ClusterCheck:
    from dmq.client.admin.cluster import ClusterReport
    from dmq.client.admin.shards import ShardReport
    from dmq.registry.url import shown_url
    from dmq.shard.admin.overview import shard_header

    found = await operations.show()
    shards = [ShardReport.of(shard_header(shard)) for shard in found.seen.shards]
    return ClusterCheck(ClusterReport.of(found.header(shown_url(registry))), shards)


def visited(registry: str, work: Callable[[ClusterOperations], Awaitable[T]]) -> T:
    """Do something through the registry, where no broker runs."""
    from dmq.shard.admin.cluster_operations import ClusterOperations
    from dmq.shard.admin.visitor import visit

    async def done(shards: Operations) -> T:
        return await work(ClusterOperations(shards))

    # The error says it once: log lines are for a server, which goes on trying.
    keep_quiet("dmq.registry")
    return asyncio.run(visit(registry, done))
