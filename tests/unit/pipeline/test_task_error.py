"""What failed in a task of Spark is told in one sentence."""

from __future__ import annotations

import pytest

from dmq.errors import DiskFull, OutOfRetries
from dmq.pipeline.spark_session import task_error

ABORTED = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most "
    "recent failure: Lost task 0.3 in stage 3.0 (TID 5) (10.0.0.7 executor 1): "
)
PYTHON = (
    ABORTED
    + """org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown:
Traceback (most recent call last):
  File "/usr/lib/pyarrow/core.py", line 1225, in write_table
    self.writer.write_table(table)
OSError: [Errno 28] Error writing bytes to file

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/usr/lib/dmq/pipeline/archive/extract.py", line 93, in extract
    note: Exception
%s
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1097)
Caused by: Another: thing
"""
)


def test_an_error_of_ours_keeps_its_class_and_its_sentence() -> None:
    found = task_error(PYTHON % "dmq.errors.DiskFull: no space left: free some", "run it again")
    assert isinstance(found, DiskFull)
    assert str(found) == "no space left: free some"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PYTHON % "ValueError: too many: 7", "a task of Spark failed: ValueError: too many: 7; run it again"),
        (PYTHON % "dmq.errors.Any: x", "a task of Spark failed: dmq.errors.Any: x; run it again"),
        (
            ABORTED + "ExecutorLostFailure (executor 1 exited)\nDriver stacktrace:",
            "failed: Lost task 0.3 in stage 3.0 (TID 5)",
        ),
    ],
)
def test_another_one_is_told_with_what_to_do(text: str, said: str) -> None:
    found = task_error(text, "run it again")
    assert isinstance(found, OutOfRetries)
    assert said in str(found)


def test_what_no_task_said_is_none_of_its_business() -> None:
    assert task_error("org.apache.spark.sql.AnalysisException: no such column", "run it again") is None
