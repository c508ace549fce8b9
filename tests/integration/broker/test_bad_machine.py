"""Machines that are not as they should be: a clear error or a safe course, and nothing half-written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
from dmq.errors import DiskFull, OffsetGone, StoreFailed
from dmq.model import Durability
from dmq.settings import StoreSettings
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from dmq.testing.processes import BrokerProcess
from tests.integration.broker.directories import SETTINGS, batch, bodies, fill, make, open_again, run
from tests.patience import PATIENCE_S

# --- a full disk ------------------------------------------------------------------------------------------------------

# A small file system of its own where mounting is allowed (as root, unseen by others), one in memory where it is not.
FULL = """
import ctypes, os, sys
from pathlib import Path
from tests.integration.broker.test_bad_machine import fill_up_and_free
from dmq.storage.files import OsFiles
from dmq.testing import MemoryFiles

def small(target):
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_namespace = 1 << 18 | 1 << 14, 0x20000
    return (
        libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(b"tmpfs", target.encode(), b"tmpfs", 0, b"size=1m") == 0
    )

target = sys.argv[1]
if small(target):
    ballast = Path(target) / "lost+found"
    def free():
        ballast.unlink()
    ballast.write_bytes(bytes(700_000))
    fill_up_and_free(OsFiles(target), free)
    print("mounted")
else:
    files = MemoryFiles(capacity_bytes=400_000)
    def free():
        files.capacity_bytes = None
    fill_up_and_free(files, free)
    print("in memory")
"""

ROOMY = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=16 << 10,
    body_bytes_max=4 << 10,
    checkpoint_bytes=64 << 10,
    disk_clean=1.0,
    disk_refuse=1.0,
)


def fill_up(store: MessageStore, sent: list[bytes]) -> None:
    for number in range(1000):
        body = b"%d " % number + bytes(number % 4000)
        store.append([batch(body)])
        store.flush()
        sent.append(body)


def fill_up_and_free(files: OsFiles | MemoryFiles, free: Callable[[], object]) -> None:
    """Write until the disk is full, go on when there is space; nothing is lost, nothing is half there."""
    sent: list[bytes] = []
    with MessageStore(files, ROOMY) as store:
        store.create_topic("orders")
        with pytest.raises(DiskFull, match="free some space on that disk or shorten the retention"):
            fill_up(store, sent)
        for _ in range(3):  # it stays full, and says so each time
            with pytest.raises(DiskFull):
                store.append([batch(bytes(4000)) for _ in range(20)], atomic=True)
        store.flush()
        assert bodies(store)[: len(sent)] == sent
        known = len(bodies(store))
        free()
        store.append([batch(b"after")])
        store.flush()
        sent = bodies(store)
        assert len(sent) == known + 1
        assert sent[-1] == b"after"
    with MessageStore(files, ROOMY) as store:
        assert bodies(store) == sent
        assert store.queries.damage == []
        assert not store.recovered.cut_bytes


def test_a_full_disk_refuses_writes_and_loses_nothing(tmp_path: Path) -> None:
    assert run(FULL, tmp_path) in ("mounted", "in memory")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_start_still_lets_messages_be_read() -> None:
    files = MemoryFiles()
    store = MessageStore(files, ROOMY)
    fill(store)
    sent = bodies(store)
    files = files.kill()  # so that opening has something to write
    files.capacity_bytes = sum(files.paths().values())
    store = MessageStore(files, ROOMY)
    assert bodies(store) == sent
    with pytest.raises(DiskFull, match="free some space"):
        store.append([batch(b"x")])
    files.capacity_bytes = None
    store.append([batch(b"x")])
    store.close()
    assert open_again(files) == [*sent, b"x"]


def test_writes_are_refused_from_a_share_of_the_disk_on_and_go_on_by_themselves() -> None:
    files = MemoryFiles(capacity_bytes=1 << 20)
    store = MessageStore(files)  # one segment, so that there is nothing retention could drop
    fill(store)
    sent = bodies(store)
    files.capacity_bytes = int(sum(files.paths().values()) / 0.95)
    store.tick()
    assert store.stats()["refusing"]
    before = store.queries.end
    with pytest.raises(DiskFull, match=r"in use, and over 90% .*sending goes on by itself"):
        store.append([batch(b"x")])
    assert store.queries.end == before
    assert bodies(store) == sent, "what is there can be read"
    files.capacity_bytes = 1 << 20
    store.append([batch(b"x")])
    store.flush()
    assert bodies(store) == [*sent, b"x"]
    store.close()


# --- what is derived, clocks, descriptors -----------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [b"", b"garbage", b"DMQC" + bytes(100)])
def test_a_damaged_checkpoint_is_harmless(tmp_path: Path, harm: bytes, caplog: pytest.LogCaptureFixture) -> None:
    sent = make(tmp_path)
    (tmp_path / "checkpoint").write_bytes(harm)
    assert open_again(OsFiles(tmp_path)) == sent
    assert "checkpoint damaged" in caplog.text
    caplog.clear()
    assert open_again(OsFiles(tmp_path)) == sent
    assert "checkpoint damaged" not in caplog.text


def test_a_clock_that_went_backwards_does_not_turn_the_journal_back() -> None:
    start_ms, hour_ms = 1_700_000_000_000, 3_600_000
    files, clock = MemoryFiles(), FakeClock(start_ms)
    settings = StoreSettings(
        segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, retention_hours=10.0
    )
    store = MessageStore(files, settings, clock)
    fill(store, 20)
    clock.set_wall_ms(start_ms - 100 * hour_ms)
    for _ in range(20):
        store.append([batch(bytes(2000), count=3)])
    store.close()
    clock.set_wall_ms(start_ms - 200 * hour_ms)
    store = MessageStore(files, settings, clock)
    store.append([batch(b"later")])
    store.flush()
    found = store.queries.record_at(int(next(store.queries.read("orders", 0, 120).records()).journal_offset))
    assert found is not None
    assert found.stored_at_ms == start_ms, "the store's time stands still until the clock has caught up"
    assert store.queries.offset_since("orders", 0, start_ms) == 0
    assert store.queries.offset_since("orders", 0, start_ms + 1) == 121
    assert store.retain() == 0, "nothing is old yet"
    clock.set_wall_ms(start_ms + 5 * hour_ms)
    store.append([batch(b"5 h later")])
    store.flush()
    assert store.queries.offset_since("orders", 0, start_ms + 1) == 121
    assert store.retain() == 0
    clock.set_wall_ms(start_ms + 11 * hour_ms)
    assert store.retain() > 0
    first = store.queries.bounds("orders", 0)[0]
    assert first > 0
    with pytest.raises(OffsetGone):
        store.queries.read("orders", 0, 0)
    assert [record.body for record in store.queries.read("orders", 0, 120).records()] == [b"later", b"5 h later"]
    store.close()


FEW_DESCRIPTORS = """
import resource, sys
from dmq.model import TopicConfig
from dmq.storage.index import queue_index
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.integration.broker.directories import SETTINGS, batch
queue_index.DRAIN_MIN = queue_index.DRAIN_ALWAYS = 10  # each queue gets a file of its own, which else takes thousands
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 4096))
store = MessageStore(OsFiles(sys.argv[1]), SETTINGS)
for number in range(8):
    store.create_topic(f"t{number}", TopicConfig(queues=250))
