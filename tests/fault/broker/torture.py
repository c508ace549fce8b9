"""Producers and consumers of every kind, a ledger of what they saw, and the checks on it.

A message says which stream it belongs to and which number it has there; its content follows from both. So the
consumer can tell whether a message is whole, and whether it was ever sent.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import dmq
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.producer.future import SendFuture
from dmq.model import DurabilityName

TOPIC = "torture"
QUEUES = 4
GROUPS = ("push", "pull", "ordered", "slow", "picky")
PREFETCH = 200
PULL = 100
MEMBERS = 2

Name = tuple[str, int]


def content(stream: str, number: int) -> bytes:
    """The one body that this message can have."""
    seed = hashlib.blake2b(f"{stream} {number}".encode(), digest_size=16).hexdigest()
    return f"{stream} {number} ".encode() + (seed * (1 + number % 9)).encode()


def name_of(body: bytes) -> Name:
    stream, number, _ = body.split(b" ", 2)
    return stream.decode(), int(number)


class Seen(NamedTuple):
    """One call of a handler."""

    name: Name
    is_whole: bool
    queue: int
    offset: int
    id: dmq.MessageId | None
    attempt: int


class Ledger:
    """What was sent, what was acknowledged, what came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()  # by stream: how many were handed to a producer, from 0 on
        self.acked: dict[Name, dmq.Receipt] = {}
        self.seen: dict[str, list[Seen]] = {group: [] for group in GROUPS}
        self.known: dict[str, set[Name]] = {group: set() for group in GROUPS}  # the names of what each has seen
        self.nacked: Counter[Name] = Counter()
        self.refused: Counter[str] = Counter()

    def next(self, stream: str) -> tuple[Name, bytes]:
        with self._lock:
            number = self.sent[stream]
            self.sent[stream] += 1
        return (stream, number), content(stream, number)

    def note(self, group: str, message: ReceivedMessage) -> Seen:
        """A consumer got it."""
        body = message.body
        name = name_of(body)
        seen = Seen(name, body == content(*name), message.queue, message.offset, message.id, message.attempt)
        with self._lock:
            self.seen[group].append(seen)
            self.known[group].add(name)
        return seen

    def refuse(self, error: dmq.DMQError) -> None:
        with self._lock:
            self.refused[type(error).__name__] += 1

    # --- checks -----------------------------------------------------------------------------------------------------

    def check(self, breaks: int) -> None:
        """Everything that was promised; `breaks` is how often connections broke."""
        self._check_amount()
        for group, all_seen in self.seen.items():
            self._check_content(group, all_seen)
            missing = set(self.acked) - self.known[group]
            assert not missing, f"{len(missing)} acknowledged messages never came to {group}: {sorted(missing)[:5]}"
            most = breaks * MEMBERS * (PULL if group == "pull" else PREFETCH)
            assert self.duplicates(group) <= most, f"{group} got {self.duplicates(group)} twice, more than {most}"
        self._check_places()
        self._check_order()
        self._check_attempts()

    def _check_amount(self) -> None:
        """Every way of sending got through, and mostly; else nothing that holds says much."""
        through = {name[0] for name in self.acked} | {name[0] for name in self.known["push"]}
        assert not self.sent.keys() - through, f"nothing of these got through: {self.sent.keys() - through}"
        assert len(self.acked) > sum(self.sent.values()) / 2, "most sends failed"
        assert self.nacked, "nothing was nacked"

    def _check_content(self, group: str, all_seen: Iterable[Seen]) -> None:
        broken = [seen for seen in all_seen if not seen.is_whole]
        assert not broken, f"content changed on the way to {group}: {broken[:3]}"
        phantoms = [seen for seen in all_seen if seen.name[1] >= self.sent[seen.name[0]]]
        assert not phantoms, f"{group} got what nobody sent: {phantoms[:3]}"

    def _check_places(self) -> None:
        """A message has one id and one place, the same for every group and in its receipt; a place has one message."""
        ids: dict[Name, object] = {name: receipt.id for name, receipt in self.acked.items()}
        places = {name: (receipt.queue, receipt.offset) for name, receipt in self.acked.items()}
        for all_seen in self.seen.values():
            for seen in all_seen:
                assert ids.setdefault(seen.name, seen.id) == seen.id, f"the id of {seen} changed"
                place = (seen.queue, seen.offset)
                assert places.setdefault(seen.name, place) == place, f"{seen} is stored twice, also at another place"
        assert len(set(places.values())) == len(places), "two messages share a place"
        assert len(set(ids.values())) == len(ids), "two messages share an id"

    def _check_order(self) -> None:
        """Within a queue, a stream keeps its order, as stored and as an ordered group gets it."""
        by_offset = sorted({(s.queue, s.offset, *s.name) for all_seen in self.seen.values() for s in all_seen})
        self._rising("stored", ((queue, stream, number) for queue, _, stream, number in by_offset))
        first = self._first_seen("ordered")
        self._rising("ordered", ((seen.queue, seen.name[0], seen.name[1]) for seen in first))
        offsets: dict[int, int] = defaultdict(lambda: -1)
        for seen in first:
            assert seen.offset > offsets[seen.queue], f"the ordered group got {seen} after {offsets[seen.queue]}"
            offsets[seen.queue] = seen.offset

    def _first_seen(self, group: str) -> list[Seen]:
        """What a group got, each message where it came first: what comes again may come behind later ones."""
        found: dict[Name, Seen] = {}
        for seen in self.seen[group]:
            found.setdefault(seen.name, seen)
        return [*found.values()]

    @staticmethod
    def _rising(what: str, numbers: Iterable[tuple[int, str, int]]) -> None:
        last: dict[tuple[int, str], int] = {}
        for queue, stream, number in numbers:
            before = last.get((queue, stream), -1)
            assert number > before, f"{what}: {stream} {number} stands behind {before} in queue {queue}"
            last[queue, stream] = number

    def _check_attempts(self) -> None:
        """A restart, a cut or a stop of the broker is not an attempt: only what was nacked comes with a higher one."""
        for group, all_seen in self.seen.items():
            for seen in all_seen:
                most = 1 + (self.nacked[seen.name] if group == "picky" else 0)
                assert seen.attempt <= most, f"{group}: attempt {seen.attempt} of {seen}, nacked {most - 1} times"

    def duplicates(self, group: str) -> int:
        """Calls of a handler for a message that it had had before, other than because it was nacked."""
        twice = len(self.seen[group]) - len(self.known[group])
        return twice - (sum(self.nacked.values()) if group == "picky" else 0)

    def report(self, kills: int, breaks: int) -> str:
        twice = {group: self.duplicates(group) for group in GROUPS}
        return (
            f"{sum(self.sent.values())} sent, {len(self.acked)} acknowledged, {dict(self.refused)} refused; "
            f"{sum(map(len, self.seen.values()))} deliveries to {len(GROUPS)} groups; {kills} kills, {breaks} breaks; "
            f"delivered twice: {twice}, {sum(twice.values()) / len(GROUPS) / max(1, kills):.1f} a kill and group"
        )


