"""The notebook in `examples` works: its cells are run, in order, against a broker and in the session of all tests."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dmq.testing import TestBroker

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "spark_tour.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def run_cell(source: str, where: str, names: dict[str, Any]) -> object:
    """Run a cell; returns its last expression, which a notebook would show."""
    tree = ast.parse(source, where)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, where, "exec"), names)
        return None
    del tree.body[-1]
    exec(compile(tree, where, "exec"), names)
    return eval(compile(ast.Expression(last.value), where, "eval"), names)


def test_the_notebook_is_stored_without_its_output() -> None:
    for cell in cells():
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_notebook_shows_what_works(
    spark: SparkSession,
    dmq_broker: TestBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names: dict[str, Any] = {"__name__": "notebook"}
    shown: list[str] = []
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("dmq://127.0.0.1:9611", dmq_broker.url)
            found = run_cell(source, f"cell {number} of {NOTEBOOK.name}", names)
            shown += [found._repr_html_()] if hasattr(found, "_repr_html_") else []
    assert names["spark"] is spark
    assert "600 orders were billed, 15 of them at the second attempt" in capsys.readouterr().out
    assert sum(row.euros for row in spark.table("turnover").collect()) == sum(5 + number % 40 for number in range(600))
    took = {(row.kind, row.attempts): row for row in names["took"].collect()}
    assert sum(row.orders for row in took.values()) == 600
    assert {kind for kind, attempts in took if attempts == 2} == {"book", "poster", "record"}
    assert max(row.stored_within_ms for row in took.values()) < 2000  # what was delayed waited longer
    (picture,) = shown
    assert "poster, attempt 2" in picture
