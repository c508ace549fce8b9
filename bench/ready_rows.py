"""A data source of Spark's that does nothing: its rows are ready before they are asked for.

What Spark itself takes to plan a read, to run the tasks, to move Arrow batches from a Python worker into the JVM and to
make rows of them there: about the most that `format("dmq")`, or any source in Python, can reach.

What always holds: rows have the columns and about the sizes of the load that `bench.pipeline` reads, and batches
have as many rows as those of a broker's answer.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

__all__ = ["SCHEMA", "ReadyRows"]

SCHEMA: Final = "key binary, value binary, offset bigint"
BATCH_ROWS: Final = 13_000
_KEY_BYTES: Final = 8
_VALUE_BYTES: Final = 200


@functools.cache
def _batch() -> pa.RecordBatch:
    """Made once in a worker."""
    gc.freeze()  # as the source of ours does
    arrays = [_octets(_KEY_BYTES), _octets(_VALUE_BYTES), pa.array(np.arange(BATCH_ROWS, dtype=np.int64))]
    return pa.RecordBatch.from_arrays(arrays, names=["key", "value", "offset"])


def _octets(size: int) -> pa.Array:
    ends = np.arange(0, (BATCH_ROWS + 1) * size, size, dtype=np.int32)
    data = np.random.default_rng(size).integers(0, 256, BATCH_ROWS * size, dtype=np.uint8)
    return pa.Array.from_buffers(pa.binary(), BATCH_ROWS, [None, pa.py_buffer(ends), pa.py_buffer(data)])


class _Reader(DataSourceReader):
    def __init__(self, rows: int, partitions: int) -> None:
        self._rows = rows
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        bounds = [self._rows * number // self._partitions for number in range(self._partitions + 1)]
        return [InputPartition(last - first) for first, last in itertools.pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left: int = partition.value
        while left > 0:
            batch = _batch().slice(0, left)
            left -= batch.num_rows
            yield batch


class ReadyRows(DataSource):
    """`format("ready")` with the options `rows` and `partitions`."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: object) -> DataSourceReader:
        return _Reader(int(self.options["rows"]), int(self.options["partitions"]))
