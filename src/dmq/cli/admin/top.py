"""`dmq top`: rates, topics and lag, live."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import printable, quantity, show_facts, show_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dmq.client.admin.admin import Admin
    from dmq.client.admin.shards import ShardReport

__all__ = ["app"]

app = make_app("Watch rates, topics and lag live.")

_RATES = {"in": "broker_messages_in", "out": "broker_delivered", "acked": "broker_acked", "bytes in": "broker_bytes_in"}


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="How often to look.")] = 2.0,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Watch a broker: messages a second, topics, and how far behind each group is. Ctrl-C ends it.

    Without a terminal it shows everything once, as with --once.
    """
    with connected(url) as client:
        before = _snapshot(client.admin)
        if once or form == Format.JSON or not sys.stdout.isatty():
            time.sleep(min(interval, 1.0))
            _show_once(before, _snapshot(client.admin), form)
            return
        from rich.live import Live

        with Live(_screen(before, before), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                now = _snapshot(client.admin)
                live.update(_screen(before, now), refresh=True)
                before = now


def _snapshot(admin: Admin) -> dict[str, Any]:
    broker = admin.cluster()[0]
    return {
        "at": time.monotonic(),
        "broker": broker,
        "shard": admin.shard() if broker.shard else None,
        "stats": admin.stats(),
        "topics": admin.topics(),
        "groups": admin.groups(),
    }


def _topic_rows(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    stored = {topic.name: topic.stored for topic in before["topics"]}
    return [
        {
            "topic": topic.name,
            "queues": topic.queues,
            "messages": topic.messages,
            "in_per_second": _per_second(topic.stored - stored.get(topic.name, 0), before, now),
        }
        for topic in now["topics"]
    ]


def _group_rows(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    settled, known = _settled(now), _settled(before)
    return [
        {
            "group": group.name,
            "topics": ", ".join(group.topics),
            "members": group.members,
            "lag": group.lag,
            "out_per_second": _per_second(
                settled[group.name] - known.get(group.name, settled[group.name]), before, now
            ),
        }
        for group in now["groups"]
    ]


def _settled(seen: dict[str, Any]) -> dict[str, int]:
    """How much each group has behind it: what its topics ever had, without its lag."""
    stored = {topic.name: topic.stored for topic in seen["topics"]}
    return {group.name: sum(stored.get(name, 0) for name in group.topics) - group.lag for group in seen["groups"]}


def _per_second(more: int, before: dict[str, Any], now: dict[str, Any]) -> float:
    # A topic that was made anew counts from zero, and a group that was moved back has less behind it.
    return 0.0 if now is before else round(max(0, more) / max(now["at"] - before["at"], 1e-3), 1)


def _rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    seconds = max(now["at"] - before["at"], 1e-3)
    # A broker that came back counts from zero.
    return {
        f"{name}_per_second": max(0.0, now["stats"].get(key, 0) - before["stats"].get(key, 0)) / seconds
        if now is not before
        else 0.0
        for name, key in _RATES.items()
    }


def _facts(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    broker, stats = now["broker"], now["stats"]
    return {
        "broker": broker.name,
        "address": broker.address,
        "state": broker.state,
        **({} if now["shard"] is None else {"shard": _shard(now["shard"])}),
        "clients": int(stats.get("broker_sessions", 0)),
        "leased": int(stats.get("broker_out", 0)),
        "journal_bytes": int(stats.get("store_journal_end", 0) - stats.get("store_journal_start", 0)),
        **{name.replace(" ", "_"): round(rate, 1) for name, rate in _rates(before, now).items()},
    }


def _shard(shard: ShardReport) -> str:
    """What a person should know of the shard first."""
    first = shard.findings[0]
    return f"{shard.name}, {first.severity}: {first.what}"


def _show_once(before: dict[str, Any], now: dict[str, Any], form: Format) -> None:
    facts = _facts(before, now)
    if form == Format.JSON:
        show_facts({**facts, "topics": _topic_rows(before, now), "groups": _group_rows(before, now)}, form)
        return
    show_facts(facts, form)
    typer.echo("")
    show_rows(_topic_rows(before, now), form, empty="no topics yet")
    typer.echo("")
    show_rows(_group_rows(before, now), form, empty="no groups yet")


def _screen(before: dict[str, Any], now: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = _facts(before, now)
    heading = f"{facts['broker']} {facts['address']} {facts['state']}, {facts['clients']} clients"
    rates = "   ".join(f"{name} {quantity(rate)}/s" for name, rate in _rates(before, now).items())
    parts: list[RenderableType] = [
        Text(printable(heading), style="bold"),
        *([Text(printable(f"shard {facts['shard']}"))] if "shard" in facts else []),
        Text(rates.replace("_per_second", "")),
        Text(f"journal {quantity(facts['journal_bytes'])} bytes, {quantity(facts['leased'])} messages leased\n"),
    ]
    for rows in (_topic_rows(before, now), _group_rows(before, now)):
        if not rows:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, value in rows[0].items():
            label = name.replace("_per_second", "/s").replace("_", " ")
            table.add_column(label, justify="right" if isinstance(value, int | float) else "left")
        for row in rows:
            cells = (quantity(v) if isinstance(v, int | float) else printable(str(v)) for v in row.values())
            table.add_row(*map(Text, cells))
        parts += [table, Text("")]
    return Group(*parts)
