"""Following a topic: every message once, in order, from the place asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, cast

from dmq.client.admin.admin import Admin
from dmq.client.admin.reports import QueueRange, ShardRows, StoredMessage
from dmq.client.consumer.follow import FollowOptions, follow


class StubAdmin:
    """Queues in memory."""

    def __init__(self, queues: int) -> None:
        self.queues: list[list[StoredMessage]] = [[] for _ in range(queues)]
        self.first = self.stored = 0
        self.missing: list[tuple[str, ...]] = []  # one for each question

    def put(self, queue: int, at_ms: int, tag: str | None = None) -> None:
        messages = self.queues[queue]
        self.stored += 1
        found = StoredMessage(None, "t", queue, len(messages), b"", None, tag, None, 4, at_ms, at_ms, "app", {})
        messages.append(replace(found, journal_offset=self.stored))

    def offsets(self, topic: str, *, queue: int | None = None, at: Any = "earliest") -> ShardRows[QueueRange]:
        rows = []
        for number, messages in enumerate(self.queues):
            place = {"earliest": self.first, "latest": len(messages)}.get(at, at)
            rows.append(QueueRange(number, self.first, len(messages), place))
        return ShardRows(
            (row for row in rows if queue in (None, row.queue)), self.missing.pop(0) if self.missing else ()
        )

    def read(
        self, topic: str, queue: int, offset: int, *, limit: int, tags: str, shard: int = 0
    ) -> tuple[list[StoredMessage], int]:
        chosen = self.queues[queue][max(offset, self.first) :][: min(limit, 3)]
        end = chosen[-1].offset + 1 if chosen else offset
        return [message for message in chosen if not tags or message.tag == tags], end


def seen(admin: StubAdmin, count: int | None = None, **options: Any) -> list[tuple[int, int]]:
    start = options.pop("start", "earliest")
    chosen = FollowOptions(
        **{"ends": True, **{name: options.pop(name) for name in FollowOptions._fields if name in options}}
    )
    found = follow(cast(Admin, admin), "t", start, chosen, **options)
    return [(message.queue, message.offset) for message in islice(found, count)]


def test_every_message_comes_once_and_each_queue_in_order() -> None:
    admin = StubAdmin(3)
    for number in range(30):
        admin.put(number % 3, 1000 + number)
    found = seen(admin)
    assert len(set(found)) == len(found) == 30
    for queue in range(3):
        assert [offset for where, offset in found if where == queue] == list(range(10))


def test_messages_of_several_queues_come_as_they_were_stored() -> None:
    admin = StubAdmin(2)
    for queue, at_ms in ((0, 1), (1, 2), (1, 3), (0, 4)):
        admin.put(queue, at_ms)
    assert seen(admin) == [(0, 0), (1, 0), (1, 1), (0, 1)]


def test_messages_of_one_millisecond_come_as_they_stand_in_the_journal() -> None:
    admin = StubAdmin(2)
    for queue in (1, 0, 0, 1):
        admin.put(queue, 7)
    assert seen(admin) == [(1, 0), (0, 0), (0, 1), (1, 1)]


def test_what_arrives_later_comes_too_and_nothing_before_the_place() -> None:
    admin = StubAdmin(1)
    admin.put(0, 1)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            admin.put(0, 2)

    assert seen(admin, 1, start="latest", ends=False, sleep=sleep) == [(0, 1)]
    assert waits == [0.1, 0.1, 0.1]


def test_a_filter_that_leaves_everything_out_goes_on() -> None:
    admin = StubAdmin(1)
    for number in range(20):
        admin.put(0, number, "paid" if number == 19 else "created")
    assert seen(admin, tags="paid") == [(0, 19)]


def test_without_following_it_ends_where_the_topic_ended_when_it_began() -> None:
    admin = StubAdmin(1)
    admin.put(0, 1)
    found = follow(cast(Admin, admin), "t", "earliest", FollowOptions(ends=True))
    assert next(found).offset == 0
    admin.put(0, 2)
    assert list(found) == []


def test_a_queue_that_was_added_is_read_from_its_beginning() -> None:
    admin = StubAdmin(1)

    def sleep(_: float) -> None:
        if len(admin.queues) == 1:
            admin.queues.append([])
            admin.put(1, 5)

    assert seen(admin, 1, start="latest", ends=False, sleep=sleep) == [(1, 0)]


def test_shards_that_do_not_answer_are_told_once_and_again_when_they_do() -> None:
    admin, told = StubAdmin(1), list[Any]()
    for number in range(12):
        admin.put(0, number)
    admin.missing = [(), (), ("s2",), ("s2",), ()]
    assert len(seen(admin, on_missing=told.append)) == 12
    assert told == [("s2",), ()]
