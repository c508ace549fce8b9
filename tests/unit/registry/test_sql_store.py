"""A registry in SQL: what the contract's suite cannot see from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from dmq.errors import (
    DatabaseDown,
    DirectoryInUse,
    InvalidRequest,
    InvalidSettings,
    RegistryConflict,
    SessionExpired,
    StorageError,
    WriteUnknown,
    WrongFormat,
)
from dmq.registry.name_server.backend import News
from dmq.registry.name_server.sql_store import CHANGES_KEPT, SqlStore
from dmq.registry.registry import Create, Delete, Entry, Put
from dmq.testing.clock import FakeClock

TERM = 6.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["server's clock", "database's clock"])
def store(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[SqlStore]:
    """With sessions by the server's clock, or by that of the database, which is then moved along."""
    made = SqlStore("sqlite://", clock=clock, session_seconds=TERM, shared=request.param == "database's clock")
    if request.param == "database's clock":

        @event.listens_for(made._engine, "connect")
        def prepare(connection: Any, _: Any) -> None:
            # What `NOW_MS` calls for SQLite.
            connection.create_function("julianday", 1, lambda _: clock.now_ms() / 86_400_000 + 2440587.5)

    made.open()
    made.expire()
    yield made
    made.close()


def pass_time(store: SqlStore, clock: FakeClock, seconds: float, *alive: int) -> None:
    """Let time pass while the store is looked at, and these sessions are heard."""
    for _ in range(round(seconds * 2)):
        clock.advance(0.5)
        assert not store.renew(alive)
        store.expire()


def test_a_session_that_is_not_heard_for_a_term_is_over(store: SqlStore, clock: FakeClock) -> None:
    heard, silent = store.open_session(0, "a"), store.open_session(0, "b")
    store.write(heard, 1, [Create("/h", b"", ephemeral=True)])
    store.write(silent, 1, [Create("/s", b"", ephemeral=True)])
    pass_time(store, clock, TERM - 1, heard)
    assert store.read("/s") is not None
    pass_time(store, clock, 2, heard)
    assert store.read("/s") is None
    assert store.read("/h") is not None
    assert store.renew([silent]) == {silent}
    with pytest.raises(SessionExpired):
        store.write(silent, 2, [Create("/late", b"")])
    assert store.open_session(heard, "a") == heard
    assert store.open_session(silent, "b") not in (0, heard, silent)


