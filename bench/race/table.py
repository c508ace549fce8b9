"""The table that a race prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.race.contest import Result
from bench.race.rows import Row

__all__ = ["HEAD", "lines_of", "plain"]

_FORMAT = "{:<38} {:<13} {:<12} {:>8} {:>8} {:>7}  {:<15} {:>5} {:>6}  {:<7} {}"
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
