"""Transactions, through a broker in memory whose clock is moved: what a user relies on. (R-09)"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from msgspec.structs import replace

import dmq
import dmq.aio
from dmq.client.admin.reports import StoredMessage
from dmq.client.aio.transaction import AioTransaction
from dmq.client.client import Client
from dmq.client.producer.transaction import Transaction
from dmq.model import MessageId
from dmq.protocol import Command, decode_response
from dmq.protocol.produce import ProduceFlag, TransactionEnd, TransactionEndReply, TransactionOutcome
from dmq.protocol.status import Status
from dmq.settings import StoreSettings
from dmq.storage.read.record_group import Gathered
from dmq.testing import TestBroker
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, produce
from tests.patience import PATIENCE_S, eventually

COMMIT = TransactionOutcome.COMMIT


def bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.body for message in client.admin.peek(topic, limit=1000)]


def count(client: Client, name: str) -> float:
    return client.admin.stats("broker_transactions")[f"broker_transactions_{name}"]


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create=False) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    return client


def test_leaving_the_block_commits(client: Client) -> None:
    producer = client.producer(group="shop")
    with producer.transaction("orders", b"paid", key="o-1", tag="t", properties={"a": "b"}) as tx:
        assert bodies(client) == []
        (report,) = client.admin.transactions()
        assert (report.id, report.topic, report.group, report.checks) == (tx.id, "orders", "shop", 0)
    (message,) = client.consumer("orders", group="g").pull(1, wait=PATIENCE_S)
    assert (message.id, message.body, message.key, message.tag) == (tx.id, b"paid", "o-1", "t")
    assert dict(message.properties) == {"a": "b"}
    assert client.admin.transactions() == []
    assert tx.is_ended


def test_an_exception_rolls_back_and_goes_on(client: Client) -> None:
    producer = client.producer(group="shop")
    with pytest.raises(ZeroDivisionError), producer.transaction("orders", b"never"):
        raise ZeroDivisionError
    assert client.admin.transactions() == []
    assert bodies(client) == []
    assert count(client, "rolled_back") == 1


def test_several_messages_become_visible_together(client: Client) -> None:
    client.admin.create_topic("stock", queues=3)
    producer = client.producer(group="shop")
    with producer.transaction("orders", b"one") as tx:
        tx.send("stock", b"two", key="s-1")
        tx.send("orders", b"three")
        assert bodies(client) == bodies(client, "stock") == []
    assert (bodies(client), bodies(client, "stock")) == ([b"one", b"three"], [b"two"])


def test_it_can_be_ended_by_hand_and_only_once(client: Client) -> None:
    producer = client.producer(group="shop")
    with producer.transaction("orders", b"no") as tx:
        tx.rollback()
        tx.rollback()
    with pytest.raises(dmq.InvalidRequest, match="rolled back already"):
        tx.commit()
    with pytest.raises(dmq.InvalidRequest, match="rolled back already"):
        tx.send("orders", b"more")
    tx = producer.transaction("orders", b"yes")
    tx.commit()
    tx.commit()
    assert bodies(client) == [b"yes"]


def test_ordered_messages_go_to_the_queue_of_their_business_id(client: Client) -> None:
    client.admin.create_topic("many", queues=7)
    producer = client.producer(group="shop")
    for number in range(10):
        plain = producer.send("many", b"plain", business_id=f"u-{number}", ordered=True)
        with producer.transaction("many", b"tx", business_id=f"u-{number}", ordered=True):
            pass
        assert [m.queue for m in client.admin.peek("many", queue=plain.queue) if m.business_id == f"u-{number}"] == [
            plain.queue
        ] * 2


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decision", "left"), [("commit", [b"lost"]), ("rollback", [])])
def test_one_that_nobody_ended_is_asked_about(
    broker: TestBroker, client: Client, decision: str, left: list[bytes]
) -> None:
    asked: list[StoredMessage] = []

    def check(message: StoredMessage) -> str:
        asked.append(message)
        return decision

    producer = client.producer(group="shop", check=check)
    tx = producer.transaction("orders", b"lost", key="o-1")
    broker.clock.advance(5.0)
    time.sleep(0.2)
    assert not asked
    broker.clock.advance(1.5)
    eventually(lambda: not client.admin.transactions())
    assert bodies(client) == left
    assert [(m.id, m.topic, m.body, m.key) for m in asked] == [(tx.id, "orders", b"lost", "o-1")]


def test_another_producer_of_the_group_answers_for_one_that_is_gone(broker: TestBroker, client: Client) -> None:
    gone = broker.connect()
    gone.producer(group="shop").transaction("orders", b"orphan")
    gone.close()
    stranger, answering = threading.Event(), threading.Event()
    client.producer(group="others", check=lambda _: stranger.set())

    def answer(_: StoredMessage) -> str:
        answering.set()
        return "commit"

    client.producer(group="shop", check=answer)
    broker.clock.advance(7.0)
    eventually(lambda: bodies(client) == [b"orphan"])
    assert answering.is_set()
    assert not stranger.is_set()


def test_an_answer_that_is_not_known_yet_is_asked_for_again(broker: TestBroker, client: Client) -> None:
    answers: list[object] = [None, "what?", ZeroDivisionError("check broke"), "commit"]
    asked = []

    def check(message: StoredMessage) -> object:
        asked.append(message)
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    client.producer(group="shop", check=check).transaction("orders", b"slow")
    broker.clock.advance(7.0)
    for number in range(1, 5):
        eventually(partial(lambda wanted: len(asked) == wanted, number))
        assert number == 4 or bodies(client) == []
        broker.clock.advance(31.0)
    eventually(lambda: bodies(client) == [b"slow"])


def test_after_fifteen_checks_it_is_rolled_back_and_becomes_a_dead_letter(broker: TestBroker, client: Client) -> None:
    tx = client.producer(group="shop").transaction("orders", b"forgotten", key="o-9")
    broker.clock.advance(7.0)
    for number in range(1, 16):
        eventually(partial(lambda wanted: [t.checks for t in client.admin.transactions()] == [wanted], number))
        broker.clock.advance(30.5)
    eventually(lambda: not client.admin.transactions())
    assert bodies(client) == []
    (letter,) = client.admin.peek("%DLQ%shop")
    assert (letter.id, letter.body, letter.key) == (tx.id, b"forgotten", "o-9")
    with pytest.raises(dmq.TransactionOver, match="given up"):
        tx.commit()


def test_checks_go_on_after_a_restart_of_the_broker(broker: TestBroker, client: Client) -> None:
    producer = client.producer(group="shop", check=lambda _: "commit")
    producer.transaction("orders", b"survivor")
    broker.kill()
    broker.start()
    eventually(lambda: client.admin.transactions())
    assert [t.group for t in client.admin.transactions()] == ["shop"]
    broker.clock.advance(7.0)
    eventually(lambda: bodies(client) == [b"survivor"])


def test_one_answer_holds_for_all_messages_of_a_transaction(broker: TestBroker, client: Client) -> None:
    asked: list[bytes] = []

    def check(message: StoredMessage) -> str:
        asked.append(message.body)
        return "commit" if message.body == b"one" else "rollback"

    producer = client.producer(group="shop", check=check)
    tx = producer.transaction("orders", b"one")
    broker.clock.advance(3.0)
    tx.send("orders", b"two")
    alone = producer.transaction("orders", b"another")
    tx.send("orders", b"three", ttl=60.0)
    assert len(client.admin.transactions()) == 4
    broker.clock.advance(3.5)
    eventually(lambda: bodies(client) == [b"one", b"two", b"three"])
    assert [report.id for report in client.admin.transactions()] == [alone.id]
    broker.clock.advance(3.5)
    eventually(lambda: not client.admin.transactions())
    assert asked == [b"one", b"another"]
    tx.commit()
    assert bodies(client) == [b"one", b"two", b"three"]


def test_all_messages_of_a_transaction_are_given_up_together(broker: TestBroker, client: Client) -> None:
    tx = client.producer(group="shop").transaction("orders", b"one")
    tx.send("orders", b"two")
    broker.restart()
    broker.clock.advance(7.0)
    for number in range(1, 16):
        eventually(partial(lambda wanted: [t.checks for t in client.admin.transactions()] == [wanted] * 2, number))
        broker.clock.advance(30.5)
    eventually(lambda: not client.admin.transactions())
    assert bodies(client, "%DLQ%shop") == [b"one", b"two"]
    with pytest.raises(dmq.TransactionOver, match="given up"):
        tx.commit()


def test_a_message_that_comes_when_its_transaction_is_over_ends_as_that_did(client: Client) -> None:
    producer = client.producer(group="shop")
    rolled_back = producer.transaction("orders", b"never")
    assert ended(client, rolled_back, TransactionOutcome.ROLLBACK) == []
    rolled_back.send("orders", b"nor this")
    committed = producer.transaction("orders", b"one")
    assert ended(client, committed, TransactionOutcome.COMMIT) == []
    committed.send("orders", b"two")
    eventually(lambda: not client.admin.transactions())
    assert bodies(client) == [b"one", b"two"]
    committed.commit()
    with pytest.raises(dmq.TransactionOver, match="rolled back"):
        rolled_back.commit()


def test_a_message_is_added_to_one_that_is_still_on_its_way(client: Client) -> None:
    producer = client.producer(group="shop")
    tx = producer.transaction_async("orders", b"one")
    tx.send("orders", b"two")
    assert ended(client, tx, COMMIT) == []
    assert bodies(client) == [b"one", b"two"]


# --- late, again, and for others --------------------------------------------------------------------------------------


def ended(client: Client, tx: Transaction, outcome: TransactionOutcome, epoch: int = 0) -> list[int]:
    """End a transaction once more, over the wire: the statuses of what was refused."""
    assert tx.id is not None
    header = TransactionEnd(tx.id.producer_id, epoch, tx.id.sequence, 1, outcome)
    reply: TransactionEndReply = decode_response(client._router.home.request(Command.TRANSACTION_END, header))
    return [refusal.status for refusal in reply.refused]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_asking_again_for_what_happened_is_well_and_for_the_opposite_is_not(
    broker: TestBroker, client: Client, is_restarted: bool
) -> None:
    producer = client.producer(group="shop")
    committed = producer.transaction("orders", b"yes")
    committed.commit()
    rolled_back = producer.transaction("orders", b"no")
    rolled_back.rollback()
    if is_restarted:
        broker.restart()
    for _ in range(2):
        assert ended(client, committed, TransactionOutcome.COMMIT) == []
        assert ended(client, rolled_back, TransactionOutcome.ROLLBACK) == []
        assert ended(client, committed, TransactionOutcome.ROLLBACK) == [Status.TRANSACTION_OVER]
        assert ended(client, rolled_back, TransactionOutcome.COMMIT) == [Status.TRANSACTION_OVER]
    assert bodies(client) == [b"yes"]


def test_what_was_committed_stays_so_when_a_consumer_made_a_dead_letter_of_it(
    broker: TestBroker, client: Client
) -> None:
    tx = client.producer(group="shop").transaction("orders", b"bad")
    tx.commit()
    with client.consumer("orders", "billing") as consumer:
        next(consumer).reject("cannot be read")
    eventually(lambda: client.admin.dead_letters(group="billing"))
    broker.restart()  # it knows by its journal alone what became of the transaction
    assert ended(client, tx, COMMIT) == []
    assert ended(client, tx, TransactionOutcome.ROLLBACK) == [Status.TRANSACTION_OVER]


def test_a_late_commit_of_what_a_check_rolled_back_is_refused(broker: TestBroker, client: Client) -> None:
    tx = client.producer(group="shop", check=lambda _: "rollback").transaction("orders", b"late")
    broker.clock.advance(7.0)
    eventually(lambda: not client.admin.transactions())
    with pytest.raises(dmq.TransactionOver, match="rolled back before"):
        tx.commit()


def test_an_end_of_what_was_never_prepared_is_refused(client: Client) -> None:
    header = TransactionEnd(77, 0, 5, 2, TransactionOutcome.COMMIT)
    reply: TransactionEndReply = decode_response(client._router.home.request(Command.TRANSACTION_END, header))
    assert [(r.sequence, r.status) for r in reply.refused] == [
        (5, Status.UNKNOWN_MESSAGE),
        (6, Status.UNKNOWN_MESSAGE),
    ]


def test_a_producer_without_a_group_has_no_transactions(client: Client) -> None:
    with pytest.raises(dmq.InvalidSettings, match="group="):
        client.producer().transaction("orders", b"x")
    with pytest.raises(dmq.InvalidSettings, match="group="):
        client.producer(check=lambda _: None)
    with pytest.raises(dmq.Unsupported, match="spool"):
        client.producer(group="g", spool="somewhere")


def test_a_late_commit_of_an_older_epoch_is_refused(broker: TestBroker, client: Client) -> None:
    with RawClient(broker.port) as raw:

        def prepare(sequence: int, epoch: int) -> None:
            header, body = produce("orders", b"e-%d" % epoch, sequence=sequence, flags=ProduceFlag.HALF, group="shop")
            assert raw.ask(Command.PRODUCE, replace(header, producer_epoch=epoch), body).status == 0

        def end(sequence: int, epoch: int) -> int:
            return raw.ask(Command.TRANSACTION_END, TransactionEnd(77, epoch, sequence, 1, COMMIT)).status

        prepare(0, 1)
        prepare(0, 2)  # a newer one has taken over
        assert end(0, 1) == Status.STALE_EPOCH
        assert bodies(client) == []
        assert end(0, 2) == 0
        assert bodies(client) != []


def test_no_more_than_so_many_may_be_open() -> None:
    with (
        ServedBroker(store=StoreSettings(transactions_max=3), auto_create=True) as served,
        dmq.connect(served.url) as c,
    ):
        producer = c.producer(group="shop", retries=0)
        open_ones = [producer.transaction("orders", b"x") for _ in range(3)]
        with pytest.raises(dmq.LimitReached, match="transactions_max"):
            producer.transaction("orders", b"x")
        open_ones[0].commit()
        producer.transaction("orders", b"x").commit()


def test_many_at_once_open_no_more_than_so_many() -> None:
    async def prepare(url: str) -> list[object]:
        async with dmq.aio.connect(url) as client:
            producers = [client.producer(group="shop", retries=0) for _ in range(20)]
            await producers[0].send("orders", b"known")
            begun = (begin(producer.transaction("orders", b"x")) for producer in producers)
            return [*await asyncio.gather(*begun, return_exceptions=True)]

    async def begin(transaction: AioTransaction) -> None:
        await transaction

    with (
        ServedBroker(store=StoreSettings(transactions_max=3)) as served,
        dmq.connect(served.url) as c,
    ):
        c.admin.create_topic("orders")
        refused = asyncio.run(prepare(served.url))
        assert [type(error) for error in refused if error is not None] == [dmq.LimitReached] * 17
        assert len(c.admin.transactions()) == 3


def test_a_transaction_for_no_topic_is_refused(client: Client) -> None:
    producer = client.producer(group="shop")
    with pytest.raises(dmq.UnknownTopic):
        producer.transaction("nowhere", b"x")
    assert client.admin.transactions() == []


# --- many -------------------------------------------------------------------------------------------------------------


def test_many_in_parallel_each_end_their_own_way(client: Client) -> None:
    producer = client.producer(group="shop")
    ends = []
    for number in range(2000):
        tx = producer.transaction_async("orders", b"%d" % number)
        ends.append(tx.rollback_async() if number % 5 == 0 else tx.commit_async())
    for end in ends:
        end.result(PATIENCE_S)
    assert client.admin.transactions() == []
    read: list[StoredMessage] = []
    at = 0
    while len(read) < 1600:
        page, at = client.admin.read("orders", 0, at, limit=1000)
        assert page
        read += page
    assert sorted(int(message.body) for message in read) == [n for n in range(2000) if n % 5]


def test_threads_share_a_producer(client: Client) -> None:
    producer = client.producer(group="shop")

    def work(thread: int) -> None:
        for number in range(25):
            with producer.transaction("orders", b"%d-%d" % (thread, number)):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(bodies(client)) == sorted(b"%d-%d" % (t, n) for t in range(8) for n in range(25))


def test_the_asyncio_client_has_them_too(broker: TestBroker, client: Client) -> None:
    decided = []

    async def check(message: StoredMessage) -> str:
        await asyncio.sleep(0)
        decided.append(message.id)
        return "commit"

    async def main() -> MessageId | None:
        async with dmq.aio.connect(broker.url, app="test") as aio:
            producer = aio.producer(group="shop", check=check)
            async with producer.transaction("orders", b"one") as tx:
                await tx.send("orders", b"two")
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction("orders", b"never"):
                    raise ZeroDivisionError
            other = await producer.transaction("orders", b"asked")
            assert [report.id for report in await aio.admin.transactions()] == [other.id]
            broker.clock.advance(7.0)
            while await aio.admin.transactions():
                await asyncio.sleep(0.01)

            async def one(number: int) -> None:
                async with producer.transaction("orders", b"p-%d" % number):
                    await asyncio.sleep(0)

            await asyncio.gather(*(one(number) for number in range(50)))
            return other.id

    asked = asyncio.run(main())
    assert decided == [asked]
    assert bodies(client)[:3] == [b"one", b"two", b"asked"]
    assert sorted(bodies(client)[3:]) == sorted(b"p-%d" % number for number in range(50))


def test_a_commit_to_a_topic_that_was_deleted_is_a_dead_letter(client: Client) -> None:
    tx = client.producer(group="shop").transaction("orders", b"orphan")
    client.admin.delete_topic("orders")
    tx.commit()
    assert client.admin.transactions() == []
    assert bodies(client, "%DLQ%test") == [b"orphan"]


def test_a_commit_does_not_reach_a_new_topic_of_the_same_name(client: Client) -> None:
    producer = client.producer(group="shop")
    tx = producer.transaction("orders", b"old")
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    with producer.transaction("orders", b"new"):
        tx.commit()
    assert bodies(client) == [b"new"]
    assert bodies(client, "%DLQ%test") == [b"old"]


def test_a_transaction_over_topics_of_which_one_is_made_anew_in_between(client: Client) -> None:
    client.admin.create_topic("bills", queues=1)
    transaction = client.producer(group="shop").transaction("orders", b"0", key="k-0")
    for number in range(1, 30):
        if number == 15:
            client.admin.delete_topic("bills")
            client.admin.create_topic("bills", queues=1)
        transaction.send(("orders", "bills")[number % 2], b"%d" % number, key=f"k-{number}")
    transaction.commit()
    assert bodies(client) == [b"%d" % number for number in range(0, 30, 2)]
    assert bodies(client, "bills") == [b"%d" % number for number in range(15, 30, 2)]
    assert bodies(client, "%DLQ%test") == [b"%d" % number for number in range(1, 15, 2)]
    assert [found.body for found in client.admin.find(key="k-17", topic="bills")] == [b"17"]


def test_a_large_transaction_is_read_in_small_parts_each_once() -> None:
    asked: list[int] = []
    # So little memory for what was read that most of it is read from the disk.
    with ServedBroker(store=StoreSettings(read_cache_bytes=0), auto_create=True) as served:
        queries = served.broker.store.queries
        gather = queries.gather

        def counted(offsets: Sequence[int]) -> tuple[list[Gathered], list[int]]:
            asked.append(len(offsets))
            return gather(offsets)

        queries.gather = counted  # type: ignore[method-assign]
        with dmq.connect(served.url) as client:
            client.admin.create_topic("orders", queues=1)
            transaction = client.producer(group="shop").transaction("orders", b"0")
            for number in range(1, 600):
                transaction.send("orders", b"%d" % number + b"." * 4000)
            transaction.commit()
            assert [body.split(b".")[0] for body in bodies(client)] == [b"%d" % number for number in range(600)]
    assert max(asked) <= 256  # a turn of the loop is short
    assert sum(asked) < 3 * 600  # and what was read is not read again and again


def test_checks_go_to_the_members_of_a_group_in_turn_and_to_nobody_who_left(broker: TestBroker, client: Client) -> None:
    asked: list[str] = []
    clients = [broker.connect() for _ in range(3)]
    producers = [
        one.producer(group="shop", check=partial(lambda name, _: asked.append(name), f"p-{number}"))
        for number, one in enumerate(clients)
    ]
    for number in range(12):
        client.producer(group="shop").transaction("orders", b"%d" % number)
    broker.clock.advance(7.0)
    eventually(lambda: len(asked) == 12)
    assert {name: asked.count(name) for name in sorted(set(asked))} == {"p-0": 4, "p-1": 4, "p-2": 4}
    producers[0].close()
    clients[1].close()
    asked.clear()
    eventually(lambda: len([*client.admin.stats()]) > 0)
    broker.clock.advance(31.0)
    eventually(lambda: len(asked) == 12)
    assert set(asked) == {"p-2"}
