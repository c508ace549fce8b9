"""Dead-letter topics go once their letters have: there is one for each group and app that ever had any."""

from __future__ import annotations

from dmq.broker.dead_letters.dead_letters import drop_spent_topics
from dmq.model import DLQ_PREFIX, DRAIN_GROUP, Message, TopicConfig, dead_letter_topic_name
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import PositionSet, Settled
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

SETTINGS = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, retention_hours=1.0)
CONFIG = TopicConfig(queues=1, carry_for=DRAIN_GROUP)


def letter(store: MessageStore, owner: str, body: bytes = b"dead") -> None:
    name = dead_letter_topic_name(owner)
    if store.queries.find_topic(name) is None:
        store.append([store.creation(name, CONFIG, system=True)])
        store.flush()
    encoded = encode_batch(name, "shop", [Message(body)], sent_at_ms=1)
    store.append([Batch(topic=name, queue=0, data=encoded.data, lengths=encoded.lengths)])
    store.flush()


def drained(store: MessageStore, owner: str) -> None:
    topic = store.queries.topic(dead_letter_topic_name(owner))
    store.append([Settled(DRAIN_GROUP, topic.id, 0, 0, count=store.queries.bounds(topic.name, 0)[1])])
    store.flush()


def names(store: MessageStore) -> list[str]:
    return sorted(topic.name for topic in store.queries.topics() if topic.name.startswith(DLQ_PREFIX))


def test_they_go_with_their_group_when_all_letters_are_past_the_retention_and_nobody_consumes_them() -> None:
    files, clock = MemoryFiles(), FakeClock()
    store = MessageStore(files, SETTINGS, clock)
    for owner in ("gone", "consumed", "waiting", "again", "people"):
        letter(store, owner)
        if owner != "waiting":
            drained(store, owner)
    store.append([PositionSet("people", store.queries.topic("%DLQ%consumed").id, 0, 1)])
    while store.stats()["segments"] < 3:
        letter(store, "filler", bytes(4000))
    drained(store, "filler")
    drop_spent_topics(store)
    assert names(store) == ["%DLQ%again", "%DLQ%consumed", "%DLQ%filler", "%DLQ%gone", "%DLQ%people", "%DLQ%waiting"]
    clock.advance(2 * 3600.0)
    assert store.retain() == 2
    letter(store, "again")
    store.close()

    store = MessageStore(files, SETTINGS, clock)
    drop_spent_topics(store)
    # What the database has not taken yet was carried along by the retention.
    assert names(store) == ["%DLQ%again", "%DLQ%consumed", "%DLQ%filler", "%DLQ%people", "%DLQ%waiting"]
    assert store.queries.groups() == [DRAIN_GROUP, "people"]
    letter(store, "gone", b"new")
    store.close()
    store = MessageStore(files, SETTINGS, clock)
    drop_spent_topics(store)
    assert [bytes(record.body) for record in store.queries.read("%DLQ%gone", 0, 0).records()] == [b"new"]
    store.close()
