"""The table that a race prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.race.bar import Bar
from bench.race.contest import Result
from bench.race.rows import Row

__all__ = ["HEAD", "lines_of", "markdown", "plain"]

_FORMAT = "{:<38} {:<13} {:<12} {:>8} {:>8} {:>7}  {:<15} {:>5} {:>6}  {:<7} {}"
_FIGURES_SHOWN = 3
HEAD = _FORMAT.format(
    "what", "beside", "tree", "plain", "with ext", "median", "spread", "A/A", "by CPU", "", "figures (medians)"
)


def lines_of(row: Row, results: dict[str, Result], has_extension: dict[str, bool]) -> Iterator[str]:
    """What the terminal shows of a row."""
    for line in row.lines:
        for name, result in results.items():
            outcome, by_cpu = result.outcome(line), result.by_cpu()
            spread = f"{min(outcome.ratios):.3g}-{max(outcome.ratios):.3g}"
            yield _FORMAT.format(
                line.what,
                line.of,
                name,
                line.bar.shown(False),
                line.bar.shown(True),
                f"{outcome.median:.3g}",
                spread,
                f"{statistics.median(outcome.to_itself):.2f}" if outcome.to_itself else "",
                "" if by_cpu is None else f"{by_cpu:.3g}",
                outcome.verdict(line.bar, has_extension[name]),
                _shown(result) if line is row.lines[0] else "",
            )
    names = list(results)
    for other in names[1:]:
        shares = results[names[0]].to(results[other])
        yield f"    {names[0]} of {other}: " + ", ".join(f"{name} {value:.3g}" for name, value in shares.items())


def _shown(result: Result) -> str:
    own = " ".join(f"{name}={statistics.median(values):,.4g}" for name, values in result.figures().items())
    base = " ".join(f"{name}={statistics.median(values):,.4g}" for name, values in result.base_figures().items())
    return own if base == own or not result.again else f"{own} | {base}"


def plain(row: Row, results: dict[str, Result], has_extension: dict[str, bool]) -> dict[str, object]:
    """The same for JSON."""
    names = list(results)
    return {
        "own": {"task": row.own.name, **row.own.options},
        "lines": [
            {
                "what": line.what,
                "of": line.of,
                "bar": line.bar._asdict(),
                "trees": {
                    name: {
                        "median": outcome.median,
                        "ratios": list(outcome.ratios),
                        "to_itself": list(outcome.to_itself),
                        "verdict": outcome.verdict(line.bar, has_extension[name]),
                    }
                    for name, outcome in ((name, result.outcome(line)) for name, result in results.items())
                },
            }
            for line in row.lines
        ],
        "by_cpu": {name: result.by_cpu() for name, result in results.items()},
        "figures": {name: result.figures() for name, result in results.items()},
        "beside": {name: result.base_figures() for name, result in results.items()},
        "shares": {other: results[names[0]].to(results[other]) for other in names[1:]},
    }


def markdown(found: dict[str, Any]) -> Iterator[str]:
    """What a run wrote, as the table of bench/README.md: the first tree, and how it compares with the others."""
    host, settings = found["machine"], found["settings"]
    name, told = next(iter(host["trees"].items()))
    build = "Debian's build" if told["is_debian_python"] else "optimized" if told["is_optimized"] else "not optimized"
    yield (
        f"{told['version']}, Python {told['python']} ({build}, {host['loop_ns']:.0f} ns a turn of a plain loop), "
        f"{host['processor']}, {host['cpus']} CPUs, load {host['load'][0]:.1f} before, {settings['rounds']} rounds, "
        f"scale {settings['scale']:g}, seed {settings['seed']}"
    )
    others = [other for other in host["trees"] if other != name]
    yield ""
    yield "| what | beside | bar, with extension | reached | A/A | | " + "".join(f"of {other} | " for other in others)
    yield "|---|---|---|---|---|---|" + "---|" * len(others)
    for row in found["rows"].values():
        for line in row["lines"]:
            yield _markdown_line(line, name, row["shares"] if line is row["lines"][0] else {}, others)


def _markdown_line(line: dict[str, Any], name: str, shares: dict[str, Any], others: list[str]) -> str:
    bar, tree = Bar(**line["bar"]), line["trees"][name]
    ratios, to_itself = tree["ratios"], tree["to_itself"]
    bars = f"{bar.shown(False)}, {bar.shown(True)}" if bar.plain is not None else ""
    cells = [
        line["what"],
        line["of"],
        bars,
        f"{tree['median']:.3g} ({min(ratios):.3g}-{max(ratios):.3g})",
        f"{statistics.median(to_itself):.2f}" if to_itself else "",
        tree["verdict"],
    ]
    for other in others:
        figures = list(shares.get(other, {}).items())[:_FIGURES_SHOWN]
        cells += [", ".join(f"{key} {value:.2f}" for key, value in figures)]
    return f"| {' | '.join(cells)} |"
