"""The tables of both services, and how their databases are opened. No service reads the other's."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Column, Engine, Integer, MetaData, String, Table, create_engine, event

from dmq.outbox import create_tables, tables

TOPIC = "orders"
GROUP = "stock"

order_data = MetaData()

# What customers want. The order service works through it, so it knows where it was when it is started again.
baskets = Table(
    "baskets", order_data,
    Column("number", Integer, primary_key=True),
    Column("book", String(40), nullable=False),
    Column("copies", Integer, nullable=False),
    Column("changes_mind", Boolean, nullable=False),
    Column("state", String(10), nullable=False),  # WAITING, ORDERED, WITHDRAWN
)  # fmt: skip

orders = Table(
    "orders", order_data,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("book", String(40), nullable=False),
    Column("copies", Integer, nullable=False),
    Column("send_id", String(40), nullable=False),  # the message that went with it
    Column("state", String(10), nullable=False),  # PLACED, CANCELLED
)  # fmt: skip

# One row for each time an order was cancelled. Nothing here forbids a second one: it would show.
cancellations = Table(
    "cancellations", order_data,
    Column("id", Integer, primary_key=True),
    Column("order_number", Integer, nullable=False),
    Column("reason", String(200), nullable=False),
)  # fmt: skip

stock_data = MetaData()

shelves = Table(
    "shelves", stock_data,
    Column("book", String(40), primary_key=True),
    Column("bought", Integer, nullable=False),
    Column("copies", Integer, nullable=False),  # what is left
)  # fmt: skip

# One row for each time books were taken for an order. Nothing forbids a second one here, either.
movements = Table(
    "movements", stock_data,
    Column("id", Integer, primary_key=True),
    Column("order_number", Integer, nullable=False),
    Column("book", String(40), nullable=False),
    Column("copies", Integer, nullable=False),
)  # fmt: skip


def open_database(url: str) -> Engine:
    """An engine. Checks its connections: a database server may have been away."""
    engine = create_engine(url, pool_size=10, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, _: Any) -> None:
            connection.execute("PRAGMA journal_mode = WAL")  # readers and one writer at the same time
            connection.execute("PRAGMA busy_timeout = 30000")

    return engine


def create(engine: Engine, data: MetaData) -> None:
    """The business's tables and DMQ's. In earnest your migration tool does this."""
    data.create_all(engine)
    create_tables(engine, tables())
