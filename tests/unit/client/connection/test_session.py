"""One connection's conversation, byte by byte and without a connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dmq.client.connection.session import Received, Session
from dmq.errors import (
    Busy,
    DMQError,
    FrameCorrupt,
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    ProtocolError,
    VersionMismatch,
)
from dmq.protocol import (
    Buffer,
    Command,
    Frame,
    FrameParser,
    Kind,
    Status,
    decode_request,
    decode_response,
    error_frame,
    one_way_head,
    request_head,
    response_head,
    seal_frame,
)
from dmq.protocol.consume import Credit, Push
from dmq.protocol.session import FRAME_CRC, Heartbeat, Hello, HelloReply, Limits, ServerReboot, Stats, StatsReply
from dmq.testing import FakeClock
from tests.unit.protocol.samples import build_frame

LIMITS = Limits(1 << 20, 1 << 19, 10_000, 1000, 1 << 24, 5_000)


class Talk:
    """A session, and the broker's side of it."""

    def __init__(self, outstanding_max: int = 100, hello: bool = True) -> None:
        self.clock = FakeClock()
        self.session = Session(Hello("shop"), self.clock, outstanding_max=outstanding_max)
        self.parser = FrameParser(1 << 20)
        self.answers: list[Frame | DMQError] = []
        (self.hello,) = self.sent([self.session.greet()])
        if hello:
            self.say(response_head(Command.HELLO, HelloReply("b", "", 1, LIMITS), self.hello.correlation))

    def sent(self, output: Sequence[Buffer]) -> list[Frame]:
        return self.parser.feed(b"".join(output))

    def say(self, data: bytes) -> Received:
        room = self.session.get_buffer()
        room[: len(data)] = data
        received = self.session.receive(len(data))
        for pending, frame in received.answers:
            pending.on_answer(frame)
        return received

    def ask(self) -> Frame:
        _, output = self.session.request(Command.STATS, Stats(), on_answer=self.answers.append)
        return self.sent(output)[0]


def test_the_hello_comes_first_and_makes_the_session_ready() -> None:
    talk = Talk(hello=False)
    assert decode_request(talk.hello).app == "shop"
    with pytest.raises(NotConnected, match="hello"):
        talk.ask()
    talk.say(response_head(Command.HELLO, HelloReply("b", "", 1, LIMITS), talk.hello.correlation))
    assert talk.session.is_ready
    assert talk.session.limits == LIMITS


def test_a_refused_hello_ends_the_session_with_the_reason() -> None:
    talk = Talk(hello=False)
    talk.say(error_frame(VersionMismatch("too old"), Command.HELLO, talk.hello.correlation))
    assert isinstance(talk.session.closed_by, VersionMismatch)


def test_a_version_nobody_asked_for_is_refused() -> None:
    talk = Talk(hello=False)
    talk.say(response_head(Command.HELLO, HelloReply("b", "", 9, LIMITS), talk.hello.correlation))
    assert isinstance(talk.session.closed_by, VersionMismatch)


def test_answers_find_their_requests_in_any_order() -> None:
    talk = Talk()
    first, second = talk.ask(), talk.ask()
    talk.say(response_head(Command.STATS, StatsReply({"b": 2.0}), second.correlation))
    talk.say(response_head(Command.STATS, StatsReply({"a": 1.0}), first.correlation))
    assert [frame.correlation for frame in talk.answers if isinstance(frame, Frame)] == [
        second.correlation,
        first.correlation,
    ]
    assert talk.session.outstanding == 0


def test_an_answer_to_nobody_is_dropped() -> None:
    talk = Talk()
    received = talk.say(response_head(Command.STATS, StatsReply({}), 77))
    assert received == Received([], [], [])
    assert talk.session.is_ready


def test_an_answer_that_was_given_up_is_dropped() -> None:
    talk = Talk()
    pending, output = talk.session.request(Command.STATS, Stats(), on_answer=talk.answers.append)
    assert talk.session.forget(pending)
    assert not talk.session.forget(pending)
    talk.say(response_head(Command.STATS, StatsReply({}), talk.sent(output)[0].correlation))
    assert talk.answers == []


def test_requests_without_an_answer_are_bounded() -> None:
    talk = Talk(outstanding_max=2)
    talk.ask()
    talk.ask()
    with pytest.raises(Busy):
        talk.ask()


