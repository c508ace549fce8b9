"""Addresses of brokers, as a user writes them: `dmq://host:port,host2:port2`.

What always holds: what parses has at least one address, none twice, in the order written; what does not parse raises
one sentence that says what is expected.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.errors import InvalidSettings, Unsupported

__all__ = ["DEFAULT_PORT", "Address", "parse_url"]

DEFAULT_PORT: Final = 9611
ADDRESSES_MAX: Final = 256

_EXPECTED: Final = "write dmq://host:port, or dmq://host1:port1,host2:port2 for several brokers"


class Address(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> list[Address]:
    """The addresses that a URL names.

    Raises:
        InvalidSettings: it is no URL of ours.
        Unsupported: it names a registry, and this client knows brokers only.
    """
    if not isinstance(url, str):
        raise InvalidSettings(f"a URL is text, not {type(url).__name__}: {_EXPECTED}")
    scheme, found, rest = url.strip().partition("://")
    if not found:
        raise InvalidSettings(f"{url!r} is not a URL: {_EXPECTED}", url=url)
    if scheme.lower() == "zk":
        raise Unsupported(f"{url!r} names ZooKeeper, which this version does not ask yet: {_EXPECTED}", url=url)
    if scheme.lower() != "dmq":
        raise InvalidSettings(f"{url!r} begins with {scheme!r}, which is not known: {_EXPECTED}", url=url)
    hosts, slash, path = rest.partition("/")
    if path:
        raise InvalidSettings(f"{url!r} has a path, {slash + path!r}, and a broker has none: {_EXPECTED}", url=url)
    addresses = list(dict.fromkeys(parse_address(part.strip(), url) for part in hosts.split(",")))
    if len(addresses) > ADDRESSES_MAX:
        raise InvalidSettings(f"a URL names at most {ADDRESSES_MAX} brokers, and this one {len(addresses)}", url=url)
    return addresses


def parse_address(text: str, url: str = "") -> Address:
    """One `host`, `host:port`, `[v6]` or `[v6]:port`.

    Raises:
        InvalidSettings: it is none of them.
    """
    where = f"{url!r}: " if url else ""
    if "@" in text:
        raise InvalidSettings(f"{where}{text!r} has a user, and brokers know none yet: {_EXPECTED}", url=url)
    if text.startswith("["):
        host, closed, tail = text[1:].partition("]")
        if not closed or (tail and not tail.startswith(":")):
            raise InvalidSettings(f"{where}{text!r} is no address: {_EXPECTED}", url=url)
        port_text = tail[1:] if tail else None
    elif text.count(":") > 1:
        raise InvalidSettings(f"{where}put the IPv6 address {text!r} in brackets, as in dmq://[::1]:9611", url=url)
    else:
        host, colon, after = text.partition(":")
        port_text = after if colon else None
    if not host or any(char.isspace() or char in "@?#" for char in host):
        raise InvalidSettings(f"{where}{text!r} has no host name that can be used: {_EXPECTED}", url=url)
    if port_text is None:
        return Address(host, DEFAULT_PORT)
    if not (port_text.isascii() and port_text.isdigit()) or not 1 <= int(port_text) <= 65_535:
        raise InvalidSettings(f"{where}{port_text!r} is not a port: use a number from 1 to 65535", url=url)
    return Address(host, int(port_text))
