"""The key-value space in the journal: what the events say, over a restart, a checkpoint and a new segment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.settings import StoreSettings
from dmq.storage.offline.inspection import event_words
from dmq.storage.state.events import KeyPut, decode_event, encode_event
from dmq.storage.state.state import KeyTable
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles

names = st.sampled_from(["a", "b", "c"])
puts = st.builds(KeyPut, names, names, st.none() | st.binary(max_size=4), st.integers(0, 9))


@given(st.lists(puts))
def test_the_table_is_what_was_put_last(events: list[KeyPut]) -> None:
    table, model = KeyTable(), dict[tuple[str, str], KeyPut]()
    for event in events:
        table.apply(event)
        model.pop((event.namespace, event.key), None)
        if event.value is not None:
            model[event.namespace, event.key] = event
    assert {(entry.namespace, entry.key): entry for entry in table} == model
    assert table.count == len(model)
    assert table.bytes == sum(2 + len(entry.value or b"") for entry in model.values())
    for namespace in "abc":
        assert [entry.key for entry in table.among(namespace)] == sorted(key for at, key in model if at == namespace)
    again = KeyTable()
    again.load(table.dump())
    assert again.dump() == table.dump()
    assert (again.count, again.bytes) == (table.count, table.bytes)


def test_keys_outlive_the_store_a_checkpoint_and_the_loss_of_what_is_derived() -> None:
    files = MemoryFiles()
    store = MessageStore(files)
    store.append([KeyPut("confirm", "a", b"1", 5), KeyPut("confirm", "b", b"2"), KeyPut("other", "a", b"3")])
    store.append([KeyPut("confirm", "a", b"4", 9), KeyPut("confirm", "b")])
    store.flush()
    expected = [KeyPut("confirm", "a", b"4", 9)]
    assert store.queries.keys.among("confirm") == expected
    store.close()
    store = MessageStore(files)
    assert store.queries.keys.among("confirm") == expected
    store.checkpoint()
    store.close()
    store = MessageStore(files)
    assert store.queries.keys.among("confirm") == expected
    assert store.queries.keys.count == 2
    store.close()


def test_keys_outlive_the_segment_they_were_written_in() -> None:
    files = MemoryFiles()
    settings = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=32 << 10, body_bytes_max=8 << 10, retention_bytes=1)
    store = MessageStore(files, settings)
    store.append([KeyPut("confirm", "a", b"1")])
    for number in range(80):
        store.append([KeyPut("filler", "x", bytes([number]) * 4096)])
    store.flush()
    store.retain()
    assert store.stats()["segments"] == 1
    store.close()
    store = MessageStore(files, settings)
    assert store.queries.keys.among("confirm") == [KeyPut("confirm", "a", b"1")]
    store.close()


def test_an_event_reads_back_and_says_what_it_means() -> None:
    put, gone = KeyPut("confirm", "a", b"123", 7), KeyPut("confirm", "a")
    assert [decode_event(encode_event(event)) for event in (put, gone)] == [put, gone]
    assert event_words(put) == "key a of confirm holds 3 bytes until 7 ms"
    assert event_words(gone) == "key a of confirm is gone"
