"""Every command has its number, its headers, and an answer for a peer that gets them wrong."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import (
    DMQError,
    InvalidRequest,
    InvalidSettings,
    ProtocolError,
    RateLimited,
    UnknownCommand,
    Unsupported,
)
from dmq.model import DURABILITIES, Durability, TopicConfig
from dmq.protocol import (
    SPECS,
    Command,
    Frame,
    FrameParser,
    Header,
    Kind,
    Status,
    decode_request,
    decode_response,
    error_frame,
    one_way_head,
    request_head,
    response_head,
)
from dmq.protocol.admin import TopicCreate, changed_config
from dmq.protocol.commands import produce_answer, shard_produce_answer
from dmq.protocol.consume import Pull
from dmq.protocol.header import encode_header
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import Hello, choose_features, choose_version
from tests.sampling import sample_size
from tests.unit.protocol.samples import all_headers, build_frame, headers


def frame_of(raw: bytes) -> Frame:
    (frame,) = FrameParser().feed(raw)
    return frame


EXAMPLES = settings(max_examples=sample_size(share=12, whole=500))


@pytest.mark.sampled
@pytest.mark.parametrize("cls", all_headers(), ids=lambda cls: cls.__name__)
def test_every_header_comes_back_as_it_was(cls: type[Header]) -> None:
    decoder = msgspec.msgpack.Decoder(cls)

    @EXAMPLES
    @given(headers(cls))
    def round_trip(header: Header) -> None:
        assert decoder.decode(encode_header(header)) == header

    round_trip()


@pytest.mark.sampled
@pytest.mark.parametrize("cls", all_headers(), ids=lambda cls: cls.__name__)
def test_a_newer_header_is_read_without_what_it_added(cls: type[Header]) -> None:
    decoder = msgspec.msgpack.Decoder(cls)

    @EXAMPLES
    @given(headers(cls))
    def newer(header: Header) -> None:
        fields = msgspec.msgpack.decode(encode_header(header))
        assert decoder.decode(msgspec.msgpack.encode([*fields, {"new": [1, 2]}, None])) == header

    newer()


def test_an_older_header_is_filled_up_with_defaults() -> None:
    older = msgspec.msgpack.encode(["orders", "billing"])
    assert msgspec.msgpack.Decoder(Pull).decode(older) == Pull("orders", "billing")


def test_numbers_never_change() -> None:
    assert {command.name: int(command) for command in Command} == {
        "NONE": 0x0000, "HELLO": 0x0001, "HEARTBEAT": 0x0002, "SERVER_REBOOT": 0x0003, "SERVER_HEALTH": 0x0004,
        "STATS": 0x0005, "CLUSTER": 0x0006, "DRAIN": 0x0007, "PRODUCE": 0x0010, "TRANSACTION_END": 0x0011,
        "TRANSACTION_CHECK": 0x0012, "TRANSACTION_LIST": 0x0013, "TRANSACTION_JOIN": 0x0014,
        "PRODUCER_STATES": 0x0015, "PULL": 0x0020, "SUBSCRIBE": 0x0021, "UNSUBSCRIBE": 0x0022, "CONSUMER_PUSH": 0x0023,
        "CREDIT": 0x0024, "SETTLE": 0x0025, "SUBSCRIPTION_ENDED": 0x0026, "SEEK": 0x0027, "POSITION": 0x0028,
        "GROUP_MEMBERS": 0x0029, "ASSIGN": 0x002A,
        "OFFSETS": 0x0030, "PEEK": 0x0031, "FIND": 0x0032, "FETCH": 0x0033, "ARCHIVED": 0x0034, "LOCATE": 0x0035,
        "TOPIC_CREATE": 0x0040,
        "TOPIC_UPDATE": 0x0041, "TOPIC_DELETE": 0x0042, "TOPIC_LIST": 0x0043, "TOPIC_DESCRIBE": 0x0044,
        "TOPIC_PLACE": 0x0045,
        "GROUP_CREATE": 0x0048, "GROUP_DELETE": 0x0049, "GROUP_LIST": 0x004A, "GROUP_DESCRIBE": 0x004B,
        "DELAY_LIST": 0x0050, "DELAY_CANCEL": 0x0051, "DEAD_LETTER_LIST": 0x0058, "DEAD_LETTER_RESEND": 0x0059,
        "DEAD_LETTER_DELETE": 0x005A, "LIMIT_GET": 0x0060, "LIMIT_SET": 0x0061, "TRACE": 0x0068, "WHY": 0x0069,
        "KEY_PUT": 0x0070, "KEY_GET": 0x0071, "KEY_LIST": 0x0072, "KEY_DELETE": 0x0073,
        "SHARD_LIST": 0x0080, "SHARD_SHOW": 0x0081, "SHARD_SET": 0x0082, "SHARD_PROMOTE": 0x0083,
        "SHARD_HANDOVER": 0x0084, "SHARD_REPAIR": 0x0085, "SHARD_CREATE": 0x0086,
        "SHARD_ADD": 0x0087, "SHARD_REMOVE": 0x0088, "SHARD_DRAIN": 0x0089, "SHARD_MEMBER": 0x008A,
        "CLUSTER_SHOW": 0x0090, "CLUSTER_FINALIZE": 0x0091, "CLUSTER_EXPORT": 0x0092, "CLUSTER_IMPORT": 0x0093,
        "CLUSTER_REBUILD": 0x0094,
        "ROUTE": 0x0100, "ROUTE_CHANGED": 0x0101, "TOPIC_SYNC": 0x0102,
        "REGISTRY_SESSION": 0x0110, "REGISTRY_BEAT": 0x0111, "REGISTRY_CLOSE": 0x0112, "REGISTRY_READ": 0x0113,
        "REGISTRY_CHILDREN": 0x0114, "REGISTRY_WRITE": 0x0115, "REGISTRY_WATCH": 0x0116, "REGISTRY_CHANGED": 0x0117,
        "FOLLOW": 0x0200, "JOURNAL": 0x0201, "CONFIRM": 0x0202, "STANDING": 0x0203, "HANDOVER": 0x0204,
        "REPAIR": 0x0205,
    }  # fmt: skip
    assert set(SPECS) == set(Command) - {Command.NONE}


@pytest.mark.sampled
@pytest.mark.parametrize("command", SPECS, ids=lambda command: command.name)
def test_every_command_goes_there_and_back(command: Command) -> None:
    spec = SPECS[command]

    @EXAMPLES
    @given(st.data())
    def there_and_back(data: st.DataObject) -> None:
        if spec.request is not None:
            header = data.draw(headers(spec.request))
            frame = frame_of(request_head(command, header, 9))
            assert (frame.kind, frame.correlation, decode_request(frame)) == (Kind.REQUEST, 9, header)
            frame = frame_of(one_way_head(command, header))
            assert (frame.kind, frame.correlation, decode_request(frame)) == (Kind.ONE_WAY, 0, header)
        if spec.response is not None:
            header = data.draw(headers(spec.response))
            frame = frame_of(response_head(command, header, 9))
            assert (frame.kind, frame.status, frame.correlation) == (Kind.RESPONSE, 0, 9)
            assert decode_response(frame) == header

    there_and_back()


def test_an_unknown_command_is_a_frame_that_can_be_answered() -> None:
    frame = frame_of(build_frame(Kind.REQUEST, 0x7FFF, b"anything", b"body", correlation=5))
    with pytest.raises(UnknownCommand, match="0x7fff") as caught:
        decode_request(frame)
    answer = frame_of(error_frame(caught.value, frame.command, frame.correlation))
    assert (answer.command, answer.correlation, answer.status) == (0x7FFF, 5, Status.UNKNOWN_COMMAND)
    with pytest.raises(UnknownCommand, match="0x7fff"):
        decode_response(answer)


def test_bytes_that_were_no_frame_get_a_last_word() -> None:
    with pytest.raises(ProtocolError) as caught:
        FrameParser().feed(b"GET / HTTP/1.1\r\n\r\n")
    answer = frame_of(error_frame(caught.value))
    assert (answer.command, answer.correlation, answer.status) == (Command.NONE, 0, Status.PROTOCOL_ERROR)


def test_a_flag_that_must_be_understood_is_not_ignored() -> None:
    header = encode_header(Hello("shop"))
    with pytest.raises(Unsupported, match="0x0100"):
        decode_request(frame_of(build_frame(Kind.REQUEST, Command.HELLO, header, flags=0x0100)))
    assert decode_request(frame_of(build_frame(Kind.REQUEST, Command.HELLO, header, flags=0x0080))) == Hello("shop")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x91\x01",
        b"\x91\xa0",  # an app without a name
        b"\x91\xa1\xff",  # no UTF-8
        b"\x92\xa1a",  # cut
        b"\x91\xa1a\x00",  # more behind
        b"\x81\xa1a\xa1a",  # a map
        b"\x91\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G
        b"\x91" * 100_000,
        b"\x99\xa1a\xa0\x01\x01\xa0\x90\xa0\xc4\x00" + b"\x91" * 100_000 + b"\xc0",  # deep in a field we do not know
        b"\x93\xa1a\xa0\xcd\xff\xff\xff",
        b"\x91\xd9\xff" + b"a" * 255 + b"a",
    ],
    ids=lambda raw: raw[:8].hex(),
)
def test_a_hostile_header_is_an_invalid_request(raw: bytes) -> None:
    frame = Frame(Kind.REQUEST, Command.HELLO, 0, 0, 1, raw, b"")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_request(frame)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_response(frame)


@given(st.sampled_from([*SPECS]), st.binary(max_size=200), st.integers(0, 0xFFFF))
def test_random_headers_give_errors_of_ours(command: Command, raw: bytes, status: int) -> None:
    for decode, kind in ((decode_request, SPECS[command].request), (decode_response, SPECS[command].response)):
        try:
            found = decode(Frame(Kind.RESPONSE, command, status, 0, 1, raw, b""))
        except DMQError:
            continue
        assert type(found) is kind


@pytest.mark.parametrize(("field", "value"), [("queue", 256), ("count", 0), ("durability", 9), ("producer_id", -1)])
def test_a_number_out_of_its_range_is_refused(field: str, value: int) -> None:
    fields = msgspec.msgpack.decode(encode_header(Produce("orders", 3, 1, 0, 1, 0, 0)))
    fields[Produce.__struct_fields__.index(field)] = value
    with pytest.raises(InvalidRequest):
        decode_request(Frame(Kind.REQUEST, Command.PRODUCE, 0, 0, 1, msgspec.msgpack.encode(fields), b""))


def test_producer_ids_use_all_64_bits() -> None:
    header = Produce("orders", 3, 1, 0, (1 << 64) - 1, 0, (1 << 64) - 1)
    assert decode_request(frame_of(request_head(Command.PRODUCE, header, 1))) == header


def test_an_answer_we_cannot_read_is_an_error() -> None:
    for command in (0x7FFF, Command.NONE):
        with pytest.raises(InvalidRequest, match="newer"):
            decode_response(Frame(Kind.RESPONSE, command, 0, 0, 1, b"\x90", b""))


def test_an_error_answer_raises_what_the_broker_raised() -> None:
    raised = RateLimited("too fast: wait", retry_after_ms=250, topic="orders")
    with pytest.raises(RateLimited, match="too fast") as caught:
        decode_response(frame_of(error_frame(raised, Command.PRODUCE, 3)))
    assert caught.value.detail == {"retry_after_ms": 250, "topic": "orders"}
    assert caught.value.retry_after == 0.25


def test_the_newest_common_version_is_chosen() -> None:
    assert choose_version(Hello("shop")) == 1
    assert choose_version(Hello("shop", version_min=1, version_max=9)) == 1
    assert choose_version(Hello("shop", version_min=2, version_max=9)) is None
    assert choose_version(Hello("shop", version_min=0, version_max=0)) is None


def test_features_in_force_are_those_both_know() -> None:
    assert choose_features(Hello("shop", features=["b", "x", "a", "b"]), frozenset("abc")) == ["b", "a"]
    assert choose_features(Hello("shop", features=["b"])) == []


def test_durabilities_have_the_names_users_write() -> None:
    assert [*DURABILITIES] == ["none", "stored", "flushed", "replicated", "consumed"]


def test_settings_of_a_topic_travel_by_name() -> None:
    request = decode_request(
        frame_of(request_head(Command.TOPIC_CREATE, TopicCreate("orders", {"queues": 8, "ttl_ms": 5}), 1))
    )
    assert changed_config(request.settings) == TopicConfig(queues=8, ttl_ms=5)
    assert changed_config({"ttl_ms": None}, TopicConfig(queues=8, ttl_ms=5)) == TopicConfig(queues=8)
    with pytest.raises(InvalidSettings, match="no setting 'qeues'"):
        changed_config({"qeues": 8})
    with pytest.raises(InvalidSettings, match="not valid"):
        changed_config({"queues": "many"})


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from(Durability),
    st.booleans(),
)
def test_the_quick_answer_to_a_produce_says_the_same(
    correlation: int, queue: int, first: int, journal: int, durability: Durability, is_duplicate: bool
) -> None:
    answer = produce_answer(correlation, queue, first, journal, durability, is_duplicate)
    (frame,) = FrameParser().feed(answer)
    assert (frame.kind, frame.command, frame.status, frame.flags) == (Kind.RESPONSE, Command.PRODUCE, 0, 0)
    assert frame.correlation == correlation
    assert frame.body == b""
    assert decode_response(frame) == ProduceReply(queue, first, journal, durability, is_duplicate)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 255), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    st.sampled_from(Durability),
    st.booleans(),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
)
def test_the_quick_answer_of_a_shard_says_the_same(
    correlation: int,
    placed: tuple[int, int, int],
    durability: Durability,
    is_duplicate: bool,
    shard: tuple[int, int],
) -> None:
    answer = shard_produce_answer(correlation, placed, durability, is_duplicate=is_duplicate, shard=shard)
    (frame,) = FrameParser().feed(answer)
    assert (frame.kind, frame.command, frame.status, frame.flags) == (Kind.RESPONSE, Command.PRODUCE, 0, 0)
    assert frame.correlation == correlation
    assert decode_response(frame) == ProduceReply(*placed, durability, is_duplicate, *shard)
