"""Contexts: what is kept where, and which URL a command takes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from dmq.cli import main
from dmq.cli.contexts import Contexts
from dmq.errors import DMQError, InvalidName, InvalidSettings
from dmq.pipeline.archive.run import Run, RunOptions


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("DMQ_URL", raising=False)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    return shown.out


def url_row(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    rows = json.loads(run(capsys, "config", "show", "--format", "json", *arguments))
    (row,) = (row for row in rows if row["key"] == "url")
    return row["value"], row["source"]


def test_a_url_comes_from_the_strongest_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    file = folder / "dmq" / "contexts.json"
    assert url_row(capsys) == ("dmq://127.0.0.1:9611", "default")
    run(capsys, "context", "add", "prod", "dmq://prod:1")
    run(capsys, "context", "add", "test", "dmq://test:2")
    assert url_row(capsys)[1] == "default"
    assert url_row(capsys, "--context", "test") == ("dmq://test:2", f"context test ({file})")
    run(capsys, "context", "use", "prod")
    assert url_row(capsys) == ("dmq://prod:1", f"context prod ({file})")
    monkeypatch.setenv("DMQ_URL", "dmq://environment:3")
    assert url_row(capsys) == ("dmq://environment:3", "environment DMQ_URL")
    assert url_row(capsys, "--context", "test") == ("dmq://test:2", f"context test ({file})")
    assert url_row(capsys, "--url", "dmq://flag:4") == ("dmq://flag:4", "flag --url")


def test_the_archive_takes_contexts_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def brokers(*arguments: str) -> list[str]:
        """Where `archive run` would go."""
        asked: list[tuple[str, ...]] = []

        def begin(self: object, options: RunOptions, progress: object) -> None:
            asked.append(options.brokers)
            raise DMQError("far enough")

        monkeypatch.setattr(Run, "__init__", begin)
        with pytest.raises(SystemExit):
            main(["archive", "run", "--tables", str(tmp_path / "tables"), *arguments])
        assert "far enough" in capsys.readouterr().err
        return [*asked[0]]

    assert brokers() == []
    run(capsys, "context", "add", "prod", "dmq://prod:1", "--use")
    run(capsys, "context", "add", "test", "dmq://test:2")
    assert brokers() == ["dmq://prod:1"]
    assert brokers("--context", "test") == ["dmq://test:2"]
    assert brokers("--broker", "dmq://a:1", "--broker", "dmq://b:1") == ["dmq://a:1", "dmq://b:1"]
    monkeypatch.setenv("DMQ_URL", "dmq://environment:3")
    assert brokers() == ["dmq://environment:3"]
    assert brokers("--context", "test") == ["dmq://test:2"]
    with pytest.raises(SystemExit) as ended:
        main(["archive", "run", "--tables", "t", "--broker", "dmq://a:1", "--context", "test"])
    assert ended.value.code == 2
    assert "--broker and --context exclude each other" in " ".join(capsys.readouterr().err.split())


def test_contexts_are_listed_changed_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    assert "dmq context add NAME URL" in run(capsys, "context", "list")
    run(capsys, "context", "add", "prod", "dmq://prod:1", "--use")
    run(capsys, "context", "add", "prod", "dmq://prod:2", "--replace")
    rows = json.loads(run(capsys, "context", "list", "--format", "json"))
    assert rows == [{"context": "prod", "url": "dmq://prod:2", "in_use": True}]
    assert "no context is in use now" in run(capsys, "context", "remove", "prod")
    assert Contexts().current is None
    run(capsys, "context", "add", "prod", "dmq://prod:2", "--use")
    run(capsys, "context", "use", "--none")
    assert url_row(capsys)[1] == "default"


def test_only_the_user_can_read_the_file_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        contexts = Contexts()
        contexts.add("a", "dmq://a")
        contexts.save()
        contexts.save()
    finally:
        os.umask(before)
    assert stat.S_IMODE(contexts.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(contexts.file.parent.stat().st_mode) == 0o700
    assert [path.name for path in contexts.file.parent.iterdir()] == ["contexts.json"]


def test_names_and_urls_are_checked() -> None:
    contexts = Contexts()
    for name in ("", "a b", "-a", "x" * 65, "a/b"):
        with pytest.raises(InvalidName, match="not a name for a context"):
            contexts.add(name, "dmq://a")
    with pytest.raises(InvalidSettings, match="not a URL"):
        contexts.add("a", "somewhere")
    contexts.add("a", "dmq://a")
    contexts.add("a", "dmq://a")
    with pytest.raises(InvalidName, match="--replace"):
        contexts.add("a", "dmq://b")
    with pytest.raises(InvalidName, match="there are a"):
        contexts.url("b")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"current": null, "contexts": []}', '{"contexts": {"a": 1}}'])
def test_a_file_that_holds_no_contexts_is_told(folder: Path, text: str) -> None:
    (folder / "dmq").mkdir()
    (folder / "dmq" / "contexts.json").write_text(text)
    with pytest.raises(InvalidSettings, match="holds no contexts: correct or delete it"):
        Contexts()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    contexts = Contexts()
    contexts.file = tmp_path / "file" / "contexts.json"
    with pytest.raises(DMQError, match="cannot be written"):
        contexts.save()
