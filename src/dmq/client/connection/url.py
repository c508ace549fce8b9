"""Where brokers are, as a user writes it: `dmq://host:port,host2:port2`, or `zk://host:2181/dmq`.

The hosts of `dmq://` are brokers or name servers. With `zk://` the brokers are those that are registered in ZooKeeper
at the moment: it is asked for them at first, and again when none of those known answers.

What always holds: what parses has at least one address, none twice, in the order written; what does not parse raises
one sentence that says what is expected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from dmq.errors import InvalidSettings, NotConnected

__all__ = ["DEFAULT_PORT", "Address", "OneBroker", "check_url", "names_registry", "parse_url", "parsed_address"]

DEFAULT_PORT: Final = 9611
ADDRESSES_MAX: Final = 256

LOOKUP_SECONDS: Final = 0.5  # between two questions to a registry

_EXPECTED: Final = (
    "write dmq://host:port, dmq://host1:port1,host2:port2 for several brokers, or zk://host:2181/dmq for those that "
    "ZooKeeper knows"
)


class Address(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class OneBroker:
    """The table of a URL: everything is at one broker, under any of its addresses, as long as no routes are known.

    Parameters:
        addresses: at least one.
        registry: the URL of the registry that names them, if one does.
    """

    home: Final = 0

    def __init__(self, addresses: Sequence[Address], registry: str = "") -> None:
        self.url: Final = tuple(addresses)
        self._registry = registry

    @classmethod
    def at(cls, url: str, timeout: float | None = None) -> OneBroker:
        """The table of a URL. A registry is asked, until it names a broker or the time is over.

        Raises:
            InvalidSettings: it is not a URL of ours.
            NotConnected: the registry does not answer, or names no broker.
        """
        if not names_registry(url):
            return cls(parse_url(url))
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            try:
                return cls(_registered(url), url)
            except NotConnected:
                if time.monotonic() + LOOKUP_SECONDS >= deadline:
                    raise
                time.sleep(LOOKUP_SECONDS)

    def look_up(self) -> tuple[Address, ...]:
        """The addresses as they are now. A registry is asked, for seconds; while it does not answer, as they were."""
        try:
            return _registered(self._registry) if self._registry else self.url
        except NotConnected:
            return self.url

    def brokers(self, topic: str) -> Sequence[int]:
        return (0,)

    def broker(self, topic: str, place: int) -> int:
        return 0

    def addresses(self, broker: int) -> tuple[Address, ...]:
        return self.url


def names_registry(url: str) -> bool:
    """Whether a URL says where a registry is, and not where brokers are."""
    return str(url).strip().partition("://")[0].lower() == "zk"


def check_url(url: str) -> None:
    """Check a URL without asking anybody.

    Raises:
        InvalidSettings: it is not a URL of ours, or needs a package that is not here.
    """
    if names_registry(url):
        from dmq.registry.url import check_registry_url

        check_registry_url(url)
    else:
        parse_url(url)


def _registered(url: str) -> tuple[Address, ...]:
    from dmq.registry.lookup import registered_brokers

    return tuple(dict.fromkeys(parse_address(address) for address in registered_brokers(url)))


def parse_url(url: str) -> list[Address]:
    """The addresses that a URL names.

    Raises:
        InvalidSettings: it is not a URL of ours, or names a registry.
    """
    if not isinstance(url, str):
        raise InvalidSettings(f"a URL is text, not {type(url).__name__}: {_EXPECTED}")
    scheme, found, rest = url.strip().partition("://")
    if not found:
        raise InvalidSettings(f"{url!r} is not a URL: {_EXPECTED}", url=url)
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
        InvalidSettings: it is not one of them.
    """
    where = f"{url!r}: " if url else ""
    if "@" in text:
        raise InvalidSettings(f"{where}{text!r} has a user, and brokers have no users yet: {_EXPECTED}", url=url)
    if text.startswith("["):
        host, closed, tail = text[1:].partition("]")
        if not closed or (tail and not tail.startswith(":")):
            raise InvalidSettings(f"{where}{text!r} is not an address: {_EXPECTED}", url=url)
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


def parsed_address(text: str) -> Address | None:
    """An address that a broker told; None if it is not one."""
    try:
        return parse_address(text) if text else None
    except InvalidSettings:
        return None
