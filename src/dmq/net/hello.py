"""What a server checks of a hello, whatever it serves, and what it answers."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from dmq.clock import Clock
from dmq.errors import FrameCorrupt, NotAuthenticated, VersionMismatch
from dmq.model import check_name
from dmq.net.connection import Connection
from dmq.net.server import ConnectionLimits
from dmq.protocol import session as headers
from dmq.protocol.commands import Command, decode_request, response_head
from dmq.protocol.frame import Frame
from dmq.version import __version__

__all__ = ["Greeting", "Terms", "accept_hello", "answer_hello"]


class Greeting(NamedTuple):
    """Who said hello, and what both sides speak."""

    app: str
    client_id: str
    version: int
    features: list[str]


class Terms(NamedTuple):
    """What a server that serves no messages tells its clients.

    Attributes:
        name: of the server.
        limits: of its connections; silence is three heartbeats.
    """

    name: str
    address: str
    frame_bytes_max: int
    limits: ConnectionLimits


def accept_hello(connection: Connection, frame: Frame, what: str, known: frozenset[str]) -> Greeting | None:
    """The hello of a client; None if it contradicts its checksums, and the connection ends.

    Parameters:
        what: this server, for the errors.
        known: the features it offers.

    Raises:
        VersionMismatch, NotAuthenticated, InvalidName, InvalidRequest: it cannot be served.
    """
    asked: headers.Hello = decode_request(frame)
    if (headers.FRAME_CRC in asked.features) != connection.parser.is_checked:
        connection.refuse(FrameCorrupt("a hello offers checksums and has none, or the other way round: connect again"))
        return None
    version = headers.choose_version(asked)
    if version is None:
        raise VersionMismatch(
            f"the client speaks protocol {asked.version_min}-{asked.version_max}, this {what} "
            f"{headers.PROTOCOL_VERSION_MIN}-{headers.PROTOCOL_VERSION}: upgrade the older side"
        )
    if asked.auth_mechanism:
        raise NotAuthenticated(f"this {what} has no authentication called {asked.auth_mechanism!r}: connect without")
    check_name(asked.app, "app")
    client_id = asked.client_id or f"{asked.app}-{secrets.token_hex(6)}"
    return Greeting(asked.app, client_id, version, headers.choose_features(asked, known))


def answer_hello(connection: Connection, frame: Frame, greeting: Greeting, terms: Terms, *, clock: Clock) -> None:
    """Answer a hello that was accepted; from now on frames may be as large as the terms say."""
    connection.parser.frame_bytes_max = terms.frame_bytes_max
    limits = headers.Limits(
        terms.frame_bytes_max,
        0,
        int(terms.limits.silence_seconds / 3 * 1000),
        0,
        prefetch_bytes=0,
        partial_ms=int(terms.limits.partial_seconds * 1000),
    )
    reply = headers.HelloReply(
        terms.name,
        terms.address,
        greeting.version,
        limits,
        features=greeting.features,
        client_id=greeting.client_id,
        software=f"dmq {__version__}",
        now_ms=clock.now_ms(),
    )
    connection.send(response_head(Command.HELLO, reply, frame.correlation))
