"""Producers and consumers of the long run, each a process that may be killed at any moment.

What always holds: each writes what it is about to do and what became of it into a file of its own, line by line with
no buffer in between, so that the checker knows what a process did up to the moment it died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import dmq
from dmq.client.received import ReceivedMessage
from tests.fault import delivery_plan as plan
from tests.fault.delivery_plan import GROUPS, content, name_of

__all__ = ["consume", "produce"]

TIMEOUT_S: Final = 8.0
TICK_S: Final = 0.1
STALL_S: Final = 0.8


class Log:
    """See the module."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **facts})
        os.write(self._fd, line.encode() + b"\n")


def begin(path: Path) -> Log:
    """A log, and a thread that notes when this process was not let run; it ends the process with its parent."""
    logging.getLogger("dmq").setLevel(logging.CRITICAL)  # handlers fail on purpose
    log = Log(path)
    parent = os.getppid()

    def watch() -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - before > STALL_S:
                log("stall", since=before)
            before = now
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return log


# --- producing ------------------------------------------------------------------------------------------------------


class Producing:
    """One process with a thread for each kind of sending, until SIGTERM."""

    def __init__(self, url: str, path: Path, seed: str) -> None:
        self._log = begin(path)
        self._stem = path.stem
        self._seed = seed
        self._url = url
        self._counts: Counter[str] = Counter()  # by stream; each is one thread's
        self._is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._is_over.set())

    def run(self) -> None:
        kinds: list[Callable[[dmq.Producer, random.Random, str], None]] = [
            self._plain, self._stored, self._ordered, self._delayed, self._expiring, self._urgent, self._together,
            self._consumed, self._transaction, self._transaction, self._refused,
        ]  # fmt: skip
        with dmq.connect(self._url, app="life", timeout=60.0) as client:
            self._client = client
            producer = client.producer(group=plan.PRODUCERS, check=self._check, timeout=TIMEOUT_S)
            threads = [
                threading.Thread(target=self._repeat, args=(kind, producer, number))
                for number, kind in enumerate(kinds)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._log("finished")
            # It goes on answering for transactions that were left open.
            signal.sigtimedwait([signal.SIGUSR1], 600)

    def _repeat(self, kind: Callable[..., None], producer: dmq.Producer, number: int) -> None:
        rng = random.Random(f"{self._seed} {self._stem} {number}")
        stream = f"{self._stem}-{kind.__name__.strip('_')}{number}"
        try:
            while not self._is_over.is_set():
                kind(producer, rng, stream)
                self._is_over.wait(rng.uniform(0.0, 0.3))
        except BaseException as error:
            self._log("problem", error=repr(error), where=stream)
            raise

    def _check(self, message: Any) -> str | None:
        outcome = plan.outcome_of(message.key)
        return None if outcome == "unknown" else outcome

    def _new(self, stream: str, **facts: Any) -> tuple[plan.Name, bytes]:
        name = (stream, self._counts[stream])
        self._counts[stream] += 1
        self._log("try", name=name, **facts)
        return name, content(*name)

    def _send(self, producer: dmq.Producer, stream: str, topic: str = plan.TOPIC, **options: Any) -> dmq.Receipt | None:
        due, ttl = options.get("deliver_at"), options.get("ttl")
        facts = {word: options.get(word) for word in ("key", "tag", "business_id", "priority", "durability")}
        name, body = self._new(
            stream, topic=topic, due=due, expires=None if ttl is None else time.time() + ttl, **facts
        )
        try:
            receipt = producer.send(topic, body, **options)
        except dmq.ConsumeTimeout:
            self._log("ok", name=name, id=None, was_consumed=False)
        except dmq.DMQError as error:
            self._log("failed", name=name, error=type(error).__name__, retriable=error.retriable)
        else:
            is_consumed = options.get("durability") == "consumed"
            self._log(
                "ok", name=name, id=str(receipt.id), place=(receipt.queue, receipt.offset), was_consumed=is_consumed
            )
            return receipt
        return None

    def _plain(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        key = f"k-{rng.randrange(100)}" if rng.random() < 0.5 else None
        self._send(producer, stream, key=key, tag=rng.choice(plan.TAGS), priority=rng.randrange(10))

    def _stored(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        durability = "stored" if rng.random() < 0.8 else "none"
        self._send(producer, stream, durability=durability, tag=rng.choice(plan.TAGS))

    def _ordered(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        business_id = f"{stream}-{rng.randrange(4)}"
        durability = rng.choice(("stored", "flushed"))
        for _ in range(rng.randrange(1, 5)):
            self._send(producer, business_id, business_id=business_id, ordered=True, durability=durability)

    def _delayed(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        due = time.time() + rng.choice((0.0, 0.05, 0.5, 2.0, 4.0)) * rng.random()
        receipt = self._send(producer, stream, deliver_at=due, tag=rng.choice(plan.TAGS), key="later")
        if receipt is None or rng.random() > 0.25:
            return
        self._is_over.wait(rng.random())
        name = (stream, self._counts[stream] - 1)
        self._log("cancel", name=name)
        try:
            self._client.admin.cancel_delay(receipt.id)
        except dmq.UnknownMessage:
            self._log("too late", name=name)
        except dmq.DMQError as error:
            self._log("cancel failed", name=name, error=repr(error))
        else:
            self._log("cancelled", name=name)

    def _expiring(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        self._send(producer, stream, ttl=rng.choice((0.01, 0.3, 2.0, 60.0)), tag=rng.choice(plan.TAGS))

    def _urgent(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        for _ in range(rng.randrange(1, 5)):
            self._send(producer, stream, plan.URGENT, priority=rng.randrange(10))

    def _consumed(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        self._send(producer, stream, durability="consumed", consumed_by="push", tag=rng.choice(plan.TAGS))

    def _together(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        due = time.time() + rng.random() if rng.random() < 0.4 else None
        pairs = [
            self._new(stream, topic=plan.TOPIC, due=due, key="many", durability="flushed")
            for _ in range(rng.randrange(1, 12))
        ]
        messages = [dmq.Message(body, key="many") for _, body in pairs]
        try:
            receipts = producer.send_many(plan.TOPIC, messages, deliver_at=due)
        except dmq.DMQError as error:
            for name, _ in pairs:
                self._log("failed", name=name, error=type(error).__name__, retriable=True)
        else:
            for (name, _), receipt in zip(pairs, receipts, strict=True):
                self._log("ok", name=name, id=str(receipt.id), place=(receipt.queue, receipt.offset))

    def _refused(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        """What must be refused, and never be seen."""
        wrong: dict[str, Any] = rng.choice([{"ordered": True}, {"delay": 3 * 366 * 86_400.0}, {"priority": 10}])
        self._send(producer, stream, **wrong)
        self._is_over.wait(1.0)

    def _transaction(self, producer: dmq.Producer, rng: random.Random, stream: str) -> None:
        """One or more messages that are committed, rolled back, or left to a check, as their key says."""
        count = rng.randrange(1, 4)
        key = f"{stream}-{self._counts[stream]}"
        outcome = plan.outcome_of(key)
        facts = {"topic": plan.TOPIC, "key": key, "transaction": key, "outcome": outcome, "durability": "flushed"}
        names = []
        try:
            name, body = self._new(stream, **facts)
            names.append(name)
            tx = producer.transaction(plan.TOPIC, body, key=key)
            for _ in range(count - 1):
                name, body = self._new(stream, **facts)
                names.append(name)
                tx.send(plan.TOPIC, body, key=key)
        except dmq.DMQError as error:
            self._log("tx failed", transaction=key, error=repr(error))
            return  # what was prepared is left to a check
        self._log("prepared", transaction=key, id=str(tx.id))
        if outcome == "unknown" or rng.random() < 0.4:
            return
        self._is_over.wait(rng.random() * 0.3)
        try:
            tx.commit() if outcome == "commit" else tx.rollback()
        except dmq.TransactionOver as error:
            self._log("over", transaction=key, error=error.message)
        except dmq.DMQError as error:
            self._log("end failed", transaction=key, error=repr(error))
        else:
            self._log("ended", transaction=key)


def produce(url: str, path: Path, seed: str) -> None:
    """The main function of a process that sends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    Producing(url, path, seed).run()


# --- consuming ------------------------------------------------------------------------------------------------------


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
            place=(message.queue, message.offset),
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
