"""`dmq journal` on real directories: what a person sees, exit codes, and that nothing is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmq.cli import main
from dmq.errors import Damaged
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.fault.store.sample_store import Prepared, prepare
from tests.integration.broker.directories import SETTINGS, batch, content


@pytest.fixture(scope="module")
def ready() -> Prepared:
    return prepare(clean=False)


@pytest.fixture
def data(ready: Prepared, tmp_path: Path) -> Path:
    """The directory of a store whose process was killed."""
    ready.files.dump(tmp_path / "data")
    return tmp_path / "data"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def dmq(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `dmq journal`; exit code and what it said on stdout."""

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["journal", *map(str, arguments)])
        assert isinstance(caught.value.code, int)
        return caught.value.code, capsys.readouterr().out

    return run


def as_json(answer: tuple[int, str]) -> Any:
    return json.loads(answer[1])


def segments(data: Path) -> list[Path]:
    return sorted((data / "journal").iterdir())


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def kinds(report: Any) -> list[str]:
    return [finding["kind"] for finding in report["findings"]]


def test_units_are_shown_one_after_the_other(data: Path, ready: Prepared, dmq: Run) -> None:
    before = content(data)
    rows = as_json(dmq("inspect", data, "--limit", 0, "--format", "json"))
    assert [row["offset"] for row in rows] == ready.unit_starts[:-1]
    assert sum(row["snapshot"] for row in rows) == len(segments(data))
    code, shown = dmq("inspect", data, "--limit", 3)
    assert code == 0
    assert len(shown.splitlines()) == 4
    assert shown.splitlines()[1].endswith("snapshot")
    assert content(data) == before


def test_records_are_decoded_with_events_in_words(data: Path, ready: Prepared, dmq: Run) -> None:
    rows = as_json(dmq("inspect", data, "--limit", 0, "--records", "--format", "json"))
    shown = {
        (record["topic"], record["queue"], record["queue_offset"]): record
        for row in rows
        for record in row["content"]
        if "topic" in record
    }
    for (topic, queue), records in ready.answers.records.items():
        for offset, raw in records.items():
            assert shown[topic, queue, offset]["bytes"] == len(raw)
            assert shown[topic, queue, offset]["offset"] == ready.journal_offsets[topic, queue, offset]
    _, text = dmq("inspect", data, "--limit", 0, "--records")
    assert "group billing settled 5-5 of queue 1 of topic 16 as acked, attempt 1" in text
    assert "group audit was put at 144 in queue 1 of topic 16" in text
    assert "delayed (carried), at " in text
    assert "snapshot of the state, part 1 of 1" in text
    assert "id=000000000000e00000000001u8 key=k-498 app=shop priority=4" in text


def test_from_begins_with_the_unit_that_holds_the_offset(data: Path, ready: Prepared, dmq: Run) -> None:
    rows = as_json(dmq("inspect", data, "--from", ready.unit_starts[7] + 5, "--limit", 2, "--format", "json"))
    assert [row["offset"] for row in rows] == ready.unit_starts[7:9]


def test_one_segment_can_be_chosen_by_its_name_or_start(data: Path, dmq: Run) -> None:
    chosen = segments(data)[1]
    for name in (chosen.name, int(chosen.stem)):
        rows = as_json(dmq("inspect", data, "--segment", name, "--limit", 0, "--format", "json"))
        assert rows[0]["offset"] == int(chosen.stem)
        assert sum(row["bytes"] for row in rows) == chosen.stat().st_size


def test_damage_is_shown_in_its_place(data: Path, ready: Prepared, dmq: Run) -> None:
    start = int(segments(data)[0].stem)
    flip(segments(data)[0], ready.unit_starts[3] - start + 200)
    rows = as_json(dmq("inspect", data, "--limit", 5, "--format", "json"))
    assert [row["offset"] for row in rows] == ready.unit_starts[:5]
    assert ["damaged" in row for row in rows] == [False, False, False, True, False]
    assert "no valid unit" in dmq("inspect", data, "--limit", 5)[1].splitlines()[4]


def test_a_queue_shows_its_index_entries(data: Path, ready: Prepared, dmq: Run) -> None:
    rows = as_json(dmq("inspect", data, "--queue", "orders/0", "--from", 300, "--limit", 0, "--format", "json"))
    assert {row["queue_offset"]: row["state"] for row in rows if row["queue_offset"] >= 315} == dict.fromkeys(
        range(315, 1770), "ok"
    )
    assert {row["state"] for row in rows if row["queue_offset"] < 315} <= {"gone"}
    assert {row["file"].partition("/")[0] for row in rows} == {"queue"}
    flip(data / rows[0]["file"], 22 * (320 - int(Path(rows[0]["file"]).stem)))
    rows = as_json(dmq("inspect", data, "--queue", "orders/0", "--from", 319, "--limit", 3, "--format", "json"))
    assert [row["state"] for row in rows] == ["ok", "wrong", "ok"]
    assert "orders@16/0" in dmq("inspect", data, "--queue", "orders/0", "--limit", 1)[1]


def test_the_checkpoint_is_shown_with_the_state_it_holds(data: Path, ready: Prepared, dmq: Run) -> None:
    facts = as_json(dmq("inspect", data, "--checkpoint", "--format", "json"))
    assert facts["offset"] == ready.checkpointed
    assert facts["topics"][-1] == {
        "id": 16,
        "name": "orders",
        "config": "queues 3",
        "queues_first_next": [[0, 315, 1770], [1, 75, 480], [2, 0, 3]],
    }
    assert {"group": "audit", "topic_id": 16, "queue": 1, "floor": 144, "settled_above": []} in facts["positions"]
    _, shown = dmq("inspect", data, "--checkpoint")
    assert f"offset: {ready.checkpointed}\n" in shown
    assert "name=orders" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--queue", "nosuch/0"), "there is no queue 'nosuch/0': name one like orders/0"),
        (("--queue", "orders/7"), "there is no queue 'orders/7'"),
        (("--segment", "17"), "there is no segment 17: the journal has "),
    ],
)
def test_what_is_not_there_is_named(
    data: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["journal", "inspect", str(data), *arguments])
    assert capsys.readouterr().err.startswith(f"dmq: {words}")


