"""Frames of every command, with any header and any body, sent to a broker: each is answered, and it works on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dmq
from dmq.errors import DMQError
from dmq.protocol import SPECS, Command, Frame, Header, Kind, decode_response, request_head
from dmq.protocol.admin import TopicList
from dmq.protocol.consume import Subscribe
from dmq.protocol.produce import TransactionEnd
from dmq.protocol.session import Heartbeat
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, port_of, produce
from tests.sampling import sample_size
from tests.unit.protocol.samples import build_frame, headers

EXAMPLES = sample_size(share=200, whole=5000)
TOPICS = ("orders", "other", "%SCHEDULE%", "%DLQ%g", "nowhere", "\u2603", "")
GROUPS = ("g", "h", "%RETRY%g", "")
# What a log may hold of bad requests: a disk or a peer, never a defect.
EXPECTED = (
    "messages passed over",
    "dead letters could not be written",
    "stalled connection closed",
    "member silent",
    "consumer taken over",  # two requests drew one name
)


class Log(logging.Handler):
    """Keeps what was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith(EXPECTED):
            self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def broker() -> Iterator[ServedBroker]:
    with ServedBroker(auto_create=False, frame_bytes_max=64 << 10, lease_seconds=0.2, grace_seconds=0.1) as running:
        with dmq.connect(running.url) as client:
            client.admin.create_topic("orders", queues=4)
            client.admin.create_topic("other", queues=1)
            client.producer().send_many("orders", [dmq.Message(b"x", key="k", tag="t")] * 100)
        yield running


def named(header: Header) -> st.SearchStrategy[Header]:
    """The same header with names that mean something here, so that it gets past the first check."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, choices in (("topic", TOPICS), ("group", GROUPS)):
        if isinstance(getattr(header, name, None), str):
            fields[name] = st.sampled_from(choices)
    for name in ("queue", "subscription", "epoch", "lease", "journal_offset"):
        if isinstance(getattr(header, name, None), int):
            fields[name] = st.integers(0, 5)
    if hasattr(header, "wait_ms"):
        fields["wait_ms"] = st.integers(0, 100)
    if hasattr(header, "timeout_ms"):
        fields["timeout_ms"] = st.integers(1, 100)
    if isinstance(header, TransactionEnd):
        # Few, or more than any request may end: tens of thousands take seconds, see the tests of large answers.
        fields["count"] = st.integers(1, 300) | st.just(1 << 20)
    return st.fixed_dictionaries(fields).map(lambda changes: replaced(header, changes))


def replaced(header: Header, changes: dict[str, Any]) -> Header:
    values = {name: getattr(header, name) for name in header.__struct_fields__} | changes
    return type(header)(**values)


REQUESTS = {
    command: spec.request
    for command, spec in SPECS.items()
    # Deleting and reshaping what the next example needs would end the test's own use, and so would a drain.
    if spec.request is not None
    and command not in (Command.HELLO, Command.TOPIC_DELETE, Command.TOPIC_UPDATE, Command.DRAIN)
}

valid = st.sampled_from(sorted(REQUESTS)).flatmap(
    lambda command: st.tuples(st.just(int(command)), headers(REQUESTS[command]).flatmap(named), st.binary(max_size=200))
)
batches = st.tuples(
    st.just(int(Command.PRODUCE)),
    st.builds(
        lambda topic, bodies, sequence, durability, group: produce(
            topic, *bodies, sequence=sequence, durability=durability, group=group, timeout_ms=50
        ),
        st.sampled_from(TOPICS[:3]),
        st.lists(st.binary(max_size=50), min_size=1, max_size=5),
        st.integers(0, 50),
        st.integers(0, 4),
        st.sampled_from(GROUPS),
    ),
)
invalid = st.tuples(st.integers(0, 0x60), st.binary(max_size=64), st.binary(max_size=64))


def frames_of(drawn: tuple[object, ...], correlation: int, kind: Kind) -> bytes:
    match drawn:
        case (int(command), (Header() as header, bytes(body))):
            return request_head(command, header, correlation, len(body)) + body
        case (int(command), Header() as header, bytes(body)):
            return request_head(command, header, correlation, len(body)) + body
        case (int(command), bytes(raw), bytes(body)):
            return build_frame(kind, command, raw, body, correlation=correlation)
    raise AssertionError(drawn)


@pytest.mark.sampled
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(valid | batches | invalid, min_size=1, max_size=8), st.sampled_from([Kind.REQUEST, Kind.ONE_WAY]))
def test_every_request_is_answered_and_no_defect_shows(
    broker: ServedBroker, drawn: list[tuple[object, ...]], kind: Kind
) -> None:
    log = Log()
    logging.getLogger("dmq.broker").addHandler(log)
    logging.getLogger("asyncio").addHandler(log)
    try:
        with RawClient(port_of(broker.url)) as peer:
            peer.request(Command.SUBSCRIBE, Subscribe(9, "orders", "h", lease_ms=100))
            sent = {}
            for correlation, one in enumerate(drawn, 100):
                if one[0] == Command.HELLO:
                    continue
                peer.send(frames_of(one, correlation, kind))
                is_request = kind is Kind.REQUEST or not isinstance(one[1], bytes)
                if is_request and 0 < int(str(one[0])) != Command.HELLO:
                    sent[correlation] = one
            last = peer.request(Command.HEARTBEAT, Heartbeat())
            answered: set[int] = set()
            while not (last in answered and sent.keys() <= answered):
                frame = peer.read()
                assert frame is not None, f"the broker hung up on {drawn}"
                if frame.kind == Kind.RESPONSE:
                    check(frame)
                    answered.add(frame.correlation)
    finally:
        logging.getLogger("dmq.broker").removeHandler(log)
        logging.getLogger("asyncio").removeHandler(log)
    assert log.lines == []


def check(frame: Frame) -> None:
    """An answer is a good one or an error of the tree, and never a defect of the broker."""
    if frame.status:
        with pytest.raises(DMQError) as caught:
            decode_response(frame)
        assert caught.value.code != "SERVER_ERROR", caught.value


def test_the_broker_still_works(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send("other", b"good")
        seen = threading.Event()
        consumer = client.consumer("other", "afterwards")
        running = threading.Thread(
            target=consumer.run, args=(lambda message: seen.set() if message.body == b"good" else None,)
        )
        running.start()
        assert seen.wait(30)
        consumer.close()
        running.join(30)
    with RawClient(port_of(broker.url)) as peer:
        assert decode_response(peer.ask(Command.TOPIC_LIST, TopicList())).topics