def test_a_frame_over_the_limit_is_not_sent() -> None:
    talk = Talk()
    with pytest.raises(MessageTooLarge):
        talk.session.request(Command.STATS, Stats(), [bytes(1 << 20)], on_answer=talk.answers.append)
    assert talk.session.outstanding == 0


def test_pushes_come_decoded() -> None:
    talk = Talk()
    (push,) = talk.say(one_way_head(Command.SERVER_REBOOT, ServerReboot("b", 500))).pushes
    assert push.header == ServerReboot("b", 500)


def test_a_push_is_younger_than_the_newest_request_that_was_answered_before_it() -> None:
    talk = Talk()
    push = one_way_head(Command.SERVER_REBOOT, ServerReboot("b", 500))
    made = talk.clock.boottime()
    talk.clock.advance(1)
    asked = talk.ask()
    talk.clock.suspend(100)
    answer = response_head(Command.STATS, StatsReply({}), asked.correlation)
    first, second = talk.say(push + answer + push).pushes
    assert (first.since, second.since) == (made, made + 1)


def test_heartbeats_tell_how_old_a_push_is_at_most() -> None:
    talk = Talk()
    beats = []
    for _ in range(2):
        talk.clock.advance(6)
        beats.append((talk.clock.boottime(), talk.sent(talk.session.tick())[0]))
    push = one_way_head(Command.SERVER_REBOOT, ServerReboot("b", 500))
    for sent_at, beat in beats:  # the answer to the first says nothing of when the second was sent
        answer = response_head(Command.HEARTBEAT, Heartbeat(0), beat.correlation)
        assert talk.say(answer + push).pushes[0].since == sent_at


def test_a_push_of_a_newer_broker_is_skipped_and_one_that_cannot_be_read_ends_it() -> None:
    talk = Talk()
    assert talk.say(build_frame(Kind.ONE_WAY, 0x7000, b"\x90")).pushes == []
    assert talk.session.is_ready
    talk.say(build_frame(Kind.ONE_WAY, Command.SERVER_REBOOT, b"\xc1"))
    assert isinstance(talk.session.closed_by, ProtocolError)


def test_a_heartbeat_of_the_broker_is_answered_and_another_request_refused() -> None:
    talk = Talk()
    (beat,) = talk.sent(talk.say(request_head(Command.HEARTBEAT, Heartbeat(5), 9)).output)
    assert (beat.kind, beat.status, beat.correlation) == (Kind.RESPONSE, 0, 9)
    (refused,) = talk.sent(talk.say(request_head(0x7001, Heartbeat(), 10)).output)
    assert refused.status == Status.UNKNOWN_COMMAND


def test_a_heartbeat_goes_out_when_nothing_else_does() -> None:
    talk = Talk()
    talk.clock.advance(4)
    assert talk.session.tick() == []
    talk.clock.advance(2)
    (beat,) = talk.sent(talk.session.tick())
    assert (beat.kind, beat.command) == (Kind.REQUEST, Command.HEARTBEAT)
    assert talk.session.tick() == []
    talk.say(response_head(Command.HEARTBEAT, Heartbeat(), beat.correlation))
    assert talk.session.is_ready


def test_a_heartbeat_goes_out_also_while_only_we_speak() -> None:
    talk = Talk()
    for _ in range(3):
        talk.clock.advance(2)
        talk.session.one_way(Command.HEARTBEAT, Heartbeat())
    assert len(talk.session.tick()) == 1


def test_a_broker_that_is_silent_for_three_heartbeats_is_gone() -> None:
    talk = Talk()
    talk.clock.advance(29)
    talk.session.tick()
    talk.clock.advance(2)
    with pytest.raises(NotConnected, match="silent"):
        talk.session.tick()


def test_a_broker_that_stops_within_a_frame_is_gone() -> None:
    talk = Talk()
    talk.say(one_way_head(Command.SERVER_REBOOT, ServerReboot("b", 500))[:10])
    talk.clock.advance(6)
    with pytest.raises(NotConnected, match="middle"):
        talk.session.tick()


def test_what_came_before_garbage_is_answered() -> None:
    talk = Talk()
    asked = talk.ask()
    talk.say(response_head(Command.STATS, StatsReply({}), asked.correlation) + b"GET / HTTP/1.1\r\n\r\n")
    assert len(talk.answers) == 1
    assert isinstance(talk.session.closed_by, ProtocolError)


