"""A process with consumers that run on an event loop and in a thread: `python signalled.py URL SECONDS`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import dmq.aio
from dmq.client.client import connect
from dmq.client.consumer.message import ReceivedMessage

GROUPS = ("one", "two", "three")


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write, so that none is torn


async def main(url: str, seconds: float) -> None:
    async def handle(message: ReceivedMessage) -> None:
        say("begun", message.group)
        await asyncio.sleep(seconds)
        say("done", message.group)

    def work(message: ReceivedMessage) -> None:
        say("begun", message.group)
        time.sleep(seconds)
        say("done", message.group)

    with connect(url, app="test") as blocking:
        consumer = blocking.consumer("orders", "four")
        thread = threading.Thread(target=consumer.run, args=(work,), kwargs={"workers": 1})
        thread.start()
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        async with await dmq.aio.connect(url, app="test") as client:
            await asyncio.gather(*(client.consumer("orders", group).run(handle, workers=1) for group in GROUPS))
        await asyncio.to_thread(thread.join)
        say("restored", before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
    say("ended")
