"""`python -m bench.house`: see `./scripts/house`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from bench.house.source_tree import SourceTree
from bench.house.table import routes, rows, show

HERE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="house", description="How the source tree is built, in figures.")
    parser.add_argument(
        "--src", type=Path, default=HERE / "src", help="the tree to measure, of this or another checkout"
    )
    parser.add_argument("--detail", action="store_true", help="list the places behind each figure")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures and their places to a file as well"
    )
    parser.add_argument("--no-trace", action="store_true", help="leave out the routes, for which a broker is started")
    parser.add_argument(
        "--ways", action="store_true", help="only the routes: each stay in a file, and switches by pair"
    )
    arguments = parser.parse_args()
    if arguments.ways:
        table = routes(SourceTree(arguments.src))
    else:
        table = rows(arguments.src, trace=not arguments.no_trace)
    print(show(table, detail=arguments.detail or arguments.ways))
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in table], indent=1) + "\n")


if __name__ == "__main__":
    main()
