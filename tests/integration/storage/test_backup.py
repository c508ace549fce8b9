"""Backups of a broker that takes traffic, is killed, drops segments; what a broker finds on a directory restored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dmq
from dmq.cli import main
from dmq.errors import Damaged, DirectoryInUse, DMQError, WrongFormat
from dmq.storage.offline.backup import Backup, BackupSource, backups, prune, restore, take
from dmq.testing.processes import BrokerProcess
from tests.patience import eventually

SIZES = ("store.segment_bytes=256KiB", "store.unit_bytes_max=64KiB", "store.body_bytes_max=8KiB")
SMALL = [word for size in SIZES for word in ("--set", size)]


class Traffic:
    """A producer at full speed, and what it was told is stored."""

    def __init__(self, url: str) -> None:
        self.acknowledged: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()

    def _run(self, url: str) -> None:
        number = 0
        with dmq.connect(url) as client, client.producer(retries=0, timeout=2.0) as producer:
            while not self._stop.is_set():
                batch = list(range(number, number + 50))
                try:
                    producer.send_many("orders", [dmq.Message(b"%d " % n + os.urandom(500)) for n in batch])
                except DMQError:
                    return
                self.acknowledged += batch
                number += 50

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.acknowledged) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


def consume_all(url: str, group: str) -> list[int]:
    found = []
    with dmq.connect(url) as client, client.consumer("orders", group=group) as consumer:
        while batch := consumer.pull(max_messages=1000, wait=0.3):
            found += [int(message.body.partition(b" ")[0]) for message in batch]
            consumer.ack(batch)
    return found


def test_all_that_was_acknowledged_before_comes_back_exactly_once(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", SMALL) as broker:
        with dmq.connect(broker.url) as client:
            client.admin.create_topic("orders", 2)
            client.admin.create_topic("later")
            client.admin.create_group("half", "orders")
            with client.producer() as producer:
                producer.send("later", b"in a day", delay=86_400)
        traffic = Traffic(broker.url)
        traffic.wait_for(500)
        with dmq.connect(broker.url) as client, client.consumer("orders", group="half") as consumer:
            batch = consumer.pull(max_messages=100, wait=5.0)
            consumed = [int(message.body.partition(b" ")[0]) for message in batch]
            consumer.ack(batch)
        before = list(traffic.acknowledged)
        first = take(BackupSource(tmp_path / "data"), tmp_path / "backups")
        traffic.wait_for(len(before) + 1000)
        between = list(traffic.acknowledged)
        second = take(BackupSource(tmp_path / "data"), tmp_path / "backups")
        broker.kill()
        traffic.stop()
    third = take(BackupSource(tmp_path / "data"), tmp_path / "backups")  # of what a killed broker left
    assert [found.folder for found in backups(tmp_path / "backups")] == [first.folder, second.folder, third.folder]
    linked = [name for name in first.files if (second.folder / name).exists() and name.startswith("journal/")]
    assert any((second.folder / name).stat().st_nlink > 1 for name in linked)
    assert {*before} <= {*between}
    for number, (backup, expected) in enumerate([(second, between), (third, traffic.acknowledged)]):
        directory = tmp_path / f"restored-{number}"
        restore(backup, directory)
        with BrokerProcess(directory, SMALL) as broker:
            found = consume_all(broker.url, "all")
            assert len(found) == len(set(found))
            assert set(expected) <= set(found)
            assert len(set(consume_all(broker.url, "half"))) == len(found) - len(consumed)
            with dmq.connect(broker.url) as client:
                assert [row.topic for row in client.admin.delays()] == ["later"]
                with client.producer() as producer:
                    assert producer.send("orders", b"7").offset > 0


def test_a_backup_that_is_killed_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", SMALL) as broker:
        with dmq.connect(broker.url) as client:
            client.admin.create_topic("orders", 2)
        traffic = Traffic(broker.url)
        traffic.wait_for(2000)
        traffic.stop()
    program = (
        "import os, sys; from pathlib import Path; import dmq.storage.offline.backup as b\n"
        "done = b._copy\n"
        "def slow(*a):\n    done(*a); print('copied', flush=True); sys.stdin.read()\n"
        "b._copy = slow\n"
        f"b.take(b.BackupSource(Path({str(tmp_path / 'data')!r})), Path({str(tmp_path / 'backups')!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"copied\n"
        with pytest.raises(DirectoryInUse, match="another backup"):
            take(BackupSource(tmp_path / "data"), tmp_path / "backups")
        process.send_signal(signal.SIGKILL)
    assert backups(tmp_path / "backups") == []
    (left,) = os.listdir(tmp_path / "backups")
    with pytest.raises(WrongFormat, match="not a complete backup"):
        Backup(tmp_path / "backups" / left)
    made = take(BackupSource(tmp_path / "data"), tmp_path / "backups")
    assert os.listdir(tmp_path / "backups") == [made.folder.name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with several segments and a dead letter."""
    folder = tmp_path_factory.mktemp("backup") / "data"
    with BrokerProcess(folder, SMALL) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", 1)
        with client.consumer("orders", group="g") as consumer, client.producer() as producer:
            producer.send("orders", b"bad")
            consumer.pull(wait=10.0)[0].reject("bad")
            deadline = time.monotonic() + 30
            while not client.admin.dead_letters():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for _ in range(20):
                producer.send_many("orders", [dmq.Message(os.urandom(1000)) for _ in range(50)])
    return folder


