"""Conditions over long lists of values, without a parameter for each where the database spares us that. Pure.

What always holds: a condition says the same on every database; on PostgreSQL it is one parameter however long the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Column, ColumnElement, any_, bindparam
from sqlalchemy.dialects.postgresql import ARRAY

__all__ = ["among"]


def among(kind: str, column: Column[Any], values: Iterable[Any]) -> ColumnElement[bool]:
    """Whether a column has one of these values.

    Parameters:
        kind: the dialect's name.
    """
    listed = [*values]
    if kind == "postgresql":
        return column == any_(bindparam("listed", listed, type_=ARRAY(column.type), unique=True))
    return column.in_(listed)
