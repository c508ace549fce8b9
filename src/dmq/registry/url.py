"""Where the registry of a cluster is: a URL, checked before anything is opened.

`dmq://ns1:9610,ns2` are name servers. ZooKeeper (`zk://`) is not built yet, and `memory:` lives within one process.
"""

from __future__ import annotations

from typing import Final

from dmq.clock import Clock
from dmq.errors import InvalidSettings
from dmq.registry.name_server.client import NameServerClient, parse_name_servers
from dmq.registry.registry import Registry

__all__ = ["check_registry_url", "open_registry"]

_EXAMPLE: Final = "dmq://127.0.0.1:9610 for the name server that 'dmq nameserver' runs there"


def check_registry_url(url: str) -> None:
    """Raises InvalidSettings if a URL can never work."""
    scheme = url.strip().partition(":")[0].lower()
    if scheme == "dmq":
        parse_name_servers(url)
    elif scheme in ("zk", "zookeeper"):
        raise InvalidSettings(f"{url!r}: ZooKeeper comes with a later version; use name servers: {_EXAMPLE}", url=url)
    elif scheme == "memory":
        raise InvalidSettings(f"{url!r}: a registry in memory serves one process only; write {_EXAMPLE}", url=url)
    else:
        raise InvalidSettings(f"{url!r} names no registry: write {_EXAMPLE}", url=url)


async def open_registry(url: str, owner: str, *, clock: Clock | None = None) -> Registry:
    """A client with a session.

    Parameters:
        owner: who this is, for people who look into the registry.

    Raises:
        InvalidSettings: the URL can never work.
        RegistryDown: nobody answers there.
    """
    check_registry_url(url)
    return await NameServerClient.open(parse_name_servers(url), owner, clock=clock)
