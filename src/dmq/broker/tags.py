"""Tag filters: "a || b", as RocketMQ writes them.

Pure code. The broker compares 2-byte hashes out of the index and may let a stranger through; the client compares the
tags themselves (R-07).
"""

from __future__ import annotations

from dmq.errors import InvalidRequest
from dmq.records.hashes import tag_hash

__all__ = ["hashes_of", "normalised"]

_TAGS_MAX = 256


def normalised(expression: str) -> str:
    """The same filter in its one spelling; empty where everything passes."""
    tags = sorted({tag.strip() for tag in expression.split("||")} - {""})
    if len(tags) > _TAGS_MAX:
        raise InvalidRequest(f"a filter has at most {_TAGS_MAX} tags, not {len(tags)}: filter in the consumer instead")
    return "" if "*" in tags else " || ".join(tags)


def hashes_of(expression: str) -> list[int] | None:
    """The hashes a normalised filter lets through; None where everything passes."""
    return [tag_hash(tag) for tag in expression.split(" || ")] if expression else None
