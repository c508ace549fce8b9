"""PRODUCER_STATES: how far producers have come, so that one that begins again can skip what is stored."""

from __future__ import annotations

from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.session import Session
from dmq.errors import Busy
from dmq.protocol.frame import Frame
from dmq.protocol.producing import ProducerState, ProducerStates, ProducerStatesReply, QueueSequence
from dmq.storage.state import SCHEDULE_TOPIC

__all__ = ["producer_states"]

_AGAIN_MS: Final = 20


def producer_states(broker: Broker, session: Session, frame: Frame, asked: ProducerStates) -> None:
    """What is not flushed is not said: whoever skips it would be sure of messages that a power cut can take."""
    topic, store = broker.topic(asked.topic), broker.store
    if asked.is_delayed:
        topic = store.topic(SCHEDULE_TOPIC)
    states = []
    for producer_id in asked.producer_ids:
        epoch = store.producer_epoch(producer_id)
        if epoch is None:
            continue
        places = store.producer_places(producer_id, topic)
        if any(place.unit_end > store.flushed for place in places.values()):
            raise Busy("what the producer wrote is being flushed: ask again in a moment", retry_after_ms=_AGAIN_MS)
        queues = [QueueSequence(queue, place.first_sequence + place.count) for queue, place in sorted(places.items())]
        states.append(ProducerState(producer_id, epoch, queues))
    session.answer(frame, ProducerStatesReply(states))
