"""`dmq doctor`: what is wrong here, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dmq
from dmq.cli.options import APP, DEFAULT_URL, ConfigFile, Format, Formatted, Settings, Url, make_app
from dmq.cli.output import show_rows
from dmq.cli.process.server_process import Insecure, resolve
from dmq.errors import DMQError, InvalidSettings, NotConnected

if TYPE_CHECKING:
    from dmq.broker.diagnostics.doctor import Finding
    from dmq.client.admin.shards import ShardReport

__all__ = ["app"]

app = make_app("Find what is wrong here, and how to mend it.")

_SKEW_MS_MAX = 1000
_SET_SECONDS = 5.0


@app.command()
def doctor(
    data: Annotated[str | None, typer.Option(metavar="DIR", help="The data directory of the broker here.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    insecure: Insecure = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Check this machine and the broker, and say what to do about what is wrong.

    The exit code is 1 if there is a problem; warnings leave it at 0.
    """
    from dmq.broker.diagnostics.doctor import State

    findings = [*_machine(config, data, settings, insecure), *_broker(url)]
    rows = [finding._asdict() for finding in findings]
    show_rows(rows, form, empty="")
    problems = sum(finding.state is State.PROBLEM for finding in findings)
    warnings = sum(finding.state is State.WARNING for finding in findings)
    if form == Format.TABLE:
        typer.echo(f"\nproblems: {problems}, warnings: {warnings}" if problems or warnings else "\nall is well")
    if problems:
        raise typer.Exit(1)


def _machine(config: Path | None, data: str | None, settings: list[str] | None, insecure: bool) -> Iterator[Finding]:
    from dmq.broker.diagnostics.doctor import Finding, State, diagnose_machine

    try:
        resolved = resolve(config, {"broker.data": data}, settings)
    except InvalidSettings as error:
        yield Finding("settings", State.PROBLEM, error.message, "correct it; dmq config show lists them all")
        return
    changed = sum(source != "default" for source in resolved.sources.values())
    yield Finding("settings", State.OK, f"{changed} of {len(resolved.sources)} are not at their default")
    yield from diagnose_machine(resolved.settings, insecure)
    registry_url = resolved.settings.shard.registry_url
    if registry_url is not None:
        from dmq.broker.diagnostics.doctor import diagnose_registry

        yield from diagnose_registry(registry_url)


def _broker(url: str) -> Iterator[Finding]:
    from dmq.broker.diagnostics.doctor import Finding, State
    from dmq.client.broker_view import look_at

    try:
        seen = look_at(url, APP)
    except DMQError as error:
        is_unreached = isinstance(error, NotConnected)
        advice = "dmq dev starts one; --url or DMQ_URL says where it is" if is_unreached else ""
        yield Finding("broker", State.PROBLEM, error.message, advice)
        return
    yield Finding("broker", State.OK, f"{seen.broker} answers at {url} within {seen.round_trip_ms:.1f} ms")
    if seen.state == "drained":
        what = "it is drained: it takes no messages and hands nothing out"
        yield Finding("broker", State.PROBLEM, what, "dmq broker drain --undo puts it back in use")
    elif seen.shard is not None and seen.state == "standby":
        yield Finding("broker", State.OK, f"it is a member of shard {seen.shard.name} that does not lead")
    elif seen.state != "running":
        yield Finding("broker", State.PROBLEM, f"it is {seen.state}", "ask again when it is running")
    ours = f"dmq {dmq.__version__}"
    what = f"the broker is {seen.software or 'unknown'}, this is {ours}, protocol {seen.protocol}"
    if seen.software == ours:
        yield Finding("version", State.OK, what)
    else:
        yield Finding("version", State.WARNING, what, "they understand each other; upgrade the older one")
    what = f"the broker's clock is {abs(seen.clock_skew_ms)} ms {'ahead' if seen.clock_skew_ms >= 0 else 'behind'}"
    if abs(seen.clock_skew_ms) > _SKEW_MS_MAX:
        yield Finding("clock", State.WARNING, what, "have both machines keep time with NTP")
    else:
        yield Finding("clock", State.OK, what)
    behind = seen.stats.get("broker_clock_behind_seconds", 0.0)
    if abs(behind) > _SET_SECONDS:
        where = "behind" if behind > 0 else "ahead of"
        what = f"delays and expiries go by a time {abs(behind):.0f} s {where} its clock, which was set while it ran"
        yield Finding("clock", State.WARNING, what, "restart the broker, or hand its shard over to another member")
    if seen.state != "standby":
        yield from _store(seen.stats)
    if seen.shard is not None:
        yield from _cluster(url, seen.shard)
    for warning in seen.warnings:
        what, _, advice = warning.partition("; ")
        yield Finding("broker's disk", State.WARNING, what, advice)


