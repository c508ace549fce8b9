"""A member of a group in a process of its own, to be stopped: `member_process.py URL TOPIC HOW PACE PREFETCH`.

It consumes by push, by pull, ordered (a push as well) or by asyncio. It says `BODY ATTEMPT BEGUN ENDED` of each message
that it has handled.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from dmq import aio
from dmq.client.client import connect
from dmq.client.consumer.message import ReceivedMessage

GROUP = "billing"
LEASE_SECONDS = 1.0
MAX_ATTEMPTS = 3


async def run_on_a_loop(url: str, topic: str, handle: Any, options: dict[str, Any]) -> None:
    async def handle_it(message: Any) -> None:
        handle(message)

    async with await aio.connect(url, app="test") as client:
        await client.consumer(topic, GROUP, **options).run(handle_it)


def main(url: str, topic: str, how: str, pace: float, prefetch: int) -> None:
    def handle(message: ReceivedMessage) -> None:
        begun = time.monotonic()
        time.sleep(pace)
        sys.stdout.write(f"{message.body.decode()} {message.attempt} {begun} {time.monotonic()}\n")
        sys.stdout.flush()

    options: dict[str, Any] = {"prefetch": prefetch, "lease": LEASE_SECONDS, "max_attempts": MAX_ATTEMPTS}
    if how == "asyncio":
        asyncio.run(run_on_a_loop(url, topic, handle, options))
        return
    with connect(url, app="test") as client:
        consumer = client.consumer(topic, GROUP, ordered=how == "ordered", **options)
        if how != "pull":
            consumer.run(handle, workers=1)
            return
        while True:
            for message in consumer.pull(5, wait=30.0):
                handle(message)
                message.ack()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
