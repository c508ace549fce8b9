"""Planning a replay, and the batches that a plan becomes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dmq.errors import Damaged, InvalidRequest, MessageTooLarge, UnknownMessage, WrongFormat
from dmq.model import MessageId
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.replay.plan import Done, Plan, Plans, Selection, Target
from dmq.pipeline.replay.plan_builder import make_plan, overview
from dmq.pipeline.replay.sender import Parcel, parcels
from dmq.protocol.batch import unpack_batch
from dmq.records import RecordView, business_hash
from tests.object_store import ObjectStore
from tests.unit.pipeline.archives import NOON, commit_messages, message_row

TARGET = Target("again", 11, 4, False)
ALL = Selection(topic="orders")


def archive_of(folder: Path, rows: Iterable[dict[str, Any]]) -> Archive:
    archive = Archive.create(str(folder))
    commit_messages(archive, rows)
    return archive


def plan_of(
    archive: Archive, selection: Selection = ALL, target: Target = TARGET, name: str = "r"
) -> tuple[Plan, Plans]:
    plans = Plans(archive.folder, name)
    return make_plan(archive, selection, target, plans, 1000), plans


def sent(plan: Plan, plans: Plans, queue: int, start: int = 0) -> list[Parcel]:
    return [*parcels(plans.folder.below(plan.folder), plan, queue, start, 5000, 4 << 20)]


def records(parcel: Parcel) -> list[RecordView]:
    body = b"".join(map(bytes, parcel.body))
    batch = unpack_batch(body, parcel.rows, parcel.keys)
    found, at = [], 0
    for length in batch.lengths:
        found.append(RecordView(bytes(batch.data[at : at + int(length)])))
        at += int(length)
    return found


def ids(found: Iterable[Parcel]) -> list[int]:
    return [record.attributes.message_id.sequence for parcel in found for record in records(parcel)]  # type: ignore[union-attr]


# --- what is chosen -------------------------------------------------------------------------------------------------


def test_a_body_that_is_not_what_was_archived_is_not_sent(tmp_path: Path) -> None:
    bodies = (b"", None, b"one", b"two")
    rows = [message_row(number) | {"body": body} for number, body in enumerate(bodies)]
    rows[0]["body_crc"] = rows[1]["body_crc"] = 0
    rows[2]["body_crc"] = None  # nothing is known of it
    archive = archive_of(tmp_path, rows)
    with pytest.raises(Damaged, match=f"the body of message {MessageId(7, 3)} is not what was archived"):
        plan_of(archive)
    assert plan_of(archive, Selection(where="queue_offset = 0 AND queue < 3"))[0].total == 3
    assert [path.name for path in (tmp_path / "replay").rglob("*.json")] == ["plan.json"]


@pytest.mark.parametrize(
    ("selection", "numbers"),
    [
        (Selection(topic="payments"), [3, 7, 11]),
        (Selection(keys=("order-2", "it's")), [2, 5]),
        (Selection(ids=(str(MessageId(7, 4)),)), [4]),
        (Selection(business_ids=("u-1",), topic="orders"), [1, 4, 10]),
        (Selection(since=NOON + timedelta(seconds=9)), [9, 10, 11]),
        (Selection(since=NOON + timedelta(seconds=2), until=NOON + timedelta(seconds=4)), [2, 3]),
        (Selection(where="tag = 'paid' OR queue_offset > 1"), [6, 8, 9, 10, 11]),
        (Selection(topic="orders", where="tag = 'paid' OR queue_offset > 1"), [6, 8, 9, 10]),
    ],
)
def test_messages_are_chosen_by_all_that_is_said(tmp_path: Path, selection: Selection, numbers: list[int]) -> None:
    rows = [message_row(number, business_id=f"u-{number % 3}") for number in range(12)]
    for number in (3, 7, 11):
        rows[number]["topic"] = "payments"
    rows[5]["key"], rows[6]["tag"] = "it's", "paid"
    archive = archive_of(tmp_path, rows)
    plan, plans = plan_of(archive, selection)
    found = sorted(number for queue in plan.counts for number in ids(sent(plan, plans, queue)))
    assert (found, plan.total) == (numbers, len(numbers))
    assert overview(archive, selection).total == len(numbers)


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (Selection(), "say which messages"),
        (Selection(since=NOON, until=NOON), "--since must be before"),
        (Selection(where="1=1; DROP TABLE message"), "one condition"),
        (Selection(where="1=1) UNION (SELECT 1"), "cannot be answered"),
        (Selection(where="nothing = 1"), "nothing"),
        (Selection(where="body IN (SELECT content FROM read_blob('/etc/hostname'))"), "cannot be answered"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_and_leaves_nothing(
    tmp_path: Path, selection: Selection, problem: str
) -> None:
    archive = archive_of(tmp_path, [message_row(1)])
    for attempt in (overview, plan_of):
        with pytest.raises(InvalidRequest, match=problem):
            attempt(archive, selection)
    assert not [*tmp_path.glob("replay/*/*")]


def test_a_choice_of_nothing_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, [message_row(1)])
    with pytest.raises(UnknownMessage, match=r"no archived message matches \(key x\)"):
        plan_of(archive, Selection(keys=("x",)))
    assert not [*tmp_path.glob("replay/*/*")]
    assert overview(archive, Selection(keys=("x",))).total == 0


def test_an_overview_says_how_much_of_what_and_when(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, [message_row(number) for number in range(7)])
    found = overview(archive, ALL)
    assert (found.total, found.bytes) == (7, 7 * len(b"body 0"))
    assert [row["message_id"] for row in found.sample] == [str(MessageId(7, number)) for number in range(5)]
    (topic,) = found.topics
    assert (topic["topic"], topic["messages"]) == ("orders", 7)
    assert (topic["first"], topic["last"]) == (NOON, NOON + timedelta(seconds=6))


def test_a_message_that_earlier_replays_brought_back_is_sent_once(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, [message_row(number) for number in range(4)])
    again = [
        message_row(number, journal_offset=9000 + number, flags=0x28, stored_at=NOON + timedelta(days=day))
        for number in range(4)
        for day in (1, 2)
    ]
    commit_messages(archive, again)
    plan, plans = plan_of(archive)
    assert sorted(number for queue in range(4) for number in ids(sent(plan, plans, queue))) == [0, 1, 2, 3]
    assert overview(archive, ALL).total == 4


# --- where they go --------------------------------------------------------------------------------------------------


def test_messages_keep_their_queue_and_their_order(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, [message_row(number) for number in range(100)])
    plan, plans = plan_of(archive, target=TARGET._replace(queues=3))
    assert plan.counts == {0: 50, 1: 25, 2: 25}
    assert ids(sent(plan, plans, 0)) == sorted([*range(0, 100, 4), *range(3, 100, 4)])
    assert ids(sent(plan, plans, 1)) == [*range(1, 100, 4)]


def test_ordered_messages_go_where_their_business_id_says(tmp_path: Path) -> None:
    rows = [message_row(number, business_id=f"u-{number % 5}", flags=2) for number in range(50)]
    plan, plans = plan_of(archive_of(tmp_path, rows))
    for queue in plan.counts:
        mine = [number for number in range(50) if business_hash(f"u-{number % 5}") % 4 == queue]
        found = sent(plan, plans, queue)
        assert ids(found) == mine
        assert all(record.ordered for parcel in found for record in records(parcel))


def test_a_topic_by_priority_gets_them_by_priority(tmp_path: Path) -> None:
    rows = [message_row(number, priority=number % 10) for number in range(30)]
    plan, plans = plan_of(archive_of(tmp_path, rows), target=Target("again", 11, 10, True))
    assert plan.counts == dict.fromkeys(range(10), 3)
    assert ids(sent(plan, plans, 9)) == [9, 19, 29]


# --- the plan -------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, [message_row(number) for number in range(10)])
    plan, plans = plan_of(archive)
    commit_messages(archive, [message_row(number) for number in range(10, 20)])
    later, _ = plan_of(archive)
    assert later == plan == plans.load()
    assert [path.name for path in (tmp_path / "replay" / "r").iterdir() if path.is_dir()] == [plan.folder]


def test_of_two_that_begin_at_once_in_an_object_store_one_makes_the_plan(object_store: ObjectStore) -> None:
    archive = Archive.create(f"{object_store.bucket()}/archive")
    commit_messages(archive, [message_row(number) for number in range(10)])
    together = threading.Barrier(4)

    def begin() -> Plan:
        rival = Archive.open(archive.uri)
        together.wait()
        return plan_of(rival)[0]

    with ThreadPoolExecutor(4) as threads:
        plans = [begun.result() for begun in [threads.submit(begin) for _ in range(4)]]
    assert plans == [plans[0]] * 4
    kept = Plans(archive.folder, "r")
    assert kept.load() == plans[0]
    folders = {path.split("/")[0] for path in object_store.paths(kept.folder.uri) if "/" in path}
    assert folders == {plans[0].folder, "claim"}, "the rows of the others are gone"


def test_a_plan_that_was_claimed_in_an_object_store_counts_though_its_run_was_killed(object_store: ObjectStore) -> None:
    archive = Archive.create(f"{object_store.bucket()}/archive")
    commit_messages(archive, [message_row(number) for number in range(10)])
    plan, plans = plan_of(archive)
    plans.folder.files.delete_file(f"{plans.folder.path}/plan.json")
    commit_messages(archive, [message_row(10)])
    assert plan_of(archive)[0] == plan


def test_the_same_choice_of_the_same_rows_has_the_same_producer_and_others_have_others(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a", [message_row(number) for number in range(10)])
    twin = archive_of(tmp_path / "b", [message_row(number) for number in range(10)])
    plan, _ = plan_of(archive)
    same, _ = plan_of(twin)
    assert same.producer_id == plan.producer_id != 0
    other_name, _ = plan_of(archive, name="other")
    commit_messages(twin, [message_row(10)])
    other_rows, _ = plan_of(twin, Selection(where="true"), name="r.2")
    assert len({plan.producer_id, other_name.producer_id, other_rows.producer_id}) == 3


def test_a_plan_that_was_sent_keeps_no_rows(tmp_path: Path) -> None:
    plan, plans = plan_of(archive_of(tmp_path, [message_row(1)]))
    assert plans.done() is None
    plans.finish(plan, Done(sent=1, at_ms=5))
    assert plans.done() == Done(sent=1, at_ms=5)
    assert sorted(path.name for path in (tmp_path / "replay" / "r").iterdir()) == ["done.json", "plan.json"]


def test_a_plan_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    _, plans = plan_of(archive_of(tmp_path, [message_row(1)]))
    path = tmp_path / "replay" / "r" / "plan.json"
    raw = path.read_text()
    path.write_text(raw.replace('"version": 1', '"version": 9'))
    with pytest.raises(WrongFormat, match="version 9"):
        plans.load()
    path.write_text("{")
    with pytest.raises(WrongFormat, match="cannot be read"):
        plans.load()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "ü", "x" * 65, "a b"])
def test_a_replay_id_that_is_no_name_for_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="a replay id has"):
        Plans(Archive.create(str(tmp_path)).folder, name)


# --- batches --------------------------------------------------------------------------------------------------------


def test_batches_have_the_same_bounds_wherever_a_run_goes_on(tmp_path: Path) -> None:
    rows = [message_row(number, queue=0, body=b"x" * (number % 13) * 40_000) for number in range(60)]
    plan, plans = plan_of(archive_of(tmp_path, rows))
    whole = sent(plan, plans, 0)
    assert len(whole) > 10
    assert [parcel.first for parcel in whole] == [sum(one.rows for one in whole[:at]) for at in range(len(whole))]
    for at, parcel in enumerate(whole):
        assert [(one.first, one.rows) for one in sent(plan, plans, 0, parcel.first)] == [
            (one.first, one.rows) for one in whole[at:]
        ]


def test_a_batch_has_so_many_rows_at_most(tmp_path: Path) -> None:
    plan, plans = plan_of(archive_of(tmp_path, [message_row(number, queue=0) for number in range(4100)]))
    found = sent(plan, plans, 0)
    assert [(one.first, one.rows, one.first_sequence) for one in found] == [
        (0, 2000, 0), (2000, 2000, 2000), (4000, 100, 4000),
    ]  # fmt: skip
    plan, plans = plan_of(archive_of(tmp_path / "b", [message_row(1)]))
    assert sent(plan, plans, 1)[0].first_sequence == 1 << 48


def test_a_record_has_what_the_archive_has(tmp_path: Path) -> None:
    body = b"long " * 1000
    row = message_row(
        5, body=body, tag="paid", business_id="u-1", priority=9, app="web",
        headers=[{"key": "a", "value": b"1"}, {"key": "b", "value": "ü".encode()}],
    )  # fmt: skip
    plan, plans = plan_of(archive_of(tmp_path, [row, message_row(9, key=None, body=b"")]))
    (parcel,) = sent(plan, plans, 1)
    record, bare = records(parcel)
    for one in (record, bare):
        one.verify()
    assert (record.key, record.tag, record.business_id, record.priority) == ("order-5", "paid", "u-1", 9)
    assert (record.app, record.body, record.properties) == ("web", body, {"a": "1", "b": "ü"})
    assert record.attributes.original_send_time_ms == round(row["sent_at"].timestamp() * 1000)
    assert (bare.key, bare.body, bare.properties, bare.tag) == (None, b"", {}, None)
    assert parcel.keys == 1


def test_a_body_over_the_limit_of_the_broker_is_told(tmp_path: Path) -> None:
    import random

    plan, plans = plan_of(archive_of(tmp_path, [message_row(1, body=random.Random(1).randbytes(2000))]))
    with pytest.raises(MessageTooLarge, match="the broker takes 1000"):
        [*parcels(plans.folder.below(plan.folder), plan, 1, 0, 5000, 1000)]
