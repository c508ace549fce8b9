"""A broker that dies before, within or after the unit that moves a message: never lost, never twice. (D-14, R-09)

What a dead process leaves is a first part of what it wrote. So the journal of a whole run is cut at every kind of place
around the unit in question, and a broker is started on each piece.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import dmq
from dmq.client.client import Client, connect
from dmq.model import MessageId
from dmq.protocol import Command, decode_response
from dmq.protocol.produce import TransactionEnd, TransactionEndReply, TransactionOutcome
from dmq.settings import StoreSettings
from dmq.testing import FakeClock, MemoryFiles
from dmq.testing.clock import ClientClock
from tests.integration.broker_thread import ServedBroker
from tests.patience import PATIENCE_S, eventually

NOW = 1_700_000_000_000
QUICK_CHECKS: dict[str, Any] = {
    "transaction_first_check_seconds": 1.0,
    "transaction_check_seconds": 1.0,
    "transaction_checks_max": 1,
}


class Run:
    """A broker with a clock, and a client of it."""

    def __init__(self, files: MemoryFiles | None = None, now_ms: int = NOW, **settings: Any) -> None:
        self.clock = FakeClock(now_ms)
        self._files = files or MemoryFiles()
        self._served = ServedBroker(self._files, clock=self.clock, **settings)
        self._served.start()
        self.client: Client = connect(self._served.url, clock=ClientClock(self.clock))
        self.admin = self.client.admin

    @property
    def journal(self) -> int:
        return self._served.broker.store.queries.end

    @property
    def delays(self) -> float:
        return self.admin.stats("store_delays")["store_delays"]

    def bodies(self, topic: str = "orders") -> list[bytes]:
        return [message.body for message in self.admin.peek(topic, limit=1000)]

    def die(self) -> MemoryFiles:
        """What the process leaves when it is killed now."""
        left = self._files.copy()
        self.client.close()
        self._served.stop()
        return left


def cuts(files: MemoryFiles, before: int, after: int) -> Iterator[tuple[int, MemoryFiles]]:
    """The files with their journal cut around the range [before, after)."""
    (name,) = [path for path in files.listdir("journal") if path.endswith(".journal")]
    places = {before, before + 1, before + 71, (before + after) // 2, after - 1, after}
    for place in sorted(places):
        piece = files.copy()
        handle = piece.open(f"journal/{name}", write=True)
        handle.truncate(place)
        handle.sync()
        handle.close()
        yield place, piece


@pytest.mark.parametrize("is_topic_gone", [False, True])
def test_a_delayed_message_survives_every_death_around_its_move(is_topic_gone: bool) -> None:
    run = Run()
    run.admin.create_topic("orders", queues=1)
    run.client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(20)], delay=60.0)
    target = "orders"
    if is_topic_gone:
        run.admin.delete_topic("orders")
        target = "%DLQ%dmq"
    before = run.journal
    run.clock.advance(61.0)
    eventually(lambda: run.delays == 0)
    after = run.journal
    expected = [b"%d" % n for n in range(20)]
    for place, piece in cuts(run.die(), before, after):
        again = Run(piece, NOW + 61_000)
        eventually(partial(lambda broker: broker.delays == 0, again))
        assert again.bodies(target) == expected, f"cut at {place} of {before}-{after}"
        again.die()


@pytest.mark.parametrize("outcome", [TransactionOutcome.COMMIT, TransactionOutcome.ROLLBACK])
def test_a_transaction_survives_every_death_around_its_end(outcome: TransactionOutcome) -> None:
    run = Run()
    run.admin.create_topic("orders", queues=1)
    producer = run.client.producer(group="shop")
    tx = producer.transaction("orders", b"a")
    tx.send("orders", b"b")
    before = run.journal
    tx.commit() if outcome == TransactionOutcome.COMMIT else tx.rollback()
    after = run.journal
    assert isinstance(tx.id, MessageId)
    end = TransactionEnd(tx.id.producer_id, 0, tx.id.sequence, 2, outcome)
    expected = [b"a", b"b"] if outcome == TransactionOutcome.COMMIT else []
    for place, piece in cuts(run.die(), before, after):
        again = Run(piece)
        is_over = place >= after
        assert len(again.admin.transactions()) == (0 if is_over else 2), f"cut at {place} of {before}-{after}"
        assert again.bodies() == (expected if is_over else [])
        for _ in range(2):  # the producer that got no answer asks again
            reply: TransactionEndReply = decode_response(
                again.client._router.home.request(Command.TRANSACTION_END, end)
            )
            assert reply.refused == []
        assert again.bodies() == expected
        assert again.admin.transactions() == []
        again.die()


def test_a_transaction_that_is_given_up_is_one_dead_letter_whenever_the_broker_dies() -> None:
    run = Run(**QUICK_CHECKS)
    run.admin.create_topic("orders", queues=1)
    run.client.producer(group="shop").transaction("orders", b"lost")
    run.clock.advance(1.1)
    eventually(lambda: [t.checks for t in run.admin.transactions()] == [1])
    before = run.journal
    run.clock.advance(1.1)
    eventually(lambda: not run.admin.transactions())
    after = run.journal
    for place, piece in cuts(run.die(), before, after):
        again = Run(piece, **QUICK_CHECKS)
        deadline = time.monotonic() + PATIENCE_S
        while again.admin.transactions():
            assert time.monotonic() < deadline, "it is not given up"
            again.clock.advance(1.1)
            time.sleep(0.1)
        assert again.bodies("%DLQ%shop") == [b"lost"], f"cut at {place} of {before}-{after}"
        assert again.bodies() == []
        again.die()


def test_what_waits_outlives_retention() -> None:
    clock = FakeClock(NOW)
    small = StoreSettings(
        segment_bytes=1 << 16, unit_bytes_max=1 << 15, body_bytes_max=1 << 12, retention_bytes=1 << 17
    )
    with ServedBroker(MemoryFiles(), clock=clock, store=small) as served:
        client = connect(served.url, clock=ClientClock(clock))
        client.admin.create_topic("orders", queues=1)
        client.admin.create_topic("noise", queues=1)
        producer = client.producer(group="shop")
        delayed = producer.send("orders", b"delayed", key="d", delay=3600.0)
        tx = producer.transaction("orders", b"prepared", key="p")
        deadline = time.monotonic() + PATIENCE_S
        while client.admin.stats("store_journal_start")["store_journal_start"] < 1 << 18:
            assert time.monotonic() < deadline, "no segment went"
            producer.send_many("noise", [dmq.Message(b"n" * 1000) for _ in range(200)])
            clock.advance(11.0)
            time.sleep(0.3)
        assert [report.id for report in client.admin.delays()] == [delayed.id]
        assert [(report.id, report.group) for report in client.admin.transactions()] == [(tx.id, "shop")]
        tx.commit()
        clock.advance(3600.0)
        eventually(lambda: len(client.admin.peek("orders")) == 2)
        came = {message.id: message for message in client.admin.peek("orders")}
        assert (came[delayed.id].body, came[delayed.id].key) == (b"delayed", "d")
        assert (came[tx.id].body, came[tx.id].key) == (b"prepared", "p")
        client.close()
