"""Views over the tables of a registry, which several name servers make at once."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, inspect

from dmq.registry.name_server.views import VIEWS, make_views


def test_views_that_another_name_server_is_making_are_made_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "registry.db"
    engine, other = create_engine(f"sqlite:///{file}", isolation_level="AUTOCOMMIT"), sqlite3.connect(file)
    other.execute("CREATE TABLE entries (path TEXT, value TEXT)")
    overtaken: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def overtake(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("CREATE VIEW") and len(overtaken) < 2:
            overtaken.append(statement)
            other.execute(statement)
            other.commit()

    make_views(engine, "entries")
    assert len(overtaken) == 2
    assert {name.lower() for name in inspect(engine).get_view_names()} >= {*VIEWS}
    assert not caplog.messages
    other.close()
    engine.dispose()
