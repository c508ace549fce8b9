"""The one error tree.

Every error DMQ raises on purpose is a `DMQError`. A class carries what never changes about its kind: a stable `code`
(the same text on the wire, in logs and in exit messages) and whether trying the same thing again can succeed
(`retriable`). An instance carries a message that says what happened and what to do, and `detail`, the facts a program
may want to act on.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ArchiveConflict",
    "BrokerStopping",
    "Busy",
    "CannotListen",
    "ConsumeTimeout",
    "DMQError",
    "Damaged",
    "DatabaseDown",
    "DeadLettered",
    "DirectoryInUse",
    "DiskFull",
    "Diverged",
    "ForeignFile",
    "FrameCorrupt",
    "InvalidMessage",
    "InvalidName",
    "InvalidRequest",
    "InvalidSettings",
    "LeaseLost",
    "LimitReached",
    "MessageTooLarge",
    "MissingClientId",
    "NoPermission",
    "NotAllowed",
    "NotAuthenticated",
    "NotConnected",
    "NotEnoughReplicas",
    "NotInCluster",
    "NotLeader",
    "OffsetGone",
    "OutOfOrder",
    "OutOfRetries",
    "PortTaken",
    "ProtocolError",
    "RateLimited",
    "RecordCorrupt",
    "RegistryConflict",
    "RegistryDown",
    "SequenceConflict",
    "ServerError",
    "SessionExpired",
    "ShardConflict",
    "StaleEpoch",
    "StaleRoute",
    "StorageError",
    "StoreClosed",
    "StoreFailed",
    "SubscriptionConflict",
    "SubscriptionSuperseded",
    "TimedOut",
    "TooManyFiles",
    "TopicExists",
    "TransactionOver",
    "UnknownCommand",
    "UnknownEntry",
    "UnknownGroup",
    "UnknownMessage",
    "UnknownTopic",
    "Unsupported",
    "VersionMismatch",
    "WriteUnknown",
    "WrongFormat",
]


class DMQError(Exception):
    """Base of every error DMQ raises on purpose."""

    code: ClassVar[str] = "ERROR"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before trying again, if the broker said so."""
        after_ms = self.detail.get("retry_after_ms")
        return after_ms / 1000 if isinstance(after_ms, int | float) else None


# --- what a user handed in ------------------------------------------------------------------------------------------


class InvalidMessage(DMQError):
    """A message breaks a rule of the record format; nothing of it was stored."""

    code = "INVALID_MESSAGE"


class MessageTooLarge(InvalidMessage):
    """A body is over the size limit after compression."""

    code = "MESSAGE_TOO_LARGE"


class InvalidName(DMQError):
    """A topic, group or app name is empty, too long, or uses characters that are not allowed."""

    code = "INVALID_NAME"


class InvalidSettings(DMQError):
    """A setting is unknown or has a value that makes no sense; the message names it and its source."""

    code = "INVALID_SETTINGS"


class UnknownTopic(DMQError):
    """The topic, or that queue of it, does not exist."""

    code = "UNKNOWN_TOPIC"


class TopicExists(DMQError):
    """A topic of that name already exists."""

    code = "TOPIC_EXISTS"


class SequenceConflict(DMQError):
    """A producer used a sequence number again for other messages, or far out of turn."""

    code = "SEQUENCE_CONFLICT"


class OutOfOrder(DMQError):
    """A batch names a predecessor that is not the last one stored of its producer in that queue; nothing was stored."""

    code = "OUT_OF_ORDER"
    retriable = True


class StaleEpoch(DMQError):
    """The caller speaks for an epoch (of a producer or of a leader) that a newer one has replaced."""

    code = "STALE_EPOCH"


class TransactionOver(DMQError):
    """The transaction has ended otherwise: what was rolled back cannot be committed, nor the other way round."""

    code = "TRANSACTION_OVER"


class OffsetGone(DMQError):
    """The offset lies outside what is kept; `detail` has `first` and `next`, the range that exists."""

    code = "OFFSET_GONE"


# --- what was asked of a broker ---------------------------------------------------------------------------------------


