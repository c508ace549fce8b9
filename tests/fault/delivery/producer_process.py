"""Producers of the long run: processes that send in every way there is, and may be killed at any moment.

What always holds: what is about to be sent is written down before, and what its sender was told afterwards.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import dmq
from dmq.model import place_of
from tests.fault.delivery import plan
from tests.fault.delivery.plan import content
from tests.fault.delivery.process_log import begin

__all__ = ["produce"]

TIMEOUT_S: Final = 8.0


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
            receipt: dmq.Receipt = producer.send(topic, body, **options)
        except dmq.ConsumeTimeout:
            self._log("ok", name=name, id=None, was_consumed=False)
        except dmq.DMQError as error:
            self._log("failed", name=name, error=type(error).__name__, retriable=error.retriable)
        else:
            is_consumed = options.get("durability") == "consumed"
            self._log("ok", name=name, id=str(receipt.id), place=_place(receipt), was_consumed=is_consumed)
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
                self._log("ok", name=name, id=str(receipt.id), place=_place(receipt))

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


def _place(receipt: dmq.Receipt) -> tuple[int, int]:
    return place_of(receipt.queue, receipt.shard), receipt.offset


def produce(url: str, path: Path, seed: str) -> None:
    """The main function of a process that sends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    Producing(url, path, seed).run()
