"""What stands in the entries of the registry."""

from __future__ import annotations

import json

import msgspec
import pytest

from dmq.errors import WrongFormat
from dmq.registry import contents
from dmq.registry.contents import (
    ChangeContent,
    ClusterContent,
    ConsumerContent,
    Content,
    KeyContent,
    LeaderContent,
    LimitContent,
    NodeContent,
    ShardContent,
    TopicContent,
    decode_content,
    encode_content,
    hex_id,
)

R1, R2 = hex_id(1), hex_id((1 << 64) - 1)
EXAMPLES: list[Content] = [
    ClusterContent(id=R1, format=3),
    NodeContent(address="h:9611", replication_address="h:9613", shard="s1", replica=R2, zone="z", load={"cpu": 0.5}),
    ShardContent(number=1, revision=7, journal=R1, members={"b1": R1, "b2": R2}, lives={R1: 3}, leader=R1, epoch=4,
                 in_sync=[R1, R2]),
    LeaderContent(replica=R1, epoch=4),
    TopicContent(incarnation=R1, settings={"queues": 4}, slots=[("s1", 4), ("s2", 2)]),
    ConsumerContent(policies={"lease": 30}),
    LimitContent(messages=10),
    KeyContent.of(b"text"),
    ChangeContent(path="/dmq/topic/orders"),
]  # fmt: skip


@pytest.mark.parametrize("content", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_content_is_one_line_of_json_and_comes_back(content: Content) -> None:
    value = encode_content(content)
    assert b"\n" not in value
    assert isinstance(json.loads(value), dict)
    assert "unknown" not in json.loads(value)
    assert decode_content(type(content), value, "/x") == content


@pytest.mark.parametrize("content", EXAMPLES, ids=lambda one: type(one).__name__)
def test_fields_of_a_newer_version_are_kept(content: Content) -> None:
    newer = {**json.loads(encode_content(content)), "new": {"deep": [1, None]}, "unknown": "a field of that name"}
    found = decode_content(type(content), json.dumps(newer).encode(), "/x")
    again = json.loads(encode_content(msgspec.structs.replace(found)))
    assert again == newer


def test_a_change_keeps_what_it_does_not_know() -> None:
    value = b'{"number": 1, "epoch": 3, "later": true}'
    shard = decode_content(ShardContent, value, "/x")
    changed = json.loads(encode_content(msgspec.structs.replace(shard, epoch=4)))
    assert (changed["epoch"], changed["later"]) == (4, True)


def test_a_field_that_is_missing_has_its_default() -> None:
    shard = decode_content(ShardContent, b'{"number": 1}', "/x")
    assert (shard.min_in_sync, shard.state, shard.in_sync) == (2, contents.ShardState.OPEN, [])


@pytest.mark.parametrize(
    "value", [b"", b"[]", b"nothing", b'{"epoch": 1}', b'{"number": -1}', b'{"number": 1, "leader": "x"}', b"\xff"]
)
def test_what_cannot_be_read_is_named(value: bytes) -> None:
    with pytest.raises(WrongFormat, match="/dmq/shard/s1 in the registry cannot be read"):
        decode_content(ShardContent, value, "/dmq/shard/s1")


@pytest.mark.parametrize("value", [b"", b"text", "é".encode(), b"\xff\0"])
def test_a_key_holds_any_bytes(value: bytes) -> None:
    content = decode_content(KeyContent, encode_content(KeyContent.of(value, 5)), "/x")
    assert (content.value, content.expires_at_ms) == (value, 5)
