"""What could keep a broker from running well on this machine: directory, disk, descriptors, ports, event loop,
compiled loops.

What always holds: looking changes nothing; a check that cannot be made is a finding, never an exception.

What the doctor says of a registry: whether it answers, its sessions, and whether the brokers in it are reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import socket
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from dmq import compiled
from dmq.errors import DMQError, InvalidSettings, NotAllowed, UnknownEntry
from dmq.net.address import check_address, parse_address
from dmq.registry.contents import ClusterContent, Content, LeaderContent, NodeContent, ShardContent, decode_content
from dmq.registry.paths import Paths, name_of
from dmq.registry.registry import Entry, Registry
from dmq.registry.url import check_registry_url, open_registry, registry_troubles
from dmq.settings import BrokerSettings, Settings, StoreSettings, format_size
from dmq.storage.disk_space import BALLAST
from dmq.storage.files import DiskUsage, OsFiles
from dmq.storage.offline.verification import holder
from dmq.storage.upkeep.identity import IDENTITY

__all__ = ["Finding", "State", "diagnose_machine", "diagnose_registry"]

_CONNECTIONS_USUAL = 1000
_GIB = 1 << 30


class State(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """What one check found, and what to do about it."""

    check: str
    state: State
    what: str
    advice: str = ""


def diagnose_machine(settings: Settings, insecure: bool = False) -> Iterator[Finding]:
    """Everything that can be seen without a broker."""
    folder = Path(settings.broker.data)
    owner, finding = _directory(folder)
    yield finding
    yield _disk(folder, settings.store)
    yield from _ballast(folder, settings.store)
    yield _descriptors(settings)
    yield _address(settings.broker, insecure)
    # A port that the owner of the directory has is where it should be.
    if owner is None:
        yield _port(settings.broker.host, settings.broker.port, "broker.port")
        yield _port(settings.broker.host, settings.broker.metrics_port, "broker.metrics_port")
        if settings.broker.telnet_port is not None:
            yield _port(settings.broker.host, settings.broker.telnet_port, "broker.telnet_port")
    yield _loop()
    yield _loops()


def _directory(folder: Path) -> tuple[int | None, Finding]:
    check = "data directory"
    try:
        if not folder.exists():
            parent = _existing(folder)
            if os.access(parent, os.W_OK | os.X_OK):
                return None, Finding(check, State.OK, f"{folder} does not exist yet; the broker makes it")
            advice = "give the broker's user permission to write there, or choose another with --data"
            return None, Finding(check, State.PROBLEM, f"{folder} cannot be made: {parent} is not writable", advice)
        if not folder.is_dir():
            return None, Finding(check, State.PROBLEM, f"{folder} is not a directory", "choose another with --data")
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            advice = "give the broker's user permission to read and write there"
            return None, Finding(check, State.PROBLEM, f"{folder} is not writable", advice)
        owner = holder(OsFiles(folder, create=False))
    except (OSError, DMQError) as error:
        return None, Finding(check, State.PROBLEM, f"{folder}: {error}", "see dmq journal verify")
    if owner is not None:
        return owner, Finding(check, State.OK, f"{folder} is in use by process {owner}")
    return None, Finding(check, State.OK, f"{folder} can be used")


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.absolute().parent
    return folder


def _disk(folder: Path, settings: StoreSettings) -> Finding:
    try:
        usage = DiskUsage.at(_existing(folder))
    except OSError as error:
        return Finding("disk space", State.PROBLEM, f"the disk cannot be asked: {error.strerror}", "check the disk")
    if not usage.total:
        return Finding("disk space", State.PROBLEM, f"{folder} is on no disk", "name a directory on one with --data")
    share = usage.share
    what = f"{share:.1%} in use, {usage.available / _GIB:.1f} GiB available"
    advice = "free some space, shorten store.retention_hours, or use another disk with --data"
    if share > settings.disk_refuse:
        what = f"{what}: over {settings.disk_refuse:.0%} messages are refused"
        return Finding("disk space", State.PROBLEM, what, advice)
    if share > settings.disk_clean:
        what = f"{what}: over {settings.disk_refuse:.0%} messages will be refused"
        return Finding("disk space", State.WARNING, what, advice)
    if usage.available < 2 * settings.segment_bytes:
        what = f"{what}: less than two segments of {format_size(settings.segment_bytes)}"
        return Finding("disk space", State.WARNING, what, advice)
    return Finding("disk space", State.OK, what)


def _ballast(folder: Path, settings: StoreSettings) -> Iterator[Finding]:
    """Only of a directory that a broker has opened before, since that is when it is made."""
    if not settings.ballast_bytes or not os.path.exists(folder / IDENTITY):
        return
    try:
        size = (folder / BALLAST).stat().st_size
    except OSError:
        what = "it is missing: on a full disk nothing is left for settles and admin commands"
        yield Finding("ballast", State.WARNING, what, "free some space: the broker makes it anew, also while it runs")
    else:
        yield Finding("ballast", State.OK, f"{format_size(size)} are kept for a full disk")


def _descriptors(settings: Settings) -> Finding:
    check = "file descriptors"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = settings.store.files_open_max
    if soft == resource.RLIM_INFINITY or soft >= files + settings.broker.connections_max:
        return Finding(check, State.OK, "no limit" if soft == resource.RLIM_INFINITY else f"{soft} allowed")
    wanted = files + settings.broker.connections_max
    state = State.PROBLEM if soft < files + 64 else State.WARNING if soft < files + _CONNECTIONS_USUAL else State.OK
    what = f"{soft} allowed, which leaves room for {max(0, soft - files)} connections of {wanted - files} configured"
    return Finding(check, state, what, "" if state is State.OK else f"raise it to {wanted}: ulimit -n {wanted}")


def _address(settings: BrokerSettings, insecure: bool) -> Finding:
    try:
        check_address(settings.host, insecure)
    except NotAllowed as error:
        return Finding("address", State.PROBLEM, str(error), "set broker.host to 127.0.0.1, or say --insecure")
    return Finding("address", State.OK, f"listens on {settings.host}")


def _port(host: str, port: int, key: str) -> Finding:
    if port == 0:
        return Finding(key, State.OK, "any free port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            advice = f"stop the process that has it (ss -ltnp 'sport = :{port}' tells), or set {key} to another"
            return Finding(key, State.PROBLEM, f"port {port} on {host}: {error.strerror}", advice)
    return Finding(key, State.OK, f"port {port} is free")


def _loops() -> Finding:
    check = "compiled loops"
    if compiled.IS_COMPILED:
        return Finding(check, State.OK, "in use")
    what = f"pure Python does their work, more slowly: {compiled.ABSENCE}"
    return Finding(check, State.OK if compiled.is_declined() else State.WARNING, what, compiled.remedy())


def _loop() -> Finding:
    if importlib.util.find_spec("uvloop") is None:
        return Finding("event loop", State.WARNING, "uvloop is not installed", "pip install 'dmq[fast]' is faster")
    return Finding("event loop", State.OK, "uvloop")


_REACH_SECONDS: Final = 2.0
_BROKERS_MAX: Final = 100
_SHARDS_MAX: Final = 1000
_PUT_BACK: Final = (
    "put it back with 'dmq cluster import --from-members', or from an export; members that reach each other go on"
)


def diagnose_registry(url: str) -> Iterator[Finding]:
    """Everything that can be seen of a registry from this machine. Opens a session, and ends it."""
    try:
        yield from asyncio.run(_look(url))
    except InvalidSettings as error:
        yield Finding("registry", State.PROBLEM, error.message, "correct shard.registry_url")
    except DMQError as error:
        advice = "brokers that serve go on without it while they reach each other; those that start wait for it"
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
            findings.append(Finding("registry", State.PROBLEM, error.message, "members that reach each other go on"))

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