class UnknownGroup(DMQError):
    """The group does not exist, or has never consumed this topic."""

    code = "UNKNOWN_GROUP"


class UnknownMessage(DMQError):
    """No message of that id or key, no such delay, transaction or dead letter; or it is no longer kept."""

    code = "UNKNOWN_MESSAGE"


class MissingClientId(DMQError):
    """What was asked needs a client id (a broadcast subscription, a named member), and the hello had none."""

    code = "MISSING_CLIENT_ID"


class SubscriptionConflict(DMQError):
    """The group subscribes with another filter; a member that means to change it brings a higher version."""

    code = "SUBSCRIPTION_CONFLICT"


class SubscriptionSuperseded(DMQError):
    """A member with a higher version changed the group's filter; this one gets nothing more."""

    code = "SUBSCRIPTION_SUPERSEDED"


class LeaseLost(DMQError):
    """The lease ended before this arrived: its messages are handed out again, or somebody else has settled them."""

    code = "LEASE_LOST"


class ConsumeTimeout(DMQError):
    """Stored, but the named group has not acked it in time. The message stays: sending it again makes a second one."""

    code = "CONSUME_TIMEOUT"
    receipt: Any = None
    """The message's `dmq.Receipt`; none of a call with many messages, whose `detail` has where they begin."""


class DeadLettered(DMQError):
    """Not stored in its topic, but kept among the dead letters, from where it can be resent."""

    code = "DEAD_LETTERED"


class NotInCluster(DMQError):
    """What was asked needs replicas, and this broker has none."""

    code = "NOT_IN_CLUSTER"


class ShardConflict(DMQError):
    """The state of a shard forbids what was asked of it; nothing was changed. The message says what to do."""

    code = "SHARD_CONFLICT"


class NotAuthenticated(DMQError):
    """The broker does not know who is calling, or does not believe it."""

    code = "NOT_AUTHENTICATED"


class NotAllowed(DMQError):
    """The caller is known, and may not do this."""

    code = "NOT_ALLOWED"


class Unsupported(DMQError):
    """The other side understands, but does not offer this: it is older, or it is switched off there."""

    code = "UNSUPPORTED"


# --- a broker that cannot right now -----------------------------------------------------------------------------------


class Busy(DMQError):
    """A bounded queue of the broker is full; nothing was done. `retry_after` says when to try again."""

    code = "BUSY"
    retriable = True


class RateLimited(DMQError):
    """The topic or the app is over its limit; nothing was stored. `retry_after` says when to try again."""

    code = "RATE_LIMITED"
    retriable = True


class BrokerStopping(DMQError):
    """The broker is draining before it stops; nothing was done. Another broker, or this one later, will do it."""

    code = "BROKER_STOPPING"
    retriable = True


class DatabaseDown(DMQError):
    """A SQL database, of dead letters or of an outbox, cannot be used now; what belongs there waits until it can."""

    code = "DATABASE_DOWN"
    retriable = True


class NotLeader(DMQError):
    """This member of a shard does not lead it now; nothing was done. `leader` in the detail is where to ask."""

    code = "NOT_LEADER"
    retriable = True


class StaleRoute(DMQError):
    """The queue was chosen by old slots of the topic; nothing was stored. Ask for its route anew."""

    code = "STALE_ROUTE"
    retriable = True


class NotEnoughReplicas(DMQError):
    """Too few members of the shard are in sync; nothing was stored. Sends go through when enough have caught up."""

    code = "NOT_ENOUGH_REPLICAS"
    retriable = True


class ServerError(DMQError):
    """The broker failed in a way it did not expect; its log has the reason."""

    code = "SERVER_ERROR"
    retriable = True


# --- the connection ---------------------------------------------------------------------------------------------------


class ProtocolError(DMQError):
    """Bytes that are not our protocol, or break its rules; the connection cannot go on."""

    code = "PROTOCOL_ERROR"


class VersionMismatch(ProtocolError):
    """The two sides have no version of the protocol in common."""

    code = "VERSION_MISMATCH"


class UnknownCommand(ProtocolError):
    """The command is not one the other side knows; the connection goes on."""

    code = "UNKNOWN_COMMAND"


