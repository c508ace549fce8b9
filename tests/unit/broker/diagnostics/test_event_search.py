"""The events of a journal that concern one message."""

from __future__ import annotations

from dmq.broker.diagnostics.message_history import Wanted, covers, find_events
from dmq.storage.state.events import (
    DelaysDone,
    Event,
    Outcome,
    PositionSet,
    Settled,
    TransactionEnded,
    TransactionsEnded,
    pack_offsets,
)
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles

WANTED = Wanted({(16, 1): [40]}, frozenset({4096}), b"i" * 16)


def events_in(*events: Event) -> list[Event]:
    """What is found of these, each written for itself and all together."""
    store = MessageStore(MemoryFiles())
    store.create_topic("orders")
    start = store.queries.end
    store.append(list(events))
    for event in events:
        store.append([event])
    store.flush()
    raw, _ = store.queries.read_units(start)
    found = [seen.event for seen in find_events(raw, WANTED)]
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    store.close()
    return found[: len(found) // 2]


def test_a_bitmap_says_which_offsets_an_event_is_about() -> None:
    some = Settled("g", 16, 1, 8, 20, bitmap=bytes([0b101, 0b10]))
    assert [offset for offset in range(40) if covers(some, offset)] == [8, 10, 17]
    everything = Settled("g", 16, 1, 8, 20)
    assert [offset for offset in range(40) if covers(everything, offset)] == list(range(8, 28))


def test_only_what_is_about_the_message_is_found_in_the_order_it_happened() -> None:
    mine: list[Event] = [
        PositionSet("g", 16, 1, 0),
        Settled("g", 16, 1, 30, 20, Outcome.RETRIED, member="c-1", attempt=2, error="boom"),
        DelaysDone(pack_offsets([100, 4096]), "cancelled"),
        TransactionEnded(b"i" * 16, "committed"),
        TransactionsEnded(b"x" * 16 + b"i" * 16, "rolled back"),
    ]
    others: list[Event] = [
        PositionSet("g", 16, 2, 0),
        Settled("g", 16, 1, 41, 20),
        Settled("g", 17, 1, 30, 20),
        Settled("g", 16, 1, 30, 20, bitmap=b"\x01"),
        DelaysDone(pack_offsets([100])),
        TransactionEnded(b"x" * 16, "committed"),
        TransactionsEnded(b"x" * 8 + b"i" * 16 + b"x" * 8, "rolled back"),
    ]
    assert events_in(*(event for pair in zip(mine, others, strict=False) for event in pair), *others) == mine


def test_a_unit_that_is_damaged_says_nothing_and_others_are_found() -> None:
    store = MessageStore(MemoryFiles())
    start = store.queries.end
    store.append([Settled("first", 16, 1, 40, 1)])
    middle = store.queries.end
    store.append([Settled("second", 16, 1, 40, 1)])
    store.flush()
    raw = bytearray(store.queries.read_units(start)[0])
    raw[middle - start - 3] ^= 1
    found = find_events(bytes(raw), WANTED)
    assert [seen.event.group for seen in found if isinstance(seen.event, Settled)] == ["second"]
    assert find_events(b"", WANTED) == []
    store.close()
