"""Messages whose outcome is not known, repeated by their senders: found again, within bounds."""

from __future__ import annotations

import pytest

from dmq.client.producer import future as future_module
from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.future import Sent, UnknownOutcomes
from dmq.client.producer.message import SendOptions, own_message, parse_id
from dmq.errors import InvalidMessage, NotConnected, OutOfRetries, RateLimited, SequenceConflict
from dmq.model import Message, MessageId
from dmq.protocol import Flag
from tests.unit.client.producer.test_sender import Rig

GIVE_UP = 130


def sent(rig: Rig, message: Message, name: str | None = None) -> Sent:
    """A message on its way, as `send_async` puts it there."""
    draft = rig.core.draft(rig.route, message, SendOptions("orders"))
    put = rig.core.put(draft, attended=True, deadline=None)
    assert put is not None
    batch, at = put
    batch.is_kept = True
    rig.core.sender.pump(batch.lane)
    return Sent(batch, at, message, name, is_object=True)


def given_up(rig: Rig, message: Message) -> Sent:
    one = sent(rig, message)
    for _ in range(GIVE_UP):
        rig.lines.advance(1.0)
    assert isinstance(one.batch.error, OutOfRetries)
    rig.core.outcomes.failed(one.batch.error, one)
    return one


def test_a_batch_that_was_given_up_is_sent_again_with_its_numbers_and_bytes() -> None:
    rig = Rig()
    message = Message(b"once")
    first = given_up(rig, message)
    found = rig.core.outcomes.take("orders", message)
    assert found == (first.batch, 0)
    again = rig.core.sender.resume(first.batch, None)
    request = rig.link.requests[-1]
    assert request.flags & Flag.RESEND
    assert request.numbers == rig.link.requests[0].numbers
    assert request.body == rig.link.requests[0].body
    request.store(7)
    assert again.receipt(0).offset == 7
    assert again.receipt(0).id == MessageId(first.batch.producer_id, first.batch.first_sequence)
    assert rig.core.accumulator.messages == 0
    assert rig.core.outcomes.take("orders", message) is None  # found once


def test_it_waits_for_the_turn_of_its_queue() -> None:
    rig = Rig(queues=1)
    message = Message(b"once")
    first = given_up(rig, message)
    other = sent(rig, Message(b"other"))
    again = rig.core.sender.resume(first.batch, None)
    assert rig.link.requests[-1].header.first_sequence == other.batch.first_sequence
    rig.link.requests[-1].store()
    assert rig.link.requests[-1].header.first_sequence == again.first_sequence < other.batch.first_sequence


def test_two_messages_of_one_batch_share_what_is_sent_again() -> None:
    rig = Rig(queues=1)
    blocking = sent(rig, Message(b"first"))
    one, two = sent(rig, Message(b"1")), sent(rig, Message(b"2"))
    assert one.batch is two.batch
    rig.link.requests[0].store()
    assert blocking.batch.is_done
    for _ in range(GIVE_UP):
        rig.lines.advance(1.0)
    assert isinstance(one.batch.error, OutOfRetries)
    again = rig.core.sender.resume(one.batch, None)
    assert rig.core.sender.resume(two.batch, None) is again
    rig.link.requests[-1].store(5)
    assert [again.receipt(place.at).offset for place in (one, two)] == [5, 6]


def test_what_the_broker_no_longer_remembers_is_a_clear_error_that_names_the_message() -> None:
    rig = Rig()
    message = Message(b"once")
    first = given_up(rig, message)
    again = rig.core.sender.resume(first.batch, None)
    rig.link.requests[-1].refuse(SequenceConflict("too old"))
    assert again.error is not None
    error = rig.core.outcomes.failed(again.error, first._replace(batch=again))
    assert isinstance(error, OutOfRetries)
    assert error.detail["id"] in error.message
    assert rig.core.outcomes.take("orders", message) == (again, 0)  # it stays unknown


def test_the_bytes_that_are_kept_are_bounded() -> None:
    rig = Rig(window_bytes=4000)
    batches = [given_up(rig, Message(b"x" * 800)).batch for _ in range(5)]
    assert [batch.body is not None for batch in batches] == [False, False, False, True, True]
    assert rig.core.sender.resume(batches[0], None) is batches[0]  # done, with its error


def test_a_message_that_was_refused_is_new_when_it_is_sent_again() -> None:
    rig = Rig()
    one = sent(rig, Message(b"x"), name="n")
    rig.core.outcomes.name(one)
    rig.link.requests[0].refuse(RateLimited("too many"))
    assert isinstance(one.batch.error, RateLimited)
    assert rig.core.outcomes.failed(one.batch.error, one) is one.batch.error
    assert rig.core.outcomes.find("orders", one.message, "n") is None
    assert rig.core.outcomes.take("orders", one.message) is None


def test_an_unanswered_batch_that_is_then_refused_may_be_stored() -> None:
    rig = Rig()
    one = sent(rig, Message(b"x"))
    rig.link.lose()
    rig.reconnect(rig.link)
    rig.link.requests[-1].refuse(RateLimited("too many"))
    assert one.batch.is_unknown
    rig.core.outcomes.failed(one.batch.error or NotConnected(""), one)
    assert rig.core.outcomes.take("orders", one.message) == (one.batch, 0)


def test_an_equal_message_is_another_one() -> None:
    rig = Rig()
    given_up(rig, Message(b"x"))
    assert rig.core.outcomes.take("orders", Message(b"x")) is None


def test_another_topic_is_another_message() -> None:
    rig = Rig()
    message = Message(b"x")
    given_up(rig, message)
    assert rig.core.outcomes.take("bills", message) is None
    assert rig.core.outcomes.take("orders", message) is not None


def test_objects_and_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    outcomes = UnknownOutcomes(bytes_max=10_000)
    lane = sent(rig, Message(b"")).batch.lane
    messages = [Message(b"x" * 1000) for _ in range(50)]
    for number, message in enumerate(messages):
        outcomes.keep(message, SendBatch(lane), 0)
        outcomes.name(Sent(SendBatch(lane), 0, message, str(number)))
    assert [outcomes.take("orders", message) is None for message in messages] == [True] * 42 + [False] * 8
    assert not outcomes.has_objects
    assert "no longer remembered" in caplog.text
    for number in range(future_module.NAMES_MAX):
        outcomes.name(Sent(SendBatch(lane), 0, messages[0], f"n-{number}"))
    assert outcomes.find("orders", messages[0], "49") is None
    assert outcomes.find("orders", messages[0], "n-0") is not None


def test_an_id_is_for_one_message() -> None:
    rig = Rig()
    one = sent(rig, Message(b"x"), name="n")
    rig.core.outcomes.name(one)
    with pytest.raises(InvalidMessage, match="another message"):
        rig.core.outcomes.find("orders", Message(b"y"), "n")
    with pytest.raises(InvalidMessage, match="another message"):
        rig.core.outcomes.find("bills", Message(b"x"), "n")
    for wrong in ("", "x" * 256, 7):
        with pytest.raises(InvalidMessage, match="id is text"):
            parse_id(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="beside it"):
        own_message(Message(Message(b"x"), key="k"))
