"""Bits that turn between real clients and a real broker: what is stored, settled and handed out is what was said.

Every test draws its bits from the seed that it prints. What is unknown to a client, because the connection ended before
the answer, may be done or not, but never otherwise than asked, and never twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import pytest

import dmq
import dmq.aio
from dmq.protocol import Command
from dmq.protocol.frame import HEAD, HEAD_BYTES, is_sealed
from dmq.testing.processes import BrokerProcess
from tests.bit_proxy import BitProxy, Choose, Passage, some_of
from tests.patience import eventually
from tests.sampling import IS_SOAK, SEED, sample_size

pytestmark = pytest.mark.sampled

# A length that grew is waited for: not for long here, and in the short run only where a test says nothing else.
FIRST_BIT = 0 if IS_SOAK else 32
SETTINGS = [
    "--set",
    "broker.partial_seconds=1",
    "--set",
    "broker.grace_seconds=0.1",
    "--set",
    "broker.lease_seconds=5",
    "--set",
    "broker.retry_table=0.1",
]

PATIENCE = 120.0


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(arguments=SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def direct(broker: BrokerProcess) -> Iterator[dmq.Client]:
    with dmq.connect(broker.url, app="direct") as client:
        yield client


@pytest.fixture
def proxy(broker: BrokerProcess) -> Iterator[BitProxy]:
    print(f"DMQ_SEED={SEED}")
    with BitProxy(("127.0.0.1", int(broker.url.rpartition(":")[2])), seed=SEED) as made:
        yield made


@pytest.fixture
def client(proxy: BitProxy) -> Iterator[dmq.Client]:
    with dmq.connect(proxy.url, app="shop", timeout=60) as client:
        yield client
        proxy.choose = None  # so that the farewell arrives


def both_ways(*choices: Choose) -> Choose:
    """The first bit that one of them chooses. Every frame must have its checksum, but for errors before the hello."""

    def choose(passage: Passage, rng: random.Random) -> int | None:
        status = HEAD.unpack_from(passage.frame)[4]
        assert is_sealed(passage.frame) or status, passage
        return next((bit for one in choices if (bit := one(passage, rng)) is not None), None)

    return choose


def stored(direct: dmq.Client, topic: str, count: int) -> list[tuple[str | None, bytes]]:
    """Key and body of everything in a topic; `count` only says when to stop waiting."""
    found: list[tuple[str | None, bytes]] = []
    with direct.consumer(topic, f"check-{random.getrandbits(32)}", start_from="earliest") as consumer:
        while messages := consumer.pull(1000, wait=0.5 if len(found) >= count else 20):
            found += [(message.key, bytes(message.body)) for message in messages]
            messages.ack()
    return found


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("way", ["requests", "answers"])
def test_what_is_produced_is_stored_as_it_was_sent_once(
    way: str, straight: bool, direct: dmq.Client, client: dmq.Client, proxy: BitProxy
) -> None:
    topic = f"produced-{way}-{straight}"
    direct.admin.create_topic(topic, queues=2)
    rng = random.Random(SEED)
    producer = client.producer(straight=straight)
    proxy.choose = both_ways(some_of({Command.PRODUCE}, 0.3, is_to_broker=way == "requests", first_bit=FIRST_BIT))
    sure: Counter[tuple[str | None, bytes]] = Counter()
    unknown: set[tuple[str | None, bytes]] = set()
    flips = sample_size(share=20, whole=1000)
    number = 0
    while len(proxy.turned) < flips:
        count = rng.choice((1, 1, 5, 40))
        messages = [
            dmq.Message(b"%d " % (number + index) + rng.randbytes(rng.randrange(200)), key=f"k-{number + index}")
            for index in range(count)
        ]
        number += count
        sent = [(message.key, bytes(message.body)) for message in messages]
        try:
            if count == 1:
                producer.send(topic, messages[0].body, key=messages[0].key)
            else:
                producer.send_many(topic, messages)
            sure.update(sent)
        except dmq.DMQError:
            unknown.update(sent)
    proxy.choose = None
    found = Counter(stored(direct, topic, len(sure)))
    assert not sure - found, "acknowledged, and lost"
    assert not set(found) - set(sure) - unknown, "stored otherwise than sent"
    assert not {one: count for one, count in found.items() if count > 1}, "stored twice"
    assert len(unknown) < number / 2


def test_a_settlement_never_settles_anything_else(direct: dmq.Client, client: dmq.Client, proxy: BitProxy) -> None:
    """Even messages are acked, odd ones never: all odd ones stay."""
    topic, count = "settled", sample_size(share=150, whole=5000)
    direct.admin.create_topic(topic, queues=4)
    direct.producer().send_many(topic, [dmq.Message(b"%d" % number) for number in range(count)])
    proxy.choose = both_ways(some_of({Command.SETTLE}, 0.5, is_to_broker=True))
    seen: set[int] = set()
    # All that is out comes again whenever the connection ends, and is not to become a dead letter.
    with client.consumer(topic, "evens", start_from="earliest", lease=120, max_attempts=None) as consumer:
        while len(seen) < count:
            with contextlib.suppress(dmq.NotConnected):
                for message in consumer.pull(7, wait=0.2):
                    number = int(message.body)
                    seen.add(number)
                    if number % 2 == 0:
                        message.ack()
        proxy.choose = None
    assert len(proxy.turned) > 2, "how many frames there are depends on the machine"
    left: set[int] = set()
    with direct.consumer(topic, "evens", lease=120, max_attempts=None) as consumer:

        def has_all_odd() -> bool:
            left.update(int(message.body) for message in consumer.pull(1000, wait=0.2))
            return left >= set(range(1, count, 2))

        eventually(has_all_odd, "an odd message was settled")
    assert len([number for number in left if number % 2 == 0]) < count / 2, "no settlement arrived"


@pytest.mark.parametrize("way", ["pull", "push"])
def test_nothing_is_handed_out_otherwise_than_it_is_stored(
    way: str, direct: dmq.Client, client: dmq.Client, proxy: BitProxy
) -> None:
    topic, count = f"handed-{way}", sample_size(share=150, whole=20_000)
    direct.admin.create_topic(topic, queues=2)
    bodies = {f"k-{number}": b"%d " % number * (number % 30 + 1) for number in range(count)}
    direct.producer().send_many(topic, [dmq.Message(body, key=key) for key, body in bodies.items()])
    commands = {Command.PULL, Command.CONSUMER_PUSH}
    proxy.choose = both_ways(some_of(commands, 0.4, is_to_broker=False, first_bit=FIRST_BIT))
    seen: set[str] = set()
    with client.consumer(topic, "group", start_from="earliest", prefetch=10) as consumer:
        while len(seen) < count:
            messages: Iterable[dmq.ReceivedMessage] = ()
            with contextlib.suppress(dmq.NotConnected):
                messages = consumer.pull(10, wait=0.3) if way == "pull" else [next(consumer) for _ in range(5)]
            for message in messages:
                assert message.key is not None
                assert bodies[message.key] == message.body
                seen.add(message.key)
                message.ack()
        proxy.choose = None
    assert len(proxy.turned) > 2, "how many frames there are depends on the machine"


def test_an_admin_command_is_done_as_asked_or_not_at_all(
    direct: dmq.Client, client: dmq.Client, proxy: BitProxy
) -> None:
    commands = {Command.KEY_PUT, Command.TOPIC_CREATE}
    proxy.choose = both_ways(
        some_of(commands, 0.4, is_to_broker=True),
        some_of({*commands, Command.KEY_GET}, 0.2, is_to_broker=False, first_bit=FIRST_BIT),
    )
    rng = random.Random(SEED)
    put: dict[str, bytes] = {}
    topics: dict[str, int] = {}
    flips, number = sample_size(share=40, whole=1000), 0
    while len(proxy.turned) < flips:
        number += 1
        key, value = f"key-{number}", rng.randbytes(30)
        put[key] = value
        with contextlib.suppress(dmq.NotConnected):
            client.registry.put("space", key, value)
            found = client.registry.get("space", key)
            assert found is not None
            assert found == value
        if number % 4 == 0:
            name, queues = f"topic-{number}", rng.randrange(1, 9)
            topics[name] = queues
            with contextlib.suppress(dmq.NotConnected):
                assert client.admin.create_topic(name, queues=queues).queues == queues
    proxy.choose = None
    names = {topic.name: topic.queues for topic in direct.admin.topics("topic-")}
    assert {name: queues for name, queues in names.items() if topics.get(name) != queues} == {}
    kept = {key: found for key in put if (found := direct.registry.get("space", key)) is not None}
    assert {key: found for key, found in kept.items() if put[key] != found} == {}
    assert len(kept) > len(put) / 2


def test_an_asyncio_client_sends_and_gets_the_same(direct: dmq.Client, proxy: BitProxy) -> None:
    topic, count = "asyncio", sample_size(share=100, whole=3000)
    direct.admin.create_topic(topic, queues=2)
    bodies = {b"%d " % number * 10 for number in range(count)}
    commands = {Command.PRODUCE, Command.PULL, Command.SETTLE}
    ways = [some_of(commands, 0.15, is_to_broker=way, first_bit=FIRST_BIT) for way in (True, False)]

    async def run() -> set[bytes]:
        client = await dmq.aio.connect(proxy.url, app="shop", timeout=60)
        async with client, client.consumer(topic, "group", start_from="earliest", max_attempts=None) as consumer:
            proxy.choose = both_ways(*ways)
            producer = client.producer()
            for body in bodies:
                await producer.send(topic, body)
            seen: set[bytes] = set()
            while len(seen) < count:
                with contextlib.suppress(dmq.NotConnected):
                    batch = await consumer.pull(10, wait=0.3)
                    seen.update(bytes(message.body) for message in batch)
                    await batch.ack()
            proxy.choose = None
            return seen

    assert asyncio.run(run()) == bodies
    assert Counter(body for _, body in stored(direct, topic, count)) == Counter(bodies)
    assert len(proxy.turned) > 2, "how many frames there are depends on the machine"


def in_records(commands: Collection[int], *, is_to_broker: bool) -> Choose:
    """Turn a bit in the body of some frames, where records are: nothing but their own checksums can tell."""

    def choose(passage: Passage, rng: random.Random) -> int | None:
        assert not is_sealed(passage.frame), passage
        begin = HEAD_BYTES + HEAD.unpack_from(passage.frame)[7]
        is_meant = passage.is_to_broker == is_to_broker and passage.command in commands and rng.random() < 0.3
        return rng.randrange(begin * 8, len(passage.frame) * 8) if is_meant and begin < len(passage.frame) else None

    return choose


def test_records_are_checked_where_a_peer_has_no_checksums_over_frames(
    direct: dmq.Client, proxy: BitProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is acknowledged is stored otherwise than sent, and no handler gets another body than is stored."""
    monkeypatch.setattr("dmq.client.connection.session.FEATURES", frozenset())
    topic, count = "plain", sample_size(share=100, whole=3000)
    direct.admin.create_topic(topic, queues=2)
    bodies = {f"k-{number}": b"%d " % number * (number % 30 + 1) for number in range(count)}
    sure: set[str] = set()
    refused = 0
    seen: dict[str | None, bytes] = {}
    with dmq.connect(proxy.url, app="shop", timeout=60) as client:
        producer = client.producer()
        proxy.choose = in_records({Command.PRODUCE}, is_to_broker=True)
        for key, body in bodies.items():
            try:
                producer.send(topic, body, key=key)
                sure.add(key)
            except dmq.DMQError:
                refused += 1
        proxy.choose = None
        assert refused
        assert dict(stored(direct, topic, len(sure))) == {key: bodies[key] for key in sure}
        turned = len(proxy.turned)
        commands = {Command.PULL, Command.CONSUMER_PUSH}
        proxy.choose = in_records(commands, is_to_broker=False)
        with client.consumer(topic, "group", start_from="earliest", prefetch=10, max_attempts=None) as consumer:
            end = threading.Timer(PATIENCE, consumer.close)  # a message that never comes is a failure, not a wait
            end.start()
            for message in consumer:
                assert bodies[message.key or ""] == message.body
                seen[message.key] = message.body
                message.ack()
                if len(seen) == len(sure):
                    break
            end.cancel()
            proxy.choose = None
    assert seen.keys() == sure
    assert len(proxy.turned) - turned > 2, "how many frames there are depends on the machine"
    assert not [*direct.admin.dead_letters(topic=topic)]


def test_a_hello_is_understood_as_it_was_said_or_not_at_all(proxy: BitProxy) -> None:
    """And never so that the two go on without checksums."""
    proxy.choose = both_ways(
        some_of({Command.HELLO}, 0.5, is_to_broker=True), some_of({Command.HELLO}, 0.5, is_to_broker=False)
    )
    refused = 0
    for _ in range(sample_size(share=60, whole=2000)):
        before = len(proxy.turned)
        try:
            with dmq.connect(proxy.url, app="shop", reconnect=False) as client:
                client.admin.stats("none")
            assert len(proxy.turned) == before, proxy.turned[-1]
        except (dmq.NotConnected, dmq.ProtocolError):
            refused += 1
            assert len(proxy.turned) > before
    assert refused > 20
