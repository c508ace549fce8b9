"""A member of a group in a process of its own: `python group_member.py URL STRATEGY ORDER PACE`.

It says `queues 0,1` whenever its queues change, and `done QUEUE OFFSET BODY ATTEMPT NANOSECONDS` for each message.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import cast

from dmq.client.client import connect
from dmq.client.consumer.consumer import Consumer
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.consumer.options import Strategy

saying = threading.Lock()


def say(*words: object) -> None:
    with saying:
        print(*words, flush=True)


def follow(consumer: Consumer) -> None:
    """Say which queues it takes, until it closes."""
    before: tuple[int, ...] | None = None
    while not consumer.is_closing:
        now = consumer.queues
        if now != before:
            before = now
            say("queues", ",".join(map(str, now or ())))
        time.sleep(0.02)


def main(url: str, strategy: str, order: str, pace: float) -> None:
    def handle(message: ReceivedMessage) -> None:
        time.sleep(pace)
        # The clock is the machine's: what processes say can be put in order by it.
        say("done", message.queue, message.offset, message.body.decode(), message.attempt, time.monotonic_ns())

    with connect(url, app="test") as client:
        consumer = client.consumer(
            "orders",
            "billing",
            ordered=order == "ordered",
            prefetch=20,
            batch=5,
            lease=10.0,
            strategy=None if strategy == "shared" else cast("Strategy", strategy),
        )
        threading.Thread(target=follow, args=(consumer,), daemon=True).start()
        consumer.run(handle, workers=2, policy="block")
    say("ended")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
