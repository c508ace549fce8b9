"""What stands in the entries of the registry: JSON on one line, for people with a ZooKeeper shell as for programs.

What always holds: a field that this version does not know is kept when an entry is written again, so that brokers of
two versions share a registry while they are upgraded. A field that is missing has its default. Ids of 64 bits are 16
hexadecimal digits, since JSON tools round large numbers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta

from dmq.errors import WrongFormat

__all__ = [
    "CLUSTER_FORMAT",
    "MEMBERS_MAX",
    "REMOVED_MAX",
    "ChangeContent",
    "ClusterContent",
    "ConsumerContent",
    "Content",
    "KeyContent",
    "LeaderContent",
    "LimitContent",
    "NodeContent",
    "ShardContent",
    "ShardState",
    "ShardsContent",
    "TopicContent",
    "TopicState",
    "decode_content",
    "encode_content",
    "hex_id",
]

HexId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Meta(ge=0)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]

_UNKNOWN: Final = "unknown"
MEMBERS_MAX: Final = 7
WEIGHT_MAX: Final = 10_000
PATHS_MAX: Final = 64
REMOVED_MAX: Final = 16  # removed members that a record remembers

# The newest format of a cluster that this version knows. 2: the record of a shard may have members that are drained or
# removed, and be asynchronous. Kinds of events and versions of units that format 1 does not know: none so far.
CLUSTER_FORMAT: Final = 2


def hex_id(number: int) -> str:
    """An id of 64 bits as contents have it."""
    return f"{number:016x}"


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what an entry holds.

    Attributes:
        unknown: fields that a newer version wrote; they are written again as they are.
    """

    unknown: dict[str, Any] = {}


class ClusterContent(Content, frozen=True, kw_only=True):
    """`/dmq/cluster`: which cluster the registry belongs to, and how new what its members write may be."""

    id: HexId
    format: Count = 1


class NodeContent(Content, frozen=True, kw_only=True):
    """`/dmq/node/<broker>`: a broker that runs (D-02)."""

    address: str  # where clients reach it
    replication_address: str = ""
    shard: str = ""
    replica: HexId | None = None
    zone: str = ""
    weight: Count = 100
    version: str = ""
    format: Count = 1  # the newest format of a cluster that it knows
    load: dict[str, float] = {}


class ShardsContent(Content, frozen=True, kw_only=True):
    """`/dmq/shard`: how many shards were ever created; the number of each is taken from here."""

    numbers: U32 = 0


class ShardState(StrEnum):
    """What a shard takes."""

    OPEN = "open"
    READ_ONLY = "read-only"
    LEAVING = "leaving"


class ShardContent(Content, frozen=True, kw_only=True):
    """`/dmq/shard/<shard>`: the record of a shard.

    Attributes:
        number: given once, never used again.
        revision: raised by every write of the record.
        members: replica ids by the names of brokers.
        lives: how often each replica was started, as far as the record knows.
        marks: drawn by each replica at its last start: by it a member knows its own write from that of a copy.
        leader: the replica that won `epoch`.
        in_sync: replicas that have everything committed.
        unsafe: the epoch of the last promotion that accepted a loss; 0 for none.
        weight: its share of the messages that may go to any shard; 100 is usual.
        asynchronous: what the leader alone has flushed is committed; the set is the leader alone.
        drained: brokers that do not lead until they are put back in use.
        removed: replicas that are members no more, with the names of their brokers, the last ones last.
    """

    number: U32
    revision: Count = 0
    journal: HexId | None = None
    members: Annotated[dict[str, HexId], Meta(max_length=MEMBERS_MAX)] = {}
    lives: dict[HexId, Count] = {}
    marks: dict[HexId, HexId] = {}
    leader: HexId | None = None
    epoch: U32 = 0
    in_sync: Annotated[list[HexId], Meta(max_length=MEMBERS_MAX)] = []
    min_in_sync: Annotated[int, Meta(ge=1, le=MEMBERS_MAX)] = 2
    replicas: Annotated[int, Meta(ge=1, le=MEMBERS_MAX)] = 3
    state: ShardState = ShardState.OPEN
    unsafe: U32 = 0
    weight: Annotated[int, Meta(ge=0, le=WEIGHT_MAX)] = 100
    asynchronous: bool = False
    drained: list[str] = []
    removed: dict[HexId, str] = {}

    @property
    def least(self) -> int:
        """So many members of the set must have a message before it is acknowledged."""
        return 1 if self.asynchronous else self.min_in_sync


