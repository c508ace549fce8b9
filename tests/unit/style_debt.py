"""Places that break a rule of style and are not mended yet; see `tests/unit/test_style.py`.

A place that is mended has to leave its list, and none may be added: these lists only get shorter.
"""

from __future__ import annotations

# By the name of the rule in `bench.house.rules`.
PLACES: dict[str, set[str]] = {
    "wide_functions": {
        "dmq.records.encoder:make_shape",
        "dmq.records.encoder:remembered_shape",
        "dmq.records.encoder:encode_batch",
        "dmq.records.encoder:encode_plain",
    },
}

# How many there are at most, by layer.
COUNTS: dict[str, dict[str, int]] = {
    "positional_calls": {
        "dmq.records": 1,
    },
    "vague_words": {
        "dmq.client": 1,
    },
}