def test_who_was_not_heard_is_told(store: SqlStore, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    session = store.open_session(0, "broker-7")
    with caplog.at_level("INFO"):
        pass_time(store, clock, TERM + 1)
    told = f"session expired owner=broker-7 session={session:x} silent_seconds={TERM:g}"
    assert [line for line in caplog.messages if line.startswith("session expired")] == [told]


def test_a_write_renews_its_session(store: SqlStore, clock: FakeClock) -> None:
    session = store.open_session(0, "a")
    for number in range(1, 20):
        pass_time(store, clock, 2)
        store.write(session, number, [Create(f"/{number}", b"", ephemeral=True)])
    assert len(store.children("/", "", 100).entries) == 19
    assert store.open_session(session, "a") == session


def test_after_an_outage_every_session_has_a_full_term(store: SqlStore, clock: FakeClock) -> None:
    session = store.open_session(0, "a")
    clock.advance(10 * TERM)  # nobody looked, so nobody was heard
    assert not store.renew([session])
    clock.advance(10 * TERM)
    store.expire()
    pass_time(store, clock, TERM - 1)
    assert not store.renew([session])
    clock.suspend(10 * TERM)
    assert store.open_session(session, "a") == session
    pass_time(store, clock, TERM + 1)
    assert store.open_session(session, "a") != session


def test_a_step_of_the_wall_clock_ends_no_session(store: SqlStore, clock: FakeClock) -> None:
    session = store.open_session(0, "a")
    for step in (3_600_000, -7_200_000, 3_600_000):
        clock.set_wall_ms(clock.now_ms() + step)
        store.expire()
        assert not store.renew([session])
        pass_time(store, clock, TERM - 1)
        assert not store.renew([session])
    pass_time(store, clock, TERM + 1)
    assert store.renew([session]) == {session}


def test_a_write_behind_a_later_one_is_never_carried_out(store: SqlStore) -> None:
    session, other = store.open_session(0, "a"), store.open_session(0, "b")
    store.write(session, 5, [Create("/a", b"")])
    for number in (5, 4):
        with pytest.raises(InvalidRequest):
            store.write(session, number, [Create("/late", b"")])
    with pytest.raises(RegistryConflict):
        store.write(session, 7, [Create("/a", b"")])
    with pytest.raises(InvalidRequest):
        store.write(session, 6, [Create("/late", b"")])  # a conflict is an answer, too
    assert store.read("/late") is None
    store.write(other, 1, [Create("/b", b"")])


def test_news_name_what_changed_once_in_order(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    seq = store.news(0).seq
    store.write(session, 1, [Create("/b", b"", ephemeral=True), Create("/a", b"")])
    store.write(session, 2, [Put("/b", b"1", None), Put("/a", b"", None)])
    news = store.news(seq)
    assert news == News(seq + 3, ("/b", "/a"), False), "a put of the same value is no news"
    assert store.news(news.seq) == News(news.seq, (), False)
    store.close_session(session)
    assert store.news(news.seq) == News(news.seq + 1, ("/b",), False)


def test_news_that_were_dropped_are_everything(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    seq = store.news(0).seq
    store.write(session, 1, [Create("/a", b""), Create("/b", b"")])
    with store._engine.begin() as connection:
        connection.execute(text("DELETE FROM dmq_registry_change WHERE path = '/a'"))
    assert store.news(seq) == (seq + 2, (), True)
    with store._engine.begin() as connection:
        connection.execute(text("DELETE FROM dmq_registry_change"))
    assert store.news(seq) == (seq + 2, (), True)
    assert store.news(seq + 100).is_all, "the database was put back"


def test_old_changes_are_dropped(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.open_session(0, "a")
    for number in range(1, 41):
        store.write(session, number, [Create(f"/{number}-{n}", b"") for n in range(10)])
    monkeypatch.setattr("dmq.registry.name_server.sql_store.CHANGES_KEPT", 100)
    store.trim()
    with store._engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM dmq_registry_change")) == 100
    assert CHANGES_KEPT >= 1000


def test_children_come_in_pages_by_number_and_by_size(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    store.write(session, 1, [Create("/p", b""), *(Create(f"/p/{n}", b"x" * 1000) for n in range(10))])
    page = store.children("/p", "", 4, 1 << 20)
    assert ([entry.name for entry in page.entries], page.more) == (["0", "1", "2", "3"], True)
    page = store.children("/p", "/p/3", 100, 2500)
    assert ([entry.name for entry in page.entries], page.more) == (["4", "5"], True)
    page = store.children("/p", "/p/8", 100, 1)
    assert ([entry.name for entry in page.entries], page.more) == (["9"], False)


def test_a_folder_with_many_children_is_not_deleted_with_some_of_them(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    store.write(session, 1, [Create("/p", b"")])
    for part in range(2):
        store.write(session, 2 + part, [Create(f"/p/{part}-{n}", b"") for n in range(100)])
    with pytest.raises(RegistryConflict):
        store.write(session, 9, [*(Delete(f"/p/0-{n}", 0) for n in range(100)), Delete("/p", 0)])
    assert len(store.children("/p", "", 1000, 1 << 20).entries) == 200
    store.write(session, 10, [Delete(f"/p/0-{n}", 0) for n in range(100)])
    store.write(session, 11, [*(Delete(f"/p/1-{n}", 0) for n in range(100)), Delete("/p", 0)])
    assert store.read("/p") is None


def test_a_commit_that_fails_is_an_unknown_write(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    fails = True

    @event.listens_for(store._engine, "commit")
    def commit(connection: Any) -> None:
        if fails:
            raise OperationalError("COMMIT", {}, Exception("the server went away"))

    with pytest.raises(WriteUnknown, match="went away"):
        store.write(session, 1, [Create("/a", b"")])
    fails = False
    store.write(session, 2, [Create("/b", b"")])


def test_a_statement_that_fails_writes_nothing(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    fails = True

    @event.listens_for(store._engine, "before_cursor_execute")
    def execute(*arguments: Any) -> None:
        if fails and "INSERT INTO dmq_registry_change" in arguments[2]:
            raise OperationalError("INSERT", {}, Exception("no space"))

    with pytest.raises(DatabaseDown, match="no space"):
        store.write(session, 1, [Create("/a", b"")])
    fails = False
    assert store.read("/a") is None
    store.write(session, 1, [Create("/a", b"")])


def test_a_collision_is_tried_again(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    collisions = [1213, 1213]

    @event.listens_for(store._engine, "before_cursor_execute")
    def execute(*arguments: Any) -> None:
        if collisions and "INSERT INTO dmq_registry_change" in arguments[2]:
            raise OperationalError("INSERT", {}, Exception(collisions.pop(), "deadlock"))

    assert store.write(session, 1, [Create("/a", b"")]) == (0,)
    assert not collisions


def test_a_commit_that_the_database_rolled_back_is_tried_again(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    collisions = [1213]

    @event.listens_for(store._engine, "commit")
    def commit(connection: Any) -> None:
        if collisions:
            raise OperationalError("COMMIT", {}, Exception(collisions.pop(), "deadlock"))

    assert store.write(session, 1, [Create("/a", b"")]) == (0,)
    assert store.read("/a") == Entry("/a", b"", 0)
    assert not collisions


def test_what_is_nobodys_cannot_be_closed(store: SqlStore) -> None:
    session = store.open_session(0, "a")
    store.write(session, 1, [Create("/a", b"1"), Create("/e", b"2", ephemeral=True)])
    store.close_session(0)
    assert store.read("/a") == Entry("/a", b"1", 0)
    store.close_session(session)
    assert store.read("/e") is None
    assert store.read("/a") == Entry("/a", b"1", 0)


def test_beats_of_many_sessions_are_one_transaction(store: SqlStore, clock: FakeClock) -> None:
    sessions = [store.open_session(0, str(n)) for n in range(50)]
    pass_time(store, clock, TERM + 1, *sessions[1:])
    assert store.renew([*sessions, 77]) == {sessions[0], 77}
    assert store.count() == (49, 1)


# --- name servers that share a database -------------------------------------------------------------------------------


@pytest.fixture
def pair(clock: FakeClock) -> Iterator[tuple[SqlStore, SqlStore]]:
    """Two stores of one database, with sessions by its clock."""
    one, other = (SqlStore("sqlite://", clock=clock, session_seconds=TERM, shared=True) for _ in range(2))

    @event.listens_for(one._engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.create_function("julianday", 1, lambda _: clock.now_ms() / 86_400_000 + 2440587.5)

    other._engine = one._engine
    for store in (one, other):
        store.open()
        store.expire()
    yield one, other
    one.close()


def test_a_name_server_that_was_away_while_another_looked_gives_nobody_more_time(
    pair: tuple[SqlStore, SqlStore], clock: FakeClock
) -> None:
    one, other = pair
    dead, alive = one.open_session(0, "dead"), one.open_session(0, "alive")
    pass_time(one, clock, TERM - 1, alive)
    other.expire()  # it was away all the time
    assert one.count()[0] == 2
    pass_time(one, clock, 2, alive)
    assert other.renew([dead, alive]) == {dead}
    # Both are away: nobody could be heard.
    clock.advance(10 * TERM)
    other.expire()
    one.expire()
    assert not one.renew([alive])
    pass_time(one, clock, TERM + 1)
    assert other.renew([alive]) == {alive}


def test_a_clock_that_is_set_back_keeps_nobody_that_is_dead(pair: tuple[SqlStore, SqlStore], clock: FakeClock) -> None:
    one, other = pair
    dead = one.open_session(0, "dead")
    pass_time(one, clock, 1)
    clock.set_wall_ms(clock.now_ms() - 3_600_000)
    other.expire()
    pass_time(one, clock, TERM - 1)
    assert one.count()[0] == 1, "a full term"
    pass_time(one, clock, 2)
    assert one.renew([dead]) == {dead}, "and no more"


def test_a_look_that_was_not_committed_gives_no_less_time(pair: tuple[SqlStore, SqlStore], clock: FakeClock) -> None:
    one, _ = pair
    session = one.open_session(0, "a")
    clock.advance(10 * TERM)
    fails = [True]

    @event.listens_for(one._engine, "commit")
    def commit(connection: Any) -> None:
        if fails:
            fails.clear()
            raise OperationalError("COMMIT", {}, Exception("the server went away"))

    with pytest.raises(WriteUnknown):
        one.expire()
    assert one.expire() == 0
    assert not one.renew([session])


def test_name_servers_of_one_database_have_one_time_for_sessions(
    pair: tuple[SqlStore, SqlStore], clock: FakeClock
) -> None:
    one, _ = pair
    third = SqlStore("sqlite://", clock=clock, session_seconds=TERM / 2, shared=True)
    third._engine = one._engine
    with pytest.raises(InvalidSettings, match="the same --session"):
        third.open()
    clock.advance(60)  # the others were stopped
    third.open()
    assert third.expire() == 0
    with pytest.raises(InvalidSettings, match="the same --session"):
        one.expire()


def test_name_servers_of_one_database_say_the_same_id(pair: tuple[SqlStore, SqlStore], tmp_path: Path) -> None:
    one, other = pair
    assert one.registry_id == other.registry_id != ""
    store = SqlStore(url_of(tmp_path))
    store.open()
    assert store.registry_id != one.registry_id
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE dmq_registry_entry SET value = x'' WHERE path = '/'"))  # of an earlier version
    store.open()
    first = store.registry_id
    store.open()
    assert store.registry_id == first != ""
    store.close()


# --- a file -----------------------------------------------------------------------------------------------------------


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'deep' / 'registry.db'}"


def test_what_was_written_is_there_after_a_restart_and_sessions_go_on(tmp_path: Path, clock: FakeClock) -> None:
    store = SqlStore(url_of(tmp_path), clock=clock, session_seconds=TERM)
    store.open()
    session = store.open_session(0, "a")
    store.write(session, 3, [Create("/a", b"1"), Create("/e", b"2", ephemeral=True)])
    seq = store.news(0).seq
    store.close()
    clock.advance(100 * TERM)
    store = SqlStore(url_of(tmp_path), clock=clock, session_seconds=TERM)
    assert store.open() == seq
    assert store.read("/a") == Entry("/a", b"1", 0)
    pass_time(store, clock, TERM - 1)
    assert store.read("/e") == Entry("/e", b"2", 0, session)
    assert store.open_session(session, "a") == session
    with pytest.raises(InvalidRequest):
        store.write(session, 3, [Create("/late", b"")])
    pass_time(store, clock, TERM + 1)
    assert store.read("/e") is None
    store.close()


def test_a_file_takes_one_name_server(tmp_path: Path) -> None:
    first = SqlStore(url_of(tmp_path))
    with pytest.raises(DirectoryInUse):
        SqlStore(url_of(tmp_path))
    first.close()
    SqlStore(url_of(tmp_path)).close()


def test_tables_of_another_version_are_left_alone(tmp_path: Path) -> None:
    store = SqlStore(url_of(tmp_path))
    store.open()
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE dmq_schema SET version = 9"))
    with pytest.raises(WrongFormat, match="version 9"):
        store.open()
    store.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "registry.db").write_bytes(b"not a database, but long enough to be looked at " * 50)
    store = SqlStore(url_of(tmp_path))
    with pytest.raises(DatabaseDown, match="not a database"):
        store.open()
    store.close()


@pytest.mark.parametrize("url", ["nothing", "oracle://x/y", "sqlite:////proc/none/x.db"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises((InvalidSettings, StorageError)):
        SqlStore(url)
