"""What both services do when they start: read their arguments, be ready to stop, and wait for the broker."""

from __future__ import annotations

import argparse
import logging
import signal
import time
from types import FrameType

import dmq


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", required=True, metavar="URL")
    parser.add_argument("--database", required=True, metavar="URL")
    return parser


def set_up() -> None:
    """Say only what is serious, and end in good order on SIGTERM and Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    logging.basicConfig(level=logging.ERROR)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def connect(url: str, app: str, seconds: float = 60.0) -> dmq.Client:
    """A client, as soon as the broker answers. Once connected, a client comes back to its broker by itself."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return dmq.connect(url, app=app)
        except (dmq.NotConnected, dmq.TimedOut):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
