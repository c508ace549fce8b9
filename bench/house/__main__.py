"""`python -m bench.house`: see `./scripts/house`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from bench.house.table import rows, show

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
    arguments = parser.parse_args()
    table = rows(arguments.src, trace=not arguments.no_trace)
    print(show(table, detail=arguments.detail))
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in table], indent=1) + "\n")


if __name__ == "__main__":
    main()
