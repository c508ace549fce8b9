"""Found by Spark, which looks into packages called `pyspark_…`: `format("dmq")` then is known without more ado.

Where the extra is not installed there is nothing to find, and Spark goes on without.
"""

from __future__ import annotations

__all__: list[str] = []

try:
    from dmq.pipeline.source.data_source import DmqDataSource as DefaultSource
except ImportError:  # one that fails here would keep Spark from finding others
    pass
else:
    __all__ += ["DefaultSource"]
