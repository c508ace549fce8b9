"""An ensemble: what the URL of a registry in ZooKeeper says.

What always holds: a password never shows in a message.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from dmq.duration import parse_duration
from dmq.errors import InvalidName, InvalidSettings
from dmq.net.address import ServerAddress, parse_address
from dmq.registry.registry import ROOT, SESSION_SECONDS, check_path

__all__ = ["DEFAULT_PORT", "Ensemble", "parse_ensemble", "shown_url"]

DEFAULT_PORT: Final = 2181
SESSION_SECONDS_MIN: Final = 1.0
SESSION_SECONDS_MAX: Final = 60.0
_EXPECTED: Final = (
    "write zk://host1:2181,host2:2181/dmq, or zk://user:password@host1,host2/dmq, with the path below which this "
    "cluster is to be"
)


class Ensemble(NamedTuple):
    """Who serves, below which path the cluster is, and who we are there.

    Attributes:
        session_seconds: how long a session is to live without a sign of its client.
        credentials: "user:password", for the scheme digest; None if nodes are open to all.
    """

    addresses: tuple[ServerAddress, ...]
    root: str
    session_seconds: float = SESSION_SECONDS
    credentials: str | None = None


def parse_ensemble(url: str) -> Ensemble:
    """The ensemble of `zk://h1:2181,h2:2181/dmq`, `zk://user:password@h1/dmq` or `zk://h1/dmq?session=4s`.

    A sign that means something in a URL is percent-encoded in a user and a password.

    Raises:
        InvalidSettings: it is no such URL.
    """
    shown = shown_url(url)
    scheme, found, rest = url.strip().partition("://")
    if not found or scheme.lower() != "zk":
        raise InvalidSettings(f"{shown!r} names no ZooKeeper: {_EXPECTED}", url=shown)
    account, at, rest = rest.rpartition("@")
    place, _, query = rest.partition("?")
    hosts, _, path = place.partition("/")
    try:
        addresses = [parse_address(part, DEFAULT_PORT) for part in hosts.split(",")]
        root = check_path("/" + unquote(path.rstrip("/")))
    except InvalidSettings as error:
        address = error.detail["address"]
        raise InvalidSettings(f"{shown!r}: {address!r} is not an address: {_EXPECTED}", url=shown) from None
    except InvalidName as error:
        raise InvalidSettings(f"{shown!r}: {error.message}", url=shown) from None
    if root == ROOT:
        raise InvalidSettings(f"{shown!r} names no path: {_EXPECTED}", url=shown)
    return Ensemble(
        tuple(dict.fromkeys(addresses)),
        root,
        _session_seconds(query, shown),
        _credentials(account, shown) if at else None,
    )


def _session_seconds(query: str, shown: str) -> float:
    options = dict(parse_qsl(query, keep_blank_values=True))
    seconds: float | None = SESSION_SECONDS
    if "session" in options:
        seconds = parse_duration(options.pop("session"))
    if options or seconds is None or not SESSION_SECONDS_MIN <= seconds <= SESSION_SECONDS_MAX:
        raise InvalidSettings(
            f"{shown!r}: the one option is session, from {SESSION_SECONDS_MIN:g}s to {SESSION_SECONDS_MAX:g}s: write "
            "?session=4s, or leave it out",
            url=shown,
        )
    return seconds


def _credentials(account: str, shown: str) -> str:
    user, colon, password = account.partition(":")
    user, password = unquote(user), unquote(password)
    if not user or not colon or not password or ":" in user or "/" in account or "@" in account:
        raise InvalidSettings(
            f"{shown!r}: in front of the @ stand a user and a password: write zk://user:password@host/dmq, with %40 "
            "for an @, %3A for a : and %2F for a / in them",
            url=shown,
        )
    return f"{user}:{password}"


def shown_url(url: str) -> str:
    """The URL without its password."""
    scheme, _, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    return url if not at else f"{scheme}://{account.partition(':')[0]}:***@{place}"
