"""PRODUCER_STATES: how far producers have come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dmq.broker.wire.produce import producer_states
from dmq.errors import Busy
from dmq.model import Message
from dmq.protocol.produce import ProducerStates, ProducerStatesReply
from dmq.storage.store import MessageStore
from tests.unit.pipeline.journals import batch_of, new_store


def asked(store: MessageStore, producer_id: int) -> ProducerStatesReply:
    """What the handler answers."""
    answers: list[ProducerStatesReply] = []
    broker = SimpleNamespace(store=store, topic=store.queries.topic)
    session = SimpleNamespace(answer=lambda frame, reply: answers.append(reply))
    producer_states(cast(Any, broker), cast(Any, session), cast(Any, None), ProducerStates("orders", [producer_id]))
    (answer,) = answers
    return answer


def test_what_is_not_flushed_is_not_said() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(b"a"), Message(b"b")], producer_id=77, first_sequence=10)])
    with pytest.raises(Busy, match="is being flushed") as caught:
        asked(store, 77)
    assert caught.value.retry_after is not None
    store.flush()
    (state,) = asked(store, 77).producers
    assert [(queue.queue, queue.next_sequence) for queue in state.queues] == [(0, 12)]
    store.append([batch_of([Message(b"c")], producer_id=77, first_sequence=12)])
    with pytest.raises(Busy):
        asked(store, 77)


def test_a_producer_that_never_wrote_has_no_state() -> None:
    assert asked(new_store("orders"), 78).producers == []
