"""Consumers of the long run: processes that handle, fail, reject and hang, and may be killed at any moment.

What always holds: each call of a handler is written down when it begins, and its word before it is said.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import dmq
from dmq.client.consumer.message import ReceivedMessage
from dmq.model import place_of
from tests.fault.delivery import plan
from tests.fault.delivery.plan import GROUPS, content, name_of
from tests.fault.delivery.process_log import Log, begin

__all__ = ["consume"]


class Handler:
    """Does with each message what its name says, and writes it down."""

    def __init__(self, log: Log, group: str, member: str) -> None:
        self._log = log
        self._group = group
        self._member = member
        self._number = 0
        self._lock = threading.Lock()

    def begin(self, message: ReceivedMessage) -> tuple[int, plan.Name, str]:
        body = message.body
        name = name_of(body)
        with self._lock:
            self._number += 1
            number = self._number
        word = plan.word_of(self._group, name, message.attempt)
        self._log(
            "got",
            number=number,
            group=self._group,
            member=self._member,
            name=name,
            is_whole=body == content(*name),
            id=str(message.id),
            attempt=message.attempt,
            place=(place_of(message.queue, message.shard), message.offset),
            said=(message.key, message.tag, message.business_id, message.priority),
            stored=message.stored_at.timestamp(),
            topic=message.topic,
        )
        return number, name, word

    def end(self, number: int, word: str) -> None:
        self._log("end", number=number, word=word)

    def __call__(self, message: ReceivedMessage) -> None:
        number, name, word = self.begin(message)
        if plan.fate_of(self._group, name) == "slow":
            time.sleep(plan.LEASE_S * 1.4)  # its lease is extended meanwhile
        self.end(number, word)
        match word:
            case "raise":
                raise ValueError("the handler failed")
            case "retry":
                raise dmq.Retry("later", after=plan.AFTER_S)
            case "reject":
                raise dmq.Reject("no")


def consume(url: str, path: Path, group: str, member: str, version: int) -> None:
    """The main function of a process that consumes."""
    log = begin(path)
    handler = Handler(log, group, member)
    about = GROUPS[group]
    options: dict[str, Any] = {
        "prefetch": about.prefetch,
        "lease": plan.LEASE_S,
        "max_attempts": about.attempts_max,
        "ordered": group == "ledger",
        "broadcast": group == "all",
    }
    try:
        if group == "picky":
            options |= {"tags": plan.TAGS_AFTER if version else plan.TAGS_BEFORE, "version": version}
            asyncio.run(_run_aio(url, about.topic, group, options, handler))
            return
        with dmq.connect(url, app="life", timeout=60.0, client_id=member if group == "all" else None) as client:
            consumer = client.consumer(about.topic, group, **options)
            if group in ("pull", "replay"):
                _pull(consumer, handler, group, log, random.Random(path.name))
            else:
                consumer.run(handler, workers=3)
    except dmq.SubscriptionSuperseded:
        log("superseded")
    except BaseException as error:
        log("problem", error=repr(error), where=path.stem)
        raise


async def _run_aio(url: str, topic: str, group: str, options: dict[str, Any], handler: Handler) -> None:
    async with dmq.aio.connect(url, app="life", timeout=60.0) as client:
        consumer = client.consumer(topic, group, **options)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: asyncio.ensure_future(consumer.close()))
        await consumer.run(handler, workers=3)


def _pull(consumer: dmq.Consumer, handler: Handler, group: str, log: Log, rng: random.Random) -> None:
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    while not is_over.is_set():
        try:
            batch = consumer.pull(GROUPS[group].prefetch, wait=0.5)
        except dmq.DMQError as error:
            if not error.retriable:
                raise
            is_over.wait(0.05)
            continue
        began = [(message, handler.begin(message)) for message in batch]
        if began and group == "pull" and rng.random() < 0.003:
            log("hold", since=time.monotonic())  # for longer than the lease, which nobody extends here
            is_over.wait(plan.LEASE_S * 1.3)
            log("held")
        for message, (number, _, word) in began:
            handler.end(number, word)
            match word:
                case "ack":
                    message.ack()
                case "raise":
                    message.nack(reason="the handler failed")
                case "retry":
                    message.nack(delay=plan.AFTER_S, reason="later")
                case "reject":
                    message.reject("no")
