"""Bodies, limits, times, queues: everything that is decided before a message gathers."""

from __future__ import annotations

import os
import types
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from dmq.client.admin.calls import parse_point
from dmq.client.producer.core import ProducerOptions
from dmq.client.producer.encoder import check_type, decode_body, encode_body
from dmq.client.producer.message import check_message, due_ms, expiry, parse_durability
from dmq.client.producer.routes import Route, Routes, choose_queue
from dmq.errors import InvalidMessage, InvalidSettings, MessageTooLarge
from dmq.model import Durability, Message
from dmq.protocol.consume import Point, PointKind
from dmq.records import decode_attributes

NOW_MS = 1_700_000_000_000


class Order(msgspec.Struct):
    number: int
    name: str


@dataclass
class Item:
    number: int
    tags: list[str]


@pytest.mark.parametrize("body", [Order(1, "ä"), Item(2, ["x", "y"]), b"raw", "text ü"])
def test_a_body_comes_back_as_the_type_it_was(body: object) -> None:
    assert decode_body(type(body), encode_body(body)) == body


def test_pydantic_models_are_bodies_too() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Made", number=(int, ...))
    assert decode_body(model, encode_body(model(number=3))) == model(number=3)
    with pytest.raises(InvalidMessage, match="Made"):
        decode_body(model, b"{}")


def test_pydantic_models_may_stand_in_lists_and_unions() -> None:
    pydantic = pytest.importorskip("pydantic")
    order: Any = pydantic.create_model("Order", number=(int, ...))
    refund: Any = pydantic.create_model("Refund", amount=(int, ...))
    orders: Any = types.GenericAlias(list, (order,))
    assert decode_body(check_type(orders), b'[{"number": 3}]') == [order(number=3)]
    assert decode_body(check_type(order | refund), b'{"amount": 3}') == refund(amount=3)
    with pytest.raises(InvalidMessage, match=r"^the body is not of type list\[.*\]: 0\.number: [^\n]+$"):
        decode_body(orders, b'[{"number": "x"}]')


@pytest.mark.parametrize("body", [bytearray(b"ab"), memoryview(b"ab")])
def test_bytes_of_any_kind_are_taken(body: object) -> None:
    assert encode_body(body) == b"ab"


def test_dicts_and_lists_are_json() -> None:
    assert encode_body({"a": [1, None]}) == b'{"a":[1,null]}'
    assert encode_body([{"a": 1}]) == b'[{"a":1}]'


@pytest.mark.parametrize("body", [None, 3, {"a": object()}, object(), Item, Order(1, object()), "\ud800"])  # type: ignore[arg-type]
def test_what_has_no_form_is_refused_by_its_type(body: object) -> None:
    with pytest.raises(InvalidMessage) as caught:
        encode_body(body)
    if not isinstance(body, str):
        assert type(body).__name__ in caught.value.message


@dataclass
class Reading:
    values: dict[str, list[object]]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_refused(number: float) -> None:
    for body in ({"x": number}, [1.5, (None, number)], Order(number, "a"), Reading({"a": [None, {"b": number}]})):  # type: ignore[arg-type]
        with pytest.raises(InvalidMessage, match="NaN or infinity"):
            encode_body(body)
    assert encode_body({"x": None, "null": [1.5, None]}) == b'{"x":null,"null":[1.5,null]}'


def test_a_body_that_is_something_else_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="Order"):
        decode_body(Order, b'{"number": "x"}')


def test_a_body_over_the_limit_passes_only_if_it_compresses() -> None:
    check_message("t", Message(bytes(2000)), 1000)
    with pytest.raises(MessageTooLarge, match="even compressed"):
        check_message("t", Message(os.urandom(2000)), 1000)


@pytest.mark.parametrize(
    "message",
    [
        Message(b"", priority=10),
        Message(b"", priority=True),
        Message(b"", key="k" * 70_000),
        Message(b"", key=3),  # type: ignore[arg-type]
        Message(b"", tag="\ud800"),
        Message(b"", business_id="b" * 256),
        Message(b"", business_id="ü" * 200),
        Message(b"", properties={"": "x"}),
        Message(b"", properties={"a": "x" * 70_000}),
    ],
)
def test_what_breaks_a_rule_is_refused_at_once(message: Message) -> None:
    with pytest.raises(InvalidMessage) as caught:
        check_message("t", message, 1000)
    assert not caught.value.message.startswith("message 0")


