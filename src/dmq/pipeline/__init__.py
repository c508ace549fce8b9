"""Messages in bulk: Spark's source and sink, the archive and the jobs on it. Needs `pip install "dmq[spark]"`.

In reading order: `decode` turns units of the journal into rows; `source` and `sink` are Spark's `format("dmq")`, with
`spark_options` and `binary_values` for both; `tables` are those of the archive, `object_store` says where they can
lie; `archive` fills them, `jobs` derive from them, `lookup` finds in them, `report` shows them and `replay` sends from
them. `spark_session` starts Spark, and tells what failed in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmq.pipeline.source.data_source import DmqDataSource

__all__ = ["DmqDataSource"]


def __getattr__(name: str) -> Any:
    # A lookup in the archive does not load Spark.
    if name == "DmqDataSource":
        from dmq.pipeline.source.data_source import DmqDataSource

        return DmqDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
