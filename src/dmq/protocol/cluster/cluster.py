"""Headers about the whole cluster, for people who operate it: CLUSTER_SHOW to CLUSTER_REBUILD.

Any member answers them on the port of clients, whether it leads or not.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.cluster.member import MemberState
from dmq.protocol.cluster.shard import ShardFinding
from dmq.protocol.header import U32, Amount, Header, Name, OptionalName, Text

__all__ = [
    "ENTRIES_MAX",
    "PAGE_BYTES_MAX",
    "ClusterExport",
    "ClusterExportReply",
    "ClusterFinalize",
    "ClusterFinalizeReply",
    "ClusterImport",
    "ClusterImportReply",
    "ClusterNode",
    "ClusterRebuild",
    "ClusterShow",
    "ClusterShowReply",
]

ENTRIES_MAX: Final = 5000  # in one frame
PAGE_BYTES_MAX: Final = 2 << 20  # of values in one frame
NODES_MAX: Final = 2000
FINDINGS_MAX: Final = 4000
_STATES_MAX: Final = 64

# A path below the root of the cluster, and the value there.
EntryRow = tuple[Text, Annotated[bytes, Meta(max_length=128 << 10)]]


class ClusterShow(Header, frozen=True):
    """Ask for the cluster, its brokers, and what is wrong with it; SHARD_LIST tells of the shards."""


class ClusterNode(Header, frozen=True):
    """One broker that is registered."""

    name: Name
    address: Text
    replication_address: Text = ""
    shard: OptionalName = ""
    zone: Text = ""
    version: Text = ""
    weight: U32 = 100
    format: U32 = 1  # the newest format of a cluster that it knows
    load: dict[str, float] = {}


class ClusterShowReply(Header, frozen=True):
    """A cluster. `findings` are those that are no single shard's; the most important first."""

    cluster: Name
    format: U32
    format_known: U32  # of the one that was asked
    session_ms: U32
    topics: U32
    nodes: Annotated[list[ClusterNode], Meta(max_length=NODES_MAX)]
    findings: Annotated[list[ShardFinding], Meta(max_length=FINDINGS_MAX)] = []
    registry: Text = ""  # its URL, without credentials


class ClusterFinalize(Header, frozen=True):
    """Raise the cluster's format to what all its members know."""


class ClusterFinalizeReply(Header, frozen=True):
    """The format that is in force now, and in words what was done."""

    format: U32
    done: Text


class ClusterExport(Header, frozen=True):
    """Ask for everything that the registry keeps of the cluster, from one path on."""

    after: Text = ""


class ClusterExportReply(Header, frozen=True):
    """Entries below the cluster's root, parents first; `next` is what to ask for `after`, empty if these are all."""

    entries: Annotated[list[EntryRow], Meta(max_length=ENTRIES_MAX)]
    next: Text = ""


class ClusterImport(Header, frozen=True):
    """Put entries into the registry that are not there, or are older there."""

    cluster: Name  # whose they are
    entries: Annotated[list[EntryRow], Meta(max_length=ENTRIES_MAX)]
    dry_run: bool = False
    foreign: bool = False  # they are another cluster's: only metadata is taken


class ClusterRebuild(Header, frozen=True):
    """Build the records of shards anew from what their members say."""

    states: Annotated[list[MemberState], Meta(max_length=_STATES_MAX)]
    dry_run: bool = False
    accept_loss: bool = False


class ClusterImportReply(Header, frozen=True):
    """What became, or would become, of each entry, in words."""

    outcomes: Annotated[list[tuple[Text, Text]], Meta(max_length=ENTRIES_MAX)]
    written: Amount = 0
