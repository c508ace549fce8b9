"""Where a server may listen."""

from __future__ import annotations

import ipaddress

from dmq.errors import NotAllowed

__all__ = ["check_address"]


def check_address(host: str, insecure: bool) -> None:
    """Refuse to listen where strangers can reach the server, unless that is meant.

    Raises:
        NotAllowed: the address is not loopback.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not insecure:
        raise NotAllowed(
            f"{host} is not loopback, and there is no authentication yet: anybody who reaches it could read and write "
            "everything; say --insecure if that is meant",
            host=host,
        )
