"""The bookshop of examples/bookshop under a tormentor: its own services, in processes that die and are started again.

What always holds: only `trouble` and `kill` kill; no process is left after the `with` block; a kill is one
whether the rig sent it or the process died at its point.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import func, select

import dmq
from dmq.outbox import tables
from dmq.outbox.sender.envelope import result_topic
from tests.fault.bookshop.courier import CourierProxy, Repeater
from tests.fault.bookshop.service_process import EXAMPLE
from tests.fault.broker.nursery import ForkedBroker

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 300.0
CUSTOMERS = 20
TOPIC, GROUP = "orders", "stock"
OUTBOX = tables()
ROLES = ("serve", "relay", "compensate", "stock")
# Who dies, and where; "+" is two of whom the first makes the second come to its place. All of them in turn.
CYCLE = (
    "serve@commit+relay@mark", "stock@committed", "broker", "serve@result",
    "stock@answered", "serve@mark", "relay",
    "serve@written", "stock", "serve", "compensate",
)  # fmt: skip


def example(module: str) -> Any:
    """A module of the example, as the example's own files import it."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    return import_module(module)


class Bookshop:
    """Broker, order service, relay, compensator and stock service on two databases.

    Parameters:
        orders: how many customers come.
        pause: seconds between two of them.
    """

    def __init__(self, folder: Path, order_db: str, stock_db: str, seed: str, orders: int, pause: float = 0.05) -> None:
        self.chance = random.Random(seed)
        self.done: list[str] = []
        self.kills: Counter[str] = Counter()
        self._urls = {"orders": order_db, "stock": stock_db}
        self._pause = str(pause)
        open_database = example("tables").open_database
        self.order_engine, self.stock_engine = open_database(order_db), open_database(stock_db)
        example("balance").fill(self.order_engine, self.stock_engine, orders)
        self.broker = ForkedBroker(folder / "broker", ["broker.grace_seconds=0.5", "broker.retry_table=0.2,0.5,1"])
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._points: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(self.order_engine.dispose)
            self._stack.callback(self.stock_engine.dispose)
            self._stack.enter_context(self.broker)
            self.proxy = self._stack.enter_context(CourierProxy(("127.0.0.1", self.broker.port)))
            self.client = self._stack.enter_context(dmq.connect(self.broker.url, app="rig", timeout=SECONDS))
            self.client.admin.create_topic(TOPIC, queues=4)
            self.repeater = self._stack.enter_context(Repeater(self.broker.url, [TOPIC, result_topic(TOPIC)]))
            self._stack.callback(self._end_all)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"kills {dict(self.kills)}, last {self.done[-12:]}")
        self._stack.close()

    # --- processes --------------------------------------------------------------------------------------------------

    def start(self, role: str, point: str = "-", count: int = 1) -> None:
        """Start a service, which dies at a point, if it comes there."""
        service = "stock" if role == "stock" else "orders"
        command = [f"{service}.py", *([] if role == "stock" else [role])]
        # Only the consumer's deliveries are tampered with.
        where = ["--broker", self.proxy.url if role == "stock" else self.broker.url, "--database", self._urls[service]]
        more = ["--pause", self._pause] if role == "serve" else []
        self._processes[role] = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.bookshop.service_process", point, str(count), *command, *where, *more],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._points[role] = point

    def kill(self, role: str) -> None:
        """kill -9."""
        self.kills[role] += 1
        self.done.append(f"kill {role}")
        if role == "broker":
            self.broker.kill()
            self.broker.start()
            return
        process = self._processes.pop(role)
        process.kill()
        process.wait()

    def look(self, role: str) -> bool:
        """Whether a service runs. One that died at its point is counted; any other end is an error."""
        process = self._processes.get(role)
        if process is None:
            return False
        code = process.poll()
        if code is None:
            return True
        assert code == -9, f"{role} ended by itself, with {code}"
        del self._processes[role]
        self.kills[f"{role}@{self._points[role]}"] += 1
        self.done.append(f"{role} died at {self._points[role]}")
        return False

    def _end_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    # --- phases -----------------------------------------------------------------------------------------------------

    def trouble(self, plan: Iterable[str]) -> None:
        """Let every service run, and see whom the plan names die."""
        self.keep_up()
        self.until(lambda: self.states().total() > 3, "no orders are placed")
        for step in plan:
            self._more_customers()
            time.sleep(self.chance.uniform(0.0, 1.5))
            if "@" in step:
                self._die_at(step)
            else:
                self.kill(step)
            self.keep_up()

    def _die_at(self, step: str) -> None:
        """Start services anew so that they die at their points, and wait until they did."""
        doomed = [part.partition("@") for part in step.split("+")]
        for role, _, point in reversed(doomed):
            self._processes[role].terminate()
            self._processes.pop(role).wait(SECONDS)
            self.start(role, point, self.chance.randrange(1, 4) if len(doomed) == 1 else 1)

        def is_done() -> bool:
            self._more_customers()  # nobody comes anywhere without them
            return not any(self.look(role) for role, *_ in doomed)

        self.until(is_done, f"nobody comes to {step}")

    def keep_up(self) -> None:
        """Start the services that do not run."""
        for role in ROLES:
            if not self.look(role):
                self.start(role)

    def _more_customers(self) -> None:
        """See that there is something to do while somebody is to die."""
        baskets = example("tables").baskets
        with self.order_engine.connect() as connection:
            left = connection.scalar(select(func.count()).where(baskets.c.state == "WAITING")) or 0
        if left < CUSTOMERS:
            example("balance").fill(self.order_engine, self.stock_engine, CUSTOMERS)

    def calm(self) -> None:
        """Let everything come to its end without any more trouble."""
        self.keep_up()
        self.until(self.is_over, "orders do not come to their end")
        self.until(self.is_drained, "messages are left")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: {self.states()}"
            time.sleep(0.1)

    # --- looking ----------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        return bool(example("balance").is_over(self.order_engine))

    def is_drained(self) -> bool:
        """Whether consumer and sender have seen everything there is, repeated messages included."""
        lags = [self.client.admin.lag(TOPIC, GROUP), self.client.admin.lag(result_topic(TOPIC), "outbox-bookshop")]
        groups = self.client.admin.groups()
        return not any(lag.total for lag in lags) and not any(group.retrying for group in groups)

    def states(self) -> Counter[str]:
        """Messages of the sender table by their state."""
        with self.order_engine.connect() as connection:
            rows = connection.execute(select(OUTBOX.send.c.state, func.count()).group_by(OUTBOX.send.c.state))
            return Counter({row[0]: row[1] for row in rows})

    def has_been_asked(self) -> bool:
        """Whether the compensator has looked after every message."""
        with self.order_engine.connect() as connection:
            return min(connection.scalars(select(OUTBOX.send.c.checks)), default=0) > 0

    def check(self) -> Any:
        """The example's own balance, and the inbox's rows; what there was."""
        found = example("balance").balance(self.order_engine, self.stock_engine)
        assert not found.problems, found.problems
        with self.stock_engine.connect() as connection:
            consumed = Counter(connection.scalars(select(OUTBOX.consumer.c.business_state)))
        assert consumed == Counter({"SUCCESS": found.delivered, "ROLLBACK": found.cancelled}) + Counter()
        assert found.delivered
        assert found.cancelled
        assert found.withdrawn
        return found
