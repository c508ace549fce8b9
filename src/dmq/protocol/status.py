"""Statuses: what a response says, each with its one exception class, both ways.

A status has the name of its class's `code`. Numbers are grouped, so that a client can act on one that is newer than
itself: 0x01.. what was asked is wrong, 0x02.. the state of things forbids it, 0x03.. try again, 0x04.. the broker is in
trouble.

What always holds: a status is in the group 0x03.. exactly if its class is `retriable`; no two statuses share a class;
an error always becomes a response, whatever its detail holds, and a response always becomes an error, whatever it says.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dmq import errors
from dmq.errors import DMQError, ServerError
from dmq.protocol.header import TEXT_MAX, Amount, Header, check_detail, encode_header

__all__ = ["CLASSES", "ErrorHeader", "Status", "error_from_status", "status_of"]

RETRIABLE: Final = 0x0300
GROUP: Final = 0xFF00
ERROR_BYTES_MAX: Final = 16 * 1024  # an error is answered even before the hello, where a frame is small


class Status(IntEnum):
    """The number in a frame's status field."""

    OK = 0  # SEND_SUCCESS_ACK, SUBSCRIBE_ACK

    PROTOCOL_ERROR = 0x0101
    VERSION_MISMATCH = 0x0102
    UNKNOWN_COMMAND = 0x0103
    INVALID_REQUEST = 0x0104
    UNSUPPORTED = 0x0105
    NOT_AUTHENTICATED = 0x0106
    NOT_ALLOWED = 0x0107
    MISSING_CLIENT_ID = 0x0108  # SUBSCRIBE_NO_CLIENT_ID_ACK
    INVALID_NAME = 0x0109
    INVALID_SETTINGS = 0x010A
    INVALID_MESSAGE = 0x010B
    MESSAGE_TOO_LARGE = 0x010C

    UNKNOWN_TOPIC = 0x0201  # SEND_NO_TOPIC_ACK, SUBSCRIBE_NO_TOPIC_ACK
    UNKNOWN_GROUP = 0x0202
    UNKNOWN_MESSAGE = 0x0203
    TOPIC_EXISTS = 0x0204
    OFFSET_GONE = 0x0205
    SEQUENCE_CONFLICT = 0x0206
    STALE_EPOCH = 0x0207
    LEASE_LOST = 0x0208
    SUBSCRIPTION_CONFLICT = 0x0209
    SUBSCRIPTION_SUPERSEDED = 0x020A
    NOT_IN_CLUSTER = 0x020B
    CONSUME_TIMEOUT = 0x020C
    DEAD_LETTERED = 0x020D
    TRANSACTION_OVER = 0x020E
    SHARD_CONFLICT = 0x020F

    # a name server's
    REGISTRY_CONFLICT = 0x0220
    SESSION_EXPIRED = 0x0221
    UNKNOWN_ENTRY = 0x0222
    WRITE_UNKNOWN = 0x0223

    BUSY = 0x0301
    RATE_LIMITED = 0x0302  # SEND_EXCEED_LIMIT_ACK
    BROKER_STOPPING = 0x0303
    NOT_ENOUGH_REPLICAS = 0x0304
    SERVER_ERROR = 0x0305  # SEND_SERVER_ERROR, SUBSCRIBE_SERVER_ERROR
    DISK_FULL = 0x0306
    TOO_MANY_FILES = 0x0307
    LIMIT_REACHED = 0x0308
    DATABASE_DOWN = 0x0309
    FRAME_CORRUPT = 0x030A
    OUT_OF_ORDER = 0x030B
    NOT_LEADER = 0x030C
    STALE_ROUTE = 0x030D
    REGISTRY_DOWN = 0x030E

    STORAGE_ERROR = 0x0401
    STORE_FAILED = 0x0402
    DAMAGED = 0x0403
    RECORD_CORRUPT = 0x0404


def _classes() -> dict[Status, type[DMQError]]:
    by_code = {cls.code: cls for cls in (getattr(errors, name) for name in errors.__all__)}
    return {status: by_code[status.name] for status in Status if status is not Status.OK}


CLASSES: Final = _classes()
"""Every status but OK, and its class."""

_STATUSES: Final = {cls: status for status, cls in CLASSES.items()}


class ErrorHeader(Header, frozen=True):
    """The header of every response whose status is not 0, whatever its command."""

    message: Annotated[str, Meta(max_length=TEXT_MAX)] = ""  # what happened and what to do, for a person
    detail: dict[str, Any] = {}  # facts for a program
    retry_after_ms: Amount | None = None  # when trying again may help


_decoder: Final = msgspec.msgpack.Decoder(ErrorHeader)


def error_from_status(status: int, header: bytes | ErrorHeader) -> DMQError:
    """The exception that a response stands for; to be raised, or handed to the caller that waits.

    A status we do not know becomes a `ServerError` if its group says that trying again may help, else a `DMQError`;
    `detail["status"]` then has the number.

    Parameters:
        status: from the frame, not 0.
        header: from the same frame, decoded or not.
    """
    said = header if isinstance(header, ErrorHeader) else _decode(header)
    cls: type[DMQError] | None = CLASSES.get(status)  # type: ignore[call-overload]
    if cls is None:
        cls = ServerError if status & GROUP == RETRIABLE else DMQError
        said.detail["status"] = status
    error = cls(said.message or f"the broker answered {_name(status)} without a reason")
    error.detail.update(said.detail)  # not as keywords: the names in it are the peer's
    if said.retry_after_ms is not None:
        error.detail["retry_after_ms"] = said.retry_after_ms
    return error


def _decode(raw: bytes) -> ErrorHeader:
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return ErrorHeader(f"the broker answered with an error that cannot be read: {error}", {})


def _name(status: int) -> str:
    return Status(status).name if status in CLASSES else f"status {status:#06x}"


def status_of(error: BaseException) -> tuple[Status, ErrorHeader]:
    """What to answer for an exception.

    An error of a class without a status of its own is answered as its nearest base that has one. What is no `DMQError`
    becomes SERVER_ERROR, and its text stays here: it may tell a stranger too much.
    """
    if not isinstance(error, DMQError):
        return Status.SERVER_ERROR, ErrorHeader(
            "the broker failed in a way it did not expect: try again, and look into its log"
        )
    status = next((_STATUSES[cls] for cls in type(error).__mro__ if cls in _STATUSES), Status.SERVER_ERROR)
    message = error.message if len(error.message) <= TEXT_MAX else error.message[: TEXT_MAX - 1] + "…"
    message = message.encode("utf-8", "replace").decode()
    after_ms = error.detail.get("retry_after_ms")
    retry_after_ms = max(0, int(after_ms)) if isinstance(after_ms, int | float) else None
    header = ErrorHeader(
        message, {key: value for key, value in error.detail.items() if key != "retry_after_ms"}, retry_after_ms
    )
    return status, _sendable(header)


def _sendable(header: ErrorHeader) -> ErrorHeader:
    """The header with a detail that can be encoded and fits; without it if there is no way."""
    try:
        detail = {key: check_detail(value) for key, value in header.detail.items()}
        sendable = ErrorHeader(header.message, detail, header.retry_after_ms)
        if len(encode_header(sendable)) <= ERROR_BYTES_MAX:
            return sendable
    except (RecursionError, ValueError, OverflowError, TypeError, msgspec.MsgspecError):
        pass
    return ErrorHeader(header.message, {}, header.retry_after_ms)
