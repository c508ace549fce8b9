"""The checker: what was committed, answered and handed out, and what of that must hold for ever.

It sees everything at once, as no member does. What it finds wrong it notes, and the world stops.

What it holds a shard to:
- A byte of the journal that was committed once is never another, and is there on every member in the end; but for
  bits that were turned, which are never handed out nor sent to another member.
- `committed` never goes back, neither on one member in one life, nor from one leader to the next.
- Of all that may serve at a moment there is one; epochs that serve follow each other. A machine whose clocks stood
  still is excepted: only what needs no clock holds for it.
- A message of a queue keeps its offset and its body. A producer's messages are in their order, and none is there twice.
- What was answered as replicated is committed. What is committed is on as many disks as it must be.
"""

from __future__ import annotations

from collections.abc import Callable

from dmq.storage.files import Buffer
from dmq.storage.journal.journal import Journal
from dmq.storage.store import MessageStore

__all__ = ["Checker", "journal_of"]

TOPIC = "t"
QUEUES = 2


class Checker:
    """Of one run.

    Parameters:
        copies: on how many disks everything below an offset is, right now.
        copies_min: on how many it must be when it is committed.

    Attributes:
        committed: the highest offset that anybody took for committed.
        violations: what must not have happened; the first ends the run.
    """

    def __init__(self, copies: Callable[[int], int], copies_min: int) -> None:
        self._copies = copies
        self._copies_min = copies_min
        self.violations: list[str] = []
        self.journal = bytearray()
        self.first = 0  # offset of its first byte
        self.committed = 0
        self.epoch = 0  # the highest that served
        self.server = ""
        self.begun = 0  # the highest whose start was committed
        self.queues: list[dict[int, bytes]] = [{} for _ in range(QUEUES)]
        self.next = [0] * QUEUES
        self.last_of: dict[tuple[int, bytes], int] = {}  # by queue and producer, its last sequence
        self.answered: dict[bytes, int] = {}  # first body of each batch answered as replicated, and its queue
        self._bodies: set[bytes] = set()
        self.commits = self.serves = 0
        self.turned: dict[str, set[int]] = {}  # where bits of a member's journal were turned

    def violated(self, sentence: str) -> None:
        self.violations.append(sentence)

    # --- the journal ------------------------------------------------------------------------------------------------

    def began(self, who: str, store: MessageStore) -> None:
        """A leader's epoch is committed: it has everything that was committed before.

        One that stood still meanwhile may find that its epoch is committed when a later one is, too. What it has is
        what was committed, and it may not serve, which is seen at each answer.
        """
        visible, epoch = store.queries.visible, store.queries.epoch
        is_deposed, self.begun = epoch < self.begun, max(epoch, self.begun)
        if visible < self.committed and not is_deposed:
            self.violated(
                f"{who} leads epoch {store.queries.epoch} with {visible} committed, and {self.committed} was before"
            )
            return
        self.compare(who, store, min(visible, self.committed))
        self.advanced(who, store)

    def compare(self, who: str, store: MessageStore, end: int) -> None:
        """What a leader has of what was committed must be that."""
        start = max(store.queries.start, self.first)
        self._compare(who, start, journal_of(store._journal, start, end), end)

    def _compare(self, who: str, start: int, own: Buffer, end: int) -> None:
        right = self.journal[start - self.first : end - self.first]
        if own == right:
            return
        turned = self.turned.get(who, set())
        for at, (have, wanted) in enumerate(zip(own, right, strict=False), start):
            if have != wanted and at not in turned:
                self.violated(f"{who} has other bytes than those committed at {at}")
                return
        if len(own) < len(right):
            self.violated(f"{who} has nothing at {start + len(own)}, and {end} is committed")

    def advanced(self, who: str, store: MessageStore) -> None:
        """A leader shows more."""
        visible = store.queries.visible
        if visible <= self.committed:
            return
        self.commits += 1
        if not self.journal and self.committed == 0:
            self.first = self.committed = store.queries.start
        while self.committed < visible:
            raw = bytes(store.journal_bytes(self.committed, 1 << 20))[: visible - self.committed]
            if not raw:
                self.violated(f"{who} shows up to {visible}, and its journal has nothing at {self.committed}")
                return
            self.journal += raw
            self.committed += len(raw)
        if (copies := self._copies(visible)) < self._copies_min:
            self.violated(f"{who} has {visible} committed, and that is on {copies} disks")
        if store.queries.find_topic(TOPIC) is not None:
            for queue in range(QUEUES):
                self._read(who, store, queue)

    def _read(self, who: str, store: MessageStore, queue: int) -> None:
        first, end = store.queries.bounds(TOPIC, queue)
        if first > self.next[queue] or end < self.next[queue]:
            self.violated(f"{who} shows queue {queue} from {first} to {end}, and {self.next[queue]} is to come")
            return
        while self.next[queue] < end:
            found = store.queries.read(TOPIC, queue, self.next[queue], max_messages=1000)
            bodies = [bytes(record.body) for record in found.records()]
            if not bodies:
                self.violated(f"{who} shows nothing of queue {queue} at {self.next[queue]}")
                return
            for body in bodies:
                self._message(queue, self.next[queue], body)
                self.next[queue] += 1

    def _message(self, queue: int, offset: int, body: bytes) -> None:
        producer, number = body.split(b" ", 2)[:2]
        key, sequence = (queue, producer), int(number)
        if body in self._bodies:
            self.violated(f"message {body[:20]!r} is in queue {queue} twice, at last at {offset}")
        elif sequence <= self.last_of.get(key, -1):
            self.violated(f"message {body[:20]!r} of queue {queue} comes after {self.last_of[key]}")
        self._bodies.add(body)
        self.last_of[key] = sequence
        self.queues[queue][offset] = body

    # --- serving ----------------------------------------------------------------------------------------------------

    def served(self, who: str, epoch: int, *, is_excepted: bool) -> None:
        """Somebody handed something out, or answered without waiting for others."""
        self.serves += 1
        if epoch < self.epoch and not is_excepted:
            self.violated(f"{who} serves in epoch {epoch} after {self.server} did in epoch {self.epoch}")
        elif epoch == self.epoch and who != self.server:
            self.violated(f"{who} and {self.server} both serve in epoch {epoch}")
        if epoch > self.epoch:
            self.epoch, self.server = epoch, who

    def handed_out(self, who: str, queue: int, offset: int, body: bytes) -> None:
        if self.queues[queue].get(offset) != body:
            self.violated(
                f"{who} hands out {body[:20]!r} at {offset} of queue {queue}, where "
                f"{self.queues[queue].get(offset, b'nothing')[:20]!r} is committed"
            )

    def confirmed(self, who: str, queue: int, body: bytes) -> None:
        """A producer was told that its batch is replicated."""
        if body not in self._bodies:
            self.violated(f"{who} answered {body[:20]!r}, which is not committed")
        self.answered[body] = queue

    # --- in the end ---------------------------------------------------------------------------------------------------

    def member_has(self, who: str, start: int, journal: bytes) -> None:
        """The whole journal of a member, when all is quiet."""
        if start + len(journal) < self.committed:
            self.violated(f"{who} ends at {start + len(journal)}, and {self.committed} is committed")
            return
        low = max(start, self.first)
        self._compare(who, low, journal[low - start : self.committed - start], self.committed)


def journal_of(journal: Journal, start: int, end: int) -> bytes:
    """The bytes of a journal as they are, sound or not."""
    raw = bytearray()
    while start + len(raw) < end and (piece := journal.read_available(start + len(raw), end - start - len(raw))):
        raw += piece
    return bytes(raw)
