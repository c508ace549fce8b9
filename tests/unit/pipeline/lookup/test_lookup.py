"""Looking archived messages up."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from dmq.errors import Damaged, InvalidRequest, StorageError
from dmq.model import MessageId
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup import lookup as lookup_module
from dmq.pipeline.lookup.lookup import Listing, Lookup, run_sql
from dmq.pipeline.tables import CONSUME_EVENT, COPY, KEY_INDEX
from tests.object_store import ObjectStore
from tests.unit.pipeline.archives import BROKER, NOON, commit_messages, commit_rows, message_row

COUNT = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three commits over two days, with row groups so small that some are left out."""
    folder = tmp_path_factory.mktemp("archive")
    archive = Archive.create(str(folder))
    for part in range(3):
        numbers = range(part * COUNT, (part + 1) * COUNT)
        rows = [
            message_row(
                number,
                stored_at=NOON + timedelta(seconds=100 * number),
                business_id=f"u-{number % 100}",
                headers=[{"key": "n", "value": b"%d" % number}] if number % 2 else None,
            )
            for number in numbers
        ]
        commit_messages(archive, rows, row_group_rows=100)
    return folder


@pytest.fixture
def lookup(folder: Path) -> Lookup:
    return Lookup(str(folder))


def test_a_message_is_found_by_its_id_with_all_it_has(lookup: Lookup) -> None:
    (found,) = lookup.by_id(str(MessageId(7, 777)))
    expected = message_row(777, stored_at=NOON + timedelta(seconds=77_700), business_id="u-77")
    del expected["headers"]
    assert found == expected | {"properties": {"n": "777"}, "body_bytes": len(b"body 777")}


def test_a_body_that_is_not_what_was_archived_is_told(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path))
    bodies = {0: b"", 1: b"one", 2: None}
    rows = [message_row(number) | {"body": body} for number, body in bodies.items()]
    rows[0]["body_crc"], rows[2]["body_crc"] = 0, None  # nothing is known of the last one
    commit_messages(archive, rows)
    with Lookup(str(tmp_path)) as lookup:
        assert [row["body"] for row in (*lookup.by_key("order-0"), *lookup.by_key("order-2"))] == [b"", None]
        with pytest.raises(Damaged, match=f"the body of message {MessageId(7, 1)} is not what was archived"):
            lookup.by_key("order-1")
        with pytest.raises(Damaged, match="put it back from a copy; without bodies the message can be looked up"):
            lookup.by_time("orders", None, None)
        assert len(lookup.by_time("orders", None, None, bodies=False)) == 3


def test_every_message_is_found_by_its_key(lookup: Lookup) -> None:
    for number in range(0, 3 * COUNT, 37):
        (found,) = lookup.by_key(f"order-{number}", bodies=False)
        assert found["message_id"] == str(MessageId(7, number))
        assert "body" not in found
        assert found["body_bytes"] == len(b"body %d" % number)


def test_messages_of_a_business_id_come_in_the_order_of_their_time(lookup: Lookup) -> None:
    found = lookup.by_business_id("u-7")
    assert [row["journal_offset"] for row in found] == [300 * number for number in range(7, 3 * COUNT, 100)]
    assert [row["journal_offset"] for row in lookup.by_business_id("u-7", limit=3)] == [2100, 32_100, 62_100]


def test_what_is_not_there_is_not_found(lookup: Lookup) -> None:
    assert lookup.by_key("order-1500") == []
    assert lookup.by_key("order-7", topic="payments") == []
    assert lookup.by_id("order-7") == []
    assert lookup.by_business_id("order-7") == []


def test_a_topic_is_read_from_a_moment_to_another(lookup: Lookup) -> None:
    since, until = NOON + timedelta(seconds=50_000), NOON + timedelta(seconds=50_500)
    found = lookup.by_time("orders", since, until)
    assert [row["key"] for row in found] == [f"order-{number}" for number in range(500, 505)]
    assert [row["key"] for row in lookup.by_time("orders", None, None, limit=2)] == ["order-0", "order-1"]
    assert lookup.by_time("payments", since, until) == []


def test_an_answer_has_one_row_at_least(lookup: Lookup) -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        lookup.by_key("order-1", limit=0)