def test_the_brokers_last_word_ends_the_session() -> None:
    talk = Talk()
    talk.say(error_frame(Busy("too many connections")))
    assert isinstance(talk.session.closed_by, Busy)


def test_the_end_hands_back_every_request_once() -> None:
    talk = Talk()
    talk.ask()
    talk.ask()
    reason = NotConnected("gone")
    assert len(talk.session.fail(reason)) == 2
    assert talk.session.fail(NotConnected("later")) == []
    assert talk.session.closed_by is reason
    with pytest.raises(NotConnected, match="gone"):
        talk.ask()


def test_an_answer_that_cannot_be_read_is_the_askers_business() -> None:
    talk = Talk()
    asked = talk.ask()
    talk.say(build_frame(Kind.RESPONSE, Command.STATS, b"\xc1", correlation=asked.correlation))
    assert len(talk.answers) == 1
    assert talk.session.is_ready
    assert not isinstance(talk.answers[0], InvalidRequest)


def test_only_features_that_were_asked_for_and_answered_are_in_force() -> None:
    talk = Talk(hello=False)
    assert talk.session.features == frozenset()
    talk.say(
        response_head(Command.HELLO, HelloReply("b", "", 1, LIMITS, features=["surprise"]), talk.hello.correlation)
    )
    assert talk.session.is_ready
    assert talk.session.features == frozenset()


# --- checksums --------------------------------------------------------------------------------------------------------


class CheckedTalk:
    """A session that offers checksums, and the broker's side of it."""

    def __init__(self, answer: bool = True) -> None:
        self.clock = FakeClock()
        self.session = Session(Hello("shop", features=[FRAME_CRC]), self.clock)
        self.parser = FrameParser()
        (self.hello,) = self.parser.feed(self.session.greet())
        if answer:
            self.session.feed(self.answer())

    def answer(self, *, features: Sequence[str] = (FRAME_CRC,), seals: bool = True) -> bytes:
        """The answer to the hello."""
        reply = response_head(
            Command.HELLO, HelloReply("b", "", 1, LIMITS, features=[*features]), self.hello.correlation
        )
        return sealed(reply) if seals else reply


def sealed(*pieces: bytes) -> bytes:
    return b"".join(map(bytes, seal_frame(*pieces)))


def turned(frame: bytes, bit: int) -> bytes:
    data = bytearray(frame)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_a_request_may_be_claimed_sent_and_registered_late() -> None:
    talk = CheckedTalk()
    answers: list[Frame | DMQError] = []
    correlation = talk.session.claim()
    assert correlation
    assert talk.session.outstanding == 0
    pending = talk.session.expect(correlation, answers.append)
    assert talk.session.outstanding == 1
    answer = sealed(response_head(Command.STATS, StatsReply({"a": 1.0}), correlation))
    assert [answered for answered, _ in talk.session.feed(answer).answers] == [pending]


def test_nothing_is_claimed_that_has_to_be_registered_or_cannot_be_sent() -> None:
    talk = CheckedTalk()
    answers: list[Frame | DMQError] = []
    first = talk.session.claim()
    assert first not in (0, talk.session.claim())
    pending, _ = talk.session.request(Command.STATS, Stats(), on_answer=answers.append)
    answer = sealed(response_head(Command.STATS, StatsReply({"a": 1.0}), pending.correlation))
    talk.session.feed(answer[:7])
    assert talk.session.claim() == 0, "the beginning of a frame is with the parser"
    talk.session.feed(answer[7:])
    assert talk.session.claim() > pending.correlation
    reason = NotConnected("over")
    talk.session.fail(reason)
    assert talk.session.claim() == 0
    with pytest.raises(NotConnected, match="over"):
        talk.session.expect(first, answers.append)


def test_nothing_is_claimed_of_a_broker_whose_frames_have_no_checksums() -> None:
    talk = Talk()
    assert talk.session.is_ready
    assert talk.session.claim() == 0


