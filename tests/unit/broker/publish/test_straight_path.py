"""The straight path gives what the general way gives: bytes, state, counters, metrics and answers."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from dmq.broker.diagnostics.metrics import numbers
from dmq.broker.publish.rate_limits import Limit
from dmq.broker.publish.straight_path import REASONS
from dmq.model import Durability, Message, TopicConfig
from dmq.protocol import Command, pack_batch, request_head
from dmq.protocol.header import encode_header
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.records import encode_batch
from dmq.records.attributes import ANY_QUEUE
from dmq.settings import StoreSettings
from dmq.storage.journal.unit import HEADER_BYTES
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.unit.broker.turns import Peer, Rig, running

PEERS = 4
SMALL = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=64 << 10,
    body_bytes_max=32 << 10,
    ballast_bytes=0,
    disk_refuse=1.0,
    disk_clean=1.0,
)
LARGE = structs.replace(SMALL, segment_bytes=1 << 20, unit_bytes_max=512 << 10)


class Body(bytes):
    """So many zeros, which take little room where a failure is told."""

    def __repr__(self) -> str:
        return f"Body({len(self)})"


class Send(NamedTuple):
    """One PRODUCE, and what is odd about it."""

    peer: int = 0
    topic: str = "orders"
    queue: int = 0
    producer: int = 1
    step: int = 0  # from the sequence that would be next
    epoch: int = 0
    durability: Durability = Durability.STORED
    messages: tuple[Message, ...] = (Message(b"body"),)
    odd: str = ""


MANY = Send(messages=(Message(Body(2000), key="k-1"),) * 40)  # larger than what is received at a time


class Do(NamedTuple):
    """Something else that happens between two requests."""

    what: str


MESSAGES = st.builds(
    Message,
    st.sampled_from([b"", b"body", Body(3000), Body(17_000)]),
    key=st.sampled_from([None, "k-1", "k-2", "schlüssel"]),
    tag=st.sampled_from([None, "red"]),
    business_id=st.sampled_from([None, "b-1"]),
    priority=st.sampled_from([0, 3, 4]),
    properties=st.sampled_from([None, {"a": "1"}, {"ä": "ö", "c": "d"}]),
)
ODD = (
    "named", "field", "flag", "resend", "previous", "ttl", "half", "slots", "length", "bit", "crc", "record", "key",
    "one_way", "keys",
)  # fmt: skip
SENDS = st.builds(
    Send,
    peer=st.integers(0, PEERS),  # the last one has no checksums
    topic=st.sampled_from(["orders", "orders", "bills", "nowhere", "%own", "levels"]),
    queue=st.sampled_from([0, 0, 1, ANY_QUEUE, 9]),
    producer=st.integers(0, 3),
    step=st.sampled_from([0, 0, 0, 0, -1, 1]),
    epoch=st.sampled_from([0, 0, 0, 1]),
    durability=st.sampled_from([*[Durability.STORED] * 4, Durability.FLUSHED, Durability.NONE, Durability.REPLICATED]),
    messages=st.one_of(
        st.tuples(MESSAGES),
        st.tuples(MESSAGES),
        st.tuples(MESSAGES, MESSAGES),
        st.tuples(MESSAGES, st.sampled_from([2, 15, 16, 40])).map(lambda drawn: (drawn[0],) * drawn[1]),
    ),
    odd=st.one_of(st.just(""), st.just(""), st.just(""), st.sampled_from(ODD)),
)
DOINGS = st.sampled_from(
    [*map(Do, ("drain", "undrain", "limit", "unlimit", "full", "space", "fail", "tear", "time", "back", "event"))]
)
TURNS = st.lists(
    st.tuples(st.lists(st.one_of(SENDS, SENDS, SENDS, SENDS, SENDS, DOINGS), max_size=8), st.booleans()), max_size=12
)


ONE_BY_ONE = st.lists(
    st.tuples(
        st.one_of(st.lists(DOINGS, max_size=1), st.tuples(SENDS).map(list), st.tuples(DOINGS, SENDS).map(list)),
        st.booleans(),
    ),
    max_size=24,
)


class Disk:
    """The threads of the writer, which do their work when they are told to."""

    took = 0.0

    def __init__(self) -> None:
        self._given: list[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = []
        self.is_over = False

    def run(self, work: Callable[[], None], finished: Callable[[BaseException | None], None]) -> None:
        self._given.append((work, finished))
        if self.is_over:
            asyncio.get_running_loop().call_soon(self.go_on)

    def go_on(self) -> None:
        given, self._given = self._given, []
        for work, finished in given:
            error: BaseException | None = None
            try:
                work()
            except Exception as problem:
                error = problem
            finished(error)

    def close(self) -> None:
        self.go_on()


def frame_of(send: Send, peer: Peer, sequence: int, correlation: int) -> bytes:
    """The bytes of a request."""
    topic, odd = send.topic, send.odd
    messages = [structs.replace(message, body=bytes(message.body)) for message in send.messages]
    batch = encode_batch("bills" if odd == "named" else topic, "shop", messages, sent_at_ms=10**12)
    body = b"".join(pack_batch(batch))
    keys, flags = len(batch.hashes), 0
    if odd in ("ttl", "half"):
        flags = int(ProduceFlag.EXPIRING if odd == "ttl" else ProduceFlag.HALF)
    if odd == "length":
        body += b"\0"
    elif odd == "record":
        body = body[:-3] + b"\xff" + body[-2:]
    elif odd == "key" and keys:
        body = body[: 4 * batch.count + 3] + b"\7" + body[4 * batch.count + 4 :]
    elif odd == "keys":
        keys += 1
    header = Produce(
        topic,
        send.queue,
        batch.count,
        keys,
        send.producer,
        send.epoch,
        sequence,
        send.durability,
        flags,
        "g" if odd == "half" else "",
        0,
        sequence - 1 if odd == "previous" and sequence else None,
        1 if odd == "slots" else 0,
    )
    frame = bytearray(request_head(Command.PRODUCE, header, correlation, len(body)) + body)
    if odd == "field":
        raw = encode_header(header)
        frame = bytearray(request_head(Command.PRODUCE, header, correlation, len(body) + 1) + body)
        longer = bytes((raw[0] + 1,)) + raw[1:] + b"\x05"
        frame[16:20] = len(longer).to_bytes(4, "big")
        frame[20 : 20 + len(raw)] = longer
    elif odd == "flag":
        frame[11] = 0x80
    elif odd == "resend":
        frame[11] = 0x01
    elif odd == "one_way":
        frame[5] = 3
    sealed = bytearray(peer.seal(bytes(frame)))
    if odd == "bit":
        sealed[-6] ^= 4
    return bytes(sealed)


def told(rig: Rig) -> dict[str, Any]:
    """Everything that can be seen of a broker, but for the way its requests took."""
    broker, store = rig.broker, rig.store
    derived = store.queries.derived
    lookup = derived.lookup._active
    lookup.gather()
    return {
        "files": {path: rig.files.read_file(path) for path in rig.files.paths() if path.startswith("journal/")},
        "answers": [peer.wire.received for peer in rig.peers],
        "closed": [peer.wire.is_closed for peer in rig.peers],
        "state": derived.state.snapshot(store.queries.end),
        "visible": (store.queries.visible, store.queries.end, derived.applied),
        "queues": {
            key: (tail.first, [*tail.gather().offsets], [*tail.lengths], [*tail.tags])
            for key, tail in derived.queues._active.items()
        },
        "lookup": [[*column] for column in (lookup.starts, lookup.times, lookup.hashes, lookup.hash_offsets)],
        "batches": [*lookup.batches],
        "lags": derived.state.lags.recount() if derived.state.lags else None,
        "stored": derived.state.lags.stored_in(3) if derived.state.lags else None,
        "topics": broker.publisher.by_topic,
        "probe": (broker.writer.probe.turns, broker.writer.probe.waits.counts[:]),
        "metrics": {name: value for name, value in numbers(rig.dispatcher, broker).items() if "straight" not in name},
    }


async def check_both(
    turns: list[tuple[list[Send | Do], bool]], *, now: bool = False, store: StoreSettings = SMALL
) -> list[Rig]:
    """The same requests on both ways; after each turn everything must be the same.

    Parameters:
        now: what is stored is written as it comes, on the straight path.
    """
    files = MemoryFiles()
    with_topics = MessageStore(files, store, FakeClock())
    for topic in ("orders", "bills"):
        with_topics.create_topic(topic, TopicConfig(queues=4))
    with_topics.create_topic("levels", TopicConfig(queues=4, priority=True))
    with_topics.close()
    rigs: list[Rig] = []
    async with (
        running(files.copy(), store, straight=True) as one,
        running(files.copy(), store, straight=False) as other,
    ):
        for rig in (one, other):
            rig.broker.writer._disk = Disk()  # type: ignore[assignment]
            rig.broker.catalog._round_robin = itertools.count()
            rig.broker.writer._ticker.cancel()  # what depends on when it runs differs
            rig.broker._ticker.cancel()
            await rig.connect(PEERS, has_crc=True)
            await rig.connect(1)
            rigs.append(rig)
        try:
            await compare(rigs, turns, now=now)
        finally:
            for rig in rigs:
                disk: Any = rig.broker.writer._disk
                disk.is_over = True
                rig.files.heal()
                rig.files.capacity_bytes = None
                disk.go_on()
    assert other.broker.straight.taken == 0
    return rigs


async def compare(rigs: list[Rig], turns: list[tuple[list[Send | Do], bool]], *, now: bool) -> None:
    sequences: dict[int, int] = {}
    for number, (steps, is_flushed) in enumerate(turns):
        rigs[0].broker.writer.lone_turns = 16 if now else 0
        for at, step in enumerate(steps):
            if isinstance(step, Do):
                for rig in rigs:
                    do(rig, step.what)
                continue
            sequence = max(0, sequences.get(step.producer, 0) + step.step)
            sequences[step.producer] = sequence + len(step.messages)
            for rig in rigs:
                peer = rig.peers[step.peer]
                if not peer.wire.is_closed:
                    peer.feed(frame_of(step, peer, sequence, 1000 * number + at))
        for rig in rigs:
            await rig.turn()
            if is_flushed:
                rig.broker.writer._disk.go_on()  # type: ignore[attr-defined]
        same(rigs)
    for rig in rigs:
        for _ in range(3):
            rig.files.heal()
            rig.broker.writer._disk.go_on()  # type: ignore[attr-defined]
            await rig.turn()
    same(rigs)


def same(rigs: list[Rig]) -> None:
    first, second = map(told, rigs)
    for name, value in first.items():
        assert value == second[name], name


def do(rig: Rig, what: str) -> None:
    """Let something happen."""
    broker, clock = rig.broker, rig.dispatcher.clock
    assert isinstance(clock, FakeClock)
    if what in ("drain", "undrain"):
        broker.readiness.is_draining = what == "drain"
    elif what in ("limit", "unlimit"):
        limits = [Limit("orders", "", 2, None, is_dead_letter=False)] if what == "limit" else []
        broker.limits.limits.replace(limits, clock.monotonic())
    elif what in ("full", "space"):
        rig.files.capacity_bytes = sum(rig.files.paths().values()) + 700 if what == "full" else None
    elif what == "fail":
        rig.files.fail("write", 1, errno.EIO)
    elif what == "tear":
        rig.files.fail("write", 1, errno.ENOSPC, written=0.5)
    elif what == "time":
        clock.advance(0.5)
    elif what == "back":
        clock.set_wall_ms(clock.now_ms() - 5000)
    else:
        broker.writer.write_soon([broker.store.change("bills", TopicConfig(queues=4))])


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(test())  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(TURNS)
@example([([Send(odd=odd)], True) for odd in ODD])
@example([([Send(peer=peer, producer=1 + peer, odd=odd) for peer in range(PEERS)], True) for odd in ("", *ODD)])
@example([([Send(durability=Durability.FLUSHED), Send(producer=2)], False), ([Send(step=-1)], False), ([Send()], True)])
@example([([Do("full"), *[Send(peer=p, producer=1 + p) for p in range(PEERS)]], True), ([Do("space"), Send()], True)])
@example([([Do("fail"), *[Send(peer=p, producer=1 + p) for p in range(PEERS)]], True), ([Send()], True)])
def test_both_ways_give_the_same(turns: list[tuple[list[Send | Do], bool]]) -> None:
    run(lambda: check_both(turns))


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(ONE_BY_ONE, st.sampled_from([SMALL, LARGE]))
@example([([Send(odd=odd)], True) for odd in ("", *ODD)], SMALL)
@example(
    [([Send(durability=Durability.FLUSHED)], False), ([Send(step=-1)], False), ([Send()], True), ([Send()], True)],
    SMALL,
)
@example(
    [([Do("full"), Send()], True), ([Do("space"), Send()], True), ([Do("fail"), Send()], True), ([Send()], True)], SMALL
)
@example([([Send()], True), ([Send(step=-1)], True), ([Send(epoch=1)], True), ([Send()], True)], SMALL)
@example([([MANY], True)] * 5, LARGE)
@example([([MANY._replace(odd=odd)], True) for odd in ("", *ODD)], LARGE)
@example([([Do("full"), MANY], True), ([Do("space"), MANY], True), ([Do("fail"), MANY], True), ([MANY], True)], LARGE)
@example([([MANY], True), ([MANY._replace(step=-40)], True), ([MANY._replace(step=-1)], True), ([MANY], True)], LARGE)
def test_what_is_written_as_it_comes_is_the_same(
    turns: list[tuple[list[Send | Do], bool]], store: StoreSettings
) -> None:
    run(lambda: check_both(turns, now=True, store=store))


def test_messages_that_come_one_by_one_soon_need_no_turn_and_those_that_come_together_do() -> None:
    async def test() -> None:
        async with running(MemoryFiles(), SMALL, straight=True) as rig:
            rig.broker.store.create_topic("orders", TopicConfig(queues=4))
            await rig.connect(2, has_crc=True)
            writer, (one, other) = rig.broker.writer, rig.peers
            at_once = []
            for number in range(40):
                writes = one.wire.writes
                one.feed(frame_of(Send(), one, number, number))
                at_once.append(one.wire.writes > writes)
                await rig.turn()
            assert at_once[:8] == [False] * 8
            assert at_once.count(False) == 10, "and every sixteenth later on"
            for number in range(40, 60):
                one.feed(frame_of(Send(), one, number, number))
                other.feed(frame_of(Send(producer=2), other, number, number))
                await rig.turn()
            assert writer.lone_turns < 8
            units = writer.units
            one.feed(frame_of(Send(), one, 60, 60))
            other.feed(frame_of(Send(producer=2), other, 60, 60))
            await rig.turn()
            assert writer.units == units + 1

    run(test)


def test_plain_messages_of_a_turn_take_the_straight_path_in_one_unit() -> None:
    async def test() -> None:
        sends: list[Send | Do] = [Send(peer=peer, producer=1 + peer, queue=peer % 2) for peer in range(PEERS)]
        one, _ = await check_both([(sends, True), (sends, True)])
        assert one.broker.straight.taken == 2 * PEERS
        assert not any(one.broker.straight.left.values())

    run(test)


def test_what_takes_the_general_way_is_counted_by_its_reason() -> None:
    async def test() -> None:
        odd: list[tuple[list[Send | Do], bool]] = [
            ([Send(odd=odd)], True) for odd in ("field", "previous", "ttl", "keys")
        ]
        again: list[tuple[list[Send | Do], bool]] = [([Send()], True), ([Send(step=-1)], True)]
        one, _ = await check_both([*odd, *again, ([Do("event"), Send()], True), ([Send(topic="no")], True)])
        left = {reason: count for reason, count in one.broker.straight.left.items() if count}
        assert left == {"header": 1, "order": 1, "special": 1, "batch": 1, "resend": 1, "mixed": 1, "refused": 1}
        assert one.broker.straight.taken == 1
        assert set(left) < set(REASONS)

    run(test)


def test_a_batch_that_need_only_be_stored_is_written_as_it_comes_and_others_take_the_general_way() -> None:
    async def test() -> None:
        sends: list[Send | Do] = [
            MANY,
            MANY._replace(odd="previous"),
            MANY._replace(durability=Durability.FLUSHED),
            MANY._replace(odd="ttl"),
            MANY._replace(topic="no"),
            MANY._replace(odd="record"),
            MANY._replace(messages=(Message(b"few"),) * 3),
        ]
        one, _ = await check_both([([send], True) for send in sends], now=True, store=LARGE)
        left = {reason: count for reason, count in one.broker.straight.left.items() if count}
        assert left == {"durability": 1, "special": 1, "refused": 1, "content": 1}
        assert one.broker.straight.taken == 3

    run(test)


def test_a_segment_ends_on_both_ways_at_the_same_message() -> None:
    async def test() -> None:
        send = Send(messages=(Message(b"z" * (4000 - HEADER_BYTES)),))
        one, _ = await check_both([([send], True)] * 40)
        assert one.broker.straight.left["segment"] == 2
        assert one.broker.straight.taken == 38

    run(test)


def test_what_is_written_as_it_comes_is_answered_before_it_is_applied_unless_others_have_to_hear_of_it() -> None:
    async def test() -> None:
        async with running(MemoryFiles(), LARGE, straight=True) as rig:
            rig.broker.store.create_topic("orders", TopicConfig(queues=4))
            await rig.connect(1, has_crc=True)
            writer, (peer,), queries = rig.broker.writer, rig.peers, rig.store.queries
            listened: list[str] = []
            applied_at_answer: list[bool] = []
            writer.is_heard = listened.__contains__
            peer.wire.on_write = lambda: applied_at_answer.append(queries.derived.applied == queries.end)
            sequence = 0
            for topic in ("bills", "orders"):
                listened.append(topic)
                for send in (Send(), MANY):
                    writer.lone_turns = 16
                    peer.feed(frame_of(send, peer, sequence, sequence))
                    sequence += len(send.messages)
                    assert queries.derived.applied == queries.end
            assert applied_at_answer == [False, False, True, True]
            assert rig.broker.straight.taken == 4

    run(test)
