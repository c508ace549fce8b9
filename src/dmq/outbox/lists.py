"""Conditions over long lists of values, without a parameter for each where the database spares us that. Pure.

What always holds: a condition says the same on every database. On PostgreSQL it is one parameter however long the list,
written as a text: its driver takes longer over a list than the server over the statement. And the planner goes by an
index there, whatever its statistics say, which for a queue are always old.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Column, ColumnElement, String, any_, bindparam, cast, func, select
from sqlalchemy.dialects.postgresql import ARRAY

__all__ = ["among", "array_text"]


def array_text(values: Collection[Any]) -> str:
    """Numbers or texts as PostgreSQL writes an array of them."""
    if not values or isinstance(next(iter(values)), int):
        return "{" + ",".join(map(str, values)) + "}"
    # All at one stroke, with a NUL between them, which no column has: one with a NUL in it equals none of its values.
    joined = "\0".join([value for value in values if "\0" not in value])
    quoted = joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","')
    return f'{{"{quoted}"}}'


def among(kind: str, column: Column[Any], values: Collection[Any]) -> ColumnElement[bool]:
    """Whether a column has one of these values, numbers or texts.

    Parameters:
        kind: the dialect's name.
    """
    if kind == "postgresql":
        listed = bindparam("listed", array_text(values), type_=String, unique=True)
        # By way of a query of its own: it is read once, and its length is nothing that a plan could go by.
        return column == any_(func.array(select(func.unnest(cast(listed, ARRAY(column.type)))).scalar_subquery()))
    return column.in_([*values])
