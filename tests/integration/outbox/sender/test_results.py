"""Results at the sender: rows that are done, and the reverse business, which runs once (T-04, T-05)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from dmq.client.client import Client
from dmq.outbox import Alert, AlertKind, BusinessState, OutboxMessage, Result, SendState
from dmq.outbox.sender.envelope import result_topic
from dmq.testing import TestBroker
from tests.exposition_format import checked_samples
from tests.integration.outbox.effects import effect, effects, until
from tests.integration.outbox.shop import TABLES, answer, arrived, order, shop, states

SUCCESS, ROLLBACK = BusinessState.SUCCESS, BusinessState.ROLLBACK


def undo(session: Session, message: OutboxMessage, result: Result) -> None:
    session.execute(effect(f"undo {message.send_id} {result.reason}"))


def undone(engine: Engine) -> list[str]:
    return [what.split()[1] for what in effects(engine) if what.startswith("undo")]


def test_a_result_ends_its_row_and_duplicates_change_nothing(engine: Engine, client: Client) -> None:
    with shop(engine, client, reverse={"orders": undo}) as service:
        service.start()
        good, bad = order(service, engine, "good"), order(service, engine, "bad")
        answer(client, good, "stock", SUCCESS, times=3)
        answer(client, bad, "stock", ROLLBACK, times=3)
        answer(client, "0" * 32, "stock", SUCCESS)  # of a row that is not there
        until(lambda: service.counts.get("results") == 7)
        assert states(engine) == {"DONE": 1, "REVERSED": 1}
        assert service.counts.get("results_unknown") == 1
    assert undone(engine) == [bad]
    assert f"undo {bad} sold out" in effects(engine)
    result = TABLES.result
    with engine.connect() as connection:
        rows = [*connection.execute(select(result.c.send_id, result.c.consumer_group, result.c.business_state))]
    assert sorted(map(tuple, rows)) == sorted([(good, "stock", "SUCCESS"), (bad, "stock", "ROLLBACK")])


def test_the_reverse_business_runs_once_though_two_processes_get_the_result_at_once(
    engine: Engine, broker: TestBroker
) -> None:
    import threading

    client = broker.connect()
    with shop(engine, client, reverse={"orders": undo}) as one, shop(engine, client, reverse={"orders": undo}) as two:
        placed = [order(one, engine, f"{number}") for number in range(10)]
        results = [
            Result(send_id=send_id, topic="orders", group="stock", state=ROLLBACK, reason="sold out")
            for send_id in placed
        ]

        def apply(service: Any) -> None:
            for result in results:
                service.apply_result(result)

        threads = [threading.Thread(target=apply, args=(service,)) for service in (one, two, one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(undone(engine)) == sorted(placed)
    assert states(engine) == {"REVERSED": 10}


def test_a_row_is_done_when_every_expected_group_has_answered(engine: Engine, client: Client) -> None:
    with shop(engine, client, groups={"orders": ["stock", "billing"]}) as service:
        service.start()
        both, one = order(service, engine, "both"), order(service, engine, "one")
        assert service.flush(60.0)
        answer(client, both, "stock", SUCCESS, times=2)
        answer(client, both, "stranger", SUCCESS)
        until(lambda: service.counts.get("results") == 3)
        assert service.find(both).state is SendState.SENT  # type: ignore[union-attr]
        answer(client, both, "billing", SUCCESS)
        until(lambda: service.find(both).state is SendState.DONE)  # type: ignore[union-attr]
        answer(client, one, "stranger", ROLLBACK)  # nobody expects it
        answer(client, one, "stock", SUCCESS)
        answer(client, one, "billing", ROLLBACK)
        until(lambda: service.find(one).state is SendState.ROLLED_BACK)  # type: ignore[union-attr]
        answer(client, one, "billing", SUCCESS)
        until(lambda: service.counts.get("results") == 8)
        assert service.find(one).state is SendState.ROLLED_BACK  # type: ignore[union-attr]


def test_groups_of_one_message_may_be_named_when_it_is_sent(plain: Engine, client: Client) -> None:
    with shop(plain, client, groups={"orders": ["stock", "billing"]}) as service:
        service.start()
        send_id = order(service, plain, "x", groups=["stock"])
        answer(client, send_id, "stock", SUCCESS)
        until(lambda: states(plain) == {"DONE": 1})


def test_where_no_groups_are_named_a_later_refusal_still_reverses(plain: Engine, client: Client) -> None:
    with shop(plain, client, reverse={"orders": undo}) as service:
        service.start()
        send_id = order(service, plain, "x")
        answer(client, send_id, "stock", SUCCESS)
        until(lambda: states(plain) == {"DONE": 1})
        answer(client, send_id, "billing", ROLLBACK, times=2)
        until(lambda: service.counts.get("results") == 3)
        assert states(plain) == {"REVERSED": 1}
    assert undone(plain) == [send_id]


def test_a_reverse_business_that_fails_leaves_nothing_and_is_tried_again(engine: Engine, broker: TestBroker) -> None:
    client = broker.connect()
    alerts: list[Alert] = []
    failures = iter([ValueError("not now"), ValueError("not yet")])
    with shop(engine, client, alert_after=2, on_alert=alerts.append) as service:

        @service.reverse("orders")
        def undo_later(session: Session, message: OutboxMessage, result: Result) -> None:
            undo(session, message, result)
            error = next(failures, None)
            if error is not None:
                raise error

        service.start()
        send_id = order(service, engine, "x")
        assert service.flush(60.0)
        answer(client, send_id, "stock", ROLLBACK)
        until(lambda: service.counts.get("reverse_failed") == 1)
        assert states(engine) == {"SENT": 1}
        assert undone(engine) == []
        broker.clock.advance(10.0)
        until(lambda: service.counts.get("reverse_failed") == 2)
        broker.clock.advance(10.0)
        until(lambda: states(engine) == {"REVERSED": 1})
    assert undone(engine) == [send_id]
    assert [(alert.kind, alert.send_id, alert.attempts) for alert in alerts] == [(AlertKind.REVERSE, send_id, 2)]
    assert "not yet" in alerts[0].reason


def test_results_that_come_before_the_row_is_marked_as_sent_stay(plain: Engine, client: Client) -> None:
    with shop(plain, None, app="shop") as idle:
        send_id = order(idle, plain, "x")
        assert idle.apply_result(Result(send_id=send_id, topic="orders", group="g", state=SUCCESS)) is SendState.DONE
    with shop(plain, client) as service:
        service.start()
        assert arrived(client, 1, seconds=0.5) == []  # it is over
        assert states(plain) == {"DONE": 1}


def test_results_of_earlier_runs_and_other_apps(plain: Engine, broker: TestBroker) -> None:
    client = broker.connect()
    with shop(plain, client) as first:  # not started: it listens for nothing
        send_id = order(first, plain, "x")
        assert first.flush()
    answer(client, send_id, "stock", ROLLBACK, app="another")
    answer(client, send_id, "stock", SUCCESS)
    with shop(plain, client) as second:
        second.start()
        until(lambda: states(plain) == {"DONE": 1})
        assert second.counts.get("results") == 1


def test_what_is_no_result_goes_to_the_dead_letters(plain: Engine, client: Client) -> None:
    with shop(plain, client, groups={"orders": ["g"]}) as service:
        service.start()
        with client.producer() as producer:
            producer.send(result_topic("orders"), b"{}", tag="shop")
        until(lambda: service.counts.get("results_unreadable") == 1)
        until(lambda: len(client.admin.dead_letters(group="outbox-shop")) == 1)


def test_a_message_without_a_result_can_be_sent_again(plain: Engine, client: Client) -> None:
    with shop(plain, client) as service:
        service.start()
        send_id = order(service, plain, "x")
        until(lambda: states(plain) == {"SENT": 1})
        assert service.resend([send_id, "0" * 32]) == 1
        assert len(arrived(client, 2)) == 2
        until(lambda: states(plain) == {"SENT": 1})
        answer(client, send_id, "stock", SUCCESS)
        until(lambda: states(plain) == {"DONE": 1})
        assert service.resend([send_id]) == 0


def test_metrics_count_what_was_done_and_what_waits(plain: Engine, client: Client) -> None:
    with shop(plain, client) as service:
        service.start()
        first = order(service, plain, "x")
        order(service, plain, "y")
        until(lambda: service.counts.get("sent") == 2)  # a result that comes before would end the row unsent
        answer(client, first, "stock", SUCCESS)
        until(lambda: service.counts.get("done") == 1)
        found = service.metrics()
        assert (found["sent"], found["done"], found["waiting_sent"], found["waiting_new"]) == (2, 1, 1, 0)
        text = service.metrics_text()
    samples = checked_samples(text)
    assert samples['dmq_outbox_sent_total{app="shop"}'] == 2
    assert samples['dmq_outbox_waiting_sent{app="shop"}'] == 1
