"""The archive job for `spark-submit`, which wants a file: this one. Elsewhere `dmq archive run` is the same and more.

spark-submit --master spark://host:7077 …/dmq/pipeline/archive/__main__.py --broker dmq://host:9611 --tables /archive
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from dmq.errors import DMQError
from dmq.pipeline.archive.run import Run, RunOptions, progress_line, result_lines
from dmq.pipeline.jobs.job import Progress

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dmq.pipeline.archive", description="Run the archive's jobs.")
    parser.add_argument("--tables", required=True, help="folder or address of the tables")
    parser.add_argument("--broker", action="append", default=[], help="broker to archive; may be given several times")
    parser.add_argument("--job", action="append", default=[], help="only this job; may be given several times")
    parser.add_argument("--outbox", action="append", default=[], help="database to reconcile with")
    parser.add_argument("--continuous", action="store_true", help="go on until it is told to end")
    parser.add_argument("--accept-loss", action="store_true", help="go on where retention was quicker")
    parser.add_argument("--batch-bytes", type=int, help="of the journal, in one commit")
    asked = parser.parse_args(arguments)
    began = time.monotonic()

    def show(progress: Progress) -> None:
        print(progress_line(progress, time.monotonic() - began), flush=True)

    options = RunOptions(
        asked.tables,
        tuple(asked.broker),
        tuple(asked.job),
        outbox_urls=tuple(asked.outbox),
        is_continuous=asked.continuous,
        batch_bytes=asked.batch_bytes,
        accept_loss=asked.accept_loss,
    )
    try:
        results = Run(options, show).run()
    except DMQError as error:
        print(f"dmq: {error.message}", file=sys.stderr)
        return 1
    print("\n".join(result_lines(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
