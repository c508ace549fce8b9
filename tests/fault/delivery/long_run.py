"""All delivery features at once, with real processes that are killed, frozen and started again.

Brokers (`site`), producer processes, and two members of every group, each a process; then trouble in rounds, a calm
time, and a wait until everything has settled. Everything is written down; `checker` knows what must be true.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import dmq
from dmq.client.admin.dead_letters import DeadLetter
from dmq.model import broadcast_name
from tests.fault.delivery import plan
from tests.fault.delivery.consumer_process import consume
from tests.fault.delivery.process_log import STALL_S, TICK_S, Log
from tests.fault.delivery.producer_process import produce
from tests.fault.delivery.site import Site, Way

__all__ = ["Life"]

PATIENCE_S: Final = 120.0
PRODUCERS: Final = 2


class Life:
    """One run.

    Parameters:
        folder: for everybody's log.
        seed: what happens when follows from it, as far as processes let it.
        site: the brokers.
    """

    def __init__(self, folder: Path, seed: str, site: Site) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._log = Log(self._logs / "life")
        self._site = site
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["dmq.aio", "tests.fault.delivery.consumer_process", "tests.fault.delivery.producer_process"]
        )
        self._processes: dict[str, BaseProcess] = {}
        self._starts: dict[str, int] = {}
        self._version = 0
        self._is_watched = threading.Event()
        self._watch = threading.Thread(target=self._note_stalls)
        self.done: list[str] = []

    def __enter__(self) -> Self:
        self._watch.start()
        try:
            self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _begin(self) -> None:
        self._site.start(self._rng, self._break)
        with dmq.connect(self._site.url, app="life", timeout=60.0) as client:
            client.admin.create_topic(plan.TOPIC, queues=plan.QUEUES)
            client.admin.create_topic(plan.URGENT, priority=True)
            for group in plan.GROUPS.values():
                if group.name != "all":
                    client.admin.create_group(group.name, group.topic)
        for group in plan.GROUPS.values():
            for member in range(group.members):
                self._start(f"{group.name}-{member}")
        for number in range(PRODUCERS):
            self._start(f"producer-{number}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_watched.set()
        for process in self._processes.values():
            process.kill()
            process.join()
        self._watch.join()
        self._site.end(kind, error, trace)

    def _start(self, who: str) -> None:
        role, _, number = who.rpartition("-")
        self._starts[who] = count = self._starts.get(who, 0) + 1
        path = self._logs / f"{who}-{count}"
        url = self._site.url
        if role == "producer":
            process: BaseProcess = self._context.Process(target=produce, args=(url, path, self._seed), daemon=True)
        else:
            arguments = (url, path, role, f"{role}-{number}", self._version)
            process = self._context.Process(target=consume, args=arguments, daemon=True)
        process.start()
        self._processes[who] = process

    def _note_stalls(self) -> None:
        """The machine may be busy with other things: what that delays is nobody's fault."""
        before = time.monotonic()
        while not self._is_watched.wait(TICK_S):
            now = time.monotonic()
            if now - before > STALL_S:
                self._log("break", kind="stall", who="*", since=before)
            before = now

    # --- trouble ----------------------------------------------------------------------------------------------------

    def _pause(self, low: float, high: float) -> None:
        time.sleep(self._rng.uniform(low, high))

    def _break(self, kind: str, who: str, since: float) -> None:
        self._log("break", kind=kind, who=who, since=since)

    def _choose(self, role: str = "") -> str:
        """One of the processes; of all roles but the producers if none is given."""
        return self._rng.choice([who for who in self._processes if who.startswith(role or tuple(plan.GROUPS))])

    def _kill_consumer(self) -> None:
        self._replace(self._choose(), signal.SIGKILL)

    def _restart_consumer(self) -> None:
        self._replace(self._choose(), signal.SIGTERM)

    def _kill_producer(self) -> None:
        self._replace(self._choose("producer"), signal.SIGKILL)

    def _replace(self, who: str, how: signal.Signals) -> None:
        since = time.monotonic()
        process = self._processes[who]
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, how)
        process.join(PATIENCE_S)
        assert not process.is_alive(), f"{who} does not end"
        self._break("end" if how == signal.SIGTERM else "kill", who, since)
        self._start(who)

    def _freeze_consumer(self) -> None:
        """For longer than its leases, or shorter; other things go wrong meanwhile."""
        who = self._choose()
        process = self._processes[who]
        assert process.pid is not None
        since = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            self._pause(0.1, 1.5)
            if self._rng.random() < 0.3:
                self._site.kill()
            self._pause(0.0, plan.LEASE_S)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        self._break("freeze", who, since)

    def _freeze_producer(self) -> None:
        """What it knows of the brokers is old when it goes on."""
        who = self._choose("producer")
        self._signal(who, signal.SIGSTOP)
        try:
            self._rng.choice([*self._site.ways()])()
        finally:
            self._signal(who, signal.SIGCONT)

    def _deploy(self) -> None:
        """Members of the group that filters come with other tags and a higher version, one after the other."""
        self._version = 1
        for member in range(plan.GROUPS["picky"].members):
            self._replace(f"picky-{member}", signal.SIGTERM)
            self._pause(0.0, 0.5)

    def _replay(self) -> None:
        with dmq.connect(self._site.url, app="life", timeout=60.0) as client:
            client.admin.reset(plan.TOPIC, "replay", "earliest", queue=self._rng.randrange(plan.QUEUES))

    def trouble(self, rounds: int) -> None:
        """Have things go wrong, one after the other."""
        ways: dict[Way, int] = {
            **self._site.ways(), self._kill_consumer: 4, self._restart_consumer: 2, self._kill_producer: 2,
            self._freeze_producer: 1, self._freeze_consumer: 2, self._replay: 2,
        }  # fmt: skip
        for number in range(rounds):
            way = self._deploy if number == rounds // 2 else self._rng.choices([*ways], [*ways.values()])[0]
            self.done.append(way.__name__.strip("_"))
            self._log("way", name=self.done[-1])
            way()
            self._revive()
            self._pause(0.0, self._rng.choice((0.3, 1.0, 1.0, 4.0)))

    def _revive(self) -> None:
        """Members of a version that was superseded come again with the new one; nobody else ends by himself."""
        for who, process in [*self._processes.items()]:
            if not process.is_alive():
                assert who.startswith("picky-"), f"{who} ended with {process.exitcode}: {self._problems(who)}"
                self._start(who)

    def _problems(self, who: str) -> list[str]:
        found = [event for path in self._logs.glob(f"{who}-*") for event in read(path)]
        return [event["error"] for event in found if event["event"] == "problem"]

    # --- the end ----------------------------------------------------------------------------------------------------

    def calm(self, seconds: float) -> None:
        """Everybody works on, and nothing goes wrong any more."""
        self._log("calm")
        time.sleep(seconds)
        for who in [*self._processes]:
            if who.startswith("producer"):
                self._signal(who, signal.SIGTERM)

    def _signal(self, who: str, number: int) -> None:
        pid = self._processes[who].pid
        assert pid is not None
        os.kill(pid, number)

    def settle(self) -> list[DeadLetter]:
        """Wait until nothing is left to be done, and end everybody; the dead letters then."""
        deadline = time.monotonic() + PATIENCE_S
        with dmq.connect(self._site.url, app="life", timeout=60.0) as client:
            is_quiet = 0
            while is_quiet < 3:
                left = self._left(client)
                is_quiet = 0 if left else is_quiet + 1
                self._revive()
                assert time.monotonic() < deadline, f"it does not settle: {left}"
                time.sleep(0.3)
            letters = client.admin.dead_letters()
        for who, process in self._processes.items():
            self._signal(who, signal.SIGUSR1 if who.startswith("producer") else signal.SIGTERM)
            process.join(PATIENCE_S)
            assert process.exitcode == 0, f"{who} ended with {process.exitcode}: {self._problems(who)}"
        return letters

    def _left(self, client: dmq.Client) -> dict[str, Any]:
        """What is not settled yet."""
        admin = client.admin
        left: dict[str, Any] = {}
        for group in plan.GROUPS.values():
            names = [group.name]
            if group.name == "all":
                names = [broadcast_name("all", f"all-{member}") for member in range(group.members)]
            for name in names:
                lag = admin.lag(group.topic, name)
                if lag.total or lag.retrying or lag.missing:
                    left[name] = (lag.total, lag.retrying, lag.missing)
        for topic in admin.topics("%RETRY%", system=True):
            try:
                waiting = admin.lag(topic.name, topic.name.removeprefix("%RETRY%").rpartition("%")[0]).total
            except dmq.UnknownGroup:
                waiting = topic.messages  # nobody has settled anything of it yet
            if waiting:
                left[topic.name] = waiting
        if delays := admin.delays(limit=5):
            left["delays"] = delays
        if transactions := admin.transactions(limit=5):
            left["transactions"] = transactions
        if undrained := sum(map(_undrained, self._site.leader_urls)):
            left["dead letters"] = undrained
        for who in self._processes:
            if who.startswith("producer"):
                path = self._logs / f"{who}-{self._starts[who]}"
                if not any(event["event"] == "finished" for event in read(path)):
                    left[who] = "is sending"
        return left

    def events(self) -> dict[str, list[dict[str, Any]]]:
        """What everybody wrote down, by who it was."""
        return {path.name: read(path) for path in self._logs.iterdir()}


def _undrained(url: str) -> float:
    """Dead letters of a broker that are not in the database yet."""
    with dmq.connect(url, app="life", timeout=60.0) as client:
        return client.admin.stats("broker_dead_letters_waiting")["broker_dead_letters_waiting"]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; the last one may have been cut off by a kill."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]
