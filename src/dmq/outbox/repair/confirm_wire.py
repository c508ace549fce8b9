"""The bytes between a confirm service and the side that asks.

One question per connection. The bytes, both ways:

    magic "dc" (2) · version u16 · length u32 · MessagePack: `Question`, then `Reply`

What always holds: a frame is bounded; no side waits for the other beyond a deadline.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dmq.errors import NotConnected
from dmq.outbox.states import BusinessState

__all__ = [
    "IDS_MAX",
    "REASON_CHARS",
    "Confirmed",
    "Question",
    "Reply",
    "ask_address",
    "receive_question",
    "send_reply",
]

IDS_MAX: Final = 200
REASON_CHARS: Final = 1024

_HEAD: Final = struct.Struct(">2sHI")
_MAGIC: Final = b"dc"
_VERSION: Final = 1
_FRAME_BYTES_MAX: Final = 512 << 10

Id = Annotated[str, Meta(min_length=1, max_length=64)]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What did these messages come to in this group?"""

    group: Annotated[str, Meta(min_length=1, max_length=255)]
    send_ids: Annotated[list[Id], Meta(max_length=IDS_MAX)]


class Confirmed(msgspec.Struct, frozen=True, array_like=True):
    """What one message came to."""

    send_id: str
    state: BusinessState
    consumer_id: str
    at_ms: int = 0
    reason: str = ""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Those that were consumed; the others were not. With an error, nothing is known."""

    found: Annotated[list[Confirmed], Meta(max_length=IDS_MAX)] = []
    error: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_questions: Final = msgspec.msgpack.Decoder(Question)
_replies: Final = msgspec.msgpack.Decoder(Reply)


def receive_question(connection: socket.socket, deadline: float) -> Question:
    """What somebody asks.

    Raises:
        OSError, ValueError: it does not come in time, or is none.
    """
    return _questions.decode(_receive(connection, deadline))


def send_reply(connection: socket.socket, reply: Reply, deadline: float) -> None:
    """Answer."""
    _send(connection, _encode(reply), deadline)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """One frame.

    Raises:
        OSError: it does not come in time.
        ValueError: it is none.
    """
    magic, version, length = _HEAD.unpack(_receive_exactly(connection, _HEAD.size, deadline))
    if magic != _MAGIC or version != _VERSION or length > _FRAME_BYTES_MAX:
        raise ValueError("these bytes are no question or answer of a confirm service")
    return _receive_exactly(connection, length, deadline)


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        got = connection.recv(count - len(parts))
        if not got:
            raise ConnectionError("the other side closed the connection")
        parts += got
    return bytes(parts)


def _send(connection: socket.socket, body: bytes, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(_HEAD.pack(_MAGIC, _VERSION, len(body)) + body)


def ask_address(address: str, group: str, send_ids: list[str], timeout: float) -> dict[str, Confirmed]:
    """Ask one confirm service; those that are missing in the answer were not consumed.

    Raises:
        NotConnected: it gave no answer.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            _send(connection, _encode(Question(group, send_ids)), deadline)
            reply = _replies.decode(_receive(connection, deadline))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise NotConnected(f"the confirm service at {address} did not answer: {error}", address=address) from error
    if reply.error:
        raise NotConnected(f"the confirm service at {address} cannot look: {reply.error}", address=address)
    asked = set(send_ids)
    return {found.send_id: found for found in reply.found if found.send_id in asked}
