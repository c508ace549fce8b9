"""What a handler's end means, and which message is which."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import dmq
from dmq.model import MessageId
from dmq.outbox.inbox.consumption import Rollback, Turns, consumption_of, cut, result_message, settled
from dmq.outbox.inbox.recorder import Earlier
from dmq.outbox.sender.envelope import RESULT_TO, SEND_ID, SEQUENCE, make_send_id, unpack_result
from dmq.outbox.states import BusinessState


def message(**properties: str) -> Any:
    return SimpleNamespace(
        properties=properties, id=MessageId(1, 2), group="stock", topic="orders", business_id="u-1", attempt=3
    )


def test_a_message_of_an_outbox_goes_by_its_send_id_and_any_other_by_its_message_id() -> None:
    send_id = make_send_id()
    taken = consumption_of(message(**{SEND_ID: send_id, RESULT_TO: "shop", SEQUENCE: "7"}), "c", 5)
    assert (taken.row.send_id, taken.result_to, taken.row.sequence, taken.is_strict) == (send_id, "shop", 7, True)
    plain = consumption_of(message(), "c", 5)
    assert (plain.row.send_id, plain.result_to, plain.is_strict) == (str(MessageId(1, 2)), "", False)
    assert len(plain.row.send_id) <= 32
    anonymous = message()
    anonymous.id = None
    with pytest.raises(dmq.InvalidMessage, match="no id"):
        consumption_of(anonymous, "c", 5)


def test_only_success_and_rollback_are_results() -> None:
    settled(BusinessState.SUCCESS)
    with pytest.raises(Rollback):
        settled(BusinessState.ROLLBACK)
    for nothing in (None, BusinessState.UNKNOWN):
        with pytest.raises(dmq.Retry, match="UNKNOWN"):
            settled(nothing)
    for wrong in (True, "SUCCESS", 1):
        with pytest.raises(dmq.InvalidRequest, match="a handler returns"):
            settled(wrong)


def test_a_result_tells_the_sender_all_it_needs() -> None:
    send_id = make_send_id()
    taken = consumption_of(message(**{SEND_ID: send_id, RESULT_TO: "shop"}), "c", 5)
    topic, sent = result_message(taken.row, "shop", Earlier(BusinessState.ROLLBACK, "c", "no stock", 5))
    assert (topic, sent.key, sent.tag) == ("%RESULT%orders", send_id, "shop")
    result = unpack_result(sent.body)
    assert (result.send_id, result.group, result.state, result.consumer_id, result.at_ms, result.reason) == (
        send_id, "stock", BusinessState.ROLLBACK, "c", 5, "no stock",
    )  # fmt: skip


def test_a_reason_is_cut_to_what_every_database_takes() -> None:
    assert Rollback("a\0b").reason == "a\u2400b"
    assert len(cut("x" * 10_000)) == 4096


def test_turns_of_one_name_come_one_at_a_time_and_leave_nothing_behind() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(20):
            with turns.of("a"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    with turns.of("b"):
        for thread in threads:
            thread.join()
    assert most == [1]
    assert len(turns) == 0
