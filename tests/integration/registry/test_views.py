"""The views of a registry in SQL, as a person with a database's own tool sees them."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from dmq.registry.contents import (
    ConsumerContent,
    Content,
    KeyContent,
    LimitContent,
    NodeContent,
    ShardContent,
    TopicContent,
    encode_content,
    hex_id,
)
from dmq.registry.name_server.sql_store import SqlStore
from dmq.registry.name_server.views import VIEWS
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Operation
from tests.databases import DatabaseServers

PATHS = Paths()


def entry(path: str, content: Content) -> Operation:
    return Create(path, encode_content(content))


def fill(store: SqlStore) -> None:
    session = store.open_session(0, "test")
    leader, other = hex_id(2), hex_id(1)
    shard = ShardContent(number=1, members={"a": other, "b.x": leader}, leader=leader, epoch=3, in_sync=[leader])
    store.write(
        session,
        1,
        [
            *PATHS.folders(),
            entry(PATHS.shard("s1"), shard),
            entry(PATHS.shard("s2"), ShardContent(number=2)),
            entry(PATHS.node("b.x"), NodeContent(address="h:9611", shard="s1")),
            entry(PATHS.topic("orders"), TopicContent(incarnation=hex_id(9), slots=[("s1", 4), ("s2", 2)])),
            entry(PATHS.consumer("orders", "billing"), ConsumerContent(policies={"x": 1})),
            entry(PATHS.limit("shop"), LimitContent(messages=5)),
            Create(PATHS.namespace("n"), b""),
            entry(PATHS.key_value("n", "k/ü"), KeyContent.of("wért".encode())),
            # What nobody of ours writes.
            Create(PATHS.topic("binary"), b"\xff{nonsense"),
            Create(PATHS.topic("list"), b"[1]"),
            Create(PATHS.topic("odd"), b'{"slots": "x", "slots_version": "y", "state": null}'),
            Create(PATHS.shard("odd"), b'{"members": 1, "epoch": 1.5, "in_sync": {}}'),
        ],
    )


@pytest.mark.parametrize(
    "kind",
    [
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.soak),
        pytest.param("mariadb", marks=pytest.mark.soak),
    ],
)
def test_people_see_what_is_where(kind: str, request: pytest.FixtureRequest) -> None:
    url = "sqlite://"
    if kind != "sqlite":
        servers: DatabaseServers = request.getfixturevalue("database_servers")
        url = servers.get(kind).url
    store = SqlStore(url)
    try:
        store.open()
        store.open()  # which makes them once
        fill(store)
        seen: dict[str, list[dict[str, Any]]] = {}
        with store._engine.begin() as connection:
            for view in VIEWS:
                rows = connection.execute(text(f"SELECT * FROM {view} ORDER BY 1, 2, 3"))
                seen[view] = [dict(row._mapping) for row in rows]
    finally:
        store.close()
    place = {"topic": "orders", "state": "open"}
    assert seen["dmq_topic_shard"] == [
        {**place, "shard": "s1", "queues": 4, "leader": "b.x", "address": "h:9611"},
        {**place, "shard": "s2", "queues": 2, "leader": None, "address": None},
    ]
    members = [(row["shard"], row["broker"], row["is_leader"], row["is_in_sync"]) for row in seen["dmq_shard_member"]]
    assert members == [("s1", "a", 0, 0), ("s1", "b.x", 1, 1)]
    assert [(row["shard"], row["number"]) for row in seen["dmq_shard"]] == [("odd", None), ("s1", 1), ("s2", 2)]
    assert [row["topic"] for row in seen["dmq_topic"]] == ["binary", "list", "odd", "orders"]
    assert [(row["broker"], row["weight"]) for row in seen["dmq_node"]] == [("b.x", 100)]
    assert [(row["topic"], row["client"]) for row in seen["dmq_group"]] == [("orders", "billing")]
    assert [(row["app"], row["messages"]) for row in seen["dmq_limit"]] == [("shop", 5)]
    assert [(row["namespace"], row["name"], row["text"]) for row in seen["dmq_key_value"]] == [
        ("n", "k%2F%C3%BC", "wért")
    ]
