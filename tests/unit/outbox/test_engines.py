"""Long lists in conditions: how PostgreSQL is told them."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, Dialect, String
from sqlalchemy.dialects import postgresql, sqlite

from dmq.outbox.engines import among, array_text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "{}"),
        ([7], "{7}"),
        ([1, 2, 3], "{1,2,3}"),
        (["a"], '{"a"}'),
        (["", "NULL", "a,b"], '{"","NULL","a,b"}'),
        (['say "x"', "back\\slash", "{}"], '{"say \\"x\\"","back\\\\slash","{}"}'),
        (["a", "b\0c", "d"], '{"a","d"}'),
        ({"only": 1}, '{"only"}'),
    ],
)
def test_an_array_is_written_as_postgresql_reads_it(values: list[object], text: str) -> None:
    assert array_text(values) == text


def test_a_list_is_one_parameter_on_postgresql_and_one_for_each_value_elsewhere() -> None:
    condition = among("postgresql", Column("name", String(10)), ["a", "b"])
    dialect: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    assert [*condition.compile(dialect=dialect).params.values()] == ['{"a","b"}']
    elsewhere = among("sqlite", Column("name", String(10)), ["a", "b"])
    options = {"render_postcompile": True}
    compiled = elsewhere.compile(dialect=sqlite.dialect(), compile_kwargs=options)
    assert [*compiled.params.values()] == ["a", "b"]
