"""The conversations about the whole cluster, what they return, and the document that an export writes.

    {"dmq_export": 1, "cluster": "00000000000000c1", "entries": [{"path": "shard/s1", "value": {…}}, …]}

What always holds: any member is asked, whether it leads or not; entries of a document come with parents first, as they
were exported.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dmq.client.admin.calls import Call
from dmq.client.admin.shards import ShardFinding
from dmq.errors import InvalidSettings
from dmq.protocol import Command, decode_response
from dmq.protocol.cluster import cluster as headers
from dmq.protocol.cluster.member import MemberQuery, MemberState

__all__ = [
    "ClusterBroker",
    "ClusterReport",
    "ImportOutcome",
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
        InvalidSettings: it is none.
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
        raise InvalidSettings(f"this is no export of a cluster ({error!r}): dmq cluster export writes one") from error


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
