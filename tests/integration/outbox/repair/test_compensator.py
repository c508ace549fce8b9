"""The compensator alone repairs: results cut off, confirm services down and back, messages that never arrived."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

import dmq
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import (
    Alert,
    AlertKind,
    BusinessState,
    Compensation,
    Compensator,
    ConfirmOptions,
    Inbox,
    MessageService,
    OutboxMessage,
    Result,
    tables,
)
from dmq.testing import TestBroker
from dmq.testing.clock import RunningClock
from tests.integration.cli.test_commands import dmq as dmq_command
from tests.integration.outbox.effects import (
    SECONDS,
    effect,
    effects,
    results,
    until,
)

SUCCESS, ROLLBACK = BusinessState.SUCCESS, BusinessState.ROLLBACK


class Rig:
    """A sender and a consumer whose results never come: the sender does not listen."""

    def __init__(self, broker: TestBroker, engine: Engine) -> None:
        self.broker = broker
        self.engine = engine
        self.clock = RunningClock()  # a relay that is refused for a moment tries again by it
        self.client = broker.connect(app="shop")
        self.client.admin.create_topic("orders", queues=2, allow_existing=True)
        self.alerts: list[Alert] = []
        self.reversed: list[str] = []
        self.service = MessageService(
            engine,
            self.client,
            groups={"orders": ["stock"]},
            results=False,
            on_alert=self.alerts.append,
            clock=self.clock,
            result_after=600.0,
        )

        @self.service.reverse("orders")
        def reverse(session: Session, message: OutboxMessage, result: Result) -> None:
            session.execute(effect(f"reversed {message.body.decode()}"))
            self.reversed.append(result.reason)

        self.service.start()
        self.compensators: list[Compensator] = []

    def compensator(self, **options: Any) -> Compensator:
        made = Compensator(self.service, clock=self.clock, **{"tries": 4, "again": 60.0, **options})
        self.compensators.append(made)
        return made

    def send(self, *bodies: str, **options: Any) -> list[str]:
        with Session(self.engine) as session, session.begin():
            ids = [self.service.send(session, "orders", body.encode(), **options) for body in bodies]
        until(lambda: set(self.states(ids)) == {"SENT"})
        return ids

    def states(self, ids: list[str]) -> list[str]:
        send = tables().send
        with self.engine.connect() as connection:
            found = dict(connection.execute(select(send.c.send_id, send.c.state)).tuples().all())
        return [found[one] for one in ids]

    def consume(self, count: int, group: str = "stock", **options: Any) -> Inbox:
        """Take so many messages and handle them; the inbox then answers questions."""
        client = self.broker.connect(app=group)
        inbox = Inbox(self.engine, client, **options)

        @inbox.consumes_messages
        def handle(session: Session, message: ReceivedMessage) -> BusinessState:
            body = message.body.decode()
            session.execute(effect(body))
            return ROLLBACK if body.startswith("no") else SUCCESS

        consumer = client.consumer("orders", group)
        inbox.begin(group)
        left = count
        while left:
            batch = consumer.pull(left)
            for message in batch:
                handle(message)
            batch.ack()
            left -= len(batch)
        consumer.close()
        until(lambda: any(key.startswith(f"{group}/") for key in self.client.registry.entries("dmq.confirm")))
        return inbox

    def close(self) -> None:
        for compensator in self.compensators:
            compensator.close()
        self.service.close()


def rounds(compensator: Compensator, asked: int) -> Compensation:
    """Run until so many rows were asked about: a round leaves out rows that a relay has locked for a moment."""
    done = Compensation()

    def has_asked() -> bool:
        nonlocal done
        done += compensator.run_once()
        return done.asked >= asked

    until(has_asked)
    return done


@pytest.fixture
def rig(broker: TestBroker, engine: Engine) -> Iterator[Rig]:
    rig = Rig(broker, engine)
    yield rig
    rig.close()


def test_results_that_were_cut_off_are_asked_for_and_the_reverse_business_runs_once(rig: Rig) -> None:
    ids = rig.send("yes", "no stock", "yes too")
    rig.consume(3)
    compensator = rig.compensator()
    assert compensator.run_once() == Compensation()  # not yet
    rig.clock.advance(601)
    assert rounds(compensator, asked=3) == Compensation(asked=3, updated=3)
    assert rig.states(ids) == ["DONE", "REVERSED", "DONE"]
    assert compensator.run_once() == Compensation()
    assert sorted(effects(rig.engine)) == ["reversed no stock", "yes", "yes too"]
    assert len(rig.reversed) == 1
    assert rig.alerts == []


def test_what_nobody_consumed_is_sent_again_with_the_same_send_id(rig: Rig) -> None:
    ids = rig.send("m")
    rig.consume(0)
    rig.client.admin.create_group("stock", "orders")
    rig.client.admin.reset("orders", "stock", to="latest")  # an operator passed over it
    compensator = rig.compensator()
    rig.clock.advance(601)
    assert rounds(compensator, asked=1) == Compensation(asked=1, resent=1)
    until(lambda: rig.states(ids) == ["SENT"] and rig.client.admin.lag("orders", "stock").total == 1)
    rig.consume(1)
    rig.clock.advance(601)
    assert rounds(compensator, asked=1) == Compensation(asked=1, updated=1)
    assert rig.states(ids) == ["DONE"]
    assert effects(rig.engine) == ["m"]


def test_while_messages_wait_for_the_group_nothing_is_sent_twice_at_first(rig: Rig) -> None:
    ids = rig.send("m")
    rig.client.admin.create_group("stock", "orders")
    rig.consume(0)
    compensator = rig.compensator(backlog_tries=2)
    rig.clock.advance(601)
    assert rounds(compensator, asked=1) == Compensation(asked=1, waiting=1)
    assert compensator.run_once() == Compensation()  # put off
    rig.clock.advance(61)
    assert rounds(compensator, asked=1) == Compensation(asked=1, waiting=1)
    rig.clock.advance(61)
    assert rounds(compensator, asked=1) == Compensation(asked=1, resent=1)
    until(lambda: rig.states(ids) == ["SENT"])
    rig.consume(2)
    assert effects(rig.engine) == ["m"]


def test_while_no_confirm_service_answers_nothing_is_done_until_it_is_back(rig: Rig) -> None:
    ids = rig.send("m")
    inbox = rig.consume(1)
    inbox.close()
    compensator = rig.compensator()
    rig.clock.advance(601)
    assert rounds(compensator, asked=1) == Compensation(asked=1, waiting=1)
    assert rig.states(ids) == ["SENT"]
    rig.consume(0)
    rig.clock.advance(61)
    assert rounds(compensator, asked=1) == Compensation(asked=1, updated=1)
    assert rig.states(ids) == ["DONE"]


def test_an_instance_that_died_without_a_word_is_passed_over(rig: Rig) -> None:
    ids = rig.send("m")
    rig.consume(1)
    with nobody_there() as address:
        for number in range(3):
            rig.client.registry.put("dmq.confirm", f"stock/dead{number}", address, ttl=1000)
        compensator = rig.compensator(timeout=60.0)  # who is not there is refused at once
        rig.clock.advance(601)
        assert rounds(compensator, asked=1) == Compensation(asked=1, updated=1)
    assert rig.states(ids) == ["DONE"]


@contextmanager
def nobody_there() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and not listening
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_after_so_many_checks_somebody_is_told_once_and_a_late_answer_still_counts(rig: Rig) -> None:
    ids = rig.send("a", "b")
    compensator = rig.compensator(tries=3, alerted_again=1000.0)
    rig.clock.advance(601)
    assert rounds(compensator, asked=2) == Compensation(asked=2, waiting=2)
    rig.clock.advance(61)
    assert rounds(compensator, asked=2) == Compensation(asked=2, waiting=2)
    rig.clock.advance(61)
    assert rounds(compensator, asked=2) == Compensation(asked=2, alerted=2)
    assert rig.states(ids) == ["ALERTED", "ALERTED"]
    (alert,) = rig.alerts
    assert (alert.kind, alert.topic, alert.count, alert.attempts) == (AlertKind.NO_RESULT, "orders", 2, 3)
    assert "stock" in alert.reason
    rig.clock.advance(61)
    assert compensator.run_once() == Compensation()
    rig.clock.advance(1000)
    assert rounds(compensator, asked=2) == Compensation(asked=2, waiting=2)
    assert len(rig.alerts) == 1
    rig.consume(2)
    rig.clock.advance(1001)
    assert rounds(compensator, asked=2) == Compensation(asked=2, updated=2)
    assert rig.states(ids) == ["DONE", "DONE"]


def test_every_expected_group_is_asked_and_only_those_that_are_missing(rig: Rig) -> None:
    ids = rig.send("m", groups=["stock", "mail"])
    rig.consume(1)
    compensator = rig.compensator()
    rig.clock.advance(601)
    assert rounds(compensator, asked=1) == Compensation(asked=1, waiting=1)
    assert rig.states(ids) == ["SENT"]
    rig.consume(1, "mail")
    rig.clock.advance(61)
    assert rounds(compensator, asked=1) == Compensation(asked=1, updated=1)
    assert rig.states(ids) == ["DONE"]


def test_two_compensators_side_by_side_take_every_row_once(rig: Rig) -> None:
    ids = rig.send(*(f"no {n}" for n in range(60)))
    rig.consume(60)
    rig.clock.advance(601)
    done: list[Compensation] = []
    compensators = [rig.compensator(batch=5) for _ in range(3)]
    threads = [threading.Thread(target=lambda one=one: done.append(one.run_once())) for one in compensators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while sum(one.updated for one in done) < 60:  # one that found rows locked may have ended early
        done.append(compensators[0].run_once())
        assert len(done) < 100
    assert sum(one.asked for one in done) == 60
    assert set(rig.states(ids)) == {"REVERSED"}
    assert len(rig.reversed) == 60


def test_a_compensator_in_another_process_passes_refusals_on_to_the_one_that_can_reverse(rig: Rig) -> None:
    ids = rig.send("no stock", "yes")
    rig.consume(2)
    elsewhere = MessageService(rig.engine, rig.client, app="shop", relay=False, results=False, clock=rig.clock)
    compensator = Compensator(elsewhere, clock=rig.clock, passes_on=True)
    rig.clock.advance(601)
    assert rounds(compensator, asked=2) == Compensation(asked=2, updated=2)
    assert rig.states(ids) == ["SENT", "DONE"]
    assert rig.reversed == []
    listening = MessageService(rig.engine, rig.client, reverse={"orders": lambda *_: rig.reversed.append("here")})
    with listening:
        until(lambda: rig.states(ids) == ["REVERSED", "DONE"])
    assert rig.reversed == ["here"]
    compensator.close()
    elsewhere.close()


def test_a_reverse_business_that_fails_is_tried_again(rig: Rig) -> None:
    ids = rig.send("no stock")
    rig.consume(1)
    failing = iter([ValueError("not now")])

    def reverse(*_: object) -> None:
        for error in failing:
            raise error
        rig.reversed.append("done")

    rig.service._reverse["orders"] = reverse
    compensator = rig.compensator()
    rig.clock.advance(601)
    assert rounds(compensator, asked=1) == Compensation(asked=1, waiting=1)
    rig.clock.advance(61)
    assert rounds(compensator, asked=1) == Compensation(asked=1, updated=1)
    assert rig.states(ids) == ["REVERSED"]
    assert rig.reversed == ["done"]


def test_the_thread_works_by_itself(rig: Rig) -> None:
    ids = rig.send("m")
    rig.consume(1)
    rig.clock.advance(601)
    with rig.compensator(poll=0.05):
        until(lambda: rig.states(ids) == ["DONE"])


def test_values_that_make_no_sense_are_refused(rig: Rig) -> None:
    with pytest.raises(dmq.InvalidSettings, match="above 0"):
        rig.compensator(again=0)
    with pytest.raises(dmq.InvalidSettings, match="pass client="):
        Compensator(MessageService(rig.engine, None, app="x"))
    with pytest.raises(dmq.NotAllowed, match="insecure=True"):
        Inbox(rig.engine, rig.client, confirm=ConfirmOptions(host="0.0.0.0"))


def test_the_command_does_one_round_and_shows_it(rig: Rig) -> None:
    ids = rig.send("no stock", "yes")
    rig.consume(2)
    with rig.engine.begin() as connection:
        connection.execute(update(tables().send).values(due_at_ms=0))
    database = rig.engine.url.render_as_string(hide_password=False)
    options = ["--database", database, "--url", rig.broker.url, "--format", "json", "--log-level", "error"]
    done = dmq_command("outbox", "compensate", *options)
    assert done.code == 0, done.err
    assert done.json == [{"asked": 2, "updated": 2, "resent": 0, "waiting": 0, "alerted": 0}]
    assert rig.states(ids) == ["SENT", "DONE"]
    assert [result.state for result in results(rig.client) if result.send_id == ids[0]] == [ROLLBACK, ROLLBACK]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_the_command_goes_on_until_it_is_told_to_end(rig: Rig) -> None:
    ids = rig.send("yes")
    database = rig.engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-m", "dmq.cli", "outbox", "compensate", "--continuous", "--poll", "50ms"]
    with subprocess.Popen(
        [*command, "--database", database, "--url", rig.broker.url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"compensating m_msgsend with dmq://")
            rig.consume(1)
            with rig.engine.begin() as connection:
                connection.execute(update(tables().send).values(due_at_ms=0))
            until(lambda: rig.states(ids) == ["DONE"])
            process.terminate()
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
