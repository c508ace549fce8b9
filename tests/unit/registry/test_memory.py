"""A registry in memory that is unkind: answers that do not come, writes that come late, sessions that end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from dmq.errors import RegistryConflict, RegistryDown, SessionExpired, WriteUnknown
from dmq.registry.memory import Fate, MemoryClient, MemoryRegistry
from dmq.registry.registry import Create, Delete, Entry, Put
from dmq.testing.clock import FakeClock

T = TypeVar("T")


def drive(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives that has nothing to wait for."""
    with pytest.raises(StopIteration) as end:
        work.send(None)
    value: T = end.value.value
    return value


def check_failure(kind: type[Exception], work: Coroutine[Any, Any, object]) -> None:
    with pytest.raises(kind):
        work.send(None)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def registry(clock: FakeClock) -> MemoryRegistry:
    return MemoryRegistry(clock)


@pytest.fixture
def client(registry: MemoryRegistry) -> MemoryClient:
    return registry.connect(beats=False)


@pytest.fixture
def other(registry: MemoryRegistry) -> MemoryClient:
    return registry.connect(beats=False)


def test_an_unanswered_write_is_carried_out(client: MemoryClient, other: MemoryClient) -> None:
    client.fates.append(Fate.UNANSWERED)
    check_failure(WriteUnknown, client.write([Create("/a", b"", ephemeral=True)]))
    assert drive(other.read("/a")) == Entry("/a", b"", 0, client.session)
    assert client.deadline < 0, "only an answered write moves the deadline"


def test_an_unanswered_conflict_is_not_told(client: MemoryClient) -> None:
    drive(client.write([Create("/a", b"")]))
    client.fates.append(Fate.UNANSWERED)
    check_failure(WriteUnknown, client.write([Create("/a", b"")]))


def test_a_lost_write_is_never_carried_out(registry: MemoryRegistry, client: MemoryClient, other: MemoryClient) -> None:
    client.fates.append(Fate.LOST)
    check_failure(WriteUnknown, client.write([Create("/a", b"")]))
    assert registry.land_late() == 0
    drive(client.write([Create("/b", b"")]))
    assert drive(other.read("/a")) is None


def test_no_read_settles_a_late_write(registry: MemoryRegistry, client: MemoryClient, other: MemoryClient) -> None:
    client.fates.append(Fate.LATE)
    check_failure(WriteUnknown, client.write([Create("/a", b"")]))
    for _ in range(10):
        assert drive(client.read("/a")) is None
    assert registry.land_late() == 1
    assert drive(other.read("/a")) is not None


@pytest.mark.parametrize("answer", ["success", "conflict"])
def test_an_answered_write_settles_those_before_it(answer: str) -> None:
    outcomes = set()
    for seed in range(20):
        registry = MemoryRegistry(FakeClock(), seed=seed)
        client = registry.connect(beats=False)
        drive(client.write([Create("/there", b"")]))
        client.fates.append(Fate.LATE)
        check_failure(WriteUnknown, client.write([Create("/a", b"")]))
        if answer == "success":
            drive(client.write([Create("/b", b"")]))
        else:
            check_failure(RegistryConflict, client.write([Create("/there", b"")]))
        found = drive(client.read("/a"))
        assert registry.land_late() == 0
        assert drive(client.read("/a")) == found
        outcomes.add(found is None)
    assert outcomes == {True, False}, "carried out or not, by the seed"


def test_a_late_write_of_another_client_stays_late(
    registry: MemoryRegistry, client: MemoryClient, other: MemoryClient
) -> None:
    client.fates.append(Fate.LATE)
    check_failure(WriteUnknown, client.write([Create("/a", b"1")]))
    drive(other.write([Create("/b", b"")]))
    assert drive(other.read("/a")) is None
    registry.land_late()
    assert drive(other.read("/a")) is not None


