"""LIMIT_GET and LIMIT_SET."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.publish.rate_limits import Limit
from dmq.broker.runtime.tasks import Work
from dmq.broker.wire.session import Session
from dmq.protocol.admin import LimitGet, LimitInfo, LimitPolicy, LimitReply, LimitSet
from dmq.protocol.frame import Frame

__all__ = ["get_limits", "set_limit"]


def get_limits(broker: Broker, session: Session, frame: Frame, asked: LimitGet) -> None:
    limits = [
        limit
        for limit in broker.limits.kept()
        if not (asked.topic or asked.app) or (limit.topic, limit.app) in ((asked.topic, ""), ("", asked.app))
    ]
    session.answer(frame, _reply(limits))


def set_limit(broker: Broker, session: Session, frame: Frame, asked: LimitSet) -> Work:
    said = asked.limit
    is_dead_letter = said.policy == LimitPolicy.DEAD_LETTER
    limit = Limit(said.topic, said.app, said.messages, said.bytes, is_dead_letter=is_dead_letter)
    return session.answer_with(frame, broker.limits.set(limit, by=session.who), _reply)


def _reply(limits: list[Limit]) -> LimitReply:
    return LimitReply([_info(limit) for limit in limits])


def _info(limit: Limit) -> LimitInfo:
    policy = LimitPolicy.DEAD_LETTER if limit.is_dead_letter else LimitPolicy.REFUSE
    return LimitInfo(limit.topic, limit.app, limit.messages, limit.bytes, policy=policy)
