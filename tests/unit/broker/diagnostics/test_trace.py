"""The life of a message as steps."""

from __future__ import annotations

from dmq.broker.diagnostics.message_history import Copy, Leased, Letter, Life, SeenEvent, Step, steps_of
from dmq.model import MessageId
from dmq.records import DeadReason
from dmq.storage.state.events import DelaysDone, Outcome, PositionSet, Settled, TransactionsEnded

ID = MessageId(7, 8)
ORDERS = Copy("orders", 16, 1, 40, 1000, stored_at_ms=110, sent_at_ms=100, app="shop")


def life(*copies: Copy, events: list[SeenEvent] | None = None, letters: list[Letter] | None = None) -> Life:
    return Life(ID, list(copies), events or [], letters or [], True, [])


def short(steps: list[Step]) -> list[tuple[int, str, str]]:
    return [(step.at_ms, step.what, step.group) for step in steps]


def test_a_message_that_was_acked_by_two_groups() -> None:
    events = [
        SeenEvent(150, Settled("a", 16, 1, 40, 1, member="m-1", leased_at_ms=120, settled_at_ms=140)),
        SeenEvent(150, Settled("b", 16, 1, 30, 20, member="m-2", leased_at_ms=130, settled_at_ms=150)),
        SeenEvent(150, Settled("c", 16, 1, 41, 1)),
    ]
    steps = steps_of(life(ORDERS, events=events))
    assert short(steps) == [
        (100, "sent", ""),
        (110, "stored", ""),
        (120, "delivered", "a"),
        (130, "delivered", "b"),
        (140, "acked", "a"),
        (150, "acked", "b"),
    ]
    assert steps[2] == Step(120, "delivered", "orders", 1, 40, "a", "m-1", 1)
    assert steps[0].note == "by app shop"


def test_a_message_that_failed_was_retried_and_given_up() -> None:
    retry, rejected = "%RETRY%a%16", DeadReason.REJECTED
    failed = Copy(retry, 17, 1, 0, 1200, 1201, 100, is_moved=True, group="a", attempt=1, error="boom")
    copies = [
        ORDERS,
        failed._replace(topic="%SCHEDULE%", topic_id=1, queue=3, stored_at_ms=200, due_ms=1200, target=retry),
        failed,
        Copy(
            "%DLQ%a", 18, 0, 0, 1300, 1300, 100, is_moved=True, group="a", attempt=2, error="bad", reason_code=rejected
        ),
    ]
    events = [
        SeenEvent(200, Settled("a", 16, 1, 40, 1, Outcome.RETRIED, b"", "m", 1, 120, 200, "boom")),
        SeenEvent(1202, DelaysDone(b"", "fired")),
        SeenEvent(1300, Settled("a", 17, 1, 0, 1, Outcome.DEAD, b"", "m", 1, 1250, 1300, "bad")),
    ]
    letters = [Letter("orders", "a", "REJECTED", "bad", 2, 1300, "resent", 1500, "ann")]
    steps = steps_of(life(*copies, events=events, letters=letters))
    assert [(step.at_ms, step.what) for step in steps] == [
        (100, "sent"),
        (110, "stored"),
        (120, "delivered"),
        (200, "failed"),
        (200, "retry"),
        (1201, "offered again"),
        (1250, "delivered"),
        (1300, "gave up"),
        (1300, "dead letter"),
        (1500, "resent"),
    ]
    assert [step.attempt for step in steps if step.what in ("delivered", "failed", "gave up")] == [1, 1, 2, 2]
    assert steps[4].note == "gets it again at 1970-01-01 00:00:01.200Z: boom"
    assert steps[8].note == "REJECTED: bad"
    assert steps[-1].note == "by ann"


def test_delays_transactions_and_positions_have_their_steps() -> None:
    delayed = Copy("%SCHEDULE%", 1, 3, 5, 900, 105, 100, due_ms=5000, target="orders")
    cancelled = steps_of(life(delayed, events=[SeenEvent(300, DelaysDone(b"", "cancelled"))]))
    assert [step.what for step in cancelled] == ["sent", "delayed", "cancelled"]
    fired = steps_of(life(delayed, ORDERS._replace(stored_at_ms=5001, is_moved=True)))
    assert [(step.what, step.note) for step in fired][1:] == [
        ("delayed", "until 1970-01-01 00:00:05.000Z, for topic orders"),
        ("stored", "its time had come"),
    ]
    half = Copy("%HALF%", 2, 3, 5, 900, 105, 100, target="orders")
    rolled_back = steps_of(life(half, events=[SeenEvent(300, TransactionsEnded(ID.to_bytes(), "rolled back"))]))
    assert [step.what for step in rolled_back] == ["sent", "prepared", "rolled back"]
    placed = steps_of(life(ORDERS, events=[SeenEvent(300, PositionSet("a", 16, 1, 41))]))
    assert placed[-1].note == "at offset 41, behind the message"


def test_it_was_sent_before_all_else_whatever_the_clock_of_its_producer_says() -> None:
    ahead = ORDERS._replace(sent_at_ms=10**9)
    assert [step.what for step in steps_of(life(ahead))] == ["sent", "stored"]


def test_what_is_out_now_and_what_only_the_database_has_is_among_the_steps() -> None:
    steps = steps_of(life(ORDERS), [Leased(ORDERS, "a", "m-1", 200, 30_200, 1)])
    assert steps[-1] == Step(
        200, "delivered", "orders", 1, 40, "a", "m-1", 1, "is out now, until 1970-01-01 00:00:30.200Z"
    )
    letter = Letter("orders", "", "RATE_LIMITED", "too fast", 0, 500, "waiting", 0, "")
    assert [(step.what, step.note) for step in steps_of(life(letters=[letter]))] == [("dead letter", "RATE_LIMITED")]
