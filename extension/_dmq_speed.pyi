from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dmq.records.check import BatchRules
from dmq.records.layout import Buffer

SOURCES: str

def are_right(buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules) -> bool: ...
def shape_of(kind: int) -> int: ...
