"""Stores that share a database, as several name servers do: whatever they do at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import text

from dmq.errors import RegistryConflict
from dmq.registry.name_server.sql_store import SqlStore
from dmq.registry.registry import Create, Delete, Operation, Put
from tests.databases import DatabaseServers

pytestmark = [pytest.mark.soak, pytest.mark.parametrize("kind", ["postgresql", "mariadb"])]

STORES = 4


def at_once(work: Callable[[int], object]) -> list[BaseException]:
    """Do something in threads that begin together; what they raised."""
    failed: list[BaseException] = []
    start = threading.Barrier(STORES)

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(STORES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def draft(number: int, turn: int) -> list[Operation]:
    """Creates of one path; puts of two in either order; a parent that goes while children come."""
    if turn % 3 == 0:
        return [Create(f"/new-{turn}", b"")]
    if turn % 3 == 1:
        paths = ("/a", "/b") if number % 2 else ("/b", "/a")
        return [Put(path, b"%d" % turn, None) for path in paths]
    if number % 2:
        return [Create(f"/parent/{number}-{turn}", b"")]
    return [Delete("/parent", None), Create("/parent", b"")]


def test_stores_that_meet_lose_and_break_nothing(kind: str, database_servers: DatabaseServers) -> None:
    server = database_servers.get(kind)
    server.add_database("meeting")
    stores = [SqlStore(server.url.rpartition("/")[0] + "/meeting") for _ in range(STORES)]
    try:
        assert at_once(lambda number: stores[number].open()) == []
        sessions = [store.open_session(0, "test") for store in stores]
        stores[0].write(sessions[0], 1, [Create("/a", b""), Create("/b", b""), Create("/parent", b"")])
        won: list[int] = []

        def write(number: int) -> None:
            for turn in range(60):
                try:
                    stores[number].write(sessions[number], turn + 2, draft(number, turn))
                except RegistryConflict:
                    continue
                if turn % 3 == 0:
                    won.append(turn)

        assert at_once(write) == []
        assert sorted(won) == list(range(0, 60, 3)), "each was created once"
        for path in ("/a", "/b"):
            found = stores[1].read(path)
            assert found is not None
            assert found.version == STORES * 20
        with stores[0]._engine.begin() as connection:
            orphans = connection.execute(
                text(
                    "SELECT path FROM dmq_registry_entry WHERE parent <> '' AND parent NOT IN "
                    "(SELECT path FROM (SELECT path FROM dmq_registry_entry) AS all_paths)"
                )
            )
            assert list(orphans) == []
            count, last = connection.execute(text("SELECT count(*), max(seq) FROM dmq_registry_change")).one()
            assert count == last == stores[0].news(0).seq
    finally:
        for store in stores:
            store.close()
        server.drop_database("meeting")
