"""Questions that do not wait for the disk: the store says what it lacks, and is asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.file_pool import FilePool, NeedsDisk, Prepared
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

T = TypeVar("T")

SETTINGS = StoreSettings(read_cache_bytes=0, segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10)


def fill(store: MessageStore, count: int) -> None:
    store.create_topic("orders", TopicConfig(queues=1))
    for i in range(count):
        encoded = encode_batch("orders", "app", [Message(b"%d" % i * 200, key=f"k{i % 3}")], sent_at_ms=1)
        batch = Batch(
            topic="orders",
            queue=0,
            data=encoded.data,
            lengths=encoded.lengths,
            hash_index=encoded.hash_index,
            hashes=encoded.hashes,
            producer_id=7,
            first_sequence=i,
        )
        store.append([batch])
    store.flush()
    store.checkpoint()


def asked(store: MessageStore, question: Callable[[], T]) -> tuple[T, int]:
    """The answer, and how often the disk was needed."""
    prepared: Prepared = {}
    reads = 0
    while True:
        try:
            with store.queries.deferring(prepared):
                return question(), reads
        except NeedsDisk as need:
            reads += 1
            with store.queries.lending():
                prepared[need.key] = store.queries.fetch(need)


def reopened(files: MemoryFiles) -> MessageStore:
    return MessageStore(files, SETTINGS, FakeClock())


def test_deferred_answers_are_those_of_the_disk() -> None:
    files = MemoryFiles()
    with MessageStore(files, SETTINGS, FakeClock()) as store:
        fill(store, 60)
    with reopened(files) as store:
        topic = store.queries.topic("orders")
        for question in (
            lambda: [bytes(piece) for piece in store.queries.read("orders", 0, 5, 40, 1 << 20).pieces],
            lambda: store.queries.places(key="k1"),
            lambda: store.queries.offset_since("orders", 0, 0),
            lambda: store.queries.read_units(store.queries.start)[1],
            lambda: store.queries.id_runs(
                topic, 0, *(lambda s: (s.offsets.tolist(), s.pieces))(store.queries.read("orders", 0, 9, 9))
            ),
        ):
            answer, reads = asked(store, question)
            assert answer == question()
            assert reads or question() == 0


def test_a_question_that_defers_reads_nothing_by_itself() -> None:
    files = MemoryFiles()
    with MessageStore(files, SETTINGS, FakeClock()) as store:
        fill(store, 20)
    with reopened(files) as store:
        files.fail("read", lambda path, _: True)
        with pytest.raises(NeedsDisk), store.queries.deferring({}):
            store.queries.read("orders", 0, 0)
        files.heal()
        assert len(store.queries.read("orders", 0, 0, 20, 1 << 20)) == 20, "outside it reads as ever"


def test_only_the_thread_that_asks_defers() -> None:
    files = MemoryFiles()
    file = files.open("file", create=True, write=True)
    file.write(0, (b"abc",))
    file.close()
    pool = FilePool(files, 4)
    seen: list[bytes] = []
    with pool.deferring({}):
        other = threading.Thread(target=lambda: seen.append(pool.read("file", 0, 3)))
        other.start()
        other.join()
        with pytest.raises(NeedsDisk):
            pool.read("file", 0, 3)
        with pool.deferring(None) as had_prepared:
            assert had_prepared
            assert pool.read("file", 0, 3) == b"abc"
    assert seen == [b"abc"]
    pool.close()
