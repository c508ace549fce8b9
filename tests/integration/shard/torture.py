"""Torture: a shard of real processes, by default on ZooKeeper, with wires in between, under load, and its checks.

What must hold at the end: everything acknowledged is there, once and in order (`Ledger`); never two served at once
(`Witness`); no delayed message came before it was due, and each came (`DelayLoad`); journals are equal byte for byte.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import dmq
from dmq.errors import RegistryDown, WriteUnknown
from tests.fault.broker.torture import GROUPS, QUEUES, TOPIC, Ledger, Workload
from tests.integration.registry.zookeeper_registries import close_session
from tests.integration.shard.processes import SETTINGS, ShardProcesses
from tests.integration.shard.wires import CLIENT, REGISTRY, Way, Wires
from tests.integration.shard.witness import Witness
from tests.patience import eventually
from tests.sampling import IS_SOAK, SEED
from tests.zookeepers import ZooKeeperProcess

PATIENCE = 120.0
PROBES = "probes"
DELAYS = "delays"
# A consumer that is cut off comes back in time: it counts as no attempt.
TORTURED = (*SETTINGS, "shard.lag_seconds=1.5", "broker.grace_seconds=20")
_EARLY_SECONDS = 0.05  # of clocks that are read at two places
_GRANTED = struct.Struct(">iiiqi")  # length, protocol, milliseconds, session, length of the password


class Sender(threading.Thread):
    """Sends numbers one after the other until told to stop.

    Attributes:
        answered: those that were.
        errors: of sends.
        slowest: the longest that a send took, in seconds.
        began_at: when the last one that was answered was sent.
    """

    def __init__(self, url: str, topic: str) -> None:
        super().__init__(name="sender")
        self._url = url
        self._topic = topic
        self._is_over = threading.Event()
        self.answered: list[int] = []
        self.errors: list[str] = []
        self.slowest = 0.0
        self.began_at = float("-inf")

    def run(self) -> None:
        with dmq.connect(self._url, app="sender", timeout=PATIENCE) as client, client.producer() as producer:
            number = 0
            while not self._is_over.is_set():
                began = time.monotonic()
                try:
                    producer.send(self._topic, b"%d" % number, timeout=PATIENCE)
                    self.answered.append(number)
                    self.began_at = began
                except dmq.DMQError as error:
                    self.errors.append(f"{number}: {error!r}")
                self.slowest = max(self.slowest, time.monotonic() - began)
                number += 1
                time.sleep(0.01)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


class DelayLoad:
    """Sends messages with delays, and notes when they come.

    Attributes:
        skew_seconds: by how much the clock of a leader may have been ahead.
    """

    def __init__(self, url: str, rng: random.Random) -> None:
        self.skew_seconds = 0.0
        self._url = url
        self._rng = rng
        self._is_over, self._is_drained = threading.Event(), threading.Event()
        self._due: dict[int, float] = {}  # of those that were acknowledged
        self._asked: dict[int, float] = {}
        self._early: list[str] = []
        self._came: set[int] = set()
        self._threads = [threading.Thread(target=work) for work in (self._send, self._take)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        with dmq.connect(self._url, app="delays", timeout=PATIENCE) as client, client.producer(timeout=30) as producer:
            number = 0
            while not self._is_over.wait(0.05):
                delay = self._rng.uniform(0.2, 4.0)
                self._asked[number] = due = time.time() + delay
                try:
                    producer.send(DELAYS, b"%d" % number, delay=delay)
                    self._due[number] = due
                except dmq.DMQError:
                    pass  # it may come all the same
                number += 1

    def _take(self) -> None:
        with dmq.connect(self._url, app="due", timeout=PATIENCE) as client, client.consumer(DELAYS, "due") as consumer:
            while not self._is_drained.is_set():
                try:
                    batch = consumer.pull(100, wait=0.5)
                except dmq.DMQError:
                    continue
                now = time.time()
                for message in batch:
                    number = int(message.body)
                    self._came.add(number)
                    early = self._asked[number] - now
                    if early > self.skew_seconds + _EARLY_SECONDS:
                        self._early.append(f"message {number} came {early:.2f} s before it was due")
                batch.ack()

    def stop(self) -> None:
        """Send no more."""
        self._is_over.set()
        self._threads[0].join()

    def close(self) -> None:
        self._is_over.set()
        self._is_drained.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> str:
        """Each came, and none too early; call it before `close`."""
        deadline = time.monotonic() + PATIENCE
        while missing := self._due.keys() - self._came:
            assert time.monotonic() < deadline, f"{len(missing)} delayed messages never came: {sorted(missing)[:5]}"
            time.sleep(0.1)
        assert not self._early, self._early[:5]
        return f"{len(self._due)} delayed messages, none early"


def _makes_topics(client: dmq.Client) -> bool:
    """Whether topics and groups are there; a registry of a busy machine may be away for a moment."""
    try:
        for topic, queues in ((TOPIC, QUEUES), (PROBES, 1), (DELAYS, 1)):
            client.admin.create_topic(topic, queues=queues, allow_existing=True)
        for group, topic in (("due", DELAYS), ("all", PROBES), *((group, TOPIC) for group in GROUPS)):
            client.admin.create_group(group, topic)
    except (RegistryDown, WriteUnknown):
        return False
    return True


class Torture:
    """One shard of three.

    Parameters:
        is_loaded: every kind of producer and consumer works meanwhile, or one of each.

    Attributes:
        is_wired: what members say goes over wires, which can be cut.
    """

    is_wired = True

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        session_seconds: float = 2.0,
        settings: tuple[str, ...] = TORTURED,
        is_loaded: bool = IS_SOAK,
    ) -> None:
        self.rng = random.Random(f"{SEED} {name}")
        self.name = name
        self.session_seconds = session_seconds
        self._folder = folder
        self._settings = settings
        self._opened = ExitStack()
        self.ledger = Ledger()
        self._is_loaded = is_loaded
        self.breaks = 0
        self.seconds: list[float] = []  # from each loss of a leader until a message was stored again

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            registry, registry_port = self.open_registry(opened)
            self.wires = opened.enter_context(Wires(self._folder))
            self.shard = opened.enter_context(
                ShardProcesses(
                    self._folder,
                    settings=self._settings,
                    registry=registry,
                    registry_port=registry_port,
                    wires=self.wires if self.is_wired else None,
                )
            )
            with dmq.connect(self.shard.url, app="checker", timeout=PATIENCE) as checker:
                eventually(lambda: _makes_topics(checker), look_seconds=0.5)
            logs = [folder.with_suffix(".log") for folder in self.shard.folders]
            self.witness = Witness(self.shard.members, logs)
            opened.callback(self.witness.close)
            self.delays = DelayLoad(self.shard.url, random.Random(self.rng.random()))
            opened.callback(self.delays.close)
            self.sender = Sender(self.shard.url, PROBES)
            opened.callback(self.sender.stop)
            self.sender.start()
            self.workload = Workload(self.ledger, [self.shard.url], self.rng, least="replicated")
            opened.callback(self.workload.close)
            if self._is_loaded:
                self.workload.start()
            self._opened = opened.pop_all()
        return self

    def open_registry(self, opened: ExitStack) -> tuple[str, int]:
        """Start the registry: its URL, with {} for the address that a wire has, and its port."""
        self.zookeeper = opened.enter_context(ZooKeeperProcess())
        return f"zk://{{}}/dmq?session={self.session_seconds:g}s", self.zookeeper.port

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"DMQ_SEED={SEED}, {self.name}: {self.ledger.report(self.breaks, self.breaks)}")
        self._opened.__exit__(kind, error, trace)

    def finish(self) -> str:
        """Stop the load, and check everything; says what was seen."""
        self.go_on()
        self.delays.stop()
        self.sender.stop()
        self.workload.stop_producing(PATIENCE)
        epoch = self.epoch()
        with dmq.connect(self.shard.url, app="checker", timeout=PATIENCE) as checker:
            if self._is_loaded:
                self.workload.drain(checker, PATIENCE)
            self._check_sent(checker)
        delayed = self.delays.check()
        self.delays.close()
        self.workload.close()
        self.witness.close()
        self.go_on()
        if self._is_loaded:
            self.ledger.check(2 * self.breaks + epoch)  # once when it parts, once when it is mended
        size = self.shard.check_equal()
        seconds = sorted(self.seconds)
        said = f"served again after {', '.join(f'{one:.1f}' for one in seconds)} s; " if seconds else ""
        found = f"{said}{self.witness.check()}; {delayed}; {size} bytes equal"
        return f"DMQ_SEED={SEED}: {self.name}: {found}; {self.ledger.report(len(seconds), self.breaks)}"

    def _check_sent(self, client: dmq.Client) -> None:
        """What one producer had answered is there, each once and in order."""
        found: list[int] = []
        with client.consumer(PROBES, "all") as consumer:
            while len(found) < len(self.sender.answered):
                batch = consumer.pull(wait=PATIENCE)
                assert len(batch), "a message is lost"
                found += [int(message.body) for message in batch]
                batch.ack()
        missing = {*self.sender.answered} - {*found}
        assert not missing, f"acknowledged, and lost: {sorted(missing)[:5]}"
        assert found == sorted({*found}), "not each once, in order"

    # --- steps ------------------------------------------------------------------------------------------------------

    def expire(self, number: int) -> None:
        """End the session of a member from outside: its number and password passed the wire."""
        said = self.wires.head((REGISTRY, f"b{number}"))
        _, _, _, session, length = _GRANTED.unpack_from(said)
        close_session(self.zookeeper.address, session, said[_GRANTED.size : _GRANTED.size + length])

    def go_on(self) -> None:
        """No thread of the load has failed."""
        assert not self.workload.problems, self.workload.problems

    def epoch(self) -> int:
        return self.shard.until_whole().epoch

    def until_told(self, number: int, sentence: str) -> None:
        """A member says so in its log."""
        log = self.shard.folders[number].with_suffix(".log")
        eventually(lambda: sentence in log.read_text())

    def hand_over(self, number: int) -> None:
        """Let a member lead, as an operator does."""
        with dmq.connect(self.shard.url, app="checker", timeout=PATIENCE) as client:
            client.admin.hand_over(to=f"b{number}")

    def others(self, number: int) -> list[int]:
        return [one for one in range(len(self.shard.members)) if one != number]

    def until_served(self, began: float | None = None) -> None:
        """A message is stored that is sent from now on; how long that took is noted if it is said when it began."""
        asked_at = time.monotonic()
        eventually(lambda: self.sender.began_at > asked_at, "nobody serves")
        if began is not None:
            self.seconds.append(time.monotonic() - began)

    def until_led_by_another(self, number: int) -> None:
        """As the others see it: one that is cut off does not know."""
        self.shard.until(
            lambda found: found.leader not in ("", None, f"b{number}"),
            f"nobody leads in the place of b{number}",
            but=number,
        )

    def mended(self) -> None:
        """All is well again, with all members in sync."""
        self.breaks += 1
        self.wires.mend(reset=self.rng.random() < 0.3)
        self.shard.until_whole()
        self.until_served()
        self.go_on()


def between(one: str, other: str) -> list[Way]:
    return [(one, other), (other, one)]


__all__ = ["CLIENT", "PATIENCE", "PROBES", "REGISTRY", "DelayLoad", "Sender", "Torture", "between"]
