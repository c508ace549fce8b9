"""What the message store costs, and whether it holds its bars.

    python -m bench.store [--small] [--only append,read] [--dir FOLDER] [--json FILE] [--rounds N]

Every figure stands beside a baseline from the same run, taken turn by turn, as a median with its range. The full run
builds a store of 10 GB with 10,000 queues and 5 million pending delays, and one of 1 GB; it needs about 15 GB of disk
under `--dir` and removes what it made. `--small` does the same with 200 MB, to see that all is well: its figures for
size-dependent rows prove nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.large import Sizes, ask, filled, open_after_kills
from bench.loads import Spread, machine
from bench.rows import SEED, Bench, Row, verdict
from bench.store_append import append_cpu, append_wall, backlog_behind, flushed, many_queues
from bench.store_read import lookup, sequential_read


def opening(bench: Bench) -> list[Row]:
    """Opening after kill -9 just before a checkpoint, with 10 GB stored and with 1 GB, by turns."""
    large = bench.large()
    small = filled(bench.folder / "small", bench.sizes.small_bytes, bench.sizes, SEED)
    taken = open_after_kills({"large": large, "small": small}, bench.rounds, SEED)
    shutil.rmtree(small)
    wall = {name: Spread([opened["wall"] for opened in opens]) for name, opens in taken.items()}
    ratio = Spread([a["wall"] / b["wall"] for a, b in zip(taken["large"], taken["small"], strict=True)])
    cpu = Spread([a["cpu"] / b["cpu"] for a, b in zip(taken["large"], taken["small"], strict=True)])
    best = wall["large"].values[0] / wall["small"].values[0]
    replayed = Spread([opened["left"] for opened in taken["large"]])
    figures = {"large_s": wall["large"].plain(), "small_s": wall["small"].plain(), "replayed_bytes": replayed.plain()}
    return [
        Row(
            f"open after kill -9 with {taken['large'][-1]['stored'] / 1e9:.1f} GB",
            "< 2 s",
            f"{wall['large']} s, {replayed.median / 1e6:.0f} MB since the checkpoint",
            verdict(wall["large"].values[-1] < 2, wall["large"].median < 2),
            figures,
        ),
        Row(
            f"the same, against {taken['small'][-1]['stored'] / 1e9:.1f} GB",
            "<= 1.3",
            f"{ratio} by wall, {cpu} by CPU; the best of each {best:.2f}",
            verdict(ratio.median <= 1.3, ratio.values[0] <= 1.3),
            {"wall": ratio.plain(), "cpu": cpu.plain(), "best": best},
        ),
    ]


def memory(bench: Bench) -> list[Row]:
    """A fresh process that opens the large store, reads, appends and takes delays."""
    used = ask("memory", bench.large(), SEED, queues=bench.sizes.queues)
    return [
        Row(
            f"memory: {used['stored'] / 1e9:.1f} GB, {used['queues']:,} queues, {used['delays']:,} delays",
            "< 200 MB RSS",
            f"{used['rss_mb']:.0f} MB, at most {used['peak_mb']:.0f} MB ({used['imports_mb']:.0f} MB are imports, "
            f"{used['opened_mb']:.0f} MB after opening)",
            verdict(used["peak_mb"] < 200),
            used,
        )
    ]


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "append": append_cpu,
    "wall": append_wall,
    "queues": many_queues,
    "flushed": flushed,
    "open": opening,
    "memory": memory,
    "lookup": lookup,
    "read": sequential_read,
    "backlog": backlog_behind,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="200 MB instead of 10 GB: a quick check")
    parser.add_argument("--only", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--dir", type=Path, help="where to put the stores; a temporary folder if left out")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved pairs of each comparison")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    folder = Path(tempfile.mkdtemp(prefix="dmq-bench-", dir=options.dir))
    sizes = Sizes.small() if options.small else Sizes()
    rows: list[Row] = []
    try:
        bench = Bench(folder, sizes, options.rounds)
        for name in (name for name in ROWS if name in names):
            for row in ROWS[name](bench):
                rows.append(row)
                print(f"{row.verdict:6} {row.what} | {row.bar} | {row.reached}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        settings = {"seed": SEED, "rounds": options.rounds, "small": options.small, "sizes": msgspec.to_builtins(sizes)}
        result = {**machine(), **settings, "load_average": os.getloadavg(), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
