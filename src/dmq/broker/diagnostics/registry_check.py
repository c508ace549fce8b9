"""What the doctor says of a registry: whether it answers, its sessions, and whether the brokers in it are reached."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Final

from dmq.broker.diagnostics.doctor import Finding, State
from dmq.errors import DMQError, InvalidSettings, UnknownEntry
from dmq.net.address import parse_address
from dmq.registry.contents import (
    ClusterContent,
    Content,
    LeaderContent,
    NodeContent,
    ShardContent,
    decode_content,
)
from dmq.registry.paths import Paths, name_of
from dmq.registry.registry import Entry, Registry
from dmq.registry.url import check_registry_url, open_registry, registry_troubles

__all__ = ["diagnose_registry"]

_REACH_SECONDS: Final = 2.0
_BROKERS_MAX: Final = 100
_SHARDS_MAX: Final = 1000
_PUT_BACK: Final = (
    "put it back with 'dmq cluster import --from-members', or from an export; members that hear each other go on"
)


def diagnose_registry(url: str) -> Iterator[Finding]:
    """Everything that can be seen of a registry from this machine. Opens a session, and ends it."""
    try:
        yield from asyncio.run(_look(url))
    except InvalidSettings as error:
        yield Finding("registry", State.PROBLEM, error.message, "correct shard.registry_url")
    except DMQError as error:
        advice = "brokers that serve go on without it while they hear each other; those that start wait for it"
        yield Finding("registry", State.PROBLEM, error.message, advice)


async def _look(url: str) -> list[Finding]:
    paths = Paths(check_registry_url(url))
    registry = await open_registry(url, "dmq doctor")
    try:
        began = time.perf_counter()
        cluster = await registry.read(paths.cluster)
        milliseconds = (time.perf_counter() - began) * 1000
        what = f"answers within {milliseconds:.1f} ms; a session lives {registry.session_seconds:g} s"
        findings = [Finding("registry", State.OK, what)]
        findings += [Finding("registry", State.WARNING, *trouble) for trouble in await registry_troubles(registry)]
        if cluster is None:
            what, advice = (
                f"there is no cluster at {paths.root}",
                "the first broker with --registry and --shard makes it",
            )
            return [*findings, Finding("registry", State.WARNING, what, advice)]
        return [*findings, *await _entries(registry, paths, cluster), *await _brokers(registry, paths)]
    finally:
        await registry.close()


async def _entries(registry: Registry, paths: Paths, cluster: Entry) -> list[Finding]:
    """What is wrong with the entries of the cluster and its shards: somebody has deleted or written them by hand."""
    findings: list[Finding] = []

    def look(kind: type[Content], entry: Entry) -> None:
        try:
            decode_content(kind, entry.value, entry.path)
        except DMQError as error:
            findings.append(Finding("registry", State.PROBLEM, error.message, "members that hear each other go on"))

    look(ClusterContent, cluster)
    try:
        shards = await registry.children(paths.shards)
    except UnknownEntry as error:
        return [*findings, Finding("registry", State.PROBLEM, error.message, _PUT_BACK)]
    for entry in shards[:_SHARDS_MAX]:
        look(ShardContent, entry)
        held = await registry.read(f"{entry.path}/leader")
        if held is not None:
            look(LeaderContent, held)
            if not held.is_ephemeral:
                what = f"{held.path} was not created by a broker, and keeps its shard from electing a leader"
                findings.append(Finding("registry", State.PROBLEM, what, "delete it with the registry's own tools"))
    return findings


async def _brokers(registry: Registry, paths: Paths) -> list[Finding]:
    try:
        entries = await registry.children(paths.nodes)
    except UnknownEntry as error:
        return [Finding("registry", State.PROBLEM, error.message, _PUT_BACK)]
    findings: list[Finding] = []
    nodes: dict[str, NodeContent] = {}
    for entry in entries[:_BROKERS_MAX]:
        try:
            nodes[name_of(entry.path)] = decode_content(NodeContent, entry.value, entry.path)
        except DMQError as error:
            findings.append(Finding("registry", State.PROBLEM, error.message, "no broker wrote it: see who did"))
    for name, node in nodes.items():
        addresses = [node.address, *([node.replication_address] if node.replication_address else [])]
        wrong = [address for address in addresses if not await _is_reached(address)]
        if wrong:
            what = f"broker {name} says that it is at {' and '.join(wrong)}, which is not reached from here"
            advice = "check shard.address and shard.replication_address there, and the network between"
            findings.append(Finding("addresses", State.PROBLEM, what, advice))
    if not findings:
        findings.append(Finding("addresses", State.OK, f"{len(nodes)} brokers are registered, and all are reached"))
    return findings


async def _is_reached(address: str) -> bool:
    with contextlib.suppress(OSError, TimeoutError, InvalidSettings):
        host, port = parse_address(address)
        async with asyncio.timeout(_REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False
