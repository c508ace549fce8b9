"""How far producers have come, so that one that begins again can skip what is stored.

What always holds: a state that is not flushed is not told: a producer that skips it would be sure of messages that a
power cut can take.
"""

from __future__ import annotations

from typing import Final

from dmq.errors import Busy
from dmq.protocol.produce import ProducerState, ProducerStates, QueueSequence
from dmq.storage.queries import Queries
from dmq.storage.state.state import Topic

__all__ = ["states_of"]

_AGAIN_MS: Final = 20


def states_of(queries: Queries, topic: Topic, asked: ProducerStates) -> list[ProducerState]:
    """The states of those producers that have written to a topic.

    Raises:
        Busy: what they wrote is being flushed.
    """
    states = []
    for producer_id in asked.producer_ids:
        epoch = queries.producer_epoch(producer_id)
        if epoch is None:
            continue
        places = queries.producer_places(producer_id, topic)
        if any(place.unit_end > queries.flushed for place in places.values()):
            raise Busy("what the producer wrote is being flushed: ask again in a moment", retry_after_ms=_AGAIN_MS)
        queues = [QueueSequence(queue, place.first_sequence + place.count) for queue, place in sorted(places.items())]
        states.append(ProducerState(producer_id, epoch, queues))
    return states
