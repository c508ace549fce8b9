"""Settings of an outbox that cannot work: one sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateIndex, CreateTable

from dmq.errors import DatabaseDown, InvalidSettings
from dmq.outbox import MessageService, create_tables, tables
from dmq.outbox.engines import open_engine, sync_engine, usable
from dmq.outbox.schema import check_tables


@pytest.mark.parametrize("options", [{}, {"poolclass": StaticPool}])
def test_sqlite_in_memory_is_refused_since_two_connections_cannot_share_it(options: dict[str, Any]) -> None:
    engine = create_engine("sqlite://", **options)
    with pytest.raises(InvalidSettings, match="use a file instead of SQLite in memory"):
        MessageService(engine, None, app="shop")
    engine.dispose()


def test_without_a_client_the_app_must_be_named(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with pytest.raises(InvalidSettings, match="app= is needed"):
        MessageService(engine, None)
    with pytest.raises(InvalidSettings, match="grace="):
        MessageService(engine, None, app="shop", grace=0.0)


def test_missing_tables_and_columns_are_named(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    service = MessageService(engine, None, app="shop")
    with pytest.raises(InvalidSettings, match=r"the table m_msgsend is missing: make it with dmq\.outbox\.create"):
        service.start()
    create_tables(engine, tables())
    create_tables(engine, tables())  # twice does no harm
    service.start()
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE m_msgsend DROP COLUMN last_error")
    with pytest.raises(InvalidSettings, match="the table m_msgsend lacks the column last_error"):
        check_tables(engine, (tables().send,))
    engine.dispose()


def test_a_table_that_is_none_of_ours_cannot_be_named() -> None:
    with pytest.raises(InvalidSettings, match="not 'sender'"):
        tables(names={"sender": "x"})


def test_an_engine_of_asyncio_gets_one_that_blocks_beside_it(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    behind = sync_engine(create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}"))
    assert behind.url.drivername == "sqlite+pysqlite"
    found = sync_engine(create_async_engine("postgresql+psycopg://u:a%20b@h/d"))
    assert (found.url.drivername, found.url.password) == ("postgresql+psycopg", "a b")
    found = sync_engine(create_async_engine("mysql+aiomysql://u@h/d"))
    assert found.url.drivername == "mysql+pymysql"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "--database is not a database URL"),
        ("oracle://u@h/x", "--database names 'oracle', which our tables cannot be kept in"),
        ("postgresql://u@h", "--database names no database"),
    ],
)
def test_a_url_that_can_never_work_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as raised:
        open_engine(url, "--database")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:////no/such/file.db", "there is no file /no/such/file.db"),
        ("sqlite://", "there is no file :memory:"),
    ],
)
def test_a_file_that_is_not_there_is_told(url: str, said: str) -> None:
    with pytest.raises(DatabaseDown, match=said):
        open_engine(url, "--database")


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidSettings, match=r"needs the driver psycopg.*pip install 'dmq\[postgresql\]'"):
        open_engine("postgresql://u@h/d", "--database")


def test_a_database_that_is_away_is_one_sentence_without_its_password() -> None:
    engine = open_engine("postgresql://u:hidden@127.0.0.1:1/d", "--database")
    with pytest.raises(DatabaseDown) as raised, usable(engine), engine.connect():
        pass
    said = str(raised.value)
    assert said.startswith("the database postgresql+psycopg://u@127.0.0.1:1/d cannot be used: ")
    assert "hidden" not in said
    assert "\n" not in said


@pytest.mark.parametrize("kind", [mysql, postgresql, sqlite])
def test_every_database_is_told_to_compare_ids_byte_by_byte(kind: Any) -> None:
    dialect = kind.dialect()
    made = tables("x_", schema="apart")
    for table in made.all():
        ddl = str(CreateTable(table).compile(dialect=dialect))
        assert ("utf8mb4_bin" in ddl) == (dialect.name == "mysql")
        for index in table.indexes:
            CreateIndex(index).compile(dialect=dialect)
