"""The mirror of a registry in SQL: what is written, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, text

from dmq.errors import DatabaseDown, WrongFormat
from dmq.registry.name_server.mirror_store import MirrorSource, MirrorStore
from dmq.registry.registry import Entry
from dmq.testing.clock import FakeClock

URL, CLUSTER = "zk://h/dmq", "00000000000000aa"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pair(clock: FakeClock) -> Iterator[tuple[MirrorStore, MirrorStore]]:
    """The stores of two name servers that mirror into one database."""
    one, other = MirrorStore("sqlite://", "one"), MirrorStore("sqlite://", "other")

    @event.listens_for(one._engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        # What `NOW_MS` calls for SQLite.
        connection.create_function("julianday", 1, lambda _: clock.now_ms() / 86_400_000 + 2440587.5)

    other._engine = one._engine
    for store in (one, other):
        assert store.open(URL, CLUSTER) == MirrorSource(URL, CLUSTER)
    yield one, other
    one.close()


def test_what_differs_is_written_and_what_is_gone_goes(pair: tuple[MirrorStore, MirrorStore]) -> None:
    one, _ = pair
    entries = [Entry(f"/dmq/topic/{n}", b"{}", 0) for n in range(1200)]
    assert one.put(entries, ()) == 1200
    assert one.put(entries, ()) == 0
    assert one.put([Entry("/dmq/topic/7", b"{}", 0), Entry("/dmq/topic/8", b"[]", 1)], ["/dmq/topic/9"]) == 2
    assert one.count() == 1199
    assert one.paths()["/dmq/topic/8"] == 1
    # Deleted and created again, its version begins anew.
    assert one.put([Entry("/dmq/topic/8", b"new", 0)], ()) == 1
    one.mark(42, URL)
    assert one.source().change == 42


def test_one_of_several_name_servers_writes_and_another_takes_over(
    pair: tuple[MirrorStore, MirrorStore], clock: FakeClock
) -> None:
    one, other = pair
    entry = Entry("/dmq/topic/a", b"{}", 0)
    assert one.is_ours()
    assert not other.is_ours()
    assert other.put([entry], ()) == 0
    other.mark(7, URL)
    assert other.source().change == -1
    assert one.put([entry], ()) == 1
    clock.advance(16)
    assert other.is_ours(), "the first has not written for long"
    assert not one.is_ours()
    assert one.put([], ["/dmq/topic/a"]) == 0
    clock.set_wall_ms(clock.now_ms() - 3_600_000)
    assert one.is_ours(), "a clock that was set back keeps nobody out for an hour"


def test_a_mirror_of_another_cluster_is_refused(pair: tuple[MirrorStore, MirrorStore]) -> None:
    one, _ = pair
    with pytest.raises(WrongFormat, match="mirrors the cluster 00000000000000aa"):
        one.open(URL, "00000000000000bb")
    assert one.open("zk://elsewhere/dmq", CLUSTER).cluster == CLUSTER, "an ensemble may move"


def test_a_database_that_fails_is_named(pair: tuple[MirrorStore, MirrorStore]) -> None:
    one, _ = pair
    with one._engine.begin() as connection:
        connection.execute(text("DROP TABLE dmq_mirror_source"))
    with pytest.raises(DatabaseDown, match="dmq_mirror_source"):
        one.is_ours()
