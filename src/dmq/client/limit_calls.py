"""Administration of limits: how much a second producers may send. See `dmq.client.calls`.

What always holds: what can be seen to be wrong is refused here, before anything is asked.
"""

from __future__ import annotations

from dmq.client.calls import Call
from dmq.client.reports import LimitReport
from dmq.errors import InvalidSettings
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import LimitGet, LimitInfo, LimitPolicy, LimitReply, LimitSet

__all__ = ["limits", "set_limit"]

_POLICIES = {"refuse": LimitPolicy.REFUSE, "dead-letter": LimitPolicy.DEAD_LETTER}


def limits(topic: str, app: str) -> Call[list[LimitReport]]:
    reply: LimitReply = decode_response((yield Command.LIMIT_GET, LimitGet(topic, app)))
    return [_report(limit) for limit in reply.limits]


def set_limit(topic: str, app: str, messages: int | None, bytes: int | None, policy: str) -> Call[LimitReport | None]:
    if bool(topic) == bool(app):
        raise InvalidSettings("a limit is one of a topic or one of an app: give topic= or app=, one of them")
    for name, value in (("messages", messages), ("bytes", bytes)):
        if value is not None and (type(value) is not int or not 0 < value < 1 << 63):
            raise InvalidSettings(f"{name} is how many a second, a whole number from 1 on, or None, not {value!r}")
    if policy not in _POLICIES:
        raise InvalidSettings(f"policy is 'refuse' or 'dead-letter', not {policy!r}")
    asked = LimitSet(LimitInfo(topic, app, messages, bytes, _POLICIES[policy]))
    reply: LimitReply = decode_response((yield Command.LIMIT_SET, asked))
    return _report(reply.limits[0]) if reply.limits else None


def _report(limit: LimitInfo) -> LimitReport:
    policy = "dead-letter" if limit.policy == LimitPolicy.DEAD_LETTER else "refuse"
    return LimitReport(limit.topic, limit.app, limit.messages, limit.bytes, policy)