@pytest.mark.parametrize(
    "message", [Message(b"", key="ü"), Message(b"", properties={"a": "b"}), Message(encode_body("x"))]
)
def test_what_keeps_the_rules_passes(message: Message) -> None:
    check_message("t", message, 1000)


def test_due_times() -> None:
    assert due_ms(0.0, None, NOW_MS) == 0
    assert due_ms(1.5, None, NOW_MS) == NOW_MS + 1500
    at = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(hours=1)
    assert due_ms(0.0, at, NOW_MS) == NOW_MS + 3_600_000
    assert due_ms(0.0, NOW_MS / 1000 - 5, NOW_MS) == NOW_MS - 5000, "whether that is past, the broker says"
    for delay, deliver_at in ((-1.0, None), (1.0, NOW_MS / 1000), (1e9, None), (0.0, datetime(2030, 1, 1))):
        with pytest.raises(InvalidMessage):
            due_ms(delay, deliver_at, NOW_MS)


def test_expiry_is_an_attribute() -> None:
    assert expiry(None, NOW_MS) == b""
    assert decode_attributes(expiry(2.0, NOW_MS)).expires_at_ms == NOW_MS + 2000
    with pytest.raises(InvalidMessage):
        expiry(0, NOW_MS)


def test_durability_has_names() -> None:
    assert parse_durability("flushed") == Durability.FLUSHED
    with pytest.raises(InvalidMessage, match="none, stored, flushed"):
        parse_durability("safe")


def test_one_business_id_has_one_queue() -> None:
    route = Route(8, False, 0.0)
    queues = {choose_queue(route, Message(b"", business_id=f"u-{n}", ordered=True)) for n in range(200)}
    assert queues == set(range(8))
    one = Message(b"", business_id="u-7", ordered=True)
    assert choose_queue(route, one) == choose_queue(route, one)
    assert choose_queue(route, Message(b"", business_id="u-7")) == -1
    with pytest.raises(InvalidMessage, match="business_id"):
        choose_queue(route, Message(b"", ordered=True))


def test_in_a_priority_topic_the_queue_is_the_priority() -> None:
    assert choose_queue(Route(10, True, 0.0), Message(b"", priority=9)) == 9
    ordered = Message(b"", business_id="u-7", ordered=True, priority=2)
    assert choose_queue(Route(10, True, 0.0), ordered) == 2


def test_a_topic_is_asked_for_anew_once_an_hour() -> None:
    routes = Routes()
    routes.put("t", Route(4, False, 100.0))
    assert not routes.begin_refresh("t", 3000.0)
    assert routes.begin_refresh("t", 3800.0)
    assert not routes.begin_refresh("t", 3800.0), "it is being asked for"
    routes.end_refresh("t")
    assert routes.begin_refresh("t", 3800.0)
    routes.drop("t")
    assert routes.get("t") is None


@pytest.mark.parametrize(
    "bad",
    [
        {"timeout": 0}, {"timeout": -1}, {"retries": -1}, {"window_bytes": 0}, {"window_messages": 0},
        {"on_full": "drop"}, {"compression": "gzip"}, {"resend_after": (30, 20)}, {"resend_after": (0,)},
    ],
)  # fmt: skip
def test_choices_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidSettings):
        ProducerOptions(**bad)  # type: ignore[arg-type]


def test_places_in_a_queue_as_users_write_them() -> None:
    assert parse_point("latest") == Point(PointKind.LATEST)
    assert parse_point(7) == Point(PointKind.OFFSET, 7)
    assert parse_point(timedelta(minutes=1)) == Point(PointKind.BACK, 60_000)
    assert parse_point(datetime(2030, 1, 1, tzinfo=UTC)).kind == PointKind.TIME
    for wrong in ("soon", -1, True, datetime(2030, 1, 1)):
        with pytest.raises(InvalidSettings):
            parse_point(wrong)