class Workload:
    """Threads that produce and consume until told to stop.

    Parameters:
        urls: where clients connect, in turn: directly, and through a proxy.
        straight: whether lone sends take the straight path.
        least: the durability of sends that ask for less than `flushed`, and are held to be kept all the same.
    """

    def __init__(
        self,
        ledger: Ledger,
        urls: list[str],
        rng: random.Random,
        *,
        straight: bool = True,
        least: DurabilityName = "stored",
    ) -> None:
        self.ledger = ledger
        self._least = least
        self._straight = straight
        self._rng = rng
        self._urls = urls
        self._clients: list[dmq.Client] = []
        self._producing: list[threading.Thread] = []
        self._consuming: list[threading.Thread] = []
        self._is_over = threading.Event()  # no more sends
        self._is_drained = threading.Event()  # no more consuming
        self.problems: list[BaseException] = []

    def _client(self, app: str) -> dmq.Client:
        client = dmq.connect(self._urls[len(self._clients) % len(self._urls)], app=app)
        self._clients.append(client)
        return client

    def _thread(self, threads: list[threading.Thread], function: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self.problems.append(error)

        thread = threading.Thread(target=run, name=f"{function.__name__} {arguments[-1]}")
        threads.append(thread)
        thread.start()

    def start(self) -> None:
        least = self._least
        sends: list[tuple[Callable[..., None], str]] = [
            (self._send_ordered, "flushed"), (self._send_ordered, least), (self._send_alone, least),
            (self._send_async, "flushed"), (self._send_async, least), (self._send_many, "flushed"),
            (self._send_many, least), (self._send_and_forget, "none"), (self._send_until_consumed, "consumed"),
        ]  # fmt: skip
        for number, (function, durability) in enumerate(sends):
            producer = self._client(f"producer-{number}").producer(timeout=30, straight=self._straight)
            chance = random.Random(self._rng.random())
            name = f"{function.__name__.strip('_')}-{number}"
            self._thread(self._producing, function, producer, durability, chance, name)
        consumers: list[tuple[Callable[..., None], str]] = [
            (self._run, "push"), (self._run, "picky"), (self._run, "ordered"), (self._pull, "pull"),
            (self._iterate, "slow"),
        ]  # fmt: skip
        for function, group in consumers:
            for _ in range(MEMBERS):
                client = self._client(group)
                consumer = client.consumer(TOPIC, group, ordered=group == "ordered", prefetch=PREFETCH, lease=60)
                self._thread(self._consuming, function, consumer, group)

    # --- producing --------------------------------------------------------------------------------------------------

    def _send_ordered(
        self, producer: dmq.Producer, durability: DurabilityName, chance: random.Random, name: str
    ) -> None:
        while not self._is_over.is_set():
            business_id = f"{name}-{chance.randrange(6)}"
            key, body = self.ledger.next(business_id)
            try:
                self.ledger.acked[key] = producer.send(
                    TOPIC, body, business_id=business_id, ordered=True, durability=durability
                )
            except dmq.DMQError as error:
                self.ledger.refuse(error)
            self._is_over.wait(chance.uniform(0, 0.01))

    def _send_alone(self, producer: dmq.Producer, durability: DurabilityName, chance: random.Random, name: str) -> None:
        while not self._is_over.is_set():
            key, body = self.ledger.next(name)
            try:
                self.ledger.acked[key] = producer.send(TOPIC, body, key=str(key[1]), durability=durability)
            except dmq.DMQError as error:
                self.ledger.refuse(error)
            self._is_over.wait(chance.uniform(0, 0.01))

    def _send_and_forget(
        self, producer: dmq.Producer, durability: DurabilityName, chance: random.Random, name: str
    ) -> None:
        """Nothing is promised of these but their order and their content."""
        while not self._is_over.is_set():
            _, body = self.ledger.next(name)
            try:
                producer.send(TOPIC, body, durability=durability)
            except dmq.DMQError as error:
                self.ledger.refuse(error)
            self._is_over.wait(chance.uniform(0, 0.02))

    def _send_until_consumed(
        self, producer: dmq.Producer, durability: DurabilityName, chance: random.Random, name: str
    ) -> None:
        while not self._is_over.is_set():
            key, body = self.ledger.next(name)
            try:
                self.ledger.acked[key] = producer.send(TOPIC, body, durability=durability, consumed_by="push")
            except dmq.DMQError as error:
                self.ledger.refuse(error)
            else:
                assert key in self.ledger.known["push"], f"{key} was acknowledged as consumed, and nobody had it"
            self._is_over.wait(chance.uniform(0, 0.02))

    def _send_async(self, producer: dmq.Producer, durability: DurabilityName, chance: random.Random, name: str) -> None:
        futures: list[tuple[Name, SendFuture]] = []
        while not self._is_over.is_set():
            for _ in range(chance.randrange(1, 20)):
                key, body = self.ledger.next(name)
                futures.append((key, producer.send_async(TOPIC, body, durability=durability)))
            self._is_over.wait(chance.uniform(0, 0.1))
        for key, future in futures:
            try:
                self.ledger.acked[key] = future.result(60)
            except dmq.DMQError as error:
                self.ledger.refuse(error)

    def _send_many(self, producer: dmq.Producer, durability: DurabilityName, chance: random.Random, name: str) -> None:
        while not self._is_over.is_set():
            pairs = [self.ledger.next(name) for _ in range(chance.randrange(1, 60))]
            messages = [dmq.Message(body, tag="many") for _, body in pairs]
            try:
                receipts = producer.send_many(TOPIC, messages, durability=durability)
            except dmq.DMQError as error:
                self.ledger.refuse(error)
            else:
                self.ledger.acked.update((key, receipt) for (key, _), receipt in zip(pairs, receipts, strict=True))
            self._is_over.wait(chance.uniform(0, 0.2))

    # --- consuming --------------------------------------------------------------------------------------------------

    def _run(self, consumer: dmq.Consumer, group: str) -> None:
        def handle(message: ReceivedMessage) -> None:
            seen = self.ledger.note(group, message)
            if group == "picky" and seen.name[1] % 50 == 7 and not self.ledger.nacked[seen.name]:
                self.ledger.nacked[seen.name] += 1
                raise dmq.Retry(after=0.05)

        consumer.run(handle, workers=2)

    def _pull(self, consumer: dmq.Consumer, group: str) -> None:
        while not self._is_drained.is_set():
            try:
                batch = consumer.pull(PULL, wait=1)
            except dmq.DMQError as error:
                if not error.retriable and not isinstance(error, dmq.NotConnected | dmq.TimedOut):
                    raise
                self._is_drained.wait(0.05)
                continue
            for message in batch:
                self.ledger.note(group, message)
            batch.ack()

    def _iterate(self, consumer: dmq.Consumer, group: str) -> None:
        for message in consumer:
            self.ledger.note(group, message)
            if not self._is_over.is_set():
                time.sleep(0.002)
            message.ack()

    # --- ending -----------------------------------------------------------------------------------------------------

    def stop_producing(self, seconds: float) -> None:
        """Send no more, and wait until everything sent is settled."""
        self._is_over.set()
        self._join(self._producing, seconds)

    def drain(self, admin: dmq.Client, seconds: float) -> None:
        """Wait until every group has everything."""
        deadline = time.monotonic() + seconds
        while left := {group: lag for group in GROUPS if (lag := admin.admin.lag(TOPIC, group).total)}:
            assert not self.problems, self.problems
            assert time.monotonic() < deadline, f"consumers are stuck: {left}"
            time.sleep(0.05)

    def close(self) -> None:
        self._is_over.set()
        self._is_drained.set()
        for client in self._clients:
            client.close()
        self._join([*self._producing, *self._consuming], 60)

    @staticmethod
    def _join(threads: list[threading.Thread], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        assert not stuck, f"these do not end: {stuck}"
