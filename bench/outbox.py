"""What outbox and inbox cost: `python -m bench.outbox [ROW …] [--database postgresql] [--scale 1.0] [--json FILE]`.

A broker in a process of its own, and a database server of its own, on a directory that is gone afterwards. What has a
bar in relation to something else has that measured beside it, in turns.

Rows:
    send      `send` in the user's transaction, beside a bare insert of the same row into a table of the same shape
    relay     rows that lie in the table: how many a second a relay sends and marks, in order and without
    consumer  a handler with its inbox and its results, beside the same statement in a transaction of its own
    batches   the same by hundreds: `run_batches` beside a hundred statements in a transaction
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, delete, func, insert, select
from sqlalchemy.orm import Session

import dmq
from bench.rows import verdict
from dmq.outbox import BusinessState, Inbox, MessageService, Relay, create_tables, tables
from dmq.outbox.sender.envelope import RESULT_TO, SEND_ID, make_send_id
from dmq.outbox.sender.message_row import MessageDraft, make_row
from dmq.testing.benchmark.benchmark import machine
from dmq.testing.processes import BrokerProcess
from tests.databases import KINDS

TOPIC = "orders"
BODY = b"x" * 200
DRIVERS = {"mariadb": "mariadb+pymysql", "postgresql": "postgresql+psycopg"}
metadata = MetaData()
BUSINESS = Table("business", metadata, Column("id", Integer, primary_key=True), Column("what", String(50)))
OUTBOX = tables()
TWIN = tables("twin_").send
Row = dict[str, Any]


class Place(NamedTuple):
    """Where a row is measured."""

    engine: Engine
    broker: BrokerProcess
    client: dmq.Client
    scale: float

    def count(self, messages: int) -> int:
        return max(200, int(messages * self.scale))


@contextlib.contextmanager
def database(kind: str) -> Iterator[Engine]:
    """An empty database with all tables."""
    with contextlib.ExitStack() as stack:
        if kind == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dmq-"))
            url = f"sqlite:///{Path(folder) / 'bench.db'}"
        else:
            server = stack.enter_context(KINDS[kind]())
            url = server.url.replace(f"{kind}://", f"{DRIVERS[kind]}://")
        engine = create_engine(url, pool_size=12)
        stack.callback(engine.dispose)
        if kind == "sqlite":
            with engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        create_tables(engine, OUTBOX)
        create_tables(engine, tables("twin_"))
        metadata.create_all(engine)
        yield engine


def spread(values: list[float]) -> Row:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def business(number: int) -> Any:
    return insert(BUSINESS).values(what=f"order {number}")


# --- send -----------------------------------------------------------------------------------------------------------


def send(place: Place) -> Row:
    """`send` beside a bare insert of the same row, by turns in every transaction; wall and CPU of the statement."""
    transactions = place.count(3000)
    figures: Row = {"transactions": transactions}
    for name, client in (("inserting_only", None), ("with_direct_sends", place.client)):
        service = MessageService(place.engine, client, app="bench", relay=False, results=False)
        figures[name] = send_beside_bare(place.engine, service, transactions)
        service.close()
    reached = figures["inserting_only"]["of_bare"]
    return figures | {"bar": "<= 1.5 of a bare insert", "reached": reached, "verdict": verdict(reached <= 1.5)}


def send_beside_bare(engine: Engine, service: MessageService, transactions: int) -> Row:
    """Both in each transaction; who comes first takes turns."""
    bare_insert, values = insert(TWIN).inline(), row_of("b")
    taken: dict[str, list[tuple[float, float]]] = {"send": [], "bare": []}
    for number in range(transactions + 100):
        with Session(engine) as session, session.begin():
            session.execute(business(number))
            for what in ("send", "bare") if number % 2 else ("bare", "send"):
                wall, cpu = time.perf_counter(), time.thread_time()
                if what == "send":
                    service.send(session, TOPIC, BODY, business_id="b")
                else:
                    session.execute(bare_insert, values | {"send_id": make_send_id()})
                taken[what].append((time.perf_counter() - wall, time.thread_time() - cpu))
    send_us, bare_us = (statistics.median(one[0] for one in taken[what][100:]) * 1e6 for what in taken)
    send_cpu, bare_cpu = (statistics.median(one[1] for one in taken[what][100:]) * 1e6 for what in taken)
    return {
        "send_us": send_us, "bare_us": bare_us, "of_bare": send_us / bare_us,
        "send_cpu_us": send_cpu, "bare_cpu_us": bare_cpu, "of_bare_by_cpu": send_cpu / bare_cpu,
    }  # fmt: skip


def row_of(business_id: str | None) -> Row:
    """The values of a row as `send` makes them."""
    now_ms = time.time_ns() // 1_000_000
    return make_row("bench", MessageDraft(TOPIC, BODY, business_id), None, now_ms, now_ms)


# --- relay ----------------------------------------------------------------------------------------------------------


def relay(place: Place) -> Row:
    """A backlog, sent and marked by one relay in this process."""
    count = place.count(50_000)
    figures: Row = {"messages": count}
    for name, ids, is_clean in (("unordered", 0, True), ("ordered", 1000, True), ("ordered_not_vacuumed", 1000, False)):
        rounds = []
        for _ in range(4):
            fill(place.engine, count, ids, is_clean)
            rounds.append(drain(place, count))
        figures[name] = {what: statistics.median(one[what] for one in rounds[1:]) for what in rounds[0]}
        figures[name]["spread"] = spread([one["per_second"] for one in rounds[1:]])
    reached = figures["ordered"]["per_second"]
    best = max(figures["ordered"]["spread"]["highest"], reached)
    return figures | {"bar": ">= 10,000/s", "reached": reached, "verdict": verdict(reached >= 1e4, best >= 1e4)}


def fill(engine: Engine, count: int, ids: int, is_clean: bool) -> None:
    """Rows as a service without a client inserts them.

    Parameters:
        is_clean: rows that were deleted are out of the way, and PostgreSQL knows how many there are, as its own vacuum
            has it in time; else as it is right after a backlog came.
    """
    with engine.begin() as connection:
        connection.execute(delete(OUTBOX.send))
        for start in range(0, count, 1000):
            connection.execute(
                insert(OUTBOX.send),
                [row_of(f"b-{number % ids}" if ids else None) for number in range(start, min(start + 1000, count))],
            )
    if is_clean and engine.dialect.name == "postgresql":
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql(f"VACUUM ANALYZE {OUTBOX.send.name}")


def drain(place: Place, count: int) -> dict[str, float]:
    running = Relay(place.engine, place.client)
    theirs, cpu, wall = place.broker.cpu_seconds(), time.thread_time(), time.perf_counter()
    while running.counts.get("sent") < count:
        running.step()
    taken = time.perf_counter() - wall
    figures = {
        "per_second": count / taken,
        "relay_us": (time.thread_time() - cpu) / count * 1e6,
        "broker_us": (place.broker.cpu_seconds() - theirs) / count * 1e6,
    }
    running.close()
    with place.engine.connect() as connection:
        left = connection.scalar(select(func.count()).where(OUTBOX.send.c.state == "NEW"))
    assert left == 0, "the relay left something behind"
    return figures


# --- consumer -------------------------------------------------------------------------------------------------------


def consumer(place: Place) -> Row:
    """A handler for each message, in a pool of workers."""
    figures: Row = {"messages": (count := place.count(4000))}
    inbox = Inbox(place.engine, place.client)

    def plain(message: dmq.ReceivedMessage) -> None:
        with Session(place.engine) as session, session.begin():
            session.execute(business(1))

    def handle(session: Session, message: dmq.ReceivedMessage) -> BusinessState:
        session.execute(business(1))
        return BusinessState.SUCCESS

    handler = inbox.consumes_messages(handle)

    def run_with(handler: Callable[[dmq.ReceivedMessage], None], workers: int) -> Callable[[dmq.Consumer], None]:
        return lambda one: one.run(handler, workers=workers)

    for workers in (1, 8):
        figures[f"workers_{workers}"] = compared(place, count, [run_with(plain, workers), run_with(handler, workers)])
    inbox.close()
    return judged(figures, "workers_8")


def batches(place: Place) -> Row:
    """A hundred messages in a transaction."""
    figures: Row = {"messages": (count := place.count(10_000))}
    inbox = Inbox(place.engine, place.client)

    def plain(one: dmq.Consumer) -> None:
        with contextlib.suppress(dmq.NotConnected):  # it is closed
            while not one.is_closing:
                batch = one.pull(100, 1.0)
                with Session(place.engine) as session, session.begin():
                    for _ in batch:
                        session.execute(business(1))
                batch.ack()

    def handle(session: Session, message: dmq.ReceivedMessage) -> BusinessState:
        session.execute(business(1))
        return BusinessState.SUCCESS

    figures["by_100"] = compared(place, count, [plain, lambda one: inbox.run_batches(one, handle, 100)])
    inbox.close()
    return judged(figures, "by_100")


def compared(place: Place, count: int, runs: list[Callable[[dmq.Consumer], None]], rounds: int = 5) -> Row:
    """Plain and with the inbox by turns, the first pair to warm up."""
    pairs = [[consumed(place, count, run) for run in runs] for _ in range(rounds + 1)][1:]
    return {
        "plain_per_second": statistics.median(plain[0] for plain, _ in pairs),
        "inbox_per_second": statistics.median(inbox[0] for _, inbox in pairs),
        "of_plain": spread([inbox[0] / plain[0] for plain, inbox in pairs]),
        "plain_cpu_us": statistics.median(plain[1] for plain, _ in pairs),
        "inbox_cpu_us": statistics.median(inbox[1] for _, inbox in pairs),
        "of_plain_by_cpu": spread([plain[1] / inbox[1] for plain, inbox in pairs]),
    }


def consumed(place: Place, count: int, run: Callable[[dmq.Consumer], None]) -> tuple[float, float]:
    """Messages a second, from the first to be taken to the last to be acked, and this process's CPU for one, in us."""
    with place.engine.begin() as connection:
        connection.execute(delete(BUSINESS))
    messages = [
        dmq.Message(BODY, properties={SEND_ID: make_send_id(), RESULT_TO: "bench"}, key=str(number))
        for number in range(count)
    ]
    place.client.producer().send_many(TOPIC, messages)
    one = place.client.consumer(TOPIC, "bench", prefetch=500)
    thread = threading.Thread(target=run, args=(one,))
    began, cpu = time.perf_counter(), time.process_time()
    thread.start()
    while place.client.admin.lag(TOPIC, "bench").total:
        time.sleep(0.05)
    taken, cpu = time.perf_counter() - began, time.process_time() - cpu
    one.close()
    thread.join()
    assert done(place.engine) == count, "a message had two effects"
    return count / taken, cpu / count * 1e6