places = [(f"t{topic}", queue) for topic in range(8) for queue in range(250)]
for turn in range(12):
    for at in range(0, 2000, 100):
        items = [batch(b"%s/%d %d" % (t.encode(), q, turn), topic=t, queue=q) for t, q in places[at : at + 100]]
        store.append(items)
    store.checkpoint()
for topic, queue in places:
    expected = [b"%s/%d %d" % (topic.encode(), queue, turn) for turn in range(12)]
    assert [record.body for record in store.queries.read(topic, queue, 0).records()] == expected
store.close()
with MessageStore(OsFiles(sys.argv[1]), SETTINGS) as store:
    for topic, queue in places:
        assert len(store.queries.read(topic, queue, 0)) == 12
"""


def test_few_file_descriptors_are_enough_for_thousands_of_queues(tmp_path: Path) -> None:
    run(FEW_DESCRIPTORS, tmp_path, 40)
    assert len(list(tmp_path.glob("queue/*/*/*.queue"))) == 2000
    assert len(list(tmp_path.glob("journal/*"))) > 40


TOO_FEW = """
import resource, sys
from dmq.errors import TooManyFiles
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.integration.broker.directories import SETTINGS, bodies
held = [open("/dev/null") for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 2, 4096))
try:
    MessageStore(OsFiles(sys.argv[1]), SETTINGS)
except TooManyFiles as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
with MessageStore(OsFiles(sys.argv[1]), SETTINGS) as store:
    print(len(bodies(store)))
"""


def test_too_few_file_descriptors_are_named(tmp_path: Path) -> None:
    sent = make(tmp_path)
    said, count = run(TOO_FEW, tmp_path).splitlines()
    assert said.startswith("out of file descriptors while trying to ")
    assert said.endswith("raise the limit (ulimit -n)")
    assert int(count) == len(sent)


def test_a_failed_flush_stops_the_store_and_the_next_start_has_what_was_acknowledged() -> None:
    files = MemoryFiles()
    store = MessageStore(files, SETTINGS)
    fill(store)
    sent = bodies(store)
    files.fail("sync", 1, errno.EIO)
    store.append([batch(b"lost?")])
    with pytest.raises(StoreFailed, match="check the disk, then start again; what was acknowledged is safe"):
        store.flush()
    with pytest.raises(StoreFailed):
        store.append([batch(b"no")], Durability.STORED)
    assert bodies(store) == sent
    store.close()
    assert open_again(files.kill())[: len(sent)] == sent


# --- a directory that goes away ---------------------------------------------------------------------------------------


def test_a_broker_whose_directory_was_moved_away_stops_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """A cleaner of temporary files, or `rm -rf` in the wrong place: nothing may be acknowledged into nowhere."""
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    broker = BrokerProcess(folder, ["--set=broker.auto_create=true"]).start()
    with dmq.connect(broker.url, app="shop", timeout=5) as client, client.producer(timeout=5) as producer:
        producer.send("orders", b"before")
        folder.rename(elsewhere)
        assert broker.ended(PATIENCE_S) == 1
        with pytest.raises(dmq.DMQError):
            producer.send("orders", b"into nowhere")
    assert f"{folder}/journal/00000000000000000000.journal was removed or moved while it was in use" in broker.log
    elsewhere.rename(folder)
    with BrokerProcess(folder) as again, dmq.connect(again.url, app="shop") as client:
        assert [message.body for message in client.admin.peek("orders")] == [b"before"]
