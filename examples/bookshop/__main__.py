"""`python examples/bookshop`: runs the whole bookshop, every service in a process of its own, and checks its books.

A process that ends, because you killed it or because of `--torment`, is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from balance import balance, fill, is_over
from startup import connect
from tables import TOPIC, open_database

import dmq
from dmq.testing.processes import free_port

HERE = Path(__file__).resolve().parent


class Service:
    """A process that is started again whenever it has ended."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._command = [sys.executable, *command]
        self._process: subprocess.Popen[bytes] | None = None

    def keep_up(self) -> None:
        """Start it, if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            print(f"    {self.name} is started again", flush=True)
        self._process = subprocess.Popen(self._command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        print(f"    {self.name} is process {self._process.pid}", flush=True)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            print(f"    {self.name} is killed", flush=True)
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(15.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def services(data: Path, port: int, order_db: str, stock_db: str, pause: float) -> list[Service]:
    broker = f"dmq://127.0.0.1:{port}"
    where = ["--broker", broker, "--database"]
    orders, stock = str(HERE / "orders.py"), str(HERE / "stock.py")
    ports = ["--port", str(port), "--metrics-port", "0", "--telnet-port", "none"]
    return [
        Service("broker", ["-m", "dmq.cli", "broker", "--data", str(data / "broker"), *ports]),
        Service("order service", [orders, "serve", *where, order_db, "--pause", str(pause)]),
        Service("relay", [orders, "relay", *where, order_db]),
        Service("compensator", [orders, "compensate", *where, order_db]),
        Service("stock service", [stock, *where, stock_db]),
    ]


def make_topic(port: int) -> None:
    url = f"dmq://127.0.0.1:{port}"
    with connect(url, "bookshop-setup") as client, contextlib.suppress(dmq.TopicExists):
        client.admin.create_topic(TOPIC, queues=4)  # with --data it may be there from the last time


@contextlib.contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """Where everything lies: a folder that is kept, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="bookshop-") as made:
            yield Path(made)


def run(arguments: argparse.Namespace, data: Path) -> int:
    order_db = arguments.order_db or f"sqlite:///{data / 'orders.db'}"
    stock_db = arguments.stock_db or f"sqlite:///{data / 'stock.db'}"
    order_engine, stock_engine = open_database(order_db), open_database(stock_db)
    fill(order_engine, stock_engine, arguments.orders)
    port = free_port()
    running = services(data, port, order_db, stock_db, arguments.pause)
    chance = random.Random(arguments.seed)
    kills = arguments.torment
    next_kill = time.monotonic() + 3.0
    deadline = time.monotonic() + arguments.timeout
    try:
        running[0].keep_up()
        make_topic(port)
        while kills or not is_over(order_engine):
            for service in running:
                service.keep_up()
            if kills and time.monotonic() > next_kill:
                chance.choice(running).kill()
                kills -= 1
                next_kill = time.monotonic() + chance.uniform(0.2, 2.0)
            if time.monotonic() > deadline:
                print(f"it did not come to its end within {arguments.timeout:g} s", flush=True)
                break
            time.sleep(0.1)
    finally:
        for service in reversed(running):
            service.stop()
    found = balance(order_engine, stock_engine)
    order_engine.dispose()
    stock_engine.dispose()
    print(f"\n{found.placed} orders placed, {found.withdrawn} withdrawn by the customer")
    print(f"{found.delivered} delivered, {found.cancelled} refused and cancelled")
    for problem in found.problems:
        print(f"WRONG: {problem}")
    print("the balance does not agree" if found.problems else "the balance agrees")
    return 1 if found.problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bookshop", description=__doc__)
    parser.add_argument("--orders", type=int, default=60, help="how many customers come")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two orders")
    parser.add_argument("--order-db", metavar="URL", help="database of the order service; a SQLite file if left out")
    parser.add_argument("--stock-db", metavar="URL", help="database of the stock service; a SQLite file if left out")
    parser.add_argument("--data", type=Path, help="keep files in this folder; a temporary one if left out")
    parser.add_argument("--torment", type=int, default=0, metavar="KILLS", help="kill processes at random, so often")
    parser.add_argument("--seed", type=int, help="of --torment")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until it gives up")
    arguments = parser.parse_args()
    try:
        with folder(arguments.data) as data:
            return run(arguments, data)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
