"""Processes for tests of consuming: `python processes.py broker DIR` and `python processes.py consume URL DELAY`."""

from __future__ import annotations

import sys
import threading
import time

from dmq.broker.server import BrokerServer, run
from dmq.client.client import connect
from dmq.client.consumer.message import ReceivedMessage
from dmq.settings import BrokerSettings, Settings


async def serve(directory: str) -> None:
    """A broker that prints its port."""
    settings = BrokerSettings(
        port=0, metrics_port=0, telnet_port=None, data=directory, auto_create=True, grace_seconds=0.5
    )
    await BrokerServer(Settings(broker=settings)).serve(lambda server: print(server.port, flush=True))


def consume(url: str, delay: float) -> None:
    """A consumer that prints what it has begun, and what it has done."""

    saying = threading.Lock()

    def say(word: str, message: ReceivedMessage) -> None:
        with saying:
            print(word, message.body.decode(), flush=True)

    def handle(message: ReceivedMessage) -> None:
        say("begun", message)
        time.sleep(delay)
        say("done", message)

    with connect(url, app="test") as client:
        client.consumer("orders", "billing", prefetch=10).run(handle, workers=2)
    print("ended", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "broker":
        run(lambda: serve(sys.argv[2]))
    else:
        consume(sys.argv[2], float(sys.argv[3]))
