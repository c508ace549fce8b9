"""The command line of the race: `python -m bench.race [--quick] [--only ROW …] [--tree OTHER …] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.race.contest import Contest
from bench.race.host import facts
from bench.race.racer import Tree
from bench.race.rows import ROWS
from bench.race.table import HEAD, lines_of, markdown, plain

_PURE = ":pure"


def _tree(given: str) -> Tree:
    path = Path(given.removesuffix(_PURE)).resolve()
    python = path / ".venv" / "bin" / "python"
    if not python.exists():
        raise argparse.ArgumentTypeError(f"{python} is not there: run ./scripts/setup in {path}")
    return Tree(path.name + (_PURE if given.endswith(_PURE) else ""), str(python), given.endswith(_PURE))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.race", description="The table of bars.")
    parser.add_argument("--quick", action="store_true", help="short rounds and few: does everything work?")
    parser.add_argument("--only", action="append", metavar="ROW", choices=list(ROWS), help="; ".join(ROWS))
    parser.add_argument(
        "--tree",
        action="append",
        type=_tree,
        default=[],
        metavar="OTHER",
        help="another checkout with its .venv, measured in the same rounds; OTHER:pure leaves its extension alone",
    )
    parser.add_argument("--pure", action="store_true", help="leave our own extension alone")
    parser.add_argument("--rounds", type=int, help="9, or 2 with --quick")
    parser.add_argument("--scale", type=float, help="of the size of a round: 1, or 0.1 with --quick")
    parser.add_argument(
        "--backlog-gb", type=float, default=0.0, help="so much behind in the row `idle`; 10 for its bar"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the bodies")
    parser.add_argument("--folder", type=Path, help="on the disk of this directory; nothing is left there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing, show what a run wrote, in Markdown")
    return parser


def main() -> None:
    given = _parser().parse_args()
    if given.read:
        print("\n".join(markdown(json.loads(given.read.read_text()))))
        return
    trees = [Tree("here" + (_PURE if given.pure else ""), sys.executable, given.pure), *given.tree]
    rounds = given.rounds or (2 if given.quick else 9)
    scale = given.scale or (0.1 if given.quick else 1.0)
    host = facts(trees)
    has_extension = {tree.name: host["trees"][tree.name]["is_compiled"] for tree in trees}
    for tree in trees:
        told = host["trees"][tree.name]
        build = "Debian's" if told["is_debian_python"] else "optimized" if told["is_optimized"] else "NOT optimized"
        print(f"{tree.name}: {told['version']}, Python {told['python']} ({build}), {tree.python}")
    print(f"{host['processor']}, {host['cpus']} CPUs, load {host['load'][0]:.1f}, {rounds} rounds, scale {scale:g}\n")
    print(HEAD, flush=True)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="dmq-race-") as folder:
        contest = Contest(trees, Path(folder), rounds, scale, seed=given.seed)
        for name in given.only or ROWS:
            began = time.monotonic()
            results = contest.run(ROWS[name], given.backlog_gb if name == "idle" else 0.0)
            for line in lines_of(ROWS[name], results, has_extension):
                print(line, flush=True)
            rows[name] = {**plain(ROWS[name], results, has_extension), "seconds": time.monotonic() - began}
            if given.json:  # after each row: a long run that ends early leaves what it has
                settings = {"rounds": rounds, "scale": scale, "seed": given.seed, "backlog_gb": given.backlog_gb}
                given.json.write_text(json.dumps({"machine": host, "settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
