"""What the outbox writes on messages, and the results that come back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from dmq.errors import InvalidMessage, InvalidName
from dmq.outbox.sender.envelope import (
    RESULT_TO,
    SEND_ID,
    SEQUENCE,
    Envelope,
    Result,
    check_properties,
    floor_send_id,
    make_send_id,
    pack_properties,
    pack_result,
    result_topic,
    unpack,
    unpack_result,
)
from dmq.outbox.states import BusinessState


class Carried:
    def __init__(self, properties: Mapping[str, str]) -> None:
        self.properties = properties


def test_send_ids_are_uuids_with_the_time_in_front_and_rise_within_a_process() -> None:
    before_ms = time.time_ns() // 1_000_000
    made = [make_send_id() for _ in range(5000)]
    assert made == sorted({*made})
    parsed = uuid.UUID(made[0])
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert before_ms <= parsed.int >> 80 <= time.time_ns() // 1_000_000
    assert floor_send_id(before_ms) <= made[0] < floor_send_id(before_ms + 3_600_000)


def test_threads_never_get_the_same_send_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [
            send_id for part in pool.map(lambda _: [make_send_id() for _ in range(500)], range(8)) for send_id in part
        ]
    assert len({*made}) == 4000


def test_a_clock_that_steps_back_does_not_make_send_ids_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_send_id()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    assert make_send_id() > first


@pytest.mark.parametrize("sequence", [None, 7])
def test_what_is_packed_can_be_unpacked(sequence: int | None) -> None:
    send_id = make_send_id()
    packed = pack_properties({"own": "1"}, send_id, "shop", sequence)
    assert packed["own"] == "1"
    assert unpack(Carried(packed)) == Envelope(send_id, "shop", sequence)


def test_a_message_that_expects_no_result_says_so() -> None:
    packed = pack_properties(None, make_send_id(), "", None)
    assert RESULT_TO not in packed
    found = unpack(Carried(packed))
    assert found is not None
    assert found.result_to == ""


def test_a_message_of_no_outbox_has_no_envelope() -> None:
    assert unpack(Carried({"own": "1"})) is None


@pytest.mark.parametrize(
    "spoiled", [{SEND_ID: "short"}, {SEQUENCE: "0"}, {SEQUENCE: "-1"}, {SEQUENCE: "one"}, {SEQUENCE: ""}]
)
def test_an_envelope_that_cannot_be_is_refused(spoiled: dict[str, str]) -> None:
    with pytest.raises(InvalidMessage):
        unpack(Carried(pack_properties(None, make_send_id(), "shop", 1) | spoiled))


def test_names_of_ours_are_refused_among_a_users_properties() -> None:
    check_properties({"own": "1"})
    with pytest.raises(InvalidMessage, match="is DMQ's own"):
        check_properties({"dmq.other": "1"})


def test_a_result_comes_back_as_it_was_sent_tagged_for_its_sender() -> None:
    result = Result(
        send_id=make_send_id(), topic="orders", group="stock", state=BusinessState.ROLLBACK, consumer_id="c", at_ms=5,
        reason="sold out",
    )  # fmt: skip
    message = pack_result(result, "shop")
    assert (message.tag, message.key) == ("shop", result.send_id)
    assert unpack_result(message.body) == result


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"\xff", b'{"send_id":"a","topic":"t","group":"g","state":"UNKNOWN"}', b'{"state":"MAYBE"}'],
)
def test_what_is_no_result_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessage):
        unpack_result(body)


def test_results_of_a_topic_have_a_topic_of_their_own() -> None:
    assert result_topic("orders") == "%RESULT%orders"
    for name in ("%RESULT%orders", "", "a b", "x" * 250):
        with pytest.raises(InvalidName):
            result_topic(name)
