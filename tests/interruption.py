"""Interruptions: an exception in the middle of a call of the client, as a signal's handler raises it.

The interpreter runs such handlers in the main thread, where it looks for them: when a function begins, after a call and
where a loop turns. `interrupted` raises at one of these points, so that a test can go through all of them in order.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dmq.client

ROOT = str(Path(dmq.client.__file__).parent)
LOOKED = frozenset(
    code
    for name, code in dis.opmap.items()
    if name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") or name.startswith("POP_JUMP_BACKWARD")
)


class Interruption(Exception):
    """What the handler raises."""


@functools.cache
def _handler_at(code: CodeType, at: int) -> int | None:
    """Which `except` or `finally` an exception at this instruction goes to."""
    entries: list[Any] = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= at < entry.end), None)


def interrupted(number: int, call: Callable[[], object]) -> str | None:
    """Make a call, and raise at the point of this number; where that was, or None if there are not so many."""
    left, where = number, None

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, bytecode, last = frame.f_code, frame.f_code.co_code, -1

        def step(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last, left, where
            if event == "opcode" and where is None:
                at = frame.f_lasti
                # A handler that runs after a call runs where the call stands.
                if last >= 0 and bytecode[last] in LOOKED and _handler_at(code, last) == _handler_at(code, at):
                    left -= 1
                    if left < 0:
                        where = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
                        sys.settrace(None)
                        raise Interruption
                last = at
            return step

        return step

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    except Interruption:
        pass
    finally:
        sys.settrace(before)
    return where
