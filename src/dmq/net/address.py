"""Addresses of servers: where one may listen, and how one is written."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from dmq.errors import InvalidSettings, NotAllowed

__all__ = ["ServerAddress", "check_address", "is_loopback", "parse_address"]


class ServerAddress(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int | None = None) -> ServerAddress:
    """The address that `host:port` names; an IPv6 address stands in brackets.

    Parameters:
        default_port: of an address that names none; None if it must.

    Raises:
        InvalidSettings: it is not one.
    """
    text = text.strip()
    host, colon, port = (text, "", "") if text.endswith("]") else text.rpartition(":")
    if not colon and default_port is not None:
        host, port = text, str(default_port)
    is_bare = not host.startswith("[")
    host = host.removeprefix("[").removesuffix("]")
    if not host or (is_bare and ":" in host) or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise InvalidSettings(f"{text!r} is not an address: write host:port, or [host]:port for IPv6", address=text)
    return ServerAddress(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(host: str, insecure: bool) -> None:
    """Refuse to listen where strangers can reach the server, unless that is meant.

    Raises:
        NotAllowed: the address is not loopback.
    """
    if not is_loopback(host) and not insecure:
        raise NotAllowed(
            f"{host} is not loopback, and there is no authentication yet: anybody who reaches it could read and write "
            "everything; say --insecure if that is meant",
            host=host,
        )
