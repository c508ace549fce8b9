"""How many files of DMQ one message passes. Run by the Python of the tree that is measured: `python route.py`.

A broker on a real disk and a client run in this process, each with its own threads, and a profile function notes every
call of a function of `dmq`. A route is measured after the same thing was done five times, so that nothing is made for
the first time. A round lasts until the journal has all that the act writes and nothing is called any more; what is
called in the pause after it does not count. Of thirty rounds the one with the fewest files counts: the timers of broker
and client, which have nothing to do with the message, and threads that wait for a processor only ever add files.

What is counted: the files in which a function was called, and the switches. A switch is a call whose file is not the
file of the call before it in the same thread; a return is no switch.

This file imports nothing but the standard library and names of DMQ that are the same in every version, since it also
measures earlier checkouts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import dmq
from dmq.broker.server import BrokerServer
from dmq.settings import BrokerSettings, Settings

ROOT = f"{Path(dmq.__file__).parent}/"
WARM_UP = 5
ROUNDS = 30
TOPIC = "orders"
BODY = b"x" * 100
# The broker writes an ack with the next unit, or 5 ms later if there is none.
SETTLED_SECONDS = 0.1
QUIET_SECONDS = 0.004
WAIT_SECONDS = 5.0
WRITES = {"pwrite", "pwritev"}


class Trace:
    """The files of `dmq` in which functions are called, thread by thread, while it is on."""

    def __init__(self) -> None:
        self._calls: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self._writes = 0
        self._is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._is_on or not (file := frame.f_code.co_filename).startswith(ROOT):
            return
        if event == "call":
            self._calls[threading.get_ident()].append((file[len(ROOT) :], frame.f_code.co_name))
        elif event == "c_call" and getattr(argument, "__name__", "") in WRITES:
            self._writes += 1

    def round(self, act: Callable[[], None], writes: int) -> list[list[str]]:
        """What an act calls: for each thread a line for each stay in a file, with its functions in order."""
        self._calls.clear()
        self._writes = 0
        self._is_on = True
        act()
        self._await_end(writes)
        self._is_on = False
        return [_stays(calls) for calls in self._calls.values()]

    def _await_end(self, writes: int) -> None:
        """Wait until so many units are written and nothing more is called."""
        deadline = time.monotonic() + WAIT_SECONDS
        called = -1
        while self._writes < writes or called != (called := sum(map(len, self._calls.values()))):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._writes} of {writes} units were written within {WAIT_SECONDS:.0f} s")
            time.sleep(QUIET_SECONDS)


def _stays(calls: list[tuple[str, str]]) -> list[str]:
    groups = groupby(calls, key=itemgetter(0))
    return [f"{file}: {' '.join(function for _, function in group)}" for file, group in groups]


class Broker:
    """A broker in a thread of its own."""

    def __init__(self, folder: str) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(folder)), daemon=True)
        self._thread.start()
        if not self._ready.wait(30):
            raise SystemExit("the broker did not start")

    async def _serve(self, folder: str) -> None:
        settings = BrokerSettings(data=folder, port=0, metrics_port=0, telnet_port=None)
        server = BrokerServer(Settings(broker=settings))
        await server.start()
        self.port = server.port
        self._loop = asyncio.get_running_loop()
        self._ending = self._loop.create_future()
        self._ready.set()
        await self._ending
        await server.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set_result, None)
        self._thread.join()


def routes(client: dmq.Client, trace: Trace) -> dict[str, Any]:
    client.admin.create_topic(TOPIC, queues=1)
    producer = client.producer()

    def send() -> None:
        producer.send(TOPIC, BODY)

    found = {"send": _shortest(trace, send, writes=1)}
    pushed = iter(client.consumer(TOPIC, group="pushed"))

    def send_push_ack() -> None:
        producer.send(TOPIC, BODY)
        next(pushed).ack()

    for _ in range(WARM_UP + ROUNDS):
        next(pushed).ack()
    found["send_push_ack"] = _shortest(trace, send_push_ack, writes=2)
    consumer = client.consumer(TOPIC, group="pulled")

    def pull_ack() -> None:
        (message,) = consumer.pull(max_messages=1)
        message.ack()

    found["pull_ack"] = _shortest(trace, pull_ack, writes=1)
    return found


def _shortest(trace: Trace, act: Callable[[], None], writes: int) -> dict[str, Any]:
    """The shortest round of an act that has so many units written."""
    for _ in range(WARM_UP):
        act()
        time.sleep(SETTLED_SECONDS)
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(_measured(trace.round(act, writes)))
        time.sleep(SETTLED_SECONDS)
    return min(rounds, key=lambda route: (len(route["files"]), route["switches"]))


def _measured(threads: list[list[str]]) -> dict[str, Any]:
    return {
        "files": sorted({stay.partition(":")[0] for stays in threads for stay in stays}),
        "switches": sum(len(stays) - 1 for stays in threads),
        "pairs": _pairs(threads),
        "threads": threads,
    }


def _pairs(threads: list[list[str]]) -> list[tuple[str, int]]:
    """Between which two files how many switches are, in either direction; most first."""
    files = [[stay.partition(":")[0] for stay in stays] for stays in threads]
    counts = Counter(" - ".join(sorted(pair)) for stays in files for pair in pairwise(stays))
    return counts.most_common()


def main() -> None:
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        broker = Broker(folder)
        try:
            with dmq.connect(f"dmq://127.0.0.1:{broker.port}", app="house") as client:
                found = routes(client, trace)
        finally:
            broker.stop()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
