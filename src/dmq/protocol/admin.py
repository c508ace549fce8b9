"""Headers of administration: topics, groups, and what later parts of DMQ bring their meaning to.

What always holds: listings come in pages, so an answer fits a frame however much there is. Settings of a topic travel
by name, because a change names only what it changes; a name the broker does not know is an error, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dmq.errors import InvalidSettings
from dmq.model import TopicConfig, check_name
from dmq.protocol.header import LIST_MAX, U32, U64, Amount, Header, Id, Name, OptionalName, Text

__all__ = [
    "DelayCancel",
    "DelayInfo",
    "DelayList",
    "DelayListReply",
    "GroupCreate",
    "GroupDelete",
    "GroupDescribe",
    "GroupDescribeReply",
    "GroupInfo",
    "GroupList",
    "GroupListReply",
    "LimitGet",
    "LimitInfo",
    "LimitPolicy",
    "LimitReply",
    "LimitSet",
    "MemberInfo",
    "MessageQuery",
    "TopicCreate",
    "TopicDelete",
    "TopicDescribe",
    "TopicDescribeReply",
    "TopicInfo",
    "TopicList",
    "TopicListReply",
    "TopicPlace",
    "TopicSlot",
    "TopicSync",
    "TopicSyncReply",
    "TopicUpdate",
    "changed_config",
]

PageSize = Annotated[int, Meta(ge=1, le=1000)]


class TopicCreate(Header, frozen=True):
    """Make a topic; settings as in `TopicConfig`, by name."""

    topic: Name
    settings: dict[str, Any] = {}
    allow_existing: bool = False  # do not mind if one with the same settings is there


class TopicUpdate(Header, frozen=True):
    """Change some settings of a topic."""

    topic: Name
    settings: dict[str, Any]


class TopicDelete(Header, frozen=True):
    """Delete a topic, its messages and all positions in it."""

    topic: Name


class TopicList(Header, frozen=True):
    """Ask for topics in the order of their names, after one of them."""

    prefix: OptionalName = ""
    after: OptionalName = ""
    limit: PageSize = 1000
    system: bool = False  # ours too, whose names begin with %


class TopicSlot(Header, frozen=True):
    """The queues of a topic in one shard of a cluster."""

    shard: Name
    number: U32
    queues: U32
    is_writable: bool = True  # False: taken out of the topic, and read until it is empty


class TopicInfo(Header, frozen=True):
    """One topic on this broker."""

    topic: Name
    config: TopicConfig
    topic_id: U32 = 0  # new with every creation
    messages: Amount = 0  # kept
    bytes: Amount = 0
    stored: Amount = 0  # since it was created, kept or not
    incarnation: U64 = 0  # in a cluster: new with every creation, and the same in all shards
    slots: Annotated[list[TopicSlot], Meta(max_length=1000)] = []  # in a cluster
    slots_version: U32 = 0
    lacking: Annotated[list[Name], Meta(max_length=1000)] = []  # shards that had no leader for the last change


class TopicListReply(Header, frozen=True):
    """One page. `more` says that another follows after the last one here."""

    topics: Annotated[list[TopicInfo], Meta(max_length=1000)]
    more: bool = False


class TopicSync(Header, frozen=True):
    """From the leader of one shard to that of another: follow what the registry says of a topic, and answer then."""

    topic: Name


class TopicSyncReply(Header, frozen=True):
    """It is so."""

    behind: Amount = 0  # messages of the topic that groups have not consumed there


class TopicPlace(Header, frozen=True):
    """Change the slots of a topic in a cluster: add one, or remove one."""

    topic: Name
    add: OptionalName = ""  # a shard
    remove: OptionalName = ""  # a shard; its slot is read until it is empty, and then goes
    queues: Annotated[int, Meta(ge=0, le=255)] = 0  # of the new slot; 0 is as many as the topic usually has
    is_drained: bool = False  # ordered messages wait until what there is is consumed
    is_forced: bool = False  # what is removed goes at once, with its messages


class TopicDescribe(Header, frozen=True):
    """Ask for one topic."""

    topic: Name


class TopicDescribeReply(Header, frozen=True):
    """The topic, and the groups that consume it."""

    info: TopicInfo
    groups: Annotated[list[Name], Meta(max_length=LIST_MAX)] = []


class GroupCreate(Header, frozen=True):
    """Give a group a position in a topic before its first member comes."""

    group: Name
    topic: Name
    is_local: bool = False  # from the leader of another shard: here alone


class GroupDelete(Header, frozen=True):
    """Forget a group, or its position in one topic."""

    group: Name
    topic: OptionalName = ""
    is_local: bool = False  # from the leader of another shard: here alone


class GroupList(Header, frozen=True):
    """Ask for groups in the order of their names, after one of them."""

    topic: OptionalName = ""  # only those that consume it
    after: OptionalName = ""
    limit: PageSize = 1000


class GroupInfo(Header, frozen=True):
    """One group on this broker."""

    group: Name
    topics: Annotated[list[Name], Meta(max_length=LIST_MAX)]
    members: U32 = 0
    lag: Amount = 0
    retrying: Amount = 0  # failed, and wait for another attempt; not part of the lag


class GroupListReply(Header, frozen=True):
    """One page. `more` says that another follows after the last one here."""

    groups: Annotated[list[GroupInfo], Meta(max_length=1000)]
    more: bool = False


class GroupDescribe(Header, frozen=True):
    """Ask for one group."""

    group: Name


class MemberInfo(Header, frozen=True):
    """One member, and what it has in hand."""

    member: OptionalName
    topic: Name
    address: Text = ""
    tags: Text = ""
    version: U32 = 0
    leased: Amount = 0
    is_connected: bool = True
    since_ms: Amount = 0
    is_silent: bool = False  # a lease of it ran out without a sign of life, and it gets nothing until it speaks


class GroupDescribeReply(Header, frozen=True):
    """The group and its members; how far it is, POSITION tells."""

    info: GroupInfo
    members: Annotated[list[MemberInfo], Meta(max_length=LIST_MAX)] = []


class DelayList(Header, frozen=True):
    """Ask for pending delayed messages in the order they are due."""

    topic: OptionalName = ""
    after: bytes = b""  # `next` of the page before
    limit: PageSize = 1000


class DelayInfo(Header, frozen=True):
    """One pending message."""

    message_id: Id
    topic: Name
    due_at_ms: Amount
    journal_offset: Amount


class DelayListReply(Header, frozen=True):
    """One page; `next` is empty on the last."""

    delays: Annotated[list[DelayInfo], Meta(max_length=1000)]
    next: bytes = b""


class DelayCancel(Header, frozen=True):
    """Take back a delayed message that is not due yet."""

    message_id: Id


class LimitPolicy(IntEnum):
    """What happens to a message over the limit."""

    REFUSE = 0
    DEAD_LETTER = 1


class LimitInfo(Header, frozen=True):
    """A limit of a topic or of a producing app; the other name is empty. None means no limit."""

    topic: OptionalName = ""
    app: OptionalName = ""
    messages: Amount | None = None  # a second
    bytes: Amount | None = None  # a second
    policy: LimitPolicy = LimitPolicy.REFUSE


class LimitGet(Header, frozen=True):
    """Ask for limits: of one topic or app, or all."""

    topic: OptionalName = ""
    app: OptionalName = ""


class LimitSet(Header, frozen=True):
    """Put a limit in force at once; one without numbers is taken away."""

    limit: LimitInfo


class LimitReply(Header, frozen=True):
    """The limits in force."""

    limits: Annotated[list[LimitInfo], Meta(max_length=LIST_MAX)]


class MessageQuery(Header, frozen=True):
    """TRACE and WHY: about one message."""

    message_id: Id
    group: OptionalName = ""


def changed_config(settings: Mapping[str, Any], base: TopicConfig | None = None) -> TopicConfig:
    """The settings of a topic with these changes.

    Raises:
        InvalidSettings: a name is unknown or a value is bad.
    """
    known = TopicConfig.__struct_fields__
    for name in settings:
        if name not in known:
            raise InvalidSettings(f"a topic has no setting {name!r}: there are {', '.join(known)}", keys=[name])
    before = msgspec.structs.asdict(base or TopicConfig())
    try:
        config = msgspec.convert(before | dict(settings), TopicConfig)
    except msgspec.ValidationError as error:
        raise InvalidSettings(f"a setting of the topic is not valid: {error}", keys=[*settings]) from error
    if "carry_for" in settings and config.carry_for is not None:
        check_name(config.carry_for, "group")  # one that can never consume would keep everything for ever
    if "ttl_ms" in settings and config.ttl_ms is not None and not 0 < config.ttl_ms < 1 << 62:
        raise InvalidSettings(f"ttl_ms is a time above 0, or none, not {config.ttl_ms}", keys=["ttl_ms"])
    return config