class InvalidRequest(ProtocolError):
    """The frame is sound, but its header or body is not what its command asks for; the connection goes on."""

    code = "INVALID_REQUEST"


class NotConnected(DMQError):
    """There is no connection to a broker, or it broke before the request was sent."""

    code = "SOCKET_ERROR"
    retriable = True


class FrameCorrupt(NotConnected):
    """A frame was damaged on its way. Nothing in it was believed, and the connection ended."""

    code = "FRAME_CORRUPT"


class TimedOut(DMQError):
    """No answer came in time. Whether the request was carried out is not known."""

    code = "TIMED_OUT"
    retriable = True


class PortTaken(DMQError):
    """Somebody else listens on that port."""

    code = "PORT_TAKEN"


class CannotListen(DMQError):
    """The address cannot be listened on."""

    code = "CANNOT_LISTEN"


class ArchiveConflict(DMQError):
    """Somebody else wrote a table of the archive meanwhile; what this one was about to commit is not in it."""

    code = "ARCHIVE_CONFLICT"


class OutOfRetries(DMQError):
    """Sent again as often as allowed, and never answered. The message may be stored or not."""

    code = "OUT_OF_RETRY"


# --- the registry of a cluster ----------------------------------------------------------------------------------------


class RegistryConflict(DMQError):
    """A write to the registry did not apply, and nothing of it was written: somebody else wrote before.

    `detail` has the `index` of the operation, its `path`, and the `reason`: absent, exists, version, children or
    ephemeral.
    """

    code = "REGISTRY_CONFLICT"


class SessionExpired(DMQError):
    """The registry has not heard its client for too long: the session is over, and nothing was written."""

    code = "SESSION_EXPIRED"


class UnknownEntry(DMQError):
    """The path is not in the registry, and cannot have entries below it."""

    code = "UNKNOWN_ENTRY"


class WriteUnknown(DMQError):
    """A write to the registry was not answered: it was carried out, or will be, or never will."""

    code = "WRITE_UNKNOWN"


class RegistryDown(DMQError):
    """No server of the registry answers; nothing was written. The message names the servers.

    A broker answers with it, too, when what was asked of it needs the registry: the connection to the broker is fine.
    """

    code = "REGISTRY_DOWN"
    retriable = True


# --- the store ------------------------------------------------------------------------------------------------------


class LimitReached(DMQError):
    """Something the broker keeps is at its configured limit; it works again once some of it is gone."""

    code = "LIMIT_REACHED"
    retriable = True


class StorageError(DMQError):
    """Something about the data directory or the disk below it."""

    code = "STORAGE_ERROR"


class StoreClosed(StorageError):
    """The store was closed; open it again."""

    code = "STORE_CLOSED"


class StoreFailed(StorageError):
    """A flush failed, so what the disk holds is unknown, or the journal was removed while it was in use; the store
    takes no more writes until it is opened again."""

    code = "STORE_FAILED"


class DiskFull(StorageError):
    """No space left for this write; nothing of it was kept. Writing works again once there is space."""

    code = "DISK_FULL"
    retriable = True


class NoPermission(StorageError):
    """The process may not read or write a file it needs."""

    code = "NO_PERMISSION"


class TooManyFiles(StorageError):
    """The process ran out of file descriptors."""

    code = "TOO_MANY_FILES"
    retriable = True


class DirectoryInUse(StorageError):
    """Another process has this data directory open."""

    code = "DIRECTORY_IN_USE"


class WrongFormat(StorageError):
    """The directory was written by another version of the format, or is not a DMQ data directory."""

    code = "WRONG_FORMAT"


class ForeignFile(StorageError):
    """A file that does not belong there stands among the journal's segments."""

    code = "FOREIGN_FILE"


class RecordCorrupt(StorageError):
    """Bytes that should be a record are not one."""

    code = "RECORD_CORRUPT"


class Damaged(StorageError):
    """Stored bytes fail their checksum. `detail` has the journal range; the offsets in it can only be skipped."""

    code = "DAMAGED"


class Diverged(StorageError):
    """The journals of two members of a shard differ in what is committed. `detail` has where they part."""

    code = "DIVERGED"
