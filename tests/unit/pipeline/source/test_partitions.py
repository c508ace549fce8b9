"""What a task of a read does around its rows: once in a process, and in steps where bodies grow."""

from __future__ import annotations

import gc

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from dmq.model import Message
from dmq.pipeline.decode.units import UnitRows, decode_units
from dmq.pipeline.source import data_source
from dmq.pipeline.source.options import SourceOptions
from dmq.records import Compressor
from tests.unit.pipeline.journals import batch_of, journal, new_store

BODY = b"a body that can be compressed well, " * 100


def rows_of(*messages: Message, compressor: Compressor | None = None) -> UnitRows:
    store = new_store("orders")
    store.append([batch_of(messages, compressor=compressor)])
    return decode_units(journal(store), columns=("body",))


def test_what_imports_made_is_kept_from_the_collector_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    data_source._settle.cache_clear()
    for _ in range(3):
        assert [*data_source.read_partition(InputPartition(None), StructType(), SourceOptions("127.0.0.1:1"))] == []
    assert frozen == [1]


def test_bodies_that_are_not_compressed_come_in_one_step_without_a_look_at_their_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(data_source, "raw_sizes")
    rows = rows_of(*[Message(BODY)] * 10)
    assert [*data_source._in_steps(rows)] == [rows]


def test_bodies_that_grow_come_in_steps_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "BATCH_BYTES", 3 * len(BODY))
    rows = rows_of(*[Message(BODY)] * 10, compressor=Compressor("lz4"))
    assert rows.is_compressed().all()
    assert len(rows.buffer) < 3 * len(BODY)
    assert [len(part) for part in data_source._in_steps(rows)] == [3, 3, 3, 1]


def test_more_bodies_than_a_step_come_in_steps_though_none_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "BATCH_BYTES", 4 * len(BODY))
    rows = rows_of(*[Message(BODY)] * 10)
    assert [len(part) for part in data_source._in_steps(rows)] == [4, 4, 2]