class LeaderContent(Content, frozen=True, kw_only=True):
    """`/dmq/shard/<shard>/leader`: who leads now."""

    replica: HexId
    epoch: U32


class TopicState(StrEnum):
    """Whether a topic is there."""

    OPEN = "open"
    DELETED = "deleted"  # a tombstone: what is not in the registry deletes nothing


class TopicContent(Content, frozen=True, kw_only=True):
    """`/dmq/topic/<topic>`.

    Attributes:
        incarnation: a topic of the same name that is created later has another one.
        slots: shards, each with its number of queues.
        slots_version: raised by every change of `slots` and `removed`.
        removed: shards whose slots take no more messages, and go when they are empty.
        held_until_ms: until then ordered messages wait, since the slots are about to change; 0: they do not.
    """

    incarnation: HexId
    settings: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    slots: list[tuple[str, Count]] = []
    slots_version: U32 = 0
    state: TopicState = TopicState.OPEN
    removed: list[str] = []
    held_until_ms: Count = 0


class ConsumerContent(Content, frozen=True, kw_only=True):
    """`/dmq/topic/<topic>/<client>`: a group that may consume the topic (D-01)."""

    policies: dict[str, Any] = {}
    incarnation: str = ""  # of the topic in which it has positions; "" if that was not noted


class LimitContent(Content, frozen=True, kw_only=True):
    """`/dmq/limit/<app>`: what an app may send a second; 0 means no limit."""

    messages: Count = 0
    bytes: Count = 0
    policy: str = ""


class KeyContent(Content, frozen=True, kw_only=True):
    """`/dmq/kv/<namespace>/<key>`: as text where it is text, for people."""

    text: str | None = None
    base64: bytes | None = None
    expires_at_ms: Count = 0  # 0: never

    @classmethod
    def of(cls, value: bytes, expires_at_ms: int = 0) -> Self:
        try:
            return cls(text=value.decode(), expires_at_ms=expires_at_ms)
        except UnicodeDecodeError:
            return cls(base64=value, expires_at_ms=expires_at_ms)

    @property
    def value(self) -> bytes:
        return self.base64 if self.base64 is not None else (self.text or "").encode()


class ChangeContent(Content, frozen=True, kw_only=True):
    """`/dmq/change`: what was written last of what brokers keep a view of.

    Attributes:
        path: the last path that was written, for people.
        count: of all writes that touched this entry, whatever its version says.
        paths: of the last writes, the newest last; one that needs more of them reads everything.
    """

    path: str = ""
    count: Count = 0
    paths: Annotated[list[str], Meta(max_length=PATHS_MAX)] = []

    def touched(self, path: str) -> Self:
        """The entry after a write at a path."""
        return msgspec.structs.replace(self, path=path, count=self.count + 1, paths=[*self.paths, path][-PATHS_MAX:])


C = TypeVar("C", bound=Content)


def encode_content(content: Content) -> bytes:
    """The value of an entry."""
    fields: dict[str, Any] = msgspec.to_builtins(content)
    unknown = fields.pop(_UNKNOWN)
    return msgspec.json.format(msgspec.json.encode(unknown | fields), indent=0)


def decode_content(kind: type[C], value: bytes, path: str) -> C:
    """What an entry holds.

    Parameters:
        path: where it stands, for the error.

    Raises:
        WrongFormat: it cannot be read.
    """
    try:
        fields = msgspec.json.decode(value, type=dict[str, Any])
        known = {name: field for name, field in fields.items() if name in kind.__struct_fields__ and name != _UNKNOWN}
        unknown = {name: field for name, field in fields.items() if name not in known}
        return msgspec.convert(known | {_UNKNOWN: unknown}, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WrongFormat(
            f"{path} in the registry cannot be read ({error}): correct it with the registry's own tools, or put back "
            "what stood there",
            path=path,
        ) from error
