"""Arguments that make no sense are refused with one sentence that names them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

import pytest

import dmq
from dmq.client.admin.calls import parse_point
from dmq.client.arguments import check_function, check_seconds, check_timeout, check_whole, delay_ms, parse_id
from dmq.client.connection.router import Listeners
from dmq.client.consumer.handler import judge
from dmq.client.consumer.message import parts_to_ack
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.producer.core import ProducerOptions, listed
from dmq.client.producer.message import due_ms, expiry
from dmq.errors import InvalidMessage, InvalidName, InvalidRequest, InvalidSettings
from dmq.model import MessageId, check_name, check_target
from dmq.protocol.admin import changed_config
from dmq.records.attributes import property_entries

NO_TIMES = ["soon", None, True, math.nan, math.inf, 1e30, -1]


def test_what_makes_sense_passes() -> None:
    assert check_whole("n", 1, 1, 1) == 1
    assert check_seconds("t", 0) == 0.0
    assert check_timeout(None) is None
    assert check_function("f", print) is print
    assert (delay_ms(None), delay_ms(1.5), delay_ms(-3)) == (-1, 1500, 0)
    id = MessageId(1, 2)
    assert parse_id(id) == parse_id(str(id)) == id


@pytest.mark.parametrize("value", NO_TIMES)
def test_what_is_no_time_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(InvalidSettings, match="lease is a time in seconds"):
        check_seconds("lease", value)


@pytest.mark.parametrize("value", ["soon", True, math.nan, math.inf, 1e30, timedelta(1)])
def test_what_is_no_delay_is_refused_when_it_is_said(value: Any) -> None:
    with pytest.raises(InvalidSettings, match="two years at most"):
        delay_ms(value)
    with pytest.raises(InvalidSettings, match="two years at most"):
        dmq.Retry("x", after=value)


@pytest.mark.parametrize("value", ["1", 1.5, True, None, 0, 11])
def test_what_is_no_whole_number_within_bounds_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSettings, match="queues is a whole number from 1 to 10"):
        check_whole("queues", value, 1, 10)


@pytest.mark.parametrize("value", [5, None, "xyz", b"raw", ("a", 1)])
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a message id"):
        parse_id(value)


@pytest.mark.parametrize("name", [None, 5, b"orders", ["orders"]])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    for check in (check_target, lambda given: check_name(given, "topic")):
        with pytest.raises(InvalidName, match="topic name is text"):
            check(name)


def test_a_producer_of_values_that_make_no_sense_is_refused() -> None:
    wrong: dict[str, list[Any]] = {
        "timeout": ["x", 0, -1, math.nan],
        "retries": ["x", -1, 2.5],
        "window_bytes": ["x", 0],
        "window_messages": [None, 0],
        "resend_after": [5, ("x",), (2, 1), (-1,)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidSettings, match=name):
                ProducerOptions(**{name: value})


@pytest.mark.parametrize("type_", [5, "Order", object, print])
def test_a_type_that_no_body_can_be_of_is_refused_at_once(type_: Any) -> None:
    with pytest.raises(InvalidSettings, match="type is a msgspec struct"):
        ConsumerOptions("orders", "billing", type=type_)


@pytest.mark.parametrize("to", [True, 1 << 63, -1, math.nan, None, datetime.max])
def test_a_place_that_is_none_is_refused(to: Any) -> None:
    with pytest.raises(InvalidSettings):
        parse_point(to)


@pytest.mark.parametrize("value", ["x", timedelta(1), True])
def test_times_of_a_message_are_numbers(value: Any) -> None:
    for call in (lambda: due_ms(value, None, 0), lambda: due_ms(0, value, 0), lambda: expiry(value, 0)):
        with pytest.raises(InvalidMessage, match=r"not .*"):
            call()


def test_properties_are_a_mapping() -> None:
    with pytest.raises(InvalidMessage, match="properties map names to texts"):
        property_entries(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [None, 5, b"x", "y", dmq.Message(b"x")])
def test_send_many_takes_a_list(messages: Any) -> None:
    with pytest.raises(InvalidMessage, match="takes a list of messages"):
        listed(messages)


def test_send_many_takes_what_can_be_iterated_over() -> None:
    assert listed(dmq.Message(b"%d" % n) for n in range(2)) == [dmq.Message(b"0"), dmq.Message(b"1")]


@pytest.mark.parametrize("messages", [None, 5, [1], "x"])
def test_ack_takes_messages(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="ack takes a message"):
        parts_to_ack(messages)


def test_listeners_are_functions() -> None:
    with pytest.raises(InvalidSettings, match="on_resumed is a function"):
        Listeners(None, None, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "burst"), [("x", None), (None, None), (True, None), (math.nan, None), (1, "x")])
def test_a_rate_is_a_number(rate: Any, burst: Any) -> None:
    with pytest.raises(InvalidSettings, match="rate limit"):
        dmq.RateLimit(rate, burst)


@pytest.mark.parametrize("settings", [{"carry_for": ""}, {"carry_for": "a b"}, {"ttl_ms": 0}, {"ttl_ms": -5}])
def test_a_topic_keeps_nothing_for_a_group_that_cannot_be_and_no_time_below_zero(settings: dict[str, Any]) -> None:
    with pytest.raises((InvalidName, InvalidSettings)):
        changed_config(settings)


class Mute(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Noted:
    """A message that notes what is said of it."""

    def nack(self, delay: object, reason: str) -> None:
        self.said = (delay, reason)

    def reject(self, reason: str) -> None:
        self.said = (None, reason)


def test_an_error_that_cannot_be_shown_is_a_reason_nevertheless() -> None:
    for error, words in ((Mute(), "Mute: a Mute that cannot be shown"), (dmq.Reject(Mute()), "a Mute that")):  # type: ignore[arg-type]
        message = Noted()
        judge(error, 2, 1).settle(message)  # type: ignore[arg-type]
        assert message.said[1].startswith(words)
