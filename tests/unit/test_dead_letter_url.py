"""Where dead letters are kept: URLs that cannot work are told in one sentence, before anything is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dmq.deadletters import url as urls
from dmq.deadletters.url import check_url, default_url, shown
from dmq.errors import InvalidSettings
from dmq.settings import FIELDS


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("sqlite:////tmp/x.db", "sqlite:////tmp/x.db"),
        ("mysql://u:p@h/dmq", "mysql+pymysql://u:p@h/dmq"),
        ("MariaDB://u@h/dmq", "mariadb+pymysql://u@h/dmq"),
        ("postgres://u@h:5432/dmq", "postgresql+psycopg://u@h:5432/dmq"),
        ("postgresql+psycopg://u@h/dmq?sslmode=require", "postgresql+psycopg://u@h/dmq?sslmode=require"),
    ],
)
def test_a_url_names_its_driver(given: str, full: str) -> None:
    assert check_url(given) == full


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "is not a database URL: write something like sqlite"),
        ("/var/lib/x.db", "is not a database URL"),
        ("oracle://u@h/x", "names 'oracle', which dead letters cannot be kept in: use sqlite, mysql"),
        ("postgresql://u@h:port/x", "is not a database URL"),
        ("mysql://u:p@h", "names no database"),
    ],
)
def test_a_url_that_can_never_work_says_what_to_write(given: str, problem: str) -> None:
    with pytest.raises(InvalidSettings, match=problem) as caught:
        check_url(given)
    assert "broker.dead_letters_url" in caught.value.message


def test_a_driver_that_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(urls._DRIVERS, "mysql+pymysql", ("no_such_driver", "mysql"))
    with pytest.raises(InvalidSettings, match=r"needs the driver no_such_driver.*pip install 'dmq\[mysql\]'"):
        check_url("mysql://u@h/x")


def test_the_default_is_a_file_in_the_data_directory(tmp_path: Path) -> None:
    assert default_url(tmp_path) == f"sqlite:///{tmp_path}/deadletters/letters.db"


def test_a_password_does_not_show() -> None:
    url = "mysql+pymysql://me:top:s@cret@db.example/dmq?ssl=1"
    assert shown(url) == "mysql+pymysql://me@db.example/dmq"
    assert FIELDS["broker.dead_letters_url"].show(url) == "mysql+pymysql://me:***@db.example/dmq?ssl=1"
    assert FIELDS["broker.dead_letters_url"].show(None) == "none"


def test_sqlalchemy_is_not_loaded_before_there_is_a_dead_letter() -> None:
    modules = "dmq, dmq.cli.admin.dlq, dmq.cli.process.broker, dmq.broker.server, dmq.client.admin.admin, dmq.testing"
    check = f"import sys, {modules}; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