def test_with_checksums_every_frame_has_one_in_both_directions() -> None:
    talk = CheckedTalk()
    assert talk.parser.is_checked
    assert talk.session.features == {FRAME_CRC}
    answers: list[Frame | DMQError] = []
    pending, output = talk.session.request(Command.STATS, Stats(), [b"one", b"two"], on_answer=answers.append)
    assert [frame.body for frame in talk.parser.feed(b"".join(output))] == [b"onetwo"]
    assert len(talk.parser.feed(b"".join(talk.session.one_way(Command.CREDIT, Credit(1, 10))))) == 1
    reply = sealed(response_head(Command.STATS, StatsReply({}), pending.correlation))
    ((_, frame),) = talk.session.feed(reply).answers
    assert decode_response(frame) == StatsReply({})
    talk.clock.advance(6)
    received = talk.session.feed(sealed(request_head(Command.HEARTBEAT, Heartbeat(), 9)))
    assert len(talk.parser.feed(b"".join(received.output))) == 1
    talk.clock.advance(6)
    assert len(talk.parser.feed(b"".join(talk.session.tick()))) == 1


def test_a_damaged_answer_is_taken_for_nobody_and_ends_the_session_as_a_broken_connection() -> None:
    for bit in range(0, 8 * 38, 7):
        talk = CheckedTalk()
        pending, _ = talk.session.request(Command.STATS, Stats(), on_answer=lambda answer: None)
        reply = turned(sealed(response_head(Command.STATS, StatsReply({"a": 1.0}), pending.correlation)), bit)
        received = talk.session.feed(reply + sealed(one_way_head(Command.HEARTBEAT, Heartbeat())))
        assert received.answers == []
        if talk.session.closed_by is not None:
            assert isinstance(talk.session.closed_by, FrameCorrupt)
            assert isinstance(talk.session.closed_by, NotConnected)
        else:
            assert bit < 32  # a longer frame: see the next test
        assert talk.session.fail(NotConnected("over")) == [pending]


def test_a_frame_whose_length_was_damaged_is_not_waited_for_though_other_frames_fill_it() -> None:
    talk = CheckedTalk()
    reply = sealed(one_way_head(Command.HEARTBEAT, Heartbeat()))
    talk.session.feed(turned(reply, 8 + 3))  # the second byte of the length: half a megabyte more
    for _ in range(3):
        talk.clock.advance(LIMITS.partial_ms / 3000)
        talk.session.tick()
        talk.session.feed(reply)
    talk.clock.advance(0.1)
    with pytest.raises(NotConnected, match="its length is wrong"):
        talk.session.tick()


def test_a_large_frame_that_comes_slowly_is_waited_for() -> None:
    talk = CheckedTalk()
    body = bytes((1 << 20) - 1000)
    frame = sealed(one_way_head(Command.CONSUMER_PUSH, Push(1, []), len(body)), body)
    for at in range(0, len(frame), 64 << 10):
        talk.session.feed(frame[at : at + (64 << 10)])
        talk.clock.advance(1.0)
        talk.session.tick()
    assert talk.session.closed_by is None


@pytest.mark.parametrize(("features", "seals"), [([FRAME_CRC], False), ([], True)])
def test_an_answer_to_the_hello_that_contradicts_itself_is_damaged(features: list[str], seals: bool) -> None:
    talk = CheckedTalk(answer=False)
    talk.session.feed(talk.answer(features=features, seals=seals))
    assert isinstance(talk.session.closed_by, FrameCorrupt)


def test_a_broker_without_checksums_is_served_without() -> None:
    talk = CheckedTalk(answer=False)
    talk.session.feed(talk.answer(features=[], seals=False))
    assert talk.session.is_ready
    _, output = talk.session.request(Command.STATS, Stats(), on_answer=lambda answer: None)
    assert len(FrameParser().feed(b"".join(output))[0].body) == 0


@pytest.mark.parametrize("error", [InvalidRequest("cannot be read"), VersionMismatch("format 3", theirs=3)])
def test_a_hello_that_the_broker_cannot_read_was_damaged(error: DMQError) -> None:
    talk = CheckedTalk(answer=False)
    talk.session.feed(error_frame(error))
    assert isinstance(talk.session.closed_by, FrameCorrupt)


def test_the_last_word_of_a_broker_that_got_a_damaged_frame_ends_the_session_as_a_broken_connection() -> None:
    talk = CheckedTalk()
    talk.session.feed(sealed(error_frame(FrameCorrupt("damaged"))))
    assert isinstance(talk.session.closed_by, NotConnected)
    assert talk.session.closed_by.message == "damaged"
