"""A broker that loses its power: no ack outlives the result that was sent before it."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, Inbox
from dmq.testing import TestBroker
from tests.integration.outbox.effects import (
    consumed,
    disposed,
    effect,
    effects,
    open_database,
    outgoing,
    results,
    until,
)

MESSAGES = 60


@pytest.mark.parametrize("seed", range(6))
def test_after_a_power_loss_every_message_has_its_result_without_anybody_asking(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with (
        TestBroker(grace_seconds=0.2, retry_table="0.05") as broker,
        disposed(open_database(f"sqlite:///{tmp_path / 'stock.db'}", pool_size=6)) as engine,
    ):
        client = broker.connect(app="stock")
        sent = [outgoing(f"m {number}") for number in range(MESSAGES)]
        client.producer().send_many("orders", sent)
        ids = {message.properties["dmq.send_id"] for message in sent if message.properties}
        inbox = Inbox(engine, client, confirm=None)

        @inbox.consumes_messages
        def handle(session: Session, message: ReceivedMessage) -> BusinessState:
            session.execute(effect(message.body.decode()))
            return BusinessState.SUCCESS

        consumer = client.consumer("orders", "stock", max_attempts=None)
        worker = threading.Thread(target=lambda: consumer.run(handle, workers=4))
        worker.start()
        until(lambda: len(consumed(engine)) > chance.randrange(5, MESSAGES))
        broker.lose_power(chance)
        broker.start()
        until(lambda: is_all_acked(client))
        consumer.close()
        worker.join()
        assert {result.send_id for result in results(client)} == ids
        assert len(effects(engine)) == MESSAGES


def is_all_acked(client: Client) -> bool:
    report = client.admin.group("stock")
    return report.lag == 0 and report.retrying == 0