def done(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(BUSINESS)) or 0


def judged(figures: Row, name: str) -> Row:
    found = figures[name]["of_plain"]
    is_good = verdict(found["median"] >= 0.5, found["highest"] >= 0.5)
    return figures | {"bar": ">= 0.5 of plain", "reached": found["median"], "verdict": is_good}


ROWS: dict[str, Callable[[Place], Row]] = {"send": send, "relay": relay, "consumer": consumer, "batches": batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="which; all if left out")
    parser.add_argument("--database", choices=["sqlite", *KINDS], default="postgresql")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    results: dict[str, Row] = {}
    for name in arguments.rows or ROWS:
        with (
            database(arguments.database) as engine,
            BrokerProcess() as broker,
            dmq.connect(broker.url, app="bench") as client,
        ):
            client.admin.create_topic(TOPIC, queues=4)
            results[name] = ROWS[name](Place(engine, broker, client, arguments.scale))
        print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    print(f"\n{'row':<10} {'bar':<26} {'reached':>12}")
    for name, row in results.items():
        print(f"{name:<10} {row['bar']:<26} {row['reached']:>12,.2f} {row['verdict']}")
    if arguments.json:
        about = {"machine": machine(), "database": arguments.database, "scale": arguments.scale, "rows": results}
        Path(arguments.json).write_text(json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
