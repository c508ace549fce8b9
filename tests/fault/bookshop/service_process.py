"""A service of examples/bookshop that dies at a chosen place: `service_process.py POINT COUNT FILE ARGUMENT…`.

The service's own file is run as it is; only the outbox's methods at the chosen place are wrapped, so that the process
gets kill -9 when it comes there for the COUNT-th time. `deaf` is not an end: there the consumer has no confirm service.

    commit     between the commit of an order and its send        mark     between a send and the mark in the table
    result     a result has come, and is not written down         written  it is written down, and not acked
    committed  between the consumer's commit and its result       answered between its result and its ack
    asked      the compensator has an answer, and did nothing with it yet
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmq.outbox import Inbox, MessageService
from dmq.outbox.sender.relay import Claims
from dmq.outbox.sender.result_book import ResultBook

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "bookshop"

# point -> the methods, and whether it dies before or behind them
POINTS: dict[str, tuple[list[tuple[type, str]], str]] = {
    "commit": ([(Claims, "look")], "before"),
    "mark": ([(Claims, "sent")], "before"),
    "result": ([(ResultBook, "succeeded"), (ResultBook, "apply")], "before"),
    "written": ([(ResultBook, "succeeded"), (ResultBook, "apply")], "behind"),
    "committed": ([(Inbox, "answer")], "before"),
    "answered": ([(Inbox, "answer")], "behind"),
    "asked": ([(MessageService, "apply_result")], "before"),
}


def die_at(point: str, count: int) -> None:
    """Have this process end when it comes to a point for so many times."""
    left = count

    def come() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    methods, side = POINTS[point]
    for owner, name in methods:
        setattr(owner, name, _dying(getattr(owner, name), come, side))


def _dying(method: Callable[..., Any], come: Callable[[], None], side: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if side == "before":
            come()
        done = method(*arguments, **options)
        if side == "behind":
            come()
        return done

    return wrapped


def be_deaf() -> None:
    """Consume without a confirm service."""
    make = Inbox.__init__
    Inbox.__init__ = functools.partialmethod(make, confirm=None)  # type: ignore[method-assign,assignment]


def main(point: str, count: str, file: str, *arguments: str) -> None:
    if point == "deaf":
        be_deaf()
    elif point != "-":
        die_at(point, int(count))
    sys.path.insert(0, str(EXAMPLE))
    sys.argv = [file, *arguments]
    runpy.run_path(str(EXAMPLE / file), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