def test_a_directory_that_is_none_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "verify"):
        with pytest.raises(SystemExit, match="1"):
            main(["journal", command, str(tmp_path / "nosuch")])
        assert "name a data directory" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="1"):
            main(["journal", command, str(tmp_path)])
        assert "name a DMQ data directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- verify -----------------------------------------------------------------------------------------------------------


def test_a_good_directory_verifies(data: Path, ready: Prepared, dmq: Run) -> None:
    before = content(data)
    code, shown = dmq("verify", data)
    assert code == 0
    assert shown.endswith("all good\n")
    report = as_json(dmq("verify", data, "--format", "json"))
    assert report["is_good"]
    assert report["units"] == len(ready.unit_starts) - 1
    assert report["records"] > sum(map(len, ready.answers.records.values()))
    assert report["in_use_by"] is None
    assert content(data) == before


def test_a_torn_tail_is_no_damage(data: Path, dmq: Run) -> None:
    with segments(data)[-1].open("ab") as tail:
        tail.write(b"DMQU" + bytes(50))
    code, shown = dmq("verify", data)
    assert code == 0
    assert "torn tail: journal " in shown
    assert "the next start moves it into salvage/" in shown
    assert kinds(as_json(dmq("verify", data, "--format", "json"))) == ["torn tail"]


def test_a_damaged_unit_is_damage_even_at_the_end_where_the_checkpoint_covers_it(
    ready: Prepared, tmp_path: Path, dmq: Run
) -> None:
    clean = prepare(clean=True)
    clean.files.dump(tmp_path)
    flip(segments(tmp_path)[-1], -3)
    code, shown = dmq("verify", tmp_path)
    assert code == 1
    assert f"damage: journal {clean.unit_starts[-2]}-{clean.unit_starts[-1]}: " in shown
    assert "restore it from a replica or a backup" in shown


def test_a_cut_segment_is_damage(ready: Prepared, data: Path, dmq: Run) -> None:
    path = segments(data)[1]
    path.write_bytes(path.read_bytes()[:1000])
    report = as_json(dmq("verify", data, "--format", "json"))
    assert not report["is_good"]
    assert set(kinds(report)) == {"damage"}


def test_a_segment_that_was_restored_is_good_once_the_checkpoint_is_deleted(data: Path, dmq: Run) -> None:
    path = segments(data)[0]
    good = path.read_bytes()
    flip(path, 900)
    with MessageStore(OsFiles(data), SETTINGS) as store:
        with pytest.raises(Damaged):
            store.queries.read("orders", 1, 75)
        ((first, end),) = store.queries.damage
        assert first <= int(path.stem) + 900 < end
    assert kinds(as_json(dmq("verify", data, "--format", "json"))) == ["damage"]
    path.write_bytes(good)
    code, shown = dmq("verify", data)
    assert code == 1
    assert "delete the checkpoint" in shown
    (data / "checkpoint").unlink()
    with MessageStore(OsFiles(data), SETTINGS) as store:
        assert len(store.queries.read("orders", 1, 75)) > 15
    assert dmq("verify", data) == (0, dmq("verify", data)[1])


@pytest.mark.parametrize("folder", ["queue", "runs", "index", "delay", "offset"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_wrong_derived_file_is_named_with_the_way_out(data: Path, folder: str, harm: str, dmq: Run) -> None:
    path = next(path for path in sorted((data / folder).rglob("*")) if path.is_file())
    if harm == "flip":
        flip(path, len(path.read_bytes()) * 2 // 3 if folder not in ("index", "delay") else 4096 + 9)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.unlink()
    code, shown = dmq("verify", data)
    assert code == 1
    assert "whatever reads it builds it anew from the journal, and so does a start without it" in shown
    assert set(kinds(as_json(dmq("verify", data, "--format", "json")))) == {"derived"}


@pytest.mark.parametrize("name", ["checkpoint", "STORE"])
def test_a_wrong_checkpoint_or_identity_is_named(data: Path, name: str, dmq: Run) -> None:
    flip(data / name, 30)
    code, shown = dmq("verify", data)
    assert code == 1
    assert f"derived: {name}: " in shown


def test_a_directory_without_derived_files_is_good(data: Path, dmq: Run) -> None:
    for folder in ("queue", "runs", "index", "delay", "offset"):
        shutil.rmtree(data / folder)
    (data / "checkpoint").unlink()
    assert dmq("verify", data)[0] == 0


def test_a_directory_in_use_can_be_looked_into_and_goes_on_undisturbed(data: Path, dmq: Run) -> None:
    (data / "RUNNING").touch()
    with MessageStore(OsFiles(data), SETTINGS) as store:
        for number in range(5):
            store.append([batch(b"%d" % number)])
            store.flush()
            report = as_json(dmq("verify", data, "--format", "json"))
            assert report["is_good"], report
            assert report["in_use_by"] is not None
            rows = as_json(dmq("inspect", data, "--from", store.queries.end - 1, "--records", "--format", "json"))
            assert rows[-1]["content"][-1]["queue_offset"] == store.queries.bounds("orders", 0)[1] - 1
            store.checkpoint()
        assert "in use by process" in dmq("verify", data)[1]
