"""What a sender asks of topics, and what it learns. No sockets, no threads.

What always holds: a topic that is asked for anew stays known meanwhile; one that is gone is forgotten.
"""

from __future__ import annotations

from dmq.client.accumulator import Accumulator
from dmq.client.links import Lines, Link
from dmq.client.routes import Route, Routes
from dmq.client.settling import Settling
from dmq.clock import Clock
from dmq.errors import DMQError, UnknownTopic
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.admin import TopicDescribe, TopicDescribeReply

__all__ = ["Asking"]


class Asking(Settling):
    """The part of a sender that knows topics."""

    def __init__(self, accumulator: Accumulator, lines: Lines, routes: Routes, clock: Clock) -> None:
        super().__init__(accumulator, lines)
        self._routes = routes
        self._clock = clock

    def _ask_for(self, topic: str, link: Link) -> None:
        """Ask for a topic anew, and go on with what is known of it meanwhile."""
        try:
            link.submit(
                Command.TOPIC_DESCRIBE, TopicDescribe(topic), on_answer=lambda answer: self.learn(topic, answer)
            )
        except DMQError:
            self._routes.end_refresh(topic)

    def learn(self, topic: str, answer: Frame | DMQError) -> None:
        """What a broker said of a topic."""
        try:
            if isinstance(answer, DMQError):
                raise answer
            described: TopicDescribeReply = decode_response(answer)
        except UnknownTopic:
            self._routes.drop(topic)
        except DMQError:
            self._routes.end_refresh(topic)
        else:
            self._routes.put(topic, Route.of(described.info.config, self._clock.monotonic()))