def test_texts_that_share_a_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive.create(str(tmp_path))
    commit_messages(archive, [message_row(number) for number in range(50)], index=False)
    rows = [
        {"bucket": 0, "hash": 5, "kind": "key", "key": f"order-{number}", "queue": number % 4}
        | {"queue_offset": number // 4, "topic": "orders", "dt": NOON.date(), "journal_offset": 300 * number}
        for number in range(50)
    ]
    commit_rows(archive, KEY_INDEX, rows)
    monkeypatch.setattr(lookup_module, "text_hash", lambda _: 5)
    with Lookup(str(tmp_path)) as lookup:
        assert [row["key"] for row in lookup.by_key("order-17")] == ["order-17"]


def test_without_an_index_the_messages_themselves_are_searched(tmp_path: Path) -> None:
    commit_messages(Archive.create(str(tmp_path)), [message_row(number) for number in range(50)], index=False)
    with Lookup(str(tmp_path)) as lookup:
        assert [row["queue_offset"] for row in lookup.by_key("order-17", "orders")] == [4]
        assert lookup.by_key("order-17", "payments") == []


def test_a_message_that_was_replayed_is_found_twice(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path))
    commit_messages(archive, [message_row(1)])
    again = {"topic": "again", "journal_offset": 9000, "flags": 0x28, "stored_at": NOON + timedelta(days=1)}
    commit_messages(archive, [message_row(1, **again)])
    with Lookup(str(tmp_path)) as lookup:
        assert [row["topic"] for row in lookup.by_id(str(MessageId(7, 1)))] == ["orders", "again"]


def test_the_life_of_a_message_has_its_copies_and_what_was_said_of_it(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path))
    commit_messages(archive, [message_row(number) for number in range(3)])
    name, later = str(MessageId(7, 1)), NOON + timedelta(seconds=9)
    copy = {"message_id": name, "broker": BROKER, "journal_offset": 5000, "topic": "%RETRY%g%3", "queue": 1}
    commit_rows(archive, COPY, [copy | {"stored_at": later, "dt": later.date(), "group": "g", "attempt": 1}])
    events = [
        {"message_id": str(MessageId(7, number)), "outcome": outcome, "at": later, "journal_offset": at, "group": "g"}
        | {"dt": later.date()}
        for at, (number, outcome) in enumerate([(1, "failed"), (2, "acked"), (1, "acked")])
    ]
    commit_rows(archive, CONSUME_EVENT, events)
    with Lookup(str(tmp_path)) as lookup:
        life = lookup.life(name)
    assert [row["topic"] for row in life.messages] == ["orders"]
    assert [(row["topic"], row["group"], row["attempt"]) for row in life.copies] == [("%RETRY%g%3", "g", 1)]
    assert [row["outcome"] for row in life.events] == ["failed", "acked"]


def test_the_life_of_a_delayed_message_has_the_copy_of_months_ago(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path))
    sent_at, name = NOON - timedelta(days=90), str(MessageId(7, 1))
    commit_messages(archive, [message_row(1, sent_at=sent_at), message_row(2, sent_at=None)])
    copies = [
        {"message_id": one, "topic": "%SCHEDULE%", "journal_offset": at, "stored_at": sent_at, "dt": sent_at.date()}
        for at, one in enumerate([name, str(MessageId(7, 2))])
    ]
    commit_rows(archive, COPY, copies)
    with Lookup(str(tmp_path)) as lookup:
        assert [row["topic"] for row in lookup.life(name).copies] == ["%SCHEDULE%"]
        assert len(lookup.life(str(MessageId(7, 2))).copies) == 1  # when it was sent is not known


def test_what_is_committed_later_is_found_by_the_same_lookup(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path))
    commit_messages(archive, [message_row(1)])
    with Lookup(str(tmp_path), fresh_seconds=0.0) as lookup:
        assert lookup.by_key("order-2") == []
        commit_messages(archive, [message_row(2)])
        assert [row["key"] for row in lookup.by_key("order-2")] == ["order-2"]


def test_a_list_of_files_is_taken_for_true_for_a_while(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path))
    now = [0.0]
    listing = Listing(archive.table("message"), 1.0, lambda: now[0])
    assert listing.files() == []
    commit_messages(archive, [message_row(1)])
    assert listing.files() == []
    now[0] = 1.5
    assert len(listing.files()) == 1
    commit_messages(archive, [message_row(2, topic="payments", stored_at=NOON + timedelta(days=3))])
    now[0] = 3.0
    assert len(listing.files()) == 2
    assert len(listing.files({"topic": ("orders", "orders")})) == 1
    assert len(listing.files(days=(NOON.date() + timedelta(days=1), None))) == 1
    assert len(listing.files({"journal_offset": (301, 599)})) == 0


def test_a_place_without_an_archive_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no archive at"):
        Lookup(str(tmp_path))


def test_messages_are_found_in_an_object_store(object_store: ObjectStore) -> None:
    uri = f"{object_store.bucket()}/archive"
    commit_messages(Archive.create(uri), [message_row(number, business_id="u") for number in range(5)])
    lookup = Lookup(uri.replace("s3://", "s3a://"))
    assert [row["key"] for row in lookup.by_key("order-3")] == ["order-3"]
    assert len(lookup.by_business_id("u")) == 5
    assert len(lookup.life(str(MessageId(7, 2))).messages) == 1
    assert run_sql(uri, "SELECT count(*) AS found FROM message").table["found"].to_pylist() == [5]
    with pytest.raises(InvalidRequest, match="disabled by configuration"):
        run_sql(uri, f"SELECT * FROM read_parquet('{uri}/message/other.parquet')")
