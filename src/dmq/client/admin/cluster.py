"""The conversations about the whole cluster, what they return, and the document that an export writes.

    {"dmq_export": 1, "cluster": "00000000000000c1", "entries": [{"path": "shard/s1", "value": {…}}, …]}

What always holds: any member is asked, whether it leads or not; entries of a document come with parents first, as they
were exported.

The balance of a cluster: which leaders and which queues of topics stand in the wrong place. Pure.

Leaders belong on as many hosts as there are: a host with two leaders more than another one hands one over, also by way
of a third host. Queues of topics belong where the weights of the shards say: a shard that gets less of the load than
its weight gets queues of the topics that are largest elsewhere, and one that leaves the cluster loses what it has.

What always holds: as few leaders move as can be; only a member that has everything is to lead; a topic keeps queues
that take messages at every step; messages never move, so what a shard has stays there until it is consumed. A cluster
that is balanced gets an empty plan.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dmq.client.admin.calls import Call
from dmq.client.admin.reports import Topic
from dmq.client.admin.shards import ShardFinding, ShardMember, ShardReport
from dmq.errors import InvalidSettings
from dmq.model import SYSTEM_PREFIX
from dmq.protocol import Command, decode_response
from dmq.protocol.cluster import cluster as headers
from dmq.protocol.cluster.member import MemberQuery, MemberState

__all__ = [
    "BalancePlan",
    "ClusterBroker",
    "ClusterReport",
    "ImportOutcome",
    "LeaderMove",
    "SlotMove",
    "balanced",
    "document_of",
    "entries_of",
    "exported",
    "finalized",
    "imported",
    "rebuilt",
    "shown",
    "state",
]

DOCUMENT_VERSION: Final = 1
_BASE64: Final = "base64"


@dataclass(frozen=True, slots=True)
class ClusterBroker:
    """A broker that is registered."""

    name: str
    address: str
    replication_address: str
    shard: str
    zone: str
    version: str
    weight: int
    format: int  # the newest format of a cluster that it knows
    load: Mapping[str, float]

    @classmethod
    def of(cls, node: headers.ClusterNode) -> ClusterBroker:
        return cls(**msgspec.structs.asdict(node))


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """A cluster: its id and format, its brokers, and what is to be known of it beyond what its shards tell."""

    id: str
    format: int
    registry: str
    session: float  # seconds that a session with the registry lives
    topics: int
    brokers: tuple[ClusterBroker, ...]
    findings: tuple[ShardFinding, ...]

    @classmethod
    def of(cls, reply: headers.ClusterShowReply) -> ClusterReport:
        return cls(
            id=reply.cluster,
            format=reply.format,
            registry=reply.registry,
            session=reply.session_ms / 1000,
            topics=reply.topics,
            brokers=tuple(map(ClusterBroker.of, reply.nodes)),
            findings=tuple(map(ShardFinding.of, reply.findings)),
        )


@dataclass(frozen=True, slots=True)
class ImportOutcome:
    """What became of an entry of the registry, or would become of it."""

    path: str
    what: str


def shown() -> Call[ClusterReport]:
    return ClusterReport.of(decode_response((yield Command.CLUSTER_SHOW, headers.ClusterShow())))


def finalized() -> Call[str]:
    reply: headers.ClusterFinalizeReply = decode_response((yield Command.CLUSTER_FINALIZE, headers.ClusterFinalize()))
    return reply.done


def exported() -> Call[dict[str, Any]]:
    rows: list[tuple[str, bytes]] = []
    after = ""
    while True:
        reply: headers.ClusterExportReply = decode_response(
            (yield Command.CLUSTER_EXPORT, headers.ClusterExport(after))
        )
        rows += reply.entries
        after = reply.next
        if not after:
            return document_of(rows)


def imported(document: Mapping[str, Any], *, dry_run: bool, foreign: bool) -> Call[list[ImportOutcome]]:
    cluster, rows = entries_of(document)
    found: list[ImportOutcome] = []
    for page in _pages(rows):
        asked = headers.ClusterImport(cluster, page, dry_run, foreign)
        reply: headers.ClusterImportReply = decode_response((yield Command.CLUSTER_IMPORT, asked))
        found += [ImportOutcome(*row) for row in reply.outcomes]
    return found


def state() -> Call[MemberState]:
    found: MemberState = decode_response((yield Command.SHARD_MEMBER, MemberQuery()))
    return found


def rebuilt(states: Sequence[MemberState], *, dry_run: bool, accept_loss: bool) -> Call[list[ImportOutcome]]:
    asked = headers.ClusterRebuild([*states], dry_run, accept_loss)
    reply: headers.ClusterImportReply = decode_response((yield Command.CLUSTER_REBUILD, asked))
    return [ImportOutcome(*row) for row in reply.outcomes]


# --- the document ----------------------------------------------------------------------------------------------------


def document_of(rows: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """Entries of a registry as a document for people and programs."""
    entries = [{"path": path, "value": _readable(value)} for path, value in rows]
    cluster = next((row["value"]["id"] for row in entries if row["path"] == "cluster"), "")
    return {"dmq_export": DOCUMENT_VERSION, "cluster": cluster, "entries": entries}


def entries_of(document: Mapping[str, Any]) -> tuple[str, list[tuple[str, bytes]]]:
    """The cluster and the entries of a document.

    Raises:
        InvalidSettings: it is not one.
    """
    try:
        if document["dmq_export"] != DOCUMENT_VERSION:
            raise InvalidSettings(
                f"this export has version {document['dmq_export']}, and this dmq reads {DOCUMENT_VERSION}: use the dmq "
                "that wrote it"
            )
        rows = [(str(row["path"]), _written(row["value"])) for row in document["entries"]]
        return str(document["cluster"]), rows
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidSettings(f"not an export of a cluster ({error!r}): dmq cluster export writes one") from error


def _readable(value: bytes) -> Any:
    if not value:
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {_BASE64: b64encode(value).decode()}


def _written(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, dict) and value.keys() == {_BASE64}:
        return b64decode(value[_BASE64], validate=True)
    return msgspec.json.format(msgspec.json.encode(value), indent=0)


def _pages(rows: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    page: list[tuple[str, bytes]] = []
    size = 0
    for row in rows:
        if page and (len(page) == headers.ENTRIES_MAX or size + len(row[1]) > headers.PAGE_BYTES_MAX):
            yield page
            page, size = [], 0
        page.append(row)
        size += len(row[0]) + len(row[1])
    yield page


_TOLERATED: Final = 0.1  # of its fair share of the load that a shard may lack
_OPEN: Final = "open"
_LEAVING: Final = "leaving"


@dataclass(frozen=True, slots=True)
class LeaderMove:
    """Another member is to lead a shard."""

    shard: str
    before: str  # a member
    after: str
    why: str


@dataclass(frozen=True, slots=True)
class SlotMove:
    """A topic is to have queues in a shard, or new messages no more."""

    topic: str
    shard: str
    is_added: bool
    why: str


@dataclass(frozen=True, slots=True)
class BalancePlan:
    """What is to be moved, in this order.

    Attributes:
        obstacles: why nothing may be moved now, and what to do.
    """

    leaders: tuple[LeaderMove, ...]
    slots: tuple[SlotMove, ...]
    obstacles: tuple[str, ...] = ()


def balanced(shards: Sequence[ShardReport], topics: Iterable[Topic]) -> BalancePlan:
    """What is to be done about a cluster."""
    named = [topic for topic in topics if topic.slots and not topic.name.startswith(SYSTEM_PREFIX)]
    return BalancePlan(tuple(_leaders(shards)), tuple(_slots(shards, named)), tuple(_obstacles(shards)))


def _obstacles(shards: Iterable[ShardReport]) -> Iterator[str]:
    for shard in shards:
        if shard.leader is None:
            yield f"shard {shard.name} has no leader: dmq shard show {shard.name} says what to do"
        elif behind := [member.name for member in shard.members if not member.is_in_sync]:
            yield (
                f"shard {shard.name} is not whole, {', '.join(behind)} is not in sync: wait until it is, or take it "
                f"out with dmq shard remove; dmq shard show {shard.name} tells"
            )


# --- leaders ----------------------------------------------------------------------------------------------------------


def _leaders(shards: Iterable[ShardReport]) -> Iterator[LeaderMove]:
    """Moves that spread the leaders over the hosts.

    Each round takes the shortest chain of moves that ends at a host with two leaders fewer than the one where it
    begins, as one does for the best matching of jobs to machines. When there is none, no other spread is more even.
    """
    led = {shard.name: shard for shard in shards if shard.leader is not None}
    first = {name: _led_by(shard) for name, shard in led.items()}
    now = dict(first)
    while chain := _chain(led, now):
        now |= chain
    before = Counter(_host(member) for member in first.values())
    for name, member in now.items():
        if member.name != first[name].name:
            here, there = _host(first[name]), _host(member)
            why = f"{here} has {before[here]} leaders, and {there} has {before[there]}"
            yield LeaderMove(name, first[name].name, member.name, why)


def _led_by(shard: ShardReport) -> ShardMember:
    return next(member for member in shard.members if member.name == shard.leader)


def _chain(led: dict[str, ShardReport], now: dict[str, ShardMember]) -> dict[str, ShardMember]:
    """The next chain of moves: shards with the members that are to lead them; none if leaders are spread evenly."""
    candidates = {name: [member for member in shard.members if _may_lead(member)] for name, shard in led.items()}
    hosts = {_host(member) for members in candidates.values() for member in members}
    counts = Counter(dict.fromkeys(hosts, 0))
    at: dict[str, list[str]] = {}
    for name, member in now.items():
        counts[_host(member)] += 1
        at.setdefault(_host(member), []).append(name)
    for start in sorted(at, key=lambda host: (-counts[host], host)):
        came: dict[str, tuple[str, ShardMember]] = {}  # by which move a host is reached
        waiting, seen = deque([start]), {start}
        while waiting:
            host = waiting.popleft()
            if counts[host] <= counts[start] - 2:
                return dict(_back(host, start, came, now))
            for name in at.get(host, ()):
                for member in candidates[name]:
                    if (reached := _host(member)) not in seen:
                        seen.add(reached)
                        came[reached] = (name, member)
                        waiting.append(reached)
    return {}


def _back(
    host: str, start: str, came: dict[str, tuple[str, ShardMember]], now: dict[str, ShardMember]
) -> Iterator[tuple[str, ShardMember]]:
    while host != start:
        name, member = came[host]
        yield name, member
        host = _host(now[name])


def _may_lead(member: ShardMember) -> bool:
    return member.is_in_sync and member.is_registered and not (member.is_drained or member.is_doubtful)


def _host(member: ShardMember) -> str:
    return member.address.rpartition(":")[0]


# --- topics -----------------------------------------------------------------------------------------------------------


def _slots(shards: Sequence[ShardReport], topics: Sequence[Topic]) -> Iterator[SlotMove]:
    weights = {shard.name: shard.weight for shard in shards if shard.state == _OPEN and shard.weight}
    loads = {topic.name: 1 + topic.bytes for topic in topics}
    places = {topic.name: {slot.shard for slot in topic.slots if slot.is_writable} for topic in topics}
    leaving = {shard.name for shard in shards if shard.state == _LEAVING}
    yield from _added(weights, loads, places)
    for name, found in sorted(places.items()):
        for shard in sorted(found & leaving):
            if len(found) > 1:
                found.remove(shard)
                yield SlotMove(name, shard, is_added=False, why=f"shard {shard} leaves the cluster")


def _added(weights: dict[str, int], loads: dict[str, int], places: dict[str, set[str]]) -> Iterator[SlotMove]:
    """Give shards queues until each has its share of the load, the largest topics first."""
    total, whole = sum(loads.values()), sum(weights.values())
    by_size = sorted(loads, key=lambda name: (-loads[name], name))
    for shard in sorted(weights, key=lambda name: (_share(name, weights, loads, places) / weights[name], name)):
        fair = weights[shard] / whole
        for topic in by_size:
            share = _share(shard, weights, loads, places) / total
            if share >= fair * (1 - _TOLERATED):
                break
            if shard not in places[topic]:
                places[topic].add(shard)
                why = f"shard {shard} gets {share:.0%} of the load, and its weight is {fair:.0%} of all"
                yield SlotMove(topic, shard, is_added=True, why=why)


def _share(shard: str, weights: dict[str, int], loads: dict[str, int], places: dict[str, set[str]]) -> float:
    """The load that a shard gets: of each of its topics a part as large as its weight among those of the topic."""
    return sum(
        loads[topic] * weights[shard] / sum(weights.get(one, 0) for one in found)
        for topic, found in places.items()
        if shard in found
    )
