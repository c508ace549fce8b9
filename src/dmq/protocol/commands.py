"""Commands: their numbers, their headers, and the way from a struct to bytes and back.

What always holds: a number, once given, means the same for ever. A frame with a number that is not in the table is a
good frame: it is answered with UNKNOWN_COMMAND, and the connection goes on. A command in the table without a
struct is reserved: it has its number, and is answered with UNSUPPORTED until it has its meaning.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec
from crc32c import crc32c

from dmq.compiled import choose
from dmq.errors import InvalidRequest, UnknownCommand, Unsupported
from dmq.protocol import admin, consume, dead_letters, key_values, message_history, produce, read, session
from dmq.protocol.cluster import cluster, member, registry, replication, route, shard
from dmq.protocol.frame import (
    CRC,
    CRC_BYTES,
    HEAD,
    KNOWN_FLAGS,
    LENGTH_BYTES,
    MUST_KNOW_FLAGS,
    WIRE_FORMAT,
    Frame,
    Kind,
    error_frame_of,
    frame_head,
)
from dmq.protocol.header import UNREADABLE, Header, encode_header, header_error
from dmq.protocol.status import error_from_status, status_of

__all__ = [
    "SPECS",
    "Command",
    "Spec",
    "Way",
    "decode_request",
    "decode_response",
    "error_frame",
    "one_way_head",
    "produce_answer",
    "request_head",
    "response_head",
    "sealed_produce_answer",
    "shard_produce_answer",
]


class Command(IntEnum):
    """The number in a frame's command field.

    0x0100-0x01ff are those of name servers, 0x0200-0x02ff those between the members of a shard. Kept free: 0x8000 and
    up for experiments.
    """

    NONE = 0x0000  # only in a response to bytes that were not a frame, with correlation 0; then the connection ends

    # the session
    HELLO = 0x0001
    HEARTBEAT = 0x0002  # from a broker, one-way: SERVER_HEARTBEAT
    SERVER_REBOOT = 0x0003
    SERVER_HEALTH = 0x0004
    STATS = 0x0005
    CLUSTER = 0x0006
    DRAIN = 0x0007

    # producing
    PRODUCE = 0x0010
    TRANSACTION_END = 0x0011
    TRANSACTION_CHECK = 0x0012
    TRANSACTION_LIST = 0x0013
    TRANSACTION_JOIN = 0x0014
    PRODUCER_STATES = 0x0015

    # consuming
    PULL = 0x0020
    SUBSCRIBE = 0x0021
    UNSUBSCRIBE = 0x0022
    CONSUMER_PUSH = 0x0023
    CREDIT = 0x0024
    SETTLE = 0x0025  # ack, nack, reject, extend
    SUBSCRIPTION_ENDED = 0x0026
    SEEK = 0x0027
    POSITION = 0x0028
    GROUP_MEMBERS = 0x0029
    ASSIGN = 0x002A

    # reading without consuming
    OFFSETS = 0x0030
    PEEK = 0x0031
    FIND = 0x0032
    FETCH = 0x0033
    ARCHIVED = 0x0034
    LOCATE = 0x0035

    # topics and groups
    TOPIC_CREATE = 0x0040
    TOPIC_UPDATE = 0x0041
    TOPIC_DELETE = 0x0042
    TOPIC_LIST = 0x0043
    TOPIC_DESCRIBE = 0x0044
    TOPIC_PLACE = 0x0045
    GROUP_CREATE = 0x0048
    GROUP_DELETE = 0x0049
    GROUP_LIST = 0x004A
    GROUP_DESCRIBE = 0x004B

    # delays, dead letters, limits, and the life of one message
    DELAY_LIST = 0x0050
    DELAY_CANCEL = 0x0051
    DEAD_LETTER_LIST = 0x0058
    DEAD_LETTER_RESEND = 0x0059
    DEAD_LETTER_DELETE = 0x005A
    LIMIT_GET = 0x0060
    LIMIT_SET = 0x0061
    TRACE = 0x0068
    WHY = 0x0069

    # the key-value space
    KEY_PUT = 0x0070
    KEY_GET = 0x0071
    KEY_LIST = 0x0072
    KEY_DELETE = 0x0073

    # shards, for people
    SHARD_LIST = 0x0080
    SHARD_SHOW = 0x0081
    SHARD_SET = 0x0082
    SHARD_PROMOTE = 0x0083
    SHARD_HANDOVER = 0x0084
    SHARD_REPAIR = 0x0085
    SHARD_CREATE = 0x0086
    SHARD_ADD = 0x0087
    SHARD_REMOVE = 0x0088
    SHARD_DRAIN = 0x0089
    SHARD_MEMBER = 0x008A

    # the cluster, for people
    CLUSTER_SHOW = 0x0090
    CLUSTER_FINALIZE = 0x0091
    CLUSTER_EXPORT = 0x0092
    CLUSTER_IMPORT = 0x0093
    CLUSTER_REBUILD = 0x0094

    # where clients find what they look for
    ROUTE = 0x0100
    ROUTE_CHANGED = 0x0101
    TOPIC_SYNC = 0x0102  # between leaders

    # a registry, asked of a name server
    REGISTRY_SESSION = 0x0110
    REGISTRY_BEAT = 0x0111
    REGISTRY_CLOSE = 0x0112
    REGISTRY_READ = 0x0113
    REGISTRY_CHILDREN = 0x0114
    REGISTRY_WRITE = 0x0115
    REGISTRY_WATCH = 0x0116
    REGISTRY_CHANGED = 0x0117

    # between the members of a shard
    FOLLOW = 0x0200
    JOURNAL = 0x0201
    CONFIRM = 0x0202
    STANDING = 0x0203
    HANDOVER = 0x0204
    REPAIR = 0x0205


class Way(IntEnum):
    """Who may send a command, and whether it is answered."""

    ASK = 1  # a client's request
    TELL = 2  # a client's request, or one-way
    PUSH = 3  # a broker's one-way
    BOTH = 4  # anybody's, request or one-way


class Spec(NamedTuple):
    """What is fixed about a command; None stands for a header that is reserved."""

    way: Way
    request: type[Header] | None
    response: type[Header] | None = Header


SPECS: Final[dict[Command, Spec]] = {
    Command.HELLO: Spec(Way.ASK, session.Hello, session.HelloReply),
    Command.HEARTBEAT: Spec(Way.BOTH, session.Heartbeat, session.Heartbeat),
    Command.SERVER_REBOOT: Spec(Way.PUSH, session.ServerReboot),
    Command.SERVER_HEALTH: Spec(Way.PUSH, session.ServerHealth),
    Command.STATS: Spec(Way.ASK, session.Stats, session.StatsReply),
    Command.CLUSTER: Spec(Way.ASK, session.Cluster, session.ClusterReply),
    Command.DRAIN: Spec(Way.ASK, session.Drain, session.DrainReply),
    Command.PRODUCE: Spec(Way.TELL, produce.Produce, produce.ProduceReply),
    Command.TRANSACTION_END: Spec(Way.ASK, produce.TransactionEnd, produce.TransactionEndReply),
    Command.TRANSACTION_CHECK: Spec(Way.PUSH, produce.TransactionCheck),
    Command.TRANSACTION_LIST: Spec(Way.ASK, produce.TransactionList, produce.TransactionListReply),
    Command.TRANSACTION_JOIN: Spec(Way.ASK, produce.TransactionJoin),
    Command.PRODUCER_STATES: Spec(Way.ASK, produce.ProducerStates, produce.ProducerStatesReply),
    Command.PULL: Spec(Way.ASK, consume.Pull, consume.PullReply),
    Command.SUBSCRIBE: Spec(Way.ASK, consume.Subscribe, consume.SubscribeReply),
    Command.UNSUBSCRIBE: Spec(Way.ASK, consume.Unsubscribe),
    Command.CONSUMER_PUSH: Spec(Way.PUSH, consume.Push),
    Command.CREDIT: Spec(Way.TELL, consume.Credit),
    Command.SETTLE: Spec(Way.TELL, consume.Settle, consume.SettleReply),
    Command.SUBSCRIPTION_ENDED: Spec(Way.PUSH, consume.SubscriptionEnded),
    Command.SEEK: Spec(Way.ASK, consume.Seek, consume.SeekReply),
    Command.POSITION: Spec(Way.ASK, consume.Position, consume.PositionReply),
    Command.GROUP_MEMBERS: Spec(Way.PUSH, consume.GroupMembers),
    Command.ASSIGN: Spec(Way.TELL, consume.Assign),
    Command.OFFSETS: Spec(Way.ASK, read.Offsets, read.OffsetsReply),
    Command.PEEK: Spec(Way.ASK, read.Peek, read.PeekReply),
    Command.FIND: Spec(Way.ASK, read.Find, read.FindReply),
    Command.FETCH: Spec(Way.ASK, read.Fetch, read.FetchReply),
    Command.ARCHIVED: Spec(Way.ASK, read.Archived, read.ArchivedReply),
    Command.LOCATE: Spec(Way.ASK, read.Locate, read.LocateReply),
    Command.TOPIC_CREATE: Spec(Way.ASK, admin.TopicCreate, admin.TopicInfo),
    Command.TOPIC_UPDATE: Spec(Way.ASK, admin.TopicUpdate, admin.TopicInfo),
    Command.TOPIC_DELETE: Spec(Way.ASK, admin.TopicDelete),
    Command.TOPIC_LIST: Spec(Way.ASK, admin.TopicList, admin.TopicListReply),
    Command.TOPIC_DESCRIBE: Spec(Way.ASK, admin.TopicDescribe, admin.TopicDescribeReply),
    Command.TOPIC_PLACE: Spec(Way.ASK, admin.TopicPlace, admin.TopicInfo),
    Command.GROUP_CREATE: Spec(Way.ASK, admin.GroupCreate),
    Command.GROUP_DELETE: Spec(Way.ASK, admin.GroupDelete),
    Command.GROUP_LIST: Spec(Way.ASK, admin.GroupList, admin.GroupListReply),
    Command.GROUP_DESCRIBE: Spec(Way.ASK, admin.GroupDescribe, admin.GroupDescribeReply),
    Command.DELAY_LIST: Spec(Way.ASK, admin.DelayList, admin.DelayListReply),
    Command.DELAY_CANCEL: Spec(Way.ASK, admin.DelayCancel),
    Command.DEAD_LETTER_LIST: Spec(Way.ASK, dead_letters.DeadLetterList, dead_letters.DeadLetterListReply),
    Command.DEAD_LETTER_RESEND: Spec(Way.ASK, dead_letters.DeadLetterResend, dead_letters.DeadLetterReply),
    Command.DEAD_LETTER_DELETE: Spec(Way.ASK, dead_letters.DeadLetterDelete, dead_letters.DeadLetterReply),
    Command.LIMIT_GET: Spec(Way.ASK, admin.LimitGet, admin.LimitReply),
    Command.LIMIT_SET: Spec(Way.ASK, admin.LimitSet, admin.LimitReply),
    Command.TRACE: Spec(Way.ASK, admin.MessageQuery, message_history.TraceReply),
    Command.WHY: Spec(Way.ASK, admin.MessageQuery, message_history.WhyReply),
    Command.KEY_PUT: Spec(Way.ASK, key_values.KeyPut),
    Command.KEY_GET: Spec(Way.ASK, key_values.KeyGet, key_values.KeyReply),
    Command.KEY_LIST: Spec(Way.ASK, key_values.KeyList, key_values.KeyListReply),
    Command.KEY_DELETE: Spec(Way.ASK, key_values.KeyDelete, key_values.KeyDeleteReply),
    Command.SHARD_LIST: Spec(Way.ASK, shard.ShardList, shard.ShardListReply),
    Command.SHARD_SHOW: Spec(Way.ASK, shard.ShardShow, shard.ShardShowReply),
    Command.SHARD_SET: Spec(Way.ASK, shard.ShardSet, shard.ShardChange),
    Command.SHARD_PROMOTE: Spec(Way.ASK, shard.ShardPromote, shard.ShardChange),
    Command.SHARD_HANDOVER: Spec(Way.ASK, shard.ShardHandover, shard.ShardChange),
    Command.SHARD_REPAIR: Spec(Way.ASK, shard.ShardRepair, shard.ShardRepairReply),
    Command.SHARD_CREATE: Spec(Way.ASK, shard.ShardCreate, shard.ShardChange),
    Command.SHARD_ADD: Spec(Way.ASK, shard.ShardAdd, shard.ShardChange),
    Command.SHARD_REMOVE: Spec(Way.ASK, shard.ShardRemove, shard.ShardChange),
    Command.SHARD_DRAIN: Spec(Way.ASK, shard.ShardDrain, shard.ShardChange),
    Command.SHARD_MEMBER: Spec(Way.ASK, member.MemberQuery, member.MemberState),
    Command.CLUSTER_SHOW: Spec(Way.ASK, cluster.ClusterShow, cluster.ClusterShowReply),
    Command.CLUSTER_FINALIZE: Spec(Way.ASK, cluster.ClusterFinalize, cluster.ClusterFinalizeReply),
    Command.CLUSTER_EXPORT: Spec(Way.ASK, cluster.ClusterExport, cluster.ClusterExportReply),
    Command.CLUSTER_IMPORT: Spec(Way.ASK, cluster.ClusterImport, cluster.ClusterImportReply),
    Command.CLUSTER_REBUILD: Spec(Way.ASK, cluster.ClusterRebuild, cluster.ClusterImportReply),
    Command.ROUTE: Spec(Way.ASK, route.Route, route.RouteReply),
    Command.ROUTE_CHANGED: Spec(Way.PUSH, route.RouteChanged),
    Command.TOPIC_SYNC: Spec(Way.ASK, admin.TopicSync, admin.TopicSyncReply),
    Command.REGISTRY_SESSION: Spec(Way.ASK, registry.RegistrySession, registry.RegistrySessionReply),
    Command.REGISTRY_BEAT: Spec(Way.ASK, registry.RegistryBeat),
    Command.REGISTRY_CLOSE: Spec(Way.ASK, registry.RegistryClose),
    Command.REGISTRY_READ: Spec(Way.ASK, registry.RegistryRead, registry.RegistryReadReply),
    Command.REGISTRY_CHILDREN: Spec(Way.ASK, registry.RegistryChildren, registry.RegistryChildrenReply),
    Command.REGISTRY_WRITE: Spec(Way.ASK, registry.RegistryWrite, registry.RegistryWriteReply),
    Command.REGISTRY_WATCH: Spec(Way.ASK, registry.RegistryWatch),
    Command.REGISTRY_CHANGED: Spec(Way.PUSH, registry.RegistryChanged),
    Command.FOLLOW: Spec(Way.ASK, replication.Follow, replication.FollowReply),
    Command.JOURNAL: Spec(Way.PUSH, replication.Journal),
    Command.CONFIRM: Spec(Way.TELL, replication.Confirm),
    Command.STANDING: Spec(Way.ASK, replication.Standing, replication.StandingReply),
    Command.HANDOVER: Spec(Way.PUSH, replication.Handover),
    Command.REPAIR: Spec(Way.ASK, replication.Repair, replication.RepairReply),
}

_Decoders = dict[int, msgspec.msgpack.Decoder[Any]]
_requests: Final[_Decoders] = {
    int(command): msgspec.msgpack.Decoder(spec.request) for command, spec in SPECS.items() if spec.request
}
_responses: Final[_Decoders] = {
    int(command): msgspec.msgpack.Decoder(spec.response) for command, spec in SPECS.items() if spec.response
}


_UNKNOWN_FLAGS: Final = MUST_KNOW_FLAGS & ~KNOWN_FLAGS
# As plain numbers: to name a member of an enum costs as much as a call.
_REQUEST: Final = int(Kind.REQUEST)
_RESPONSE: Final = int(Kind.RESPONSE)
_ONE_WAY: Final = int(Kind.ONE_WAY)


def request_head(command: int, header: Header, correlation: int, body_bytes: int = 0, flags: int = 0) -> bytes:
    """A request up to its body; whole if it has none.

    Raises:
        ValueError: it is too large for any frame.
        InvalidRequest: a number in the header is too large for MessagePack, or a text is not Unicode.
    """
    try:
        raw = encode_header(header)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise InvalidRequest(f"command {command:#06x} cannot be asked like this: {error}") from error
    return frame_head(_REQUEST, command, raw, body_bytes, correlation=correlation, flags=flags)


def response_head(command: int, header: Header, correlation: int, body_bytes: int = 0) -> bytes:
    """The answer to a request, up to its body; whole if it has none."""
    return frame_head(_RESPONSE, command, encode_header(header), body_bytes, correlation=correlation)


# The header of an answer to PRODUCE is an array of five: u8, u64, u64, a small number, a bool; each with the byte that
# says so.
_REPLY: Final = struct.Struct(">BBBBQBQBB")
_ANSWER: Final = struct.Struct(HEAD.format + _REPLY.format[1:])
_ANSWER_LENGTH: Final = _ANSWER.size - LENGTH_BYTES
# That of a shard's leader has two more, u32 each.
_SHARD_REPLY: Final = struct.Struct(_REPLY.format + "BIBI")
_SHARD_ANSWER: Final = struct.Struct(HEAD.format + _SHARD_REPLY.format[1:])
_pack_answer: Final = _ANSWER.pack
_pack_crc: Final = CRC.pack
_PRODUCE: Final = int(Command.PRODUCE)


def produce_answer(
    correlation: int,
    queue: int,
    first_offset: int,
    journal_offset: int,
    durability: int,
    is_duplicate: bool,
) -> bytes:
    """The answer to a PRODUCE that went well: what `response_head` makes of a `ProduceReply`, in a third of the time.

    Its numbers always have their full size, which MessagePack allows.
    """
    return _ANSWER.pack(
        _ANSWER_LENGTH, WIRE_FORMAT, _RESPONSE, _PRODUCE, 0, 0, correlation, _REPLY.size,
        0x95, 0xCC, queue, 0xCF, first_offset, 0xCF, journal_offset, durability, 0xC3 if is_duplicate else 0xC2,
    )  # fmt: skip


def shard_produce_answer(
    correlation: int, placed: tuple[int, int, int], durability: int, *, is_duplicate: bool, shard: tuple[int, int]
) -> bytes:
    """`produce_answer` of a shard's leader.

    Parameters:
        placed: queue, first offset and journal offset.
        shard: its number, and the epoch.
    """
    queue, first_offset, journal_offset = placed
    return _SHARD_ANSWER.pack(
        _SHARD_ANSWER.size - LENGTH_BYTES, WIRE_FORMAT, _RESPONSE, _PRODUCE, 0, 0, correlation, _SHARD_REPLY.size,
        0x97, 0xCC, queue, 0xCF, first_offset, 0xCF, journal_offset, durability, 0xC3 if is_duplicate else 0xC2,
        0xCE, shard[0], 0xCE, shard[1],
    )  # fmt: skip


def sealed_produce_answer_plain(
    correlation: int, queue: int, first_offset: int, journal_offset: int, durability: int
) -> bytes:
    """`produce_answer` to a message that is new, with the frame's checksum."""
    sealed = _pack_answer(
        _ANSWER_LENGTH + CRC_BYTES, WIRE_FORMAT, _RESPONSE, _PRODUCE, 0, 0, correlation, _REPLY.size,
        0x95, 0xCC, queue, 0xCF, first_offset, 0xCF, journal_offset, durability, 0xC2,
    )  # fmt: skip
    return sealed + _pack_crc(crc32c(sealed))


