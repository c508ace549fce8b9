"""Dead letters when something dies: the broker between two steps, or the database (D-16)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import dmq
from dmq.client.client import Client
from dmq.deadletters.letter import DeadLetter
from dmq.deadletters.store import DeadLetterStore, Refused
from dmq.settings import StoreSettings
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles, TestBroker
from tests.integration.broker_thread import ServedBroker
from tests.integration.dead_letters.letters import consumed, drained, rejected
from tests.patience import eventually


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect(app="shop", client_id="me")
    client.admin.create_topic("orders", queues=1)
    return client


def waiting(client: Client) -> int:
    return int(client.admin.stats("broker_")["broker_dead_letters_waiting"])


class Database:
    """A database that fails when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down: set[str] = set()
        self.calls: list[str] = []
        for name in ("open", "put", "page", "claim", "mark_resent", "release", "claims", "delete"):
            monkeypatch.setattr(DeadLetterStore, name, self._wrapped(name, getattr(DeadLetterStore, name)))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(store: DeadLetterStore, *arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if name in self.down or "all" in self.down:
                raise dmq.DatabaseDown("the database is down: this test says so")
            return real(store, *arguments, **options)

        return call


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    return Database(monkeypatch)


def test_a_broker_that_dies_between_putting_and_settling_makes_no_second_row(
    broker: TestBroker, client: Client, monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    """D-16."""
    served = broker._server
    assert served is not None
    monkeypatch.setattr(served.broker.writer, "write_soon", lambda events: None)
    rejected(client, 5)
    drained(client, 5)
    assert waiting(client) == 5, "put, and not settled"
    broker.kill()
    puts = database.calls.count("put")
    broker.start()
    fresh = broker.connect()
    eventually(lambda: waiting(fresh) == 0)
    assert database.calls.count("put") > puts
    assert len(fresh.admin.dead_letters(state="")) == 5


def test_a_database_that_is_down_delays_dead_letters_and_nothing_else(
    broker: TestBroker, client: Client, database: Database
) -> None:
    """D-16."""
    database.down.add("all")
    rejected(client, 5)
    eventually(lambda: client.admin.stats("broker_")["broker_dead_letters_database_down"] == 1)
    assert waiting(client) == 5
    with pytest.raises(dmq.DatabaseDown, match="the database is down"):
        client.admin.dead_letters()
    with pytest.raises(dmq.DatabaseDown):
        client.admin.resend_dead_letters([1])
    client.producer().send("orders", b"as ever")
    assert consumed(client, 1) == [("as ever", 1)]
    broker.restart()
    fresh = broker.connect()
    eventually(lambda: fresh.admin.stats("broker_")["broker_dead_letters_database_down"] == 1)
    database.down.clear()
    drained(fresh, 5)
    eventually(lambda: waiting(fresh) == 0)
    assert fresh.admin.stats("broker_")["broker_dead_letters_database_down"] == 0


def test_a_letter_that_was_sent_and_not_marked_is_marked_when_the_database_is_back(
    client: Client, database: Database
) -> None:
    """D-16."""
    rejected(client, 3)
    letters = drained(client, 3)
    database.down.update(("mark_resent", "release", "claims"))
    with pytest.raises(dmq.DatabaseDown):
        client.admin.resend_dead_letters(letters)
    assert {letter.state for letter in client.admin.dead_letters(state="")} == {"waiting"}
    assert len(consumed(client, 3)) == 3
    database.down.clear()
    outcomes = client.admin.resend_dead_letters(letters)
    assert [outcome.ok or "does not wait" in str(outcome.error) for outcome in outcomes] == [True] * 3
    eventually(lambda: len(client.admin.dead_letters(state="resent")) == 3)
    assert consumed(client, 0) == [], "none came twice"


def test_a_broker_that_dies_between_sending_and_marking_marks_it_afterwards(
    broker: TestBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-16."""
    rejected(client, 4)
    letters = drained(client, 4)
    sent, go_on = threading.Event(), threading.Event()
    real = DeadLetterStore.mark_resent

    def dies(store: DeadLetterStore, *arguments: Any) -> None:
        sent.set()
        go_on.wait(30.0)
        raise dmq.DatabaseDown("it died")

    monkeypatch.setattr(DeadLetterStore, "mark_resent", dies)
    asking = threading.Thread(target=lambda: _ignore(lambda: client.admin.resend_dead_letters(letters[:3])))
    asking.start()
    assert sent.wait(30.0)
    monkeypatch.setattr(DeadLetterStore, "mark_resent", real)
    ending = threading.Thread(target=broker.kill)
    ending.start()
    go_on.set()
    ending.join()
    broker.start()
    fresh = broker.connect()
    eventually(lambda: len(fresh.admin.dead_letters(state="resent")) == 3)
    assert {letter.changed_by for letter in fresh.admin.dead_letters(state="resent")} == {"shop/me"}
    assert sorted(body for body, _ in consumed(fresh, 3)) == ["m0", "m1", "m2"]
    assert [letter.number for letter in fresh.admin.dead_letters()] == [letters[3].number]
    client.close()
    asking.join()


def _ignore(call: Any) -> None:
    try:
        call()
    except dmq.DMQError:
        pass


def test_a_broker_that_dies_between_claiming_and_sending_leaves_it_waiting(
    broker: TestBroker, client: Client, monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    """D-16."""
    rejected(client, 2)
    letters = drained(client, 2)
    served = broker._server
    assert served is not None

    async def fails(letter: DeadLetter) -> None:
        raise dmq.DiskFull("no space left")

    monkeypatch.setattr(served.broker.dead_letters.resend, "_send", fails)
    database.down.update(("release", "claims"))
    with pytest.raises(dmq.DatabaseDown):
        client.admin.resend_dead_letters(letters)
    database.down.clear()
    broker.restart()
    fresh = broker.connect()
    eventually(lambda: all(outcome.ok for outcome in fresh.admin.resend_dead_letters(letters)))
    assert len(consumed(fresh, 2)) == 2


def test_a_letter_that_the_database_refuses_stays_in_the_journal_and_blocks_no_other(
    broker: TestBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-16."""
    real = DeadLetterStore.put

    def put(store: DeadLetterStore, letters: Sequence[DeadLetter]) -> list[Refused]:
        bad = [index for index, letter in enumerate(letters) if letter.body in (b"m1", b"m3")]
        real(store, [letter for index, letter in enumerate(letters) if index not in bad])
        return [Refused(index, "too large for its column") for index in bad]

    monkeypatch.setattr(DeadLetterStore, "put", put)
    rejected(client, 5)
    found = drained(client, 3)
    assert [letter.body for letter in found] == [b"m0", b"m2", b"m4"]
    eventually(lambda: client.admin.stats("broker_")["broker_dead_letters_refused"] == 2)
    assert waiting(client) == 2
    rejected(client, 1, prefix="later")
    drained(client, 4)
    broker.restart()
    fresh = broker.connect()
    eventually(lambda: fresh.admin.stats("broker_")["broker_dead_letters_refused"] == 2)
    monkeypatch.setattr(DeadLetterStore, "put", real)
    broker.restart()
    assert len(drained(broker.connect(), 6)) == 6


def test_retention_drops_no_letter_that_is_not_in_the_database(database: Database) -> None:
    """D-16."""
    database.down.add("all")
    small = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=32 << 10, body_bytes_max=8 << 10, retention_bytes=1)
    with ServedBroker(MemoryFiles(), store=small) as served, dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        client.admin.create_topic("others", queues=1)
        rejected(client, 5)
        producer = client.producer(compression="none")
        for _ in range(40):
            producer.send_many("others", [dmq.Message(bytes(1000))] * 10)
        dropped: list[int] = []
        served.loop.call_soon_threadsafe(lambda: dropped.append(served.broker.store.retain()))
        eventually(lambda: dropped)
        assert dropped[0] >= 3
        assert waiting(client) == 5
        database.down.clear()
        assert sorted(letter.body for letter in drained(client, 5)) == [b"m0", b"m1", b"m2", b"m3", b"m4"]
        assert {letter.reason for letter in client.admin.dead_letters()} == {"REJECTED"}
        assert client.admin.resend_dead_letters(group="billing")[0].ok


def topic_of(item: Any) -> str:
    """Of a batch, or of a lone message, which is a tuple; events have none."""
    return item[0] if isinstance(item, tuple) else getattr(item, "topic", "")


def test_a_message_that_cannot_be_stored_becomes_a_dead_letter_if_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D-16."""
    is_full = threading.Event()
    for name in ("append", "append_each", "append_lone"):
        real = getattr(MessageStore, name)

        def failing(store: MessageStore, *arguments: Any, real: Any = real, **options: Any) -> Any:
            if is_full.is_set() and any(topic_of(item) == "orders" for item in arguments[0]):
                raise dmq.DiskFull("no space left to write")
            return real(store, *arguments, **options)

        monkeypatch.setattr(MessageStore, name, failing)
    with (
        ServedBroker(MemoryFiles(), dead_letter_store_failures=True) as served,
        dmq.connect(served.url, app="shop") as client,
    ):
        client.admin.create_topic("orders", queues=1)
        producer = client.producer(retries=0)
        is_full.set()
        with pytest.raises(dmq.DeadLettered, match="do not send them again") as caught:
            producer.send("orders", b"x" * 500, key="k", properties={"a": "b"})
        assert caught.value.detail["reason"] == "STORE_FAILED"
        (letter,) = client.admin.dead_letters()
        assert (letter.reason, letter.group, letter.queue, letter.offset) == ("STORE_FAILED", "", None, None)
        assert (letter.body, letter.key, letter.properties) == (b"x" * 500, "k", {"a": "b"})
        assert "no space left" in letter.last_error
        is_full.clear()
        assert client.admin.resend_dead_letters([letter])[0].ok
        (stored,) = client.admin.find("orders", id=letter.id)
        assert (stored.body, stored.id) == (b"x" * 500, letter.id)
        assert consumed(client, 1) == [("x" * 500, 1)]


def test_messages_that_come_faster_than_allowed_are_refused_as_without_dead_letters(
    monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    """D-16."""
    for name in ("append", "append_each", "append_lone"):
        real = getattr(MessageStore, name)

        def failing(store: MessageStore, *arguments: Any, real: Any = real, **options: Any) -> Any:
            if any(topic_of(item) == "orders" for item in arguments[0]):
                raise dmq.StorageError("the disk refuses")
            return real(store, *arguments, **options)

        monkeypatch.setattr(MessageStore, name, failing)
    with (
        ServedBroker(MemoryFiles(), dead_letter_store_failures=True, dead_letters_per_second=3) as served,
        dmq.connect(served.url, app="shop") as client,
    ):
        client.admin.create_topic("orders", queues=1)
        producer = client.producer(retries=0)
        kinds = []
        for number in range(5):
            with pytest.raises(dmq.DMQError) as caught:
                producer.send("orders", str(number))
            kinds.append(type(caught.value))
        assert kinds[:3] == [dmq.DeadLettered] * 3
        assert dmq.StorageError in kinds[3:]
        kept = client.admin.stats("broker_")["broker_dead_letters_taken"]
        assert len(client.admin.dead_letters()) == kept == kinds.count(dmq.DeadLettered)
        database.down.add("put")
        with pytest.raises(dmq.StorageError, match="the disk refuses"):
            producer.send_many("orders", [dmq.Message(b"x")] * 1)
