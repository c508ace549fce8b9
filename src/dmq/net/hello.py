"""What a server checks of a hello, whatever it serves."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from dmq.errors import FrameCorrupt, NotAuthenticated, VersionMismatch
from dmq.model import check_name
from dmq.net.connection import Connection
from dmq.protocol import session as headers
from dmq.protocol.commands import decode_request
from dmq.protocol.frame import Frame

__all__ = ["Greeting", "accept_hello"]


class Greeting(NamedTuple):
    """Who said hello, and what both sides speak."""

    app: str
    client_id: str
    version: int
    features: list[str]


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
