"""Bodies that were compressed together are delivered as if they had not been, on every way, to every peer."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dmq
from dmq.model import Durability
from dmq.pipeline.decode.rows import message_batch
from dmq.pipeline.decode.units import decode_units
from dmq.protocol import Command, decode_response, pack_batch, unpack_records
from dmq.protocol.consume import Pull, PullReply
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.protocol.read import Fetch, FetchReply, Peek, PeekReply
from dmq.protocol.session import BLOCKS, FRAME_CRC
from dmq.records import Compressor, EncodedBatch, EncodeOptions, RecordView, encode_batch, iter_records
from dmq.records.block import block_use, make_block
from dmq.settings import StoreSettings
from dmq.storage.files import OsFiles
from dmq.storage.offline.verification import verify
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, port_of
from tests.patience import eventually

SENT_AT_MS = 1_700_000_000_000
BOTH = [BLOCKS, FRAME_CRC]


def messages(count: int, *, odd: bool = True) -> list[dmq.Message]:
    """Messages as programs send them; with some that do not compress, are small, large or empty."""
    chance = random.Random(count)
    found = [
        dmq.Message(
            b'{"order_id": %d, "customer": "c-%d", "status": "paid", "currency": "EUR", "country": "DE", "lines": [%s]}'
            % (number, chance.randrange(1000), b", ".join(b'{"sku": "s-%d"}' % n for n in range(number % 9))),
            f"key-{number}",
            properties={"trace": f"t{number}"} if number % 7 == 0 else None,
        )
        for number in range(count)
    ]
    if odd:
        for at, body in ((3, b""), (5, b"small"), (7, chance.randbytes(500)), (11, b"large" * 10_000)):
            found[at] = dmq.Message(body, found[at].key)
    return found


def views(data: bytes, lengths: Iterable[int]) -> Iterator[RecordView]:
    """The records before their blocks."""
    at = 0
    for length in map(int, lengths):
        yield RecordView(data, at)
        at += length


def block_records(broker: ServedBroker, topic: str, queue: int = 0) -> int:
    """How many records of a queue have their bodies in blocks."""
    queries = broker.broker.store.queries
    found = queries.read_of(queries.topic(topic), queue, 0, 100_000, max_bytes=1 << 30)
    used = block_use(found.lengths, found.pieces)
    return 0 if used is None else int((used.offsets != 0).sum())


@pytest.fixture(scope="module")
def served() -> Iterator[ServedBroker]:
    with ServedBroker() as running:
        yield running


@pytest.fixture(scope="module")
def sent(served: ServedBroker) -> list[dmq.Message]:
    sample = messages(600)
    with dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        client.admin.create_topic("plain", queues=1)
        for compression, topic in (("auto", "orders"), ("none", "plain")):
            with client.producer(compression=compression) as producer:
                for at in range(0, 600, 200):
                    producer.send_many(topic, sample[at : at + 200])
    assert block_records(served, "orders") > 500
    assert block_records(served, "plain") == 0
    return sample


def facts(got: list[dmq.ReceivedMessage]) -> list[tuple[bytes, str | None, dict[str, str], int]]:
    return [(message.body, message.key, dict(message.properties), message.offset) for message in got]


def wanted(sample: list[dmq.Message]) -> list[tuple[bytes, str | None, dict[str, str], int]]:
    return [(m.body, m.key, dict(m.properties or {}), offset) for offset, m in enumerate(sample)]


@pytest.mark.parametrize("size", [1, 7, 64, 200, 333, 5000])
def test_a_pull_of_any_size_gives_what_was_sent(served: ServedBroker, sent: list[dmq.Message], size: int) -> None:
    with (
        dmq.connect(served.url, app="shop") as client,
        client.consumer("orders", f"pull-{size}", start_from="earliest") as consumer,
    ):
        sample = sent if size > 1 else sent[:150]
        got: list[dmq.ReceivedMessage] = []
        while len(got) < len(sample):
            batch = consumer.pull(size)
            got += batch
            batch.ack()
    assert facts(got) == wanted(sample)
    assert len({message.id for message in got}) == len(got)


def test_handlers_and_iterators_get_what_was_sent(served: ServedBroker, sent: list[dmq.Message]) -> None:
    with dmq.connect(served.url, app="shop") as client:
        with client.consumer("orders", "handled", start_from="earliest") as consumer:
            got: list[dmq.ReceivedMessage] = []

            def handle(message: dmq.ReceivedMessage) -> None:
                got.append(message)
                if len(got) == len(sent):
                    consumer.stop()

            consumer.run(handle)
        assert sorted(facts(got), key=str) == sorted(wanted(sent), key=str)
        with client.consumer("orders", "typed", start_from="earliest", type=dict) as typed:
            first = next(iter(typed))
            assert first.body["order_id"] == 0


@pytest.mark.parametrize("features", [[], [FRAME_CRC], [BLOCKS], BOTH])
def test_a_peer_gets_blocks_only_if_it_knows_them(
    served: ServedBroker, sent: list[dmq.Message], features: list[str]
) -> None:
    with RawClient(port_of(served.url), features=features) as raw:
        group = "raw-" + "-".join(features)
        answer = raw.ask(Command.PULL, Pull("orders", group, max_messages=150))
        reply: PullReply = decode_response(answer)
        lengths, data = unpack_records(answer.body, reply.leases[0].count, blocks=BLOCKS in features)
        assert (len(data) > sum(map(int, lengths))) is (BLOCKS in features)
        records = [*views(bytes(data), lengths)]
        assert [record.body for record in records] == [message.body for message in sent[:150]]
        assert any(record.in_block for record in records) is (BLOCKS in features)
        answer = raw.ask(Command.PEEK, Peek("orders", 0, max_messages=20))
        peeked: PeekReply = decode_response(answer)
        _, data = unpack_records(answer.body, sum(span.count for span in peeked.spans))
        assert [record.body for record in iter_records(bytes(data))] == [message.body for message in sent[:20]]


def test_units_go_to_readers_that_know_blocks(served: ServedBroker, sent: list[dmq.Message]) -> None:
    with RawClient(port_of(served.url), features=BOTH) as raw:
        rows = []
        at = 0
        while True:
            answer = raw.ask(Command.FETCH, Fetch(at))
            reply: FetchReply = decode_response(answer)
            if not len(answer.body):
                break
            batch = message_batch(decode_units(answer.body, columns=("body", "body_crc", "key", "topic", "flags")),
                                  ("topic", "queue_offset", "key", "body", "body_crc", "flags"))  # fmt: skip
            rows += batch.to_pylist()
            at = reply.end
        both = {topic: [{**row, "topic": ""} for row in rows if row["topic"] == topic] for topic in ("orders", "plain")}
    assert [row["body"] for row in both["orders"]] == [message.body for message in sent]
    same = ("queue_offset", "key", "body", "body_crc")
    assert [[row[name] for name in same] for row in both["orders"]] == [
        [row[name] for name in same] for row in both["plain"]
    ]
    with RawClient(port_of(served.url), features=[FRAME_CRC]) as raw:
        (refused,) = refusals(raw)
        assert isinstance(refused, dmq.Unsupported)
        assert "body blocks" in refused.message


def refusals(raw: RawClient) -> Iterator[dmq.DMQError]:
    """Read the journal until it ends or is refused."""
    at = 0
    while True:
        try:
            reply: FetchReply = decode_response(raw.ask(Command.FETCH, Fetch(at)))
        except dmq.DMQError as error:
            yield error
            return
        if reply.end == at:
            return
        at = reply.end


def test_messages_are_found_by_key_and_id(served: ServedBroker, sent: list[dmq.Message]) -> None:
    with dmq.connect(served.url, app="shop") as client:
        (found,) = client.admin.find(key="key-42", topic="orders")
        assert found.body == sent[42].body
        (again,) = client.admin.find(id=found.id, topic="orders")
        assert again.body == sent[42].body


def test_failed_messages_are_retried_and_become_dead_letters_with_their_bodies(tmp_path: Path) -> None:
    sample = messages(100)
    bodies = {message.key: message.body for message in sample}
    with (
        ServedBroker(dead_letters_url=f"sqlite:///{tmp_path}/letters.db") as broker,
        dmq.connect(broker.url, app="shop") as client,
    ):
        client.admin.create_topic("orders", queues=1)
        with client.producer() as producer:
            producer.send_many("orders", sample)
        assert block_records(broker, "orders") > 90
        with client.consumer("orders", "g", start_from="earliest") as consumer:
            for message in consumer.pull(100):
                if message.key in ("key-20", "key-5"):
                    message.nack(delay=0.1)
                elif message.key in ("key-30", "key-11"):
                    message.reject("no")
                else:
                    message.ack()
            retried: dict[str | None, tuple[bytes, int]] = {}
            while len(retried) < 2:
                for message in consumer.pull(10):
                    retried[message.key] = (message.body, message.attempt)
                    message.ack()
        assert retried == {key: (bodies[key], 2) for key in ("key-20", "key-5")}

        def letters() -> dict[str | None, bytes]:
            return {letter.key: letter.body for letter in client.admin.dead_letters(group="g")}

        eventually(lambda: len(letters()) == 2)
        assert letters() == {key: bodies[key] for key in ("key-30", "key-11")}


def test_delayed_messages_have_no_blocks(served: ServedBroker) -> None:
    sample = messages(100, odd=False)
    with dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("later", queues=1)
        with client.producer() as producer:
            producer.send_many("later", sample, delay=0.1)
        with client.consumer("later", "g", start_from="earliest") as consumer:
            got: list[bytes] = []
            while len(got) < 100:
                batch = consumer.pull(100)
                got += [message.body for message in batch]
                batch.ack()
    assert sorted(got) == sorted(message.body for message in sample)
    assert block_records(served, "later") == 0


def test_a_store_of_the_first_format_gets_no_blocks_and_keeps_those_it_has(tmp_path: Path) -> None:
    sample = messages(300)
    for version in (2, 1, 2):
        with (
            ServedBroker(OsFiles(str(tmp_path)), store=StoreSettings(unit_version=version)) as broker,
            dmq.connect(broker.url, app="shop") as client,
        ):
            client.admin.create_topic("orders", queues=1, allow_existing=True)
            before = block_records(broker, "orders")
            with client.producer() as producer:
                producer.send_many("orders", sample)
            assert (block_records(broker, "orders") > before) is (version == 2)
            with RawClient(port_of(broker.url), features=[BLOCKS]) as raw:
                header, body = produced("orders", encoded(sample), producer_id=random.getrandbits(60))
                assert (raw.ask(Command.PRODUCE, header, body).status == 0) is (version == 2)
    with ServedBroker(OsFiles(str(tmp_path))) as broker, dmq.connect(broker.url, app="shop") as client:
        got: list[bytes] = []
        with client.consumer("orders", "g", start_from="earliest") as consumer:
            while len(got) < 5 * len(sample):
                batch = consumer.pull(1000)
                got += [message.body for message in batch]
                batch.ack()
        assert got == [message.body for message in sample] * 5


@st.composite
def batches(draw: st.DrawFn) -> list[dmq.Message]:
    """Any messages, most of which are alike."""
    chance = draw(st.randoms(use_true_random=False))
    words = [
        b'{"order_id": ',
        b'"customer": "c-',
        b'"status": "paid", ',
        b'"currency": "EUR"}',
        b"\0\xff",
        "ключ".encode(),
    ]
    top = draw(st.sampled_from((90, 400, 5000)))
    return [
        dmq.Message(
            chance.randbytes(chance.randrange(top))
            if chance.random() < 0.05
            else b"".join(chance.choices(words, k=1 + chance.randrange(top) // 12)),
            chance.choice((None, "", "k", "ключ", f"key-{number}")),
            tag=chance.choice((None, "blue")),
            business_id=chance.choice((None, "b-1")),
            priority=chance.choice((0, 4, 9)),
            properties={"a": "b"} if chance.random() < 0.2 else None,
        )
        for number in range(draw(st.integers(1, 250)))
    ]


def seen_by(client: dmq.Client, topic: str, group: str, count: int, *, fail: bool) -> list[tuple[object, ...]]:
    """What a group gets; with `fail` each message fails once, and is retried."""
    found: list[tuple[object, ...]] = []
    with client.consumer(topic, group, start_from="earliest") as consumer:
        while len(found) < count:
            for message in consumer.pull(97, wait=5.0):
                if fail and message.attempt == 1:
                    message.nack(delay=0.0)
                    continue
                found.append(
                    (message.offset, message.body, message.key, message.tag, message.business_id, message.priority,
                     tuple(sorted(message.properties.items())), message.attempt, message.id and message.id.sequence)
                )  # fmt: skip
                message.ack()
    return sorted(found, key=lambda row: row[0])  # type: ignore[arg-type, return-value]


@given(batches())
@settings(max_examples=6, deadline=None)
def test_any_messages_are_the_same_in_blocks_and_without(served: ServedBroker, some: list[dmq.Message]) -> None:
    number = random.getrandbits(40)
    both: list[list[list[tuple[object, ...]]]] = []
    with dmq.connect(served.url, app="shop") as client:
        for compression in ("lz4", "none"):
            topic = f"any-{number}-{compression}"
            client.admin.create_topic(topic, queues=1)
            with client.producer(compression=compression) as producer:
                producer.send_many(topic, some)
            count = len(some)
            peeked = [(m.offset, m.body, m.key, dict(m.properties)) for m in client.admin.peek(topic, limit=count)]
            both.append(
                [
                    seen_by(client, topic, "g", count, fail=False),
                    seen_by(client, topic, "failing", count, fail=True),
                    peeked,  # type: ignore[list-item]
                ]
            )
            client.admin.delete_topic(topic)
    assert both[0] == both[1]
    assert [row[1] for row in both[0][0]] == [message.body for message in some]


def encoded(sample: list[dmq.Message], topic: str = "orders") -> EncodedBatch:
    return encode_batch(
        topic, "raw", sample, sent_at_ms=SENT_AT_MS, options=EncodeOptions(compressor=Compressor("lz4"), blocks=True)
    )


def produced(topic: str, batch: EncodedBatch, *, producer_id: int = 7, flags: int = 0) -> tuple[Produce, bytes]:
    header = Produce(
        topic, 0, batch.count, len(batch.hashes), producer_id=producer_id, producer_epoch=1, first_sequence=0,
        durability=Durability.FLUSHED, flags=ProduceFlag.BLOCKS | flags,
    )  # fmt: skip
    return header, b"".join(map(bytes, pack_batch(batch)))


def test_a_batch_that_comes_again_is_stored_once(served: ServedBroker) -> None:
    with dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("twice", queues=1)
    with RawClient(port_of(served.url), features=BOTH) as raw:
        header, body = produced("twice", encoded(messages(100), "twice"))
        first = decode_response(raw.ask(Command.PRODUCE, header, body))
        again = decode_response(raw.ask(Command.PRODUCE, header, body))
        assert (again.first_offset, again.is_duplicate) == (first.first_offset, True)
    assert block_records(served, "twice") > 90


@pytest.mark.parametrize("flag", [ProduceFlag.HALF, ProduceFlag.DUES, ProduceFlag.REPLAYED | ProduceFlag.NAMED])
def test_blocks_are_refused_where_they_are_not_for(served: ServedBroker, flag: int) -> None:
    with dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("plain", queues=1, allow_existing=True)
    with RawClient(port_of(served.url), features=BOTH) as raw:
        header, body = produced("plain", encoded(messages(100), "plain"), flags=int(flag))
        with pytest.raises(dmq.DMQError):
            decode_response(raw.ask(Command.PRODUCE, header, body))


def test_a_turned_bit_in_a_block_is_refused_also_without_checksums_of_frames(served: ServedBroker) -> None:
    with dmq.connect(served.url, app="shop") as client:
        client.admin.create_topic("turned", queues=1)
    batch = encoded(messages(100, odd=False), "turned")
    chance = random.Random(4)
    blocks_at = len(batch.data) - batch.block_bytes
    with RawClient(port_of(served.url), features=[BLOCKS]) as raw:
        for place in [
            *range(blocks_at, blocks_at + 16),
            *(chance.randrange(blocks_at, len(batch.data)) for _ in range(20)),
        ]:
            damaged = bytearray(batch.data)
            damaged[place] ^= 1 << chance.randrange(8)
            spoilt = EncodedBatch(damaged, batch.lengths, batch.hash_index, batch.hashes, count=batch.count)
            header, body = produced("turned", spoilt, producer_id=place)
            with pytest.raises(dmq.RecordCorrupt):
                decode_response(raw.ask(Command.PRODUCE, header, body))
    assert block_records(served, "turned") == 0


def hostile(sample: list[dmq.Message], topic: str) -> EncodedBatch:
    """A batch whose block has a right checksum and does not expand."""
    batch = encoded(sample, topic)
    blocks_at = len(batch.data) - batch.block_bytes
    codec, size, raw_size, _ = struct.unpack_from(">B3xIII", batch.data, blocks_at)
    assert size + 16 == batch.block_bytes
    data = bytes(batch.data[blocks_at + 16 :])
    bad = make_block(codec, raw_size, b"\xff" * len(data))
    return EncodedBatch(
        bytearray(batch.data[:blocks_at] + bad), batch.lengths, batch.hash_index, batch.hashes, count=batch.count
    )


def test_a_stored_block_that_nobody_can_expand_gives_dead_letters_and_holds_nobody_up(tmp_path: Path) -> None:
    good = messages(100, odd=False)
    with (
        ServedBroker(OsFiles(str(tmp_path / "data")), dead_letters_url=f"sqlite:///{tmp_path}/letters.db") as broker,
        dmq.connect(broker.url, app="shop") as client,
    ):
        client.admin.create_topic("orders", queues=1)
        with RawClient(port_of(broker.url), features=BOTH) as raw:
            for number, batch in enumerate((encoded(good), hostile(good, "orders"), encoded(good))):
                header, body = produced("orders", batch, producer_id=number + 1)
                assert raw.ask(Command.PRODUCE, header, body).status == 0
            # A peer that knows no blocks is served what can be read.
            seen: list[bytes] = []
            with RawClient(port_of(broker.url), features=[FRAME_CRC]) as old:
                while len(seen) < 200:
                    answer = old.ask(Command.PULL, Pull("orders", "old", max_messages=150, wait_ms=2000))
                    reply: PullReply = decode_response(answer)
                    _, data = unpack_records(answer.body, sum(lease.count for lease in reply.leases))
                    seen += [record.body for record in iter_records(bytes(data))]
            assert seen == [message.body for message in good] * 2
        got: list[bytes] = []
        with client.consumer("orders", "g", start_from="earliest") as consumer:

            def handle(message: dmq.ReceivedMessage) -> None:
                got.append(message.body)
                if len(got) == 200:
                    consumer.stop()

            consumer.run(handle)
        assert sorted(got) == sorted([message.body for message in good] * 2)
        eventually(lambda: sum(1 for letter in client.admin.dead_letters(group="g")) == 100)
        assert {letter.reason for letter in client.admin.dead_letters(group="g")} <= {"CORRUPT", "REJECTED"}
    findings = verify(OsFiles(str(tmp_path / "data"))).findings
    assert len([finding for finding in findings if "cannot be expanded" in str(finding) or "damaged" in str(finding)])
