"""Views of a registry for people with `psql`, `mariadb` or `sqlite3`: topics, shards, brokers, groups, limits, keys.

They show what stands in the entries, whose values are JSON; programs read entries. What always holds: an entry that is
no JSON shows empty columns and breaks no view; a database that does not let us make views serves without them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from dmq.event_log import EventLog

__all__ = ["VIEWS", "make_views"]

log = EventLog(__name__)

VIEWS: Final = (
    "dmq_node",
    "dmq_shard",
    "dmq_shard_member",
    "dmq_topic",
    "dmq_topic_shard",
    "dmq_group",
    "dmq_limit",
    "dmq_key_value",
)
"""In the order in which they can be made."""


class _Words(NamedTuple):
    """How a database says it; `j` is a value as JSON.

    Attributes:
        before: to be run first.
        json: a value that is JSON; something empty if it is not.
        field: a field as text.
        number: a field as a number.
        slots: joined to a topic: its `shard` and `queues`.
        members: joined to a shard: its `broker` and `replica`.
        holds: whether a list of JSON, by its name, holds a text.
        length: of a text in characters.
    """

    before: tuple[str, ...]
    json: str
    field: str
    number: str
    slots: str
    members: str
    holds: str
    length: str = "char_length"


_POSTGRESQL: Final = _Words(
    before=(
        """CREATE OR REPLACE FUNCTION dmq_registry_json(value bytea) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS
        'BEGIN RETURN convert_from(value, ''UTF8'')::jsonb; EXCEPTION WHEN OTHERS THEN RETURN NULL; END'""",
    ),
    json="dmq_registry_json(value)",
    field="j ->> '{}'",
    number="CASE WHEN jsonb_typeof(j -> '{0}') = 'number' THEN CAST(j ->> '{0}' AS numeric) END",
    slots=(
        "CROSS JOIN LATERAL (SELECT slot ->> 0 AS shard, "
        "CASE WHEN jsonb_typeof(slot -> 1) = 'number' THEN CAST(slot ->> 1 AS numeric) END AS queues "
        "FROM jsonb_array_elements(CASE WHEN jsonb_typeof(j -> 'slots') = 'array' THEN j -> 'slots' ELSE '[]' END) "
        "AS slot) AS slots"
    ),
    members=(
        "CROSS JOIN LATERAL jsonb_each_text("
        "CASE WHEN jsonb_typeof(j -> 'members') = 'object' THEN j -> 'members' ELSE '{}' END"
        ") AS members(broker, replica)"
    ),
    holds="COALESCE(j -> '{}' @> to_jsonb(CAST({} AS text)), FALSE)",
)
_MYSQL_FIELD: Final = "JSON_UNQUOTE(JSON_EXTRACT(j, '$.{}'))"
_MYSQL: Final = _Words(
    before=(),
    json="IF(JSON_VALID(CONVERT(value USING utf8mb4)), CONVERT(value USING utf8mb4), '{}')",
    field=f"NULLIF({_MYSQL_FIELD}, 'null')",
    number=f"CAST({_MYSQL_FIELD} AS SIGNED)",
    slots=(
        "JOIN JSON_TABLE(j, '$.slots[*]' "
        "COLUMNS (shard VARCHAR(255) PATH '$[0]', queues BIGINT PATH '$[1]')) AS slots ON 1 = 1"
    ),
    members=(
        "JOIN (SELECT path AS member_of, broker, "
        "JSON_UNQUOTE(JSON_EXTRACT(j, CONCAT('$.members.\"', broker, '\"'))) AS replica FROM {entries} AS e "
        "JOIN JSON_TABLE(COALESCE(JSON_KEYS(j, '$.members'), '[]'), '$[*]' "
        "COLUMNS (broker VARCHAR(255) PATH '$')) AS names ON 1 = 1) AS members ON member_of = path"
    ),
    holds="COALESCE(JSON_CONTAINS(j, JSON_QUOTE({1}), '$.{0}'), 0)",
)
_SQLITE: Final = _Words(
    before=(),
    json="CASE WHEN json_valid(CAST(value AS TEXT)) THEN CAST(value AS TEXT) ELSE '{}' END",
    field="json_extract(j, '$.{}')",
    number="json_extract(j, '$.{}')",
    slots=(
        "JOIN (SELECT e.path AS slot_of, json_extract(e.j, slot.fullkey || '[0]') AS shard, "
        "json_extract(e.j, slot.fullkey || '[1]') AS queues FROM {entries} AS e, json_each(e.j, '$.slots') AS slot "
        "WHERE slot.type = 'array') AS slots ON slot_of = path"
    ),
    members=(
        'JOIN (SELECT e.path AS member_of, member."key" AS broker, member.value AS replica '
        "FROM {entries} AS e, json_each(e.j, '$.members') AS member "
        "WHERE json_type(e.j, '$.members') = 'object') AS members ON member_of = path"
    ),
    holds="EXISTS (SELECT 1 FROM json_each(j, '$.{}') AS held WHERE held.value = {})",
    length="length",
)


def make_views(engine: Engine, table: str) -> None:
    """Make the views that are missing over a table of entries.

    Raises:
        SQLAlchemyError: the database does not answer.
    """
    there = _views_of(engine)
    while not there.issuperset(VIEWS):
        try:
            with engine.begin() as connection:
                words = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}.get(engine.dialect.name, _MYSQL)
                for statement in words.before:
                    connection.execute(text(statement))
                for name, query in _queries(words, table).items():
                    if name not in there:
                        connection.execute(text(f"CREATE VIEW {name} AS {query}".replace(":", "\\:")))
            return
        except SQLAlchemyError as error:
            before, there = there, _views_of(engine)
            if there > before:
                continue  # another name server makes them, one after the other
            reason = " ".join(str(getattr(error, "orig", None) or error).split())[:300]
            log.warning(
                "the views for people could not be made: let the name server's user create views", reason=reason
            )
            return


def _views_of(engine: Engine) -> set[str]:
    return {name.lower() for name in inspect(engine).get_view_names()}


def _queries(words: _Words, table: str) -> dict[str, str]:
    entries = f"(SELECT path, parent, version, {words.json} AS j FROM {table})"

    def fields(names: str) -> str:
        return ", ".join(f"{words.field.format(name)} AS {name}" for name in names.split())

    def numbers(names: str) -> str:
        return ", ".join(f"{words.number.format(name)} AS {name}" for name in names.split())

    def last(prefix: str) -> str:
        return f"substr(path, {len(prefix) + 1})"

    below = f"substr(path, {words.length}(parent) + 2)"
    holds = words.holds.format("in_sync", "replica")
    topics, shards, nodes = "/dmq/topic/", "/dmq/shard/", "/dmq/node/"
    leads = f"CASE WHEN replica = {words.field.format('leader')} THEN 1 ELSE 0 END"
    return {
        "dmq_node": (
            f"SELECT {last(nodes)} AS broker, {fields('address replication_address shard zone version')}, "
            f"{numbers('weight')} FROM {entries} AS e WHERE parent = '/dmq/node'"
        ),
        "dmq_shard": (
            f"SELECT {last(shards)} AS shard, {numbers('number epoch revision min_in_sync replicas')}, "
            f"{fields('state journal leader')} FROM {entries} AS e WHERE parent = '/dmq/shard'"
        ),
        "dmq_shard_member": (
            f"SELECT m.shard, m.broker, m.replica, m.is_leader, m.is_in_sync, n.address FROM (SELECT {last(shards)} AS "
            f"shard, broker, replica, {leads} AS is_leader, CASE WHEN {holds} THEN 1 ELSE 0 END AS is_in_sync "
            f"FROM {entries} AS e {words.members.replace('{entries}', entries)} WHERE parent = '/dmq/shard') AS m "
            "LEFT JOIN dmq_node AS n ON n.broker = m.broker"
        ),
        "dmq_topic": (
            f"SELECT {last(topics)} AS topic, {fields('incarnation state settings limits slots')}, "
            f"{numbers('slots_version')} FROM {entries} AS e WHERE parent = '/dmq/topic'"
        ),
        "dmq_topic_shard": (
            "SELECT t.topic, t.state, t.shard, t.queues, l.broker AS leader, l.address FROM (SELECT "
            f"{last(topics)} AS topic, {fields('state')}, shard, queues FROM {entries} AS e "
            f"{words.slots.replace('{entries}', entries)} WHERE parent = '/dmq/topic') AS t "
            "LEFT JOIN dmq_shard_member AS l ON l.shard = t.shard AND l.is_leader = 1"
        ),
        "dmq_group": (
            f"SELECT substr(parent, {len(topics) + 1}) AS topic, {below} AS client, "
            f"{fields('policies')} FROM {entries} AS e WHERE parent LIKE '{topics}%'"
        ),
        "dmq_limit": (
            f"SELECT {last('/dmq/limit/')} AS app, {numbers('messages bytes')}, {fields('policy')} "
            f"FROM {entries} AS e WHERE parent = '/dmq/limit'"
        ),
        "dmq_key_value": (
            f"SELECT substr(parent, 9) AS namespace, {below} AS name, "
            f"{fields('text base64')}, {numbers('expires_at_ms')} FROM {entries} AS e WHERE parent LIKE '/dmq/kv/%'"
        ),
    }
