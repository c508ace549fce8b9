"""DMQ: a distributed message queue.

This is the public door: what is listed in `__all__` here stays compatible between minor versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmq.errors import (
    ArchiveConflict,
    BrokerStopping,
    Busy,
    CannotListen,
    ConsumeTimeout,
    Damaged,
    DatabaseDown,
    DeadLettered,
    DirectoryInUse,
    DiskFull,
    Diverged,
    DMQError,
    ForeignFile,
    FrameCorrupt,
    InvalidMessage,
    InvalidName,
    InvalidRequest,
    InvalidSettings,
    LeaseLost,
    LimitReached,
    MessageTooLarge,
    MissingClientId,
    NoPermission,
    NotAllowed,
    NotAuthenticated,
    NotConnected,
    NotEnoughReplicas,
    NotInCluster,
    NotLeader,
    OffsetGone,
    OutOfOrder,
    OutOfRetries,
    PortTaken,
    ProtocolError,
    RateLimited,
    RecordCorrupt,
    RegistryConflict,
    RegistryDown,
    SequenceConflict,
    ServerError,
    SessionExpired,
    ShardConflict,
    StaleEpoch,
    StaleRoute,
    StorageError,
    StoreClosed,
    StoreFailed,
    SubscriptionConflict,
    SubscriptionSuperseded,
    TimedOut,
    TooManyFiles,
    TopicExists,
    TransactionOver,
    UnknownCommand,
    UnknownEntry,
    UnknownGroup,
    UnknownMessage,
    UnknownTopic,
    Unsupported,
    VersionMismatch,
    WriteUnknown,
    WrongFormat,
)
from dmq.model import Message, MessageId, Receipt, delay_level
from dmq.version import __version__

if TYPE_CHECKING:
    from dmq import aio
    from dmq.client.client import Client, connect
    from dmq.client.consumer.consumer import Consumer
    from dmq.client.consumer.handler import RateLimit, Reject, Retry
    from dmq.client.consumer.message import Batch, ReceivedMessage
    from dmq.client.producer.future import SendFuture
    from dmq.client.producer.producer import Producer
    from dmq.client.producer.transaction import Transaction

__all__ = [
    "ArchiveConflict",
    "Batch",
    "BrokerStopping",
    "Busy",
    "CannotListen",
    "Client",
    "ConsumeTimeout",
    "Consumer",
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
    "Message",
    "MessageId",
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
    "Producer",
    "ProtocolError",
    "RateLimit",
    "RateLimited",
    "Receipt",
    "ReceivedMessage",
    "RecordCorrupt",
    "RegistryConflict",
    "RegistryDown",
    "Reject",
    "Retry",
    "SendFuture",
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
    "Transaction",
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
    "__version__",
    "aio",
    "connect",
    "delay_level",
]

# Loaded when first used: `import dmq` alone, for its errors or its version, stays cheap.
_LATER = {
    "Batch": "dmq.client.consumer.message",
    "Client": "dmq.client.client",
    "Consumer": "dmq.client.consumer.consumer",
    "Producer": "dmq.client.producer.producer",
    "RateLimit": "dmq.client.consumer.handler",
    "ReceivedMessage": "dmq.client.consumer.message",
    "Reject": "dmq.client.consumer.handler",
    "Retry": "dmq.client.consumer.handler",
    "SendFuture": "dmq.client.producer.future",
    "Transaction": "dmq.client.producer.transaction",
    "connect": "dmq.client.client",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name == "aio":
            return import_module("dmq.aio")
        home = _LATER.get(name)
        if home is None:
            raise AttributeError(f"module 'dmq' has no attribute {name!r}")
        return getattr(import_module(home), name)
