"""Where the registry of a cluster is: a URL, checked before anything is opened.

`dmq://ns1:9610,ns2` are name servers, `zk://h1:2181,h2:2181/dmq` is ZooKeeper; `memory:` lives within one process.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from dmq.clock import Clock
from dmq.errors import InvalidSettings
from dmq.registry.name_server.client import NameServerClient, parse_name_servers
from dmq.registry.paths import DEFAULT_ROOT
from dmq.registry.registry import Registry, Trouble
from dmq.registry.zookeeper.ensemble import Ensemble, parse_ensemble, shown_url

__all__ = ["check_registry_url", "open_registry", "registry_troubles", "shown_url"]

_EXAMPLE: Final = "dmq://127.0.0.1:9610 for a name server ('dmq nameserver'), or zk://127.0.0.1:2181/dmq for ZooKeeper"


def check_registry_url(url: str) -> str:
    """The path in the registry below which the cluster is.

    Raises:
        InvalidSettings: the URL can never work.
    """
    scheme = _scheme(url)
    if scheme == "dmq":
        parse_name_servers(url)
        return DEFAULT_ROOT
    if scheme == "zk":
        return _parse_zookeeper(url).root
    if scheme == "memory":
        raise InvalidSettings(f"{url!r}: a registry in memory serves one process only; write {_EXAMPLE}", url=url)
    raise InvalidSettings(f"{url!r} names no registry: write {_EXAMPLE}", url=url)


async def open_registry(url: str, owner: str, *, clock: Clock | None = None) -> Registry:
    """A client with a session.

    Parameters:
        owner: who this is, for people who look into the database of name servers.

    Raises:
        InvalidSettings: the URL can never work.
        RegistryDown: nobody answers there.
    """
    check_registry_url(url)
    if _scheme(url) == "zk":
        from dmq.registry.zookeeper.client import ZooKeeperClient

        return await ZooKeeperClient.open(_parse_zookeeper(url), clock=clock)
    return await NameServerClient.open(parse_name_servers(url), owner, clock=clock)


def _scheme(url: str) -> str:
    return url.strip().partition(":")[0].lower()


def _parse_zookeeper(url: str) -> Ensemble:
    ensemble = parse_ensemble(url)
    if importlib.util.find_spec("kazoo") is None:
        raise InvalidSettings(
            f"{shown_url(url)!r}: ZooKeeper needs a package that is not here (kazoo): pip install 'dmq[zookeeper]'",
            url=shown_url(url),
        )
    return ensemble


async def registry_troubles(registry: Registry) -> list[Trouble]:
    """What is not as it should be with a registry that answers, as far as its client can tell.

    Raises:
        RegistryDown: nobody answers.
    """
    troubles = getattr(registry, "troubles", None)
    return [] if troubles is None else await troubles()
