"""Processes for tests of retry: `python processes.py broker DIR PORT`, `fail URL` and `version URL TAGS VERSION`."""

from __future__ import annotations

import sys
import threading

import dmq
from dmq.broker.server import BrokerServer, run
from dmq.client.client import connect
from dmq.client.consumer.message import ReceivedMessage
from dmq.settings import BrokerSettings, Settings

saying = threading.Lock()


def say(*words: object) -> None:
    with saying:
        print(*words, flush=True)


async def serve(directory: str, port: int) -> None:
    """A broker that prints its port, and retries at once."""
    settings = BrokerSettings(
        port=port,
        metrics_port=0,
        telnet_port=None,
        data=directory,
        auto_create=True,
        grace_seconds=0.5,
        retry_table="0.05,0.1,0",
    )
    await BrokerServer(Settings(broker=settings)).serve(lambda server: say(server.port))


def fail(url: str) -> None:
    """A consumer whose handler fails twice with every message, and rejects some."""

    def handle(message: ReceivedMessage) -> None:
        if message.attempt < 3:
            raise dmq.Retry(f"attempt {message.attempt}")
        if int(message.body) % 10 == 0:
            raise dmq.Reject("a round number")
        say("done", message.body.decode())

    with connect(url, app="test") as client:
        client.consumer("orders", "billing", prefetch=50, lease=2.0).run(handle, workers=2)


def poison(url: str) -> None:
    """A consumer that dies of what it gets."""
    with connect(url, app="test") as client:
        message = next(client.consumer("orders", "billing", max_attempts=3, lease=2.0))
        say("got", message.body.decode(), message.attempt)
        threading.Event().wait(60)


def version(url: str, tags: str, number: int) -> None:
    """A consumer of one version of a group's subscription; says what it handled, and how it ended."""
    with connect(url, app="test") as client:
        consumer = client.consumer("orders", "billing", tags=tags, version=number, prefetch=5)

        def handle(message: ReceivedMessage) -> None:
            say("done", message.body.decode())

        try:
            consumer.run(handle, workers=1)
        except dmq.DMQError as error:
            say("ended", type(error).__name__, error.message)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["broker", directory, port]:
            run(lambda: serve(directory, int(port)))
        case ["fail", url]:
            fail(url)
        case ["poison", url]:
            poison(url)
        case ["version", url, tags, number]:
            version(url, tags, int(number))
