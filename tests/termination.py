"""A run of tests that is told to end does so as after Ctrl-C: fixtures are undone, no process and no file is left.

`timeout`, continuous integration and a shell that closes send SIGTERM, at which Python ends at once by itself: brokers
and databases that tests had started would go on for ever, and their directories stay. A shell without job control has
the processes it starts in the background ignore SIGINT, and so would all that tests start.
"""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["end_in_order"]


def end_in_order() -> None:
    """Have SIGTERM end this process as Ctrl-C does, once: `timeout` sends it twice, and cleaning up takes a while.

    Ctrl-C does so in a process of the background, too.
    """

    def end(number: int, frame: FrameType | None) -> None:
        # Not SIG_IGN, which processes started from now on would inherit.
        signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