def test_a_late_write_that_no_longer_applies_changes_nothing(
    registry: MemoryRegistry, client: MemoryClient, other: MemoryClient
) -> None:
    drive(client.write([Create("/a", b"0")]))
    client.fates.append(Fate.LATE)
    check_failure(WriteUnknown, client.write([Put("/a", b"late", 0), Create("/b", b"")]))
    drive(other.write([Put("/a", b"other", 0)]))
    assert registry.land_late() == 0
    assert drive(other.read("/a")) == Entry("/a", b"other", 1)
    assert drive(other.read("/b")) is None


def test_a_late_write_whose_session_is_over_is_refused(
    registry: MemoryRegistry, client: MemoryClient, other: MemoryClient
) -> None:
    client.fates.append(Fate.LATE)
    check_failure(WriteUnknown, client.write([Create("/a", b"")]))
    registry.expire(client.session)
    assert registry.land_late() == 0
    assert drive(other.read("/a")) is None


def test_a_session_ends_when_its_client_was_not_heard_for_so_long(
    registry: MemoryRegistry, clock: FakeClock, client: MemoryClient, other: MemoryClient
) -> None:
    drive(client.write([Create("/e", b"", ephemeral=True)]))
    session = client.session
    for _ in range(4):
        clock.advance(registry.session_seconds / 2)
        client.beat()
        assert drive(other.read("/e")) is not None
    clock.suspend(registry.session_seconds)
    assert drive(other.read("/e")) is None
    check_failure(SessionExpired, client.write([Create("/f", b"")]))
    assert client.session not in (0, session)
    assert drive(other.read("/f")) is None
    drive(client.write([Create("/f", b"")]))


def test_a_deadline_is_over_before_the_session_is(
    registry: MemoryRegistry, clock: FakeClock, client: MemoryClient, other: MemoryClient
) -> None:
    drive(client.write([Create("/e", b"", ephemeral=True)]))
    assert client.deadline == clock.boottime() + registry.session_seconds / 2
    clock.advance(registry.session_seconds / 2)
    assert client.deadline <= clock.boottime()
    assert drive(other.read("/e")) is not None


def test_a_cut_client_learns_of_it_by_a_write_without_an_answer(client: MemoryClient, other: MemoryClient) -> None:
    watch = client.watch("/")
    assert watch.take() == ((), True)
    client.cut()
    check_failure(WriteUnknown, client.write([Create("/a", b"")]))
    check_failure(RegistryDown, client.write([Create("/a", b"")]))
    check_failure(RegistryDown, client.read("/a"))
    check_failure(RegistryDown, client.children("/"))
    drive(other.write([Create("/b", b"")]))
    assert watch.take() is None
    client.mend()
    assert watch.take() == ((), True)
    assert [entry.name for entry in drive(client.children("/"))] == ["b"]


def test_faults_by_chance_are_the_same_with_the_same_seed() -> None:
    def run(seed: int) -> list[str]:
        chances = {Fate.LOST: 0.2, Fate.UNANSWERED: 0.2, Fate.LATE: 0.2}
        registry = MemoryRegistry(FakeClock(), seed=seed, chances=chances)
        client = registry.connect(beats=False)
        told = []
        for n in range(50):
            try:
                client.write([Create(f"/{n}", b"")]).send(None)
            except StopIteration:
                told.append("answered")
            except WriteUnknown:
                told.append("unknown")
        return told + [entry.name for entry in drive(client.children("/"))]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert {"answered", "unknown"} <= set(run(3))


def test_a_closed_client_is_closed_for_good(client: MemoryClient, other: MemoryClient) -> None:
    drive(client.write([Create("/e", b"", ephemeral=True)]))
    drive(client.close())
    drive(client.close())
    assert drive(other.read("/e")) is None
    check_failure(RegistryDown, client.write([Delete("/e", None)]))
    client.beat()
    assert client.session == 0


def test_beats_keep_a_session_alive() -> None:
    async def main() -> None:
        registry = MemoryRegistry(session_seconds=0.2)
        client = registry.connect()
        session = client.session
        await client.write([Create("/e", b"", ephemeral=True)])
        await asyncio.sleep(0.5)
        registry.tick()
        # The machine may be so busy that the beats came too late: then there is another session.
        assert (await client.read("/e") is not None) == (client.session == session)
        await client.close()

    asyncio.run(main())