def _cluster(url: str, own: ShardReport) -> Iterator[Finding]:
    """The shard of the broker, and what is wrong with the rest of its cluster."""
    from dmq.broker.diagnostics.doctor import Finding, State
    from dmq.cli.admin.cluster_check import look_at_cluster

    name = f"shard {own.name}"
    yield from (Finding(name, State(one.severity), one.what, one.advice) for one in own.findings)
    seen = look_at_cluster(None, url)
    wrong = [*seen.wrong()]
    others = (found for found in wrong if found.about != name)
    yield from (Finding(found.about, State(found.severity), found.what, found.advice) for found in others)
    report = seen.report
    if report is None:
        return
    what = f"{report.registry or 'it'} answers the broker; a session lives {report.session:g} s"
    yield Finding("registry", State.OK, what)
    if not wrong:
        what = f"shards: {len(seen.shards)}, brokers: {len(report.brokers)}; all are well, and reached from here"
        yield Finding("cluster", State.OK, what)


def _store(stats: dict[str, float]) -> Iterator[Finding]:
    from dmq.broker.diagnostics.doctor import Finding, State

    check = "broker's store"
    if stats.get("store_failed"):
        yield Finding(check, State.PROBLEM, "a flush failed: it takes no writes", "check its disk, then restart it")
    elif stats.get("store_refusing"):
        share = stats.get("disk_used_ratio", 1.0)
        what = f"its disk is too full, {share:.1%} in use: messages are refused, consumers go on"
        yield Finding(check, State.PROBLEM, what, "free some space there")
    else:
        yield Finding(check, State.OK, f"takes writes; journal segments: {stats.get('store_segments', 0):.0f}")
    yield from _dead_letters(stats)
    if stats.get("store_damage"):
        what = f"{stats['store_damage']:.0f} damaged ranges were found"
        yield Finding(check, State.PROBLEM, what, "dmq journal verify DIR tells which, and what to do")
    if stats.get("store_doubtful"):
        what = (
            f"{stats['store_doubtful']:.0f} ranges of the journal are refused by its disk; their queues wait for them"
        )
        advice = "look at the disk (dmesg, smartctl): after half a minute they count as damaged, and are passed over"
        yield Finding(check, State.PROBLEM, what, advice)
    elif stats.get("store_read_failures"):
        what = f"its disk refused {stats['store_read_failures']:.0f} reads of the journal since the start"
        yield Finding(check, State.WARNING, what, "look at the disk (dmesg, smartctl), and replace it before it fails")


def _dead_letters(stats: dict[str, float]) -> Iterator[Finding]:
    from dmq.broker.diagnostics.doctor import Finding, State

    check = "dead letters"
    waiting = int(stats.get("broker_dead_letters_waiting", 0))
    refused = int(stats.get("broker_dead_letters_refused", 0))
    if stats.get("broker_dead_letters_database_down"):
        what = f"their database cannot be used; {waiting} wait in the journal, where they are safe"
        yield Finding(check, State.PROBLEM, what, "check broker.dead_letters_url and the database; the log has more")
    elif refused:
        what = f"{refused} are refused by their database and stay in the journal"
        yield Finding(check, State.WARNING, what, "the broker's log says why, for each of them")
    else:
        yield Finding(check, State.OK, "their database takes them" if waiting == 0 else f"{waiting} are on their way")
