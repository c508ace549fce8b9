"""LIMIT_GET, LIMIT_SET, and what a PRODUCE asks before it is taken: may the topic be sent to, and that much of it?"""

from __future__ import annotations

from dmq.broker.broker import Broker, Work
from dmq.broker.publish.rate_limits import LIMITS_MAX, Limit, kept_limits
from dmq.broker.wire.session import Session
from dmq.errors import InvalidRequest, InvalidSettings, LimitReached, NotAllowed, RateLimited
from dmq.model import check_name
from dmq.protocol.admin import LimitGet, LimitInfo, LimitPolicy, LimitReply, LimitSet
from dmq.protocol.frame import Frame
from dmq.records import RecordView
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import LimitPut
from dmq.storage.state.state import Topic

__all__ = ["check_can_produce", "get_limits", "over_limit", "set_limit"]


def check_can_produce(topic: Topic) -> None:
    """Raises NotAllowed if an operator has switched producing off."""
    if not topic.config.can_produce:
        raise NotAllowed(
            f"topic {topic.name!r} takes no messages: producing is switched off; send when it is on again, which "
            f"'dmq topic update {topic.name} --produce' does",
            topic=topic.name,
        )


def over_limit(broker: Broker, topic: str, batch: Batch) -> tuple[RateLimited, bool] | None:
    """Let a batch pass its limits, or say which it is over, and whether it becomes a dead letter.

    Parameters:
        topic: where its messages go in the end.
        batch: as it would be stored; its app is that of its first message, since a batch is one producer's.
    """
    limits = broker.limits
    app = RecordView(batch.data, 0, int(batch.lengths[0])).app if limits.has_apps else ""
    count = len(batch.lengths)
    over = limits.take(topic, app, count, len(batch.data), broker.clock.monotonic())
    if over is None or _is_resent(broker, batch, count):
        return None
    broker.counters["limited"] += count
    error = RateLimited(
        f"{over.limit.describe()}: try again in {over.retry_after_ms} ms, or raise the limit",
        retry_after_ms=over.retry_after_ms,
        topic=over.limit.topic,
        app=over.limit.app,
    )
    return error, over.is_dead_letter


def _is_resent(broker: Broker, batch: Batch, count: int) -> bool:
    """Whether it is stored already: whoever sends it again is told so, and nothing is stored twice."""
    stored = broker.store.queries.topic(batch.topic)
    return broker.store.queries.is_resent(
        stored, batch.queue, batch.producer_id, batch.producer_epoch, batch.first_sequence, count
    )


def get_limits(broker: Broker, session: Session, frame: Frame, asked: LimitGet) -> None:
    limits = [
        limit
        for limit in kept_limits(broker.store.queries)
        if not (asked.topic or asked.app) or (limit.topic, limit.app) in ((asked.topic, ""), ("", asked.app))
    ]
    session.answer(frame, LimitReply([_info(limit) for limit in limits]))


def _info(limit: Limit) -> LimitInfo:
    policy = LimitPolicy.DEAD_LETTER if limit.is_dead_letter else LimitPolicy.REFUSE
    return LimitInfo(limit.topic, limit.app, limit.messages, limit.bytes, policy)


def set_limit(broker: Broker, session: Session, frame: Frame, asked: LimitSet) -> Work:
    broker.check_running()
    limit = asked.limit
    if bool(limit.topic) == bool(limit.app):
        raise InvalidRequest("a limit is one of a topic or one of an app: give exactly one of them")
    if limit.messages == 0 or limit.bytes == 0:
        raise InvalidSettings(
            "a limit is at least 1 a second: to stop a topic from taking messages, switch producing off with "
            "'dmq topic update TOPIC --no-produce'"
        )
    topic_id = 0
    if limit.topic:
        check_name(limit.topic, "topic")
        topic_id = broker.store.queries.topic(limit.topic).id
    else:
        check_name(limit.app, "app")
    known = kept_limits(broker.store.queries)
    is_new = (limit.topic, limit.app) not in {(one.topic, one.app) for one in known}
    if is_new and len(known) >= LIMITS_MAX:
        raise LimitReached(f"there are {len(known)} limits, and no more are kept: take some away first")

    async def change() -> None:
        await broker.write([LimitPut(topic_id, limit.app, limit.messages, limit.bytes, int(limit.policy))])
        broker.load_limits()
        kept = [one for one in kept_limits(broker.store.queries) if (one.topic, one.app) == (limit.topic, limit.app)]
        session.answer(frame, LimitReply([_info(one) for one in kept]))

    return change()
