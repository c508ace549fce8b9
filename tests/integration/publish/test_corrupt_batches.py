"""A batch with a record that nobody could read is refused whole, and the connection goes on."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from dmq.client.client import Client
from dmq.model import Durability
from dmq.protocol import Command, Frame, error_from_status
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.protocol.session import Heartbeat
from dmq.testing import TestBroker
from tests.integration.broken_records import BROKEN, key, record
from tests.integration.frame_client import RawClient

HEARTBEAT = Heartbeat(0)
DUE_MS = 4_000_000_000_000


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.connect().admin.create_topic("orders", queues=1)
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    return broker.connect()


def produce(raw: RawClient, records: list[bytes], flags: ProduceFlag) -> Frame:
    dues = struct.pack(f">{len(records)}Q", *[DUE_MS] * len(records)) if flags & ProduceFlag.DUES else b""
    header = Produce(
        "orders",
        0,
        len(records),
        0,
        77,
        1,
        0,
        durability=Durability.STORED,
        flags=int(flags),
        group="g" if flags & ProduceFlag.HALF else "",
    )
    lengths = struct.pack(f">{len(records)}I", *map(len, records))
    return raw.ask(Command.PRODUCE, header, lengths + dues + b"".join(records))


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(
    "flags", [ProduceFlag(0), ProduceFlag.HALF, ProduceFlag.DUES], ids=["plain", "half", "delayed"]
)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_batch_with_a_broken_record_is_refused_and_nothing_of_it_is_stored(
    broker: TestBroker, client: Client, broken: str, flags: ProduceFlag, count: int
) -> None:
    def end() -> tuple[int, int]:
        return sum(queue.next_offset for queue in client.admin.offsets("orders")), len(client.admin.transactions())

    before = end()
    with RawClient(broker.port) as raw:
        records = [record("orders", key(b"good"))] * (count - 1) + [BROKEN[broken]("orders")]
        answer = produce(raw, records, flags)
        error = error_from_status(answer.status, answer.header)
        assert error.code == "RECORD_CORRUPT"
        assert "send it again" in error.message
        assert error.detail["index"] == count - 1
        assert end() == before
        # The connection is as good as before.
        assert raw.ask(Command.HEARTBEAT, HEARTBEAT).status == 0
