"""What tests of the inbox share: a database of each kind, with a table that shows what had an effect, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, event, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from dmq.client.client import Client
from dmq.errors import UnknownTopic
from dmq.model import Message
from dmq.outbox.schema import create_tables, tables
from dmq.outbox.sender.envelope import RESULT_TO, SEND_ID, SEQUENCE, Result, make_send_id, result_topic, unpack_result
from tests.databases import DatabaseServers
from tests.patience import PATIENCE_S, eventually

KINDS = ("sqlite", "mariadb", "postgresql")
DRIVERS = {"sqlite": "sqlite", "mariadb": "mariadb+pymysql", "postgresql": "postgresql+psycopg"}
AIO_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb": "mariadb+aiomysql", "postgresql": "postgresql+psycopg"}
SECONDS = PATIENCE_S

metadata = MetaData()
EFFECTS = Table(
    "effects",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("what", String(100), nullable=False),
)


def url_of(kind: str, servers: DatabaseServers, folder: Path) -> str:
    """An empty database."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'stock.db'}"
    return servers.get(kind).url.replace(f"{kind}://", f"{DRIVERS[kind]}://")


def open_database(url: str, **options: Any) -> Engine:
    """An engine with our tables and the business's own."""
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        _patient(engine)
    create_tables(engine, tables())
    metadata.create_all(engine)
    return engine


def _patient(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = OFF")
        cursor.execute("PRAGMA busy_timeout = 10000")
        cursor.close()


def open_aio(url: str) -> AsyncEngine:
    """The same database for asyncio; without a pool, so that it may be used on several loops."""
    for kind, driver in DRIVERS.items():
        if url.startswith(f"{driver}://"):
            url = url.replace(f"{driver}://", f"{AIO_DRIVERS[kind]}://", 1)
            break
    engine = create_async_engine(url, poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        _patient(engine.sync_engine)
    return engine


def effects(engine: Engine) -> list[str]:
    """What had an effect, in order."""
    with engine.connect() as connection:
        return [*connection.scalars(select(EFFECTS.c.what).order_by(EFFECTS.c.number))]


def effect(what: str) -> Any:
    return insert(EFFECTS).values(what=what)


def consumed(engine: Engine) -> dict[str, str]:
    """The consumer table: send id -> business state."""
    consumer = tables().consumer
    with engine.connect() as connection:
        return {row[0]: row[1] for row in connection.execute(select(consumer.c.send_id, consumer.c.business_state))}


def outgoing(body: str, sequence: int | None = None, business_id: str | None = None, send_id: str = "") -> Message:
    """A message as an outbox sends it."""
    properties = {SEND_ID: send_id or make_send_id(), RESULT_TO: "shop"}
    if sequence is not None:
        properties[SEQUENCE] = str(sequence)
    return Message(body.encode(), business_id=business_id, ordered=business_id is not None, properties=properties)


def results(client: Client, topic: str = "orders") -> list[Result]:
    """All results that were sent."""
    try:
        found = client.admin.peek(result_topic(topic), limit=10_000)
    except UnknownTopic:
        return []  # it is made for the first one
    return [unpack_result(message.body) for message in found]


def until(is_done: Callable[[], object], what: str = "it does not happen") -> None:
    """Wait until something holds, looking less often than `eventually`: a look is a query."""
    eventually(is_done, what, look_seconds=0.02)


@contextmanager
def disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()
