"""A server of an ensemble: what it says of itself, for people that ask why it does not serve.

What always holds: a server is asked by `srvr`, which every version of ZooKeeper allows unless somebody took it out of
its list; each state is the end of a sentence that says what to do.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final, NamedTuple

from dmq.net.address import ServerAddress

__all__ = ["ServerState", "state_of"]

_LOOK_SECONDS: Final = 1.0
_SAID_BYTES_MAX: Final = 4096
_SERVING: Final = ("leader", "follower", "observer", "standalone")


class ServerState(NamedTuple):
    """How a server stands.

    Attributes:
        mode: as ZooKeeper calls it: leader, follower, observer, standalone, read-only; empty if it serves nobody.
        sentence: why it does not take a client, and what to do, behind its address.
    """

    mode: str
    sentence: str

    @property
    def is_serving(self) -> bool:
        return self.mode in _SERVING


def state_of(address: ServerAddress, zxid: int = 0) -> ServerState:
    """How a server stands to a client that has seen the change of this number. Blocks, for a second or two at most."""
    try:
        with socket.create_connection(address, _LOOK_SECONDS) as connection:
            connection.settimeout(_LOOK_SECONDS)
            connection.sendall(b"srvr")
            said = b""
            while len(said) < _SAID_BYTES_MAX and (part := connection.recv(_SAID_BYTES_MAX)):
                said += part
    except TimeoutError:
        return ServerState("", "does not answer: check whether it is overloaded or stopped")
    except OSError as error:
        return ServerState("", f"is not reached ({error.strerror or error}): check that it runs, and the address")
    return _told(said.decode("utf-8", "replace"), zxid)


def _told(said: str, zxid: int) -> ServerState:
    lines = dict(line.partition(": ")[::2] for line in said.splitlines())
    mode = lines.get("Mode", "")
    if "not currently serving" in said:
        return ServerState("", "has no quorum: start the other servers of its ensemble")
    if mode == "read-only":
        return ServerState(
            mode, "serves reads only, since it has no quorum, and is not used: start the other servers of its ensemble"
        )
    with contextlib.suppress(ValueError):
        if int(lines.get("Zxid", ""), 16) < zxid:
            return ServerState(
                mode,
                "has older data than this broker has seen: it lags behind, or was restored from an old copy; in that "
                "case restart the brokers",
            )
    if mode:
        return ServerState(
            mode, "runs, and gives no session: check its log, and its limits of connections (maxClientCnxns)"
        )
    return ServerState("", "is not a ZooKeeper server, or does not allow the command srvr: check the address")
