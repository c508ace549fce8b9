"""What failed in a task of Spark, told as if it had failed here.

Spark hands the driver a page of text: Java's stack, and in it the trace of the Python worker. Its last line is what a
user needs.

What always holds: an error of ours that a task raised has its class and its sentence here, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dmq import errors
from dmq.errors import DMQError, OutOfRetries

__all__ = ["task_error", "task_errors"]

_TRACE: Final = "Traceback (most recent call last):"
_ABORTED: Final = "Job aborted"
_LAST: Final = "most recent failure: "
_ERROR: Final = re.compile(r"^([A-Za-z_][\w.]*): (.+)$")
_SAID_MAX: Final = 500


def task_error(text: str, advice: str) -> DMQError | None:
    """The error for what Spark says of a job that failed; None if no task of it has.

    Parameters:
        advice: what to do after one that is not ours.
    """
    if _TRACE in text:
        trace = text.rpartition(_TRACE)[2].partition("\n\tat ")[0]
        for line in reversed(trace.splitlines()):
            found = _ERROR.match(line)
            if found is None:
                continue
            kind = getattr(errors, found[1].removeprefix("dmq.errors."), None)
            if isinstance(kind, type) and issubclass(kind, DMQError):
                return kind(found[2])
            return OutOfRetries(f"a task of Spark failed: {found[0][:_SAID_MAX]}; {advice}")
    if _ABORTED in text:
        said = text.strip().splitlines()[0].rpartition(_LAST)[2]
        return OutOfRetries(f"a task of Spark failed: {said[:_SAID_MAX]}; {advice}")
    return None


@contextmanager
def task_errors(advice: str) -> Iterator[None]:
    """Tasks that failed as often as Spark allows are told in a sentence in here; see `task_error`.

    Raises:
        DMQError: what the last attempt of a task met.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error.java_exception) if isinstance(error, Py4JJavaError) else str(error)
        found = task_error(text, advice)
        if found is None:
            raise
        raise found from error
