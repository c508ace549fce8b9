"""Registries beside a simple model: whatever the order of events, and whatever answers are lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from dmq.errors import DMQError, NotConnected, SessionExpired, WriteUnknown
from dmq.registry.memory import Fate, MemoryClient, MemoryRegistry
from dmq.registry.name_server.client import NameServerClient, ServerAddress
from dmq.registry.registry import Operation, Registry
from dmq.registry.zookeeper.client import ZooKeeperClient
from dmq.registry.zookeeper.ensemble import Ensemble
from dmq.registry.zookeeper.multi import send_multi
from dmq.testing.clock import FakeClock
from tests.integration.registry.name_servers import NameServerProcess, expire
from tests.integration.registry.registry_model import RegistryMachine
from tests.integration.registry.zookeeper_registries import expire as expire_zookeeper
from tests.zookeepers import ZooKeeperProcess

T = TypeVar("T")


class MemoryMachine(RegistryMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = MemoryRegistry(FakeClock(), seed=7)

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            work.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        raise AssertionError("memory has nothing to wait for")

    def connect(self) -> Registry:
        return self.registry.connect(beats=False)

    def expire_session(self, client: Registry) -> None:
        self.registry.expire(client.session)

    def decide(self, client: Registry, fate: Fate) -> None:
        assert isinstance(client, MemoryClient)
        # Some late writes come by themselves, between other events.
        if self.registry.random.random() < 0.2:
            self.registry.land_late()
        client.fates.append(fate)


class NameServerMachine(RegistryMachine):
    """Answers are lost here by a connection that ends while the request is on its way."""

    addresses: Sequence[ServerAddress]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.ways = itertools.cycle(self.addresses)

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def connect(self) -> Registry:
        return self.drive(FatefulClient.open([next(self.ways)], "machine", timeout=30.0))

    def expire_session(self, client: Registry) -> None:
        self.drive(expire(next(self.ways), client))

    def decide(self, client: Registry, fate: Fate) -> None:
        assert isinstance(client, FatefulClient)
        client.fate = fate

    def settle_watch(self, holds: Callable[[], bool]) -> None:
        for _ in range(1000):
            if holds():
                return
            self.drive(asyncio.sleep(0.01))
        raise AssertionError("the watch does not tell the last state")

    def teardown(self) -> None:
        super().teardown()
        self.runner.close()


class FatefulClient(NameServerClient):
    """A client whose connection ends before, or right after, a request is sent."""

    fate = Fate.ANSWERED

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        fate, self.fate = self.fate, Fate.ANSWERED
        if fate is Fate.ANSWERED:
            return await self._write_again(operations)
        link = await self._ready(asyncio.get_running_loop().time() + 30.0)
        if fate is Fate.LOST:
            self._number += 1
            link.close(NotConnected("cut before it was sent"))
            raise WriteUnknown("never sent")
        assert link._transport is not None
        # Sent, and the connection ends with it: the name server carries it out, now or when it gets to it.
        asyncio.get_running_loop().call_soon(link.eof_received if fate is Fate.LATE else link._transport.close)
        return await super().write(operations)

    async def _write_again(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """A write that is answered."""
        while True:
            try:
                return await super().write(operations)
            except SessionExpired:
                continue


class ZooKeeperMachine(NameServerMachine):
    """The same, with ZooKeeper."""

    def connect(self) -> Registry:
        return self.drive(FatefulZooKeeperClient.open(Ensemble((next(self.ways),), "/dmq"), timeout=30.0))

    def expire_session(self, client: Registry) -> None:
        self.drive(self._expire(client))

    async def _expire(self, client: Registry) -> None:
        session = client.session
        await expire_zookeeper(next(self.ways), client)
        while client.session in (0, session):  # until it notices, a write is sent into a connection that has ended
            await asyncio.sleep(0.01)

    def decide(self, client: Registry, fate: Fate) -> None:
        assert isinstance(client, FatefulZooKeeperClient)
        client.fate = fate


class FatefulZooKeeperClient(ZooKeeperClient):
    """A client whose connection ends before, or right after, a request is sent; or who does not wait for the answer."""

    fate = Fate.ANSWERED

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        fate, self.fate = self.fate, Fate.ANSWERED
        if fate is Fate.ANSWERED:
            return await self._write_again(operations)
        until = asyncio.get_running_loop().time() + 30.0
        link = await self._ready(until)
        if fate is Fate.LATE:
            # On its way, and nobody waits for it.
            link = await self._take_room(until)
            link.send(lambda kazoo: send_multi(kazoo, operations)).cancel()
        else:
            if fate is Fate.UNANSWERED:
                with contextlib.suppress(DMQError):
                    await super().write(operations)
            number = link.number
            with contextlib.suppress(AttributeError, OSError):  # there is none just now
                link._kazoo._connection._socket.shutdown(socket.SHUT_RDWR)
            # Until it notices, the next one is sent into a connection that has ended.
            while link.is_connected and link.number == number:
                await asyncio.sleep(0.01)
        raise WriteUnknown("lost on purpose")

    async def _write_again(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """A write that is answered."""
        while True:
            try:
                return await super().write(operations)
            except SessionExpired:
                continue


def machine_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # another process has no seed: what failed may not fail again
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def test_a_registry_in_memory_does_what_the_model_does() -> None:
    run_state_machine_as_test(MemoryMachine, settings=machine_settings(60, 30))


def test_a_registry_behind_a_name_server_does_what_the_model_does(
    name_server: NameServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NameServerMachine, "addresses", [name_server.address], raising=False)
    run_state_machine_as_test(NameServerMachine, settings=machine_settings(4, 15))


def test_zookeeper_does_what_the_model_does(zookeeper: ZooKeeperProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZooKeeperMachine, "addresses", [zookeeper.address], raising=False)
    run_state_machine_as_test(ZooKeeperMachine, settings=machine_settings(3, 15))


@pytest.mark.soak
def test_zookeeper_does_what_the_model_does_for_long(
    zookeeper: ZooKeeperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZooKeeperMachine, "addresses", [zookeeper.address], raising=False)
    run_state_machine_as_test(ZooKeeperMachine, settings=machine_settings(200, 40))


@pytest.mark.soak
def test_a_registry_behind_a_name_server_does_what_the_model_does_for_long(
    name_server: NameServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NameServerMachine, "addresses", [name_server.address], raising=False)
    run_state_machine_as_test(NameServerMachine, settings=machine_settings(300, 40))


@pytest.mark.soak
def test_a_registry_in_memory_does_what_the_model_does_for_long() -> None:
    run_state_machine_as_test(MemoryMachine, settings=machine_settings(3000, 60))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_registry_behind_two_name_servers_does_what_the_model_does(
    kind: str, shared_name_servers: Callable[[str], list[ServerAddress]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NameServerMachine, "addresses", shared_name_servers(kind), raising=False)
    run_state_machine_as_test(NameServerMachine, settings=machine_settings(40, 30))