def test_dead_letters_come_back(data: Path, tmp_path: Path) -> None:
    restore(take(BackupSource(data), tmp_path / "backups"), tmp_path / "data")
    with sqlite3.connect(tmp_path / "data" / "deadletters" / "letters.db") as database:
        assert [row[0] for row in database.execute("PRAGMA integrity_check")] == ["ok"]
    with BrokerProcess(tmp_path / "data", SMALL) as broker, dmq.connect(broker.url) as client:
        assert [letter.body for letter in client.admin.dead_letters()] == [b"bad"]


def test_one_turned_bit_is_found_in_the_source_and_in_the_backup(data: Path, tmp_path: Path) -> None:
    backup = take(BackupSource(data), tmp_path / "backups")
    backup.check()
    segment = next(name for name in backup.files if name.startswith("journal/"))
    path = backup.folder / segment
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="its checksum differs"):
        restore(backup, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    segments = [name for name in backup.files if name.startswith("journal/")]
    assert len(segments) > 2
    for name in (segments[0], segments[-1]):
        broken = tmp_path / name.replace("/", "-")
        shutil.copytree(data, broken)
        content = bytearray((broken / name).read_bytes())
        content[len(content) // 2] ^= 1
        (broken / name).write_bytes(content)
        with pytest.raises(Damaged, match="the journal is damaged at"):
            take(BackupSource(broken), tmp_path / "others")
        assert os.listdir(tmp_path / "others") == []


def test_a_segment_that_retention_takes_away_meanwhile_is_in_the_backup(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dmq.storage.offline import backup as module

    source = tmp_path / "source"
    shutil.copytree(data, source)
    first = sorted((source / "journal").iterdir())[0]
    copy = module._copy_database

    def copy_late(*paths: Path) -> None:
        first.unlink()
        copy(*paths)

    monkeypatch.setattr(module, "_copy_database", copy_late)
    backup = take(BackupSource(source), tmp_path / "backups")
    assert f"journal/{first.name}" in backup.files
    backup.check()


def test_an_open_transaction_is_open_in_what_is_restored(tmp_path: Path) -> None:
    quick = ["--set", "broker.transaction_first_check_seconds=0.2"]
    with BrokerProcess(tmp_path / "data", SMALL) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", 1)
        with client.producer(group="shop", check=lambda message: "unknown") as producer:
            with producer.transaction("orders", b"1 done"):
                pass
            transaction = producer.transaction("orders", b"2 open")
            backup = take(BackupSource(tmp_path / "data"), tmp_path / "backups")
            transaction.rollback()
    restore(backup, tmp_path / "restored")
    with BrokerProcess(tmp_path / "restored", [*SMALL, *quick]) as broker, dmq.connect(broker.url) as client:
        assert [found.group for found in client.admin.transactions()] == ["shop"]
        asked = []

        def answer(message: dmq.Message) -> str:
            asked.append(message.body)
            return "commit"

        with client.producer(group="shop", check=answer):
            eventually(lambda: not client.admin.transactions())
        assert asked == [b"2 open"]
        assert consume_all(broker.url, "all") == [1, 2]


@pytest.mark.soak  # retention looks every ten seconds
def test_a_broker_that_drops_segments_meanwhile_is_backed_up(tmp_path: Path) -> None:
    dropping = ["--set", "store.retention_bytes=512KiB", "--set", "store.keep_unconsumed=false"]
    with BrokerProcess(tmp_path / "data", [*SMALL, *dropping]) as broker:
        with dmq.connect(broker.url) as client:
            client.admin.create_topic("orders", 1)
        traffic = Traffic(broker.url)
        oldest, backup = "", take(BackupSource(tmp_path / "data"), tmp_path / "backups")

        def was_dropped() -> bool:
            nonlocal oldest, backup
            traffic.wait_for(len(traffic.acknowledged) + 50)
            backup = take(BackupSource(tmp_path / "data"), tmp_path / "backups")
            backup.check()
            before, oldest = oldest, min(name for name in backup.files if name.startswith("journal/"))
            prune(tmp_path / "backups", 2)
            return "" < before < oldest

        eventually(was_dropped, "nothing was dropped between two backups")
        traffic.stop()
    restore(backup, tmp_path / "restored")
    with BrokerProcess(tmp_path / "restored", SMALL) as broker:
        found = consume_all(broker.url, "all")
    assert found == [*range(found[0], found[-1] + 1)]


def test_the_commands(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.out + shown.err

    target = str(tmp_path / "backups")
    made = [
        json.loads(run("backup", "--data", str(data), "--to", target, "--keep", "2", "--format", "json"))["backup"]
        for _ in range(3)
    ]
    assert [row["backup"] for row in json.loads(run("backup", "list", target, "--format", "json"))] == made[1:]
    assert "verified" in run("backup", "verify", made[-1])
    assert "restored to" in run("restore", made[-1], "--data", str(tmp_path / "data"))
    assert "is not empty" in run("restore", made[-1], "--data", str(tmp_path / "data"), code=1)
    assert "not a complete backup" in run("restore", target, "--data", str(tmp_path / "other"), code=1)
    assert "say where the backup goes" in run("backup", "--data", str(data), code=2)
    assert "all good" in run("journal", "verify", str(tmp_path / "data"))
    assert prune(Path(target), 1) == [os.path.basename(made[1])]


def test_a_segment_that_was_just_begun_is_left_out(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(data, source)
    last = sorted((source / "journal").iterdir())[-1]
    begun = source / "journal" / f"{int(last.stem) + last.stat().st_size:020d}.journal"
    begun.write_bytes(b"\0" * 10)
    backup = take(BackupSource(source), tmp_path / "backups")
    assert f"journal/{last.name}" in backup.files
    assert f"journal/{begun.name}" not in backup.files
    restore(backup, tmp_path / "data")
