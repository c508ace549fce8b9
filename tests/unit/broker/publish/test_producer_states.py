"""PRODUCER_STATES: how far producers have come."""

from __future__ import annotations

import pytest

from dmq.broker.publish.publisher import states_of
from dmq.errors import Busy
from dmq.model import Message
from dmq.protocol.produce import ProducerState, ProducerStates
from dmq.storage.store import MessageStore
from tests.unit.pipeline.journals import batch_of, new_store


def asked(store: MessageStore, producer_id: int) -> list[ProducerState]:
    return states_of(store.queries, store.queries.topic("orders"), ProducerStates("orders", [producer_id]))


def test_what_is_not_flushed_is_not_said() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(b"a"), Message(b"b")], producer_id=77, first_sequence=10)])
    with pytest.raises(Busy, match="is being flushed") as caught:
        asked(store, 77)
    assert caught.value.retry_after is not None
    store.flush()
    (state,) = asked(store, 77)
    assert [(queue.queue, queue.next_sequence) for queue in state.queues] == [(0, 12)]
    store.append([batch_of([Message(b"c")], producer_id=77, first_sequence=12)])
    with pytest.raises(Busy):
        asked(store, 77)


def test_a_producer_that_never_wrote_has_no_state() -> None:
    assert asked(new_store("orders"), 78) == []
