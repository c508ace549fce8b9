"""A member that consumes in every way at once, in a process of its own: `python stopped_member.py URL`.

It says `begun WAY QUEUE BODY ATTEMPT NANOSECONDS` and `done ...` for each message; the ways are topics as well.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import dmq.aio
from dmq.client.client import Client, connect
from dmq.client.consumer.message import ReceivedMessage

LEASE_SECONDS = 1.0
PACE_SECONDS = 0.01
WAYS = ("run", "iterate", "ordered", "task", "thread")


def say(word: str, message: ReceivedMessage) -> None:
    # The clock is the machine's: what processes say can be put in order by it. One write each, so that none is torn.
    said = (word, message.topic, message.queue, message.body.decode(), message.attempt, time.monotonic_ns())
    os.write(1, (" ".join(map(str, said)) + "\n").encode())


def handle(message: ReceivedMessage) -> None:
    say("begun", message)
    time.sleep(PACE_SECONDS)
    say("done", message)


def iterate(client: Client) -> None:
    for message in client.consumer("iterate", "billing", prefetch=20, lease=LEASE_SECONDS):
        handle(message)
        message.ack()


async def on_a_loop(url: str) -> None:
    async def wait(message: ReceivedMessage) -> None:
        say("begun", message)
        await asyncio.sleep(PACE_SECONDS)
        say("done", message)

    async with await dmq.aio.connect(url, app="test") as client:
        task = client.consumer("task", "billing", prefetch=20, lease=LEASE_SECONDS)
        thread = client.consumer("thread", "billing", prefetch=20, lease=LEASE_SECONDS)
        await asyncio.gather(task.run(wait, workers=2), thread.run(handle, workers=2))


def main(url: str) -> None:
    with connect(url, app="test") as client:
        ordered = client.consumer("ordered", "billing", prefetch=20, lease=LEASE_SECONDS, ordered=True)
        for work in (
            lambda: iterate(client),
            lambda: ordered.run(handle, workers=2),
            lambda: asyncio.run(on_a_loop(url)),
        ):
            threading.Thread(target=work, daemon=True).start()
        client.consumer("run", "billing", prefetch=20, lease=LEASE_SECONDS).run(handle, workers=2)


if __name__ == "__main__":
    main(sys.argv[1])
