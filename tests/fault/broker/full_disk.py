"""A real broker on a small file system that another program fills. Run by `test_full_disk`, in a process of its own.

The process mounts a file system that no other process sees, and that goes with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import dmq
from dmq.client.consumer.consumer import Consumer
from dmq.storage.files import DiskUsage
from dmq.testing.processes import BrokerProcess, free_port
from tests.patience import eventually

BODY = os.urandom(16_000)
SMALL = (
    *("--set", "store.segment_bytes=1MiB", "--set", "store.unit_bytes_max=256KiB"),
    *("--set", "store.body_bytes_max=64KiB", "--set", "store.checkpoint_seconds=0.5"),
)
NO_MARKS = ("--set", "store.disk_clean=1", "--set", "store.disk_refuse=1")


def mount(target: Path, size: str) -> bool:
    """A small file system of this process alone; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_users, private = 0x20000, 0x10000000, 1 << 18 | 1 << 14
    if libc.unshare(new_mounts) != 0 and libc.unshare(new_users | new_mounts) != 0:
        return False
    return bool(
        libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(b"tmpfs", str(target).encode(), b"tmpfs", 0, f"size={size}".encode()) == 0
    )


class Scene:
    """The broker, the other program's file, and what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.other = folder / "other"
        self.metrics_port = free_port()
        self.sent = 0
        self.consumed: set[int] = set()
        self.begin()

    def begin(self, *settings: str) -> None:
        ports = ("--metrics-port", str(self.metrics_port))
        self.broker = BrokerProcess(self.folder / "data", [*SMALL, *settings, *ports]).start()
        self.client = dmq.connect(self.broker.url, app="shop")
        self.producer = self.client.producer(retries=0, timeout=60.0)

    def kill(self) -> None:
        time.sleep(0.5)  # a broker that is killed forgets the settles of its last moment, full disk or not
        self.broker.kill()
        self.producer.close()
        self.client.close()

    def fill(self, share: float) -> None:
        """Another program takes all but a share of the disk."""
        usage = DiskUsage.at(self.folder)
        with self.other.open("ab") as file:
            left = int(share * usage.total) - usage.used
            while left > 0:
                try:
                    left -= file.write(BODY[: min(left, len(BODY))])
                    file.flush()
                except OSError:
                    file.close()
                    return

    def free(self) -> None:
        self.other.unlink()

    def send(self, count: int) -> None:
        for _ in range(count):
            self.producer.send("orders", BODY, key=str(self.sent))
            self.sent += 1

    def assert_refused(self) -> str:
        try:
            self.producer.send("orders", BODY, key="refused")
        except dmq.DiskFull as error:
            return str(error)
        raise AssertionError("it was taken")

    def consume(self, group: str, count: int) -> set[int]:
        """Consume and settle so many."""
        found: list[int] = []
        with self.client.consumer("orders", group=group, lease=600.0) as consumer:
            while len(found) < count:
                found += self._take(consumer, count - len(found))
        assert len(set(found)) == count
        return set(found)

    @staticmethod
    def _take(consumer: Consumer, count: int) -> list[int]:
        messages = consumer.pull(min(count, 50), wait=20.0)
        assert messages, "nothing more came"
        for message in messages:
            message.ack()
        return [int(message.key or "") for message in messages]

    def lag(self, group: str = "billing") -> int:
        return self.client.admin.lag("orders", group).total

    def readiness(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/readyz") as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def is_refusing(self) -> bool:
        return bool(self.client.admin.stats("disk_")["disk_refusing"])

    def admin_works(self, name: str) -> None:
        admin = self.client.admin
        admin.create_topic(name, queues=1)
        admin.create_group("g", name)
        admin.set_limit(topic=name, messages=5)
        admin.reset("orders", "billing", "earliest", dry_run=True)
        admin.delete_topic(name)


def at_the_marks(scene: Scene) -> None:
    """What an existing group has not consumed stays at every mark; messages are refused, consumers go on."""
    scene.client.admin.create_topic("orders", queues=1)
    scene.client.admin.create_group("billing", "orders")
    scene.send(300)
    scene.fill(0.80)
    eventually(lambda: scene.client.admin.stats("disk_")["disk_used_ratio"] > 0.79, "the disk was not looked at")
    scene.send(1)
    assert scene.lag() == 301
    scene.fill(0.94)
    eventually(scene.is_refusing, "a disk that another program filled was not noticed")
    assert "over 90%" in scene.assert_refused()
    status, text = scene.readiness()
    assert (status, "94." in text) == (503, True), text
    assert scene.lag() == 301
    assert scene.consume("first-seen-now", 10) == set(range(10))
    scene.admin_works("while-refused")
    scene.consumed |= scene.consume("billing", 50)
    scene.kill()
    scene.begin()
    assert scene.is_refusing(), "it was not looked at when it began"
    scene.assert_refused()
    scene.free()
    eventually(lambda: not scene.is_refusing(), "space that is back was not noticed")
    assert scene.readiness()[0] == 200
    scene.send(1)
    told = [line for line in scene.broker.log.splitlines() if "mark" in line]
    assert [("over" in line, "below" in line) for line in told] == [(True, False), (False, True)], told
    scene.kill()


def truly_full(scene: Scene) -> None:
    """Marks off and not a block left: the ballast makes room for settles, new groups and admin commands."""
    scene.begin(*NO_MARKS)
    assert (scene.folder / "data" / "ballast").stat().st_blocks * 512 > 1 << 20
    scene.fill(1.0)
    assert DiskUsage.at(scene.folder).available < 4096
    scene.assert_refused()
    assert scene.consume("second-seen-now", 10) == set(range(10))
    scene.admin_works("while-full")
    scene.consumed |= scene.consume("billing", 100)
    for _ in range(3):
        assert "no space is left" in scene.assert_refused()
    assert scene.readiness()[0] == 503
    assert not (scene.folder / "data" / "ballast").exists()
    eventually(lambda: scene.lag() == scene.sent - 150)
    scene.kill()
    full = [line for line in scene.broker.log.splitlines() if "the disk is full" in line]
    assert len(full) == 1, full
    assert len(scene.broker.log.splitlines()) < 20, scene.broker.log
    scene.begin(*NO_MARKS)
    assert scene.lag() == scene.sent - 150, "what was settled on a full disk is settled"
    scene.consumed |= scene.consume("billing", 20)
    scene.free()
    eventually(lambda: (scene.folder / "data" / "ballast").exists(), "the ballast was not made anew")
    scene.send(1)
    scene.consumed |= scene.consume("billing", scene.sent - 170)
    assert scene.consumed == set(range(scene.sent))
    assert scene.broker.stop() == 0


def main(folder: Path) -> None:
    if not mount(folder, "48m"):
        print("no file system can be mounted")
        return
    scene = Scene(folder)
    try:
        at_the_marks(scene)
        truly_full(scene)
    except BaseException:
        print(scene.broker.log[-5000:], file=sys.stderr)
        raise
    finally:
        scene.kill()
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
