"""A strict reader of Prometheus' text format, with the rules that `promtool check metrics` has for names."""

from __future__ import annotations

import re

__all__ = ["checked_samples"]

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\[\\n"])*"'
SAMPLE = re.compile(rf"([a-z_:][a-z0-9_:]*)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.e+-]+|NaN|[+-]Inf)")
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Prometheus wants base units, and no name that says what kind of metric it is.
WRONG_WORDS = {"ms", "milliseconds", "minutes", "hours", "kilobytes", "megabytes", "percent", "counter", "gauge"}


def checked_samples(text: str) -> dict[str, float]:
    """The samples by series, if the text is in order.

    Raises:
        AssertionError: it is not.
    """
    assert text.endswith("\n")
    helps: dict[str, str] = {}
    types: dict[str, str] = {}
    samples: dict[str, float] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, said = line.removeprefix("# HELP ").partition(" ")
            assert name not in helps, f"{name} is explained twice"
            assert re.fullmatch(r"[A-Z0-9].*[.]", said), f"{name}: {said!r}"
            helps[name] = said
        elif line.startswith("# TYPE "):
            current, _, kind = line.removeprefix("# TYPE ").partition(" ")
            assert current in helps, f"{current} has no HELP before its TYPE"
            assert current not in types, f"{current} is declared twice"
            types[current] = kind
            _check_name(current, kind)
        elif not line.startswith("# next: "):
            series, value = _sample(line, current, types.get(current, ""))
            assert series not in samples, f"{series} is there twice"
            samples[series] = value
    assert helps.keys() == types.keys()
    _check_histograms(samples, [name for name, kind in types.items() if kind == "histogram"])
    return samples


def _check_name(name: str, kind: str) -> None:
    assert NAME.fullmatch(name), name
    assert kind in ("counter", "gauge", "histogram"), f"{name} is a {kind}"
    assert (kind == "counter") == name.endswith("_total"), f"a counter, and nothing else, ends in _total: {name}"
    assert not WRONG_WORDS & {*name.split("_")}, name
    assert not name.endswith(("_count", "_sum", "_bucket")), name


def _sample(line: str, current: str, kind: str) -> tuple[str, float]:
    found = SAMPLE.fullmatch(line)
    assert found, line
    suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    assert found[1] in [current + suffix for suffix in suffixes], f"{found[1]} does not stand below its TYPE"
    return line.rpartition(" ")[0], float(found[3])


def _check_histograms(samples: dict[str, float], names: list[str]) -> None:
    for name in names:
        buckets = [value for series, value in samples.items() if series.startswith(f"{name}_bucket{{le=")]
        assert buckets == sorted(buckets), f"{name} is not cumulative"
        assert samples[f'{name}_bucket{{le="+Inf"}}'] == samples[f"{name}_count"]