sealed_produce_answer: Final = choose(sealed_produce_answer_plain, "sealed_produce_answer")


def one_way_head(command: int, header: Header, body_bytes: int = 0) -> bytes:
    """A frame that is not answered, up to its body; whole if it has none."""
    return frame_head(_ONE_WAY, command, encode_header(header), body_bytes)


def error_frame(error: BaseException, command: int = Command.NONE, correlation: int = 0) -> bytes:
    """The answer to a request that failed; without a command, the last word to a peer that sent no frame."""
    status, header = status_of(error)
    return error_frame_of(command, status, encode_header(header), correlation)


def decode_request(frame: Frame) -> Any:
    """The header of a request or one-way frame: the struct that `SPECS` has for its command.

    Raises:
        UnknownCommand: the number is not in the table.
        Unsupported: the frame has a flag that must be understood, and is not.
        InvalidRequest: the header is not that of the command.
    """
    decoder = _requests.get(frame.command)
    if decoder is None:
        raise UnknownCommand(
            f"command {frame.command:#06x} is not known here: the other side may be newer", command=frame.command
        )
    unknown = frame.flags & _UNKNOWN_FLAGS
    if unknown:
        raise Unsupported(f"flags {unknown:#06x} are not known here: the other side may be newer", flags=unknown)
    try:
        return decoder.decode(frame.header)
    except UNREADABLE as error:
        raise header_error(decoder, frame.command, error) from error


def decode_response(frame: Frame) -> Any:
    """The header of a response: the struct that `SPECS` has for the command it answers.

    Raises:
        DMQError: what the status stands for, see `error_from_status`.
        InvalidRequest: the header is not that of an answer to this command.
    """
    if frame.status:
        raise error_from_status(frame.status, frame.header)
    decoder = _responses.get(frame.command)
    if decoder is None:
        raise InvalidRequest(f"an answer to command {frame.command:#06x} cannot be read here: it may be a newer DMQ's")
    try:
        return decoder.decode(frame.header)
    except UNREADABLE as error:
        raise header_error(decoder, frame.command, error) from error
