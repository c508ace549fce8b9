"""A random history of a broker and its archive, with the truth kept beside it, and the one checker of the tables.

Messages are produced, retried, rejected; a topic is deleted and made anew; the broker is killed; the archive job is
run, and killed at each of its steps; tables are compacted, and all that they have is dropped as too old. What is
expected follows from what producers and consumers were told, never from what a broker counts.

What always holds: the same seed makes the same choices. A step ends when nothing is on its way, so that what was
settled is in the broker's journal. Days are dropped only when everything is archived; what happens later to a message
that was dropped then has no id in the table.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import dmq
from dmq.model import DLQ_PREFIX, RETRY_PREFIX
from dmq.pipeline.archive.job import TABLES, ArchiveJob, ArchiveOptions, app_id_of
from dmq.pipeline.archive.key_index import cover
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import compact, retain
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.lookup.lookup import Lookup
from dmq.pipeline.tables import CONSUME_EVENT, COPY, KEY_INDEX, MESSAGE
from tests.patience import eventually
from tests.spark.producer_logs import content_hash, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.client.client import Client
    from dmq.testing.processes import BrokerProcess

__all__ = ["POINTS", "History", "Killed"]

POINTS: Final = (
    "extracted",
    "committed message",
    "committed copy",
    "committed key_index",
    "resolved",
    "committed consume_event",
    "acknowledged",
)
TOPICS: Final = ("orders", "parcels", "bills")
GROUPS: Final = ("billing", "audit")
ATTEMPTS_MAX: Final = 3
SECONDS: Final = 60.0


class Killed(BaseException):
    """What nobody catches."""


class Stored(NamedTuple):
    """A message as its producer knows it, and how often everything had been dropped when it was stored."""

    id: str
    topic: str
    key: str | None
    business_id: str | None
    content: str
    era: int


class History:
    """One history.

    Parameters:
        kill: archives as far as a step and is killed there; in this process unless told.
    """

    def __init__(
        self,
        seed: int,
        spark: SparkSession,
        broker: BrokerProcess,
        archive: Archive,
        kill: Callable[[str], None] | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._spark = spark
        self._broker = broker
        self._archive = archive
        self._kill = kill or self._kill_here
        self._era = 0
        self._sent: list[Stored] = []
        self._events: Counter[tuple[Any, ...]] = Counter()  # id, group, outcome and attempt, of this era
        self._letters: Counter[tuple[str, str]] = Counter()  # id and group of dead letters, of this era
        self._records: dict[tuple[str, str], int] = {}  # by id and group, the era of what is delivered next
        self._marks = 0
        self.done: Counter[str] = Counter()  # by kind of step
        with self._client() as client:
            for topic in TOPICS:
                client.admin.create_topic(topic, queues=self._rng.randint(1, 4))

    def run(self, steps: int) -> None:
        """Take so many steps, then check."""
        ways: list[tuple[Callable[[], None], int]] = [
            (self._produce, 6),
            (self._consume, 6),
            (self._recreate, 2),
            (self._restart, 1),
            (self._archive_all, 2),
            (self._archive_killed, 3),
            (self._compact, 1),
            (self._drop, 1),
        ]
        for way in self._rng.choices([way for way, _ in ways], [weight for _, weight in ways], k=steps):
            way()
            self.done[way.__name__.removeprefix("_")] += 1
        for _ in range(2):  # so that there is something to check whatever was dropped last
            for topic in TOPICS:
                self._produce(topic)
                self._consume(topic)
        self.check()

    def _client(self) -> Client:
        return dmq.connect(self._broker.url, app="shop", timeout=SECONDS)

    # --- what happens to messages -----------------------------------------------------------------------------------

    def _produce(self, topic: str = "") -> None:
        rng, topic = self._rng, topic or self._rng.choice(TOPICS)
        waiting = []
        with self._client() as client, client.producer() as producer:
            for _ in range(rng.choice((1, 5, 60))):
                body = rng.randbytes(rng.choice((0, 1, 200, 5000)))
                key = f"k-{rng.randrange(40)}" if rng.random() < 0.7 else None
                business_id = f"b-{rng.randrange(10)}" if rng.random() < 0.5 else None
                properties = {"n": str(rng.random())} if rng.random() < 0.3 else {}
                receipt = producer.send_async(
                    topic, body, key=key, business_id=business_id, properties=properties, durability="flushed"
                )
                waiting.append((receipt, key, business_id, content_hash(body, properties)))
            producer.flush()
            self._sent += [
                Stored(str(receipt.result(SECONDS).id), topic, key, business_id, content, era=self._era)
                for receipt, key, business_id, content in waiting
            ]

    def _consume(self, topic: str = "") -> None:
        rng, topic, group = self._rng, topic or self._rng.choice(TOPICS), self._rng.choice(GROUPS)
        with self._client() as client:
            consumer = client.consumer(topic, group, max_attempts=ATTEMPTS_MAX)
            before, moves = _moved(client, group), 0
            for _ in range(rng.choice((1, 3))):
                waiting = any(offsets.next_offset for offsets in client.admin.offsets(topic))
                for message in consumer.pull(rng.choice((1, 20, 50)), 0.5 if waiting else 0.0):
                    moves += self._settle(message, group) != "acked"
                    self.done["settled"] += 1
            consumer.close()
            # The broker writes a failure when it has read the message again.
            eventually(lambda: (_moved(client, group) - before).total() == moves)
            self._mark(client)

    def _settle(self, message: Any, group: str) -> str:
        """Settle it somehow; returns the outcome."""
        id, attempt, lot = str(message.id), message.attempt, self._rng.random()
        known = self._records.get((id, group))
        if known is None:
            known = next(sent.era for sent in reversed(self._sent) if sent.id == id)
        outcome = "acked"
        if lot < 0.15:
            outcome = "dead"
            message.reject("broken")
        elif lot < 0.4:
            outcome = "dead" if attempt >= ATTEMPTS_MAX else "failed"
            message.nack(0.0, "not yet")
        else:
            message.ack()
        self._records[id, group] = self._era  # a retry is a record of its own, stored now
        if outcome == "dead":
            self._letters[id, group] += 1
        if known == self._era:
            self._events[id, group, "delivered", attempt] += 1
            self._events[id, group, outcome, attempt] += 1
        else:
            self._events[None, group, "delivered", None] += 1
            self._events[None, group, outcome, None] += 1
        return outcome

    def _recreate(self) -> None:
        topic = self._rng.choice(TOPICS)
        with self._client() as client:
            client.admin.delete_topic(topic)
            client.admin.create_topic(topic, queues=self._rng.randint(1, 4))

    def _mark(self, client: Client) -> None:
        """What is settled goes to the journal with the next unit; this makes one, and flushes it."""
        self._marks += 1
        client.admin.create_topic(f"mark-{self._marks}")

    def _restart(self) -> None:
        with self._client() as client:
            self._mark(client)
        self._broker.kill()
        self._broker.start()

    # --- what happens to the archive --------------------------------------------------------------------------------

    def _job(self, step: Callable[[str], None] = lambda name: None) -> ArchiveJob:
        size = self._rng.choice((20_001, 300_000, None))
        return ArchiveJob(
            self._spark, Archive.create(self._archive.uri), self._broker.url, ArchiveOptions(size), step=step
        )

    def _archive_all(self) -> None:
        self._job().run()

    def _archive_killed(self) -> None:
        self._kill(self._rng.choice(POINTS))

    def _kill_here(self, point: str) -> None:
        left = self._rng.choice((1, 1, 2))

        def step(name: str) -> None:
            nonlocal left
            left -= name == point
            if left == 0:
                raise Killed(point)

        try:
            self._job(step).run()
        except Killed:
            self.done[f"killed after {point}"] += 1

    def _context(self, option: str, value: str, days_on: int = 0) -> JobContext:
        return JobContext(self._archive.uri, datetime.now(UTC) + timedelta(days=days_on), options={option: value})

    def _compact(self) -> None:
        compact.run(self._spark, self._archive, self._context("compact.files_min", "2"))
        cover(self._archive, files_min=1)

    def _drop(self) -> None:
        """Archive everything, and let it become too old."""
        self._archive_all()
        retain.run(self._spark, self._archive, self._context("retain.days", "1", 2))
        self._era += 1
        self._events.clear()
        self._letters.clear()

    # --- what must be so --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Archive what is left, and compare every table with the truth."""
        self._archive_all()
        here = [sent for sent in self._sent if sent.era == self._era]
        self._check_messages(here)
        self._check_index(here)
        self._check_outcomes()
        with self._client() as client:
            told = client.admin.archived()
        assert {self._archive.table(name).version_of(app_id_of(told.journal_id)) for name in TABLES} == {told.archived}

    def _check_messages(self, here: list[Stored]) -> None:
        found: Counter[Stored] = Counter()
        for row in rows_of(self._archive, MESSAGE).to_pylist():
            properties = {entry["key"]: entry["value"].decode() for entry in row["headers"] or ()}
            content = content_hash(row["body"], properties)
            found[Stored(row["message_id"], row["topic"], row["key"], row["business_id"], content, era=self._era)] += 1
        assert found == Counter(here)

    def _check_index(self, here: list[Stored]) -> None:
        rows = rows_of(self._archive, KEY_INDEX).select(["kind", "key", "message_id"]).to_pylist()
        wanted = Counter(("message_id", sent.id, sent.id) for sent in here)
        wanted += Counter(("key", sent.key, sent.id) for sent in here if sent.key is not None)
        wanted += Counter(("business_id", sent.business_id, sent.id) for sent in here if sent.business_id is not None)
        assert Counter((row["kind"], row["key"], row["message_id"]) for row in rows) == wanted
        with Lookup(self._archive.uri) as lookup:
            for sent in self._rng.sample(here, min(len(here), 5)):
                assert [row["message_id"] for row in lookup.by_id(sent.id)] == [sent.id]
                if sent.key is not None:
                    same = Counter(other.id for other in here if other.key == sent.key)
                    assert Counter(row["message_id"] for row in lookup.by_key(sent.key, limit=10_000)) == same

    def _check_outcomes(self) -> None:
        found: Counter[tuple[Any, ...]] = Counter()
        for row in rows_of(self._archive, CONSUME_EVENT).to_pylist():
            attempt = None if row["message_id"] is None else row["attempt"]
            found[row["message_id"], row["group"], row["outcome"], attempt] += 1
        assert found == self._events
        copies = rows_of(self._archive, COPY).to_pylist()
        letters = [row for row in copies if row["topic"].startswith(DLQ_PREFIX)]
        assert Counter((row["message_id"], row["group"]) for row in letters) == self._letters


def _moved(client: Client, group: str) -> Counter[str]:
    """How many copies of a group's messages there are to be tried again, or dead, by topic."""
    prefixes = (f"{RETRY_PREFIX}{group}%", f"{DLQ_PREFIX}{group}")
    found = (topic for prefix in prefixes for topic in client.admin.topics(prefix, system=True))
    return Counter({topic.name: topic.messages for topic in found})
