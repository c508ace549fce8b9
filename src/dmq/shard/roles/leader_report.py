"""The report of a leader: what it has to say of itself and its followers beyond what every member says."""

from __future__ import annotations

from typing import Any

from dmq.shard.report import FollowerReport
from dmq.shard.roles.post import Post
from dmq.shard.roles.term import Term
from dmq.storage.replica import Replica

__all__ = ["led"]


def led(post: Post, replica: Replica | None, term: Term) -> dict[str, Any]:
    """The fields of `MemberReport` that a leader fills otherwise."""
    view, in_sync, queries = post.view, term.in_sync, term.store.queries
    now, connected = post.now(), {*term.followers}
    members = set() if view.record is None else {int(one, 16) for one in view.record.members.values()}
    own = 0 if replica is None else replica.membership.replica_id
    followers = [
        FollowerReport(
            broker=view.name_of(other),
            replica=other,
            flushed=in_sync.flushed_of(other),
            seconds_behind=in_sync.seconds_behind(other, now),
            is_in_sync=other in in_sync.recorded,
            is_connected=other in connected,
            skew_seconds=term.skew_of(other),
        )
        for other in sorted((members | connected | in_sync.recorded) - {own})
    ]
    return {
        "epoch": term.epoch,
        "start": queries.start,
        "committed": in_sync.committed,
        "end": queries.end,
        "flushed": queries.flushed,
        "followers": tuple(followers),
        "right": str(term.right),
        "is_serving": term.is_serving,
    }
