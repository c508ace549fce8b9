"""A lookup in a registry for a program that is not a member: where the brokers are. Blocking.

What always holds: the session of the lookup ends with it, and its event loop is its own, so that any thread may call.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from dmq.errors import NotConnected, RegistryDown, UnknownEntry
from dmq.registry.contents import NodeContent, decode_content
from dmq.registry.paths import Paths
from dmq.registry.url import check_registry_url, open_registry, shown_url

__all__ = ["registered_brokers"]


def registered_brokers(url: str, owner: str = "dmq-client") -> list[str]:
    """Where clients reach the brokers that are registered now, as `host:port`.

    Raises:
        InvalidSettings: the URL can never work.
        NotConnected: the registry does not answer, or names no broker.
    """
    check_registry_url(url)
    with ThreadPoolExecutor(1, "dmq-registry") as thread:
        return thread.submit(lambda: asyncio.run(_found(url, owner))).result()


async def _found(url: str, owner: str) -> list[str]:
    nodes = Paths(check_registry_url(url)).nodes
    try:
        registry = await open_registry(url, owner)
        try:
            entries = await registry.children(nodes)
        finally:
            await registry.close()
    except RegistryDown as error:
        raise NotConnected(error.message) from error
    except UnknownEntry:
        entries = []
    if not entries:
        raise NotConnected(
            f"{shown_url(url)} names no broker that runs: start one with dmq broker --registry, or check the path"
        )
    return [decode_content(NodeContent, entry.value, entry.path).address for entry in entries]
