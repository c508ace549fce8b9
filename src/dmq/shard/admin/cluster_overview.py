"""The overview of a cluster: its brokers, and what is wrong or risky that no single shard tells. Pure code.

What always holds: the first finding is the most important one, and each says what to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from dmq.protocol.cluster.cluster import ClusterNode, ClusterShowReply
from dmq.protocol.cluster.shard import Severity
from dmq.registry.contents import CLUSTER_FORMAT, ClusterContent, NodeContent
from dmq.shard.admin.overview import Finding, Overview, finding_header

__all__ = ["ClusterOverview", "ClusterSighting"]

_SESSION_SECONDS: Final = 2.0  # a shorter one ends with a pause that a healthy machine may have
_NAMED_MAX: Final = 10


class ClusterSighting(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as it was seen at one moment.

    Attributes:
        nodes: brokers that are registered, by name.
        session_seconds: of a session with the registry.
        topics: how many there are.
        troubles: what is wrong with the registry itself, and what to do about it.
        own_obstacle: why the member that is asked has not joined.
    """

    cluster: ClusterContent
    shards: Sequence[Overview]
    nodes: Mapping[str, NodeContent]
    session_seconds: float
    topics: int
    troubles: Sequence[tuple[str, str]] = ()
    own_obstacle: str = ""


class ClusterOverview:
    """A cluster, and what is to be known of it beyond what its shards tell.

    Attributes:
        findings: the most important first.
    """

    def __init__(self, seen: ClusterSighting) -> None:
        self.seen = seen
        self.findings = sorted(_findings(seen), key=lambda finding: -finding.severity)

    def header(self, registry: str) -> ClusterShowReply:
        """As commands tell of it.

        Parameters:
            registry: its URL, without credentials.
        """
        seen = self.seen
        return ClusterShowReply(
            cluster=seen.cluster.id,
            format=seen.cluster.format,
            format_known=CLUSTER_FORMAT,
            session_ms=round(seen.session_seconds * 1000),
            topics=seen.topics,
            nodes=[_node_header(name, node) for name, node in sorted(seen.nodes.items())],
            findings=[finding_header(found) for found in self.findings],
            registry=registry,
        )


def _node_header(name: str, node: NodeContent) -> ClusterNode:
    return ClusterNode(
        name=name,
        address=node.address,
        replication_address=node.replication_address,
        shard=node.shard,
        zone=node.zone,
        version=node.version,
        weight=node.weight,
        format=node.format,
        load=node.load,
    )


def _findings(seen: ClusterSighting) -> Iterator[Finding]:
    if seen.own_obstacle:
        yield Finding(Severity.PROBLEM, f"the member that was asked cannot join: {seen.own_obstacle}")
    yield from (Finding(Severity.WARNING, *trouble) for trouble in seen.troubles)
    known = {shard.name for shard in seen.shards}
    lost: dict[str, list[str]] = defaultdict(list)
    for name, node in sorted(seen.nodes.items()):
        if node.shard and node.shard not in known:
            lost[node.shard].append(name)
    for missing, names in lost.items():
        yield Finding(
            Severity.PROBLEM,
            f"the registry has no record of shard {missing}, and {_list(names)} are members of it: nobody can "
            "be elected",
            "put the registry's data back, or have the record rebuilt by dmq cluster import --from-members",
        )
    if not seen.shards and not lost:
        yield Finding(Severity.WARNING, "the cluster has no shards", "dmq broker --registry … --shard s1 makes one")
    yield from _about_versions(seen)
    if seen.session_seconds < _SESSION_SECONDS:
        yield Finding(
            Severity.WARNING,
            f"a session with the registry lives {seen.session_seconds:g} s: a short pause of a machine ends it, and "
            "with it a leader's term",
            "ask for 6 s (?session=6s), and see that ZooKeeper's tickTime and maxSessionTimeout grant it",
        )
    for shard in seen.shards:
        record = shard.record
        if record.unsafe and record.unsafe >= record.epoch:
            yield Finding(
                Severity.WARNING,
                f"shard {shard.name} began epoch {record.epoch} with loss (unsafe): what was acknowledged before it "
                "may be missing",
                "what other members cut is in their salvage/; see what is to be sent again. The next regular election "
                f"ends this warning: dmq shard handover {shard.name}",
            )


def _about_versions(seen: ClusterSighting) -> Iterator[Finding]:
    versions: dict[str, list[str]] = defaultdict(list)
    for name, node in sorted(seen.nodes.items()):
        versions[node.version].append(name)
    if len(versions) > 1:
        told = "; ".join(f"{version or 'unknown'} ({_list(names)})" for version, names in sorted(versions.items()))
        yield Finding(Severity.WARNING, f"brokers run different versions: {told}", "upgrade the older ones")
    format_known = min((node.format for node in seen.nodes.values()), default=0)
    if seen.cluster.format > CLUSTER_FORMAT:
        yield Finding(
            Severity.WARNING,
            f"the cluster has format {seen.cluster.format}, and this dmq knows {CLUSTER_FORMAT}",
            "use the version of the brokers",
        )
    elif seen.cluster.format < min(format_known, CLUSTER_FORMAT):
        what = f"the cluster has format {seen.cluster.format}, and every broker that runs knows {format_known}"
        yield Finding(Severity.OK, what, "dmq cluster finalize raises it; then older brokers cannot join any more")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
