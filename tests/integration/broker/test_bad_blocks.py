"""A disk that refuses to read (EIO): what may pass is waited for, what stays is damage, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dmq
from dmq.errors import Damaged, StorageError
from dmq.settings import StoreSettings
from dmq.storage.read.read_failures import PATIENCE_SECONDS
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from dmq.testing.clock import RunningClock
from tests.integration.broker.directories import SETTINGS, batch, bodies, fill
from tests.integration.broker_thread import ServedBroker
from tests.patience import eventually


def place_of(files: MemoryFiles, text: bytes) -> tuple[str, int]:
    """The segment that has these bytes, and where."""
    for path in files.paths():
        if path.startswith("journal/") and (at := files.read_file(path).find(text)) >= 0:
            return path, at
    raise AssertionError(f"{text!r} is not in the journal")


def spoil(files: MemoryFiles, text: bytes) -> str:
    """Spoil a block within the message that begins with these bytes, and in no other."""
    path, at = place_of(files, text)
    files.spoil(path, at + 1000)
    return path


class Rig:
    """A store that was opened again, so that it reads from its disk."""

    def __init__(self, settings: StoreSettings = SETTINGS) -> None:
        self.files = MemoryFiles()
        self.clock = FakeClock()
        self.settings = settings
        with MessageStore(self.files, settings, self.clock) as store:
            fill(store)
            self.sent = bodies(store)
        self.store = MessageStore(self.files, settings, self.clock)

    def refused(self, offset: int) -> Damaged:
        with pytest.raises(Damaged) as caught:
            self.store.queries.read("orders", 0, offset)
        return caught.value

    def reopen(self) -> None:
        self.files = self.files.kill()
        self.store = MessageStore(self.files, self.settings, self.clock)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.store.close()


# --- a store ----------------------------------------------------------------------------------------------------------


def test_a_block_that_is_refused_once_is_no_damage(rig: Rig) -> None:
    path = spoil(rig.files, b"9 " + bytes(100))
    error = rig.refused(27)
    assert error.detail["may_pass"]
    assert (error.detail["first"], error.detail["next"]) == (27, 30)
    assert rig.store.queries.may_be_mended(error.detail["start"], error.detail["end"])
    assert rig.store.queries.damage == []
    rig.files.mend(path)
    assert bodies(rig.store) == rig.sent
    assert rig.store.stats()["doubtful"] == 0
    assert rig.store.stats()["read_failures"] > 0


def test_messages_before_and_behind_a_block_that_is_refused_are_read(rig: Rig) -> None:
    spoil(rig.files, b"9 " + bytes(100))
    found = [record.body for record in rig.store.queries.read("orders", 0, 0, max_bytes=1 << 20).records()]
    assert found == rig.sent[:27]
    found = [record.body for record in rig.store.queries.read("orders", 0, 30, max_bytes=1 << 20).records()]
    assert found == rig.sent[30 : 30 + len(found)]
    assert found


def test_a_block_that_is_refused_for_long_is_damage(rig: Rig) -> None:
    spoil(rig.files, b"9 " + bytes(100))
    for _ in range(2):
        assert rig.refused(27).detail["may_pass"]
        rig.clock.advance(PATIENCE_SECONDS / 2)
    error = rig.refused(27)
    assert not error.detail["may_pass"]
    start, end = error.detail["start"], error.detail["end"]
    assert rig.store.queries.damage == [(start, end)]
    assert not rig.store.queries.may_be_mended(start, end)
    assert rig.store.stats()["doubtful"] == 0


def test_units_for_the_archive_are_read_up_to_a_block_that_is_refused(rig: Rig) -> None:
    path, at = place_of(rig.files, b"9 " + bytes(100))
    rig.files.spoil(path, at + 1000)
    queries = rig.store.queries
    start = queries.unit_start(int(path[-28:-8]) + at)
    end = queries.start
    while end < start:
        end = queries.read_units(end)[1]
    assert end == start
    with pytest.raises(Damaged) as caught:
        queries.read_units(end)
    assert caught.value.detail["may_pass"]
    assert caught.value.detail["start"] == start


def test_a_block_that_another_member_has_is_written_over_at_once(rig: Rig) -> None:
    path = spoil(rig.files, b"9 " + bytes(100))
    whole = rig.files.read_file(path)
    rig.store.damage.expect_mending()
    error = rig.refused(27)
    assert not error.detail["may_pass"]
    start, end = error.detail["start"], error.detail["end"]
    assert rig.store.damage.ranges == [(start, end)]
    assert rig.store.queries.may_be_mended(start, end)
    first = int(path[-28:-8])
    mending = rig.store.damage.begin(start, end, whole[start - first : end - first])
    mending.write()
    assert not rig.store.damage.finish(mending)
    assert bodies(rig.store) == rig.sent


@pytest.mark.parametrize("folder", ["runs", "index", "offset"])
def test_a_derived_file_that_is_refused_is_built_anew(rig: Rig, folder: str) -> None:
    rig.store.close()
    for path, size in rig.files.paths().items():
        for at in range(0, size if path.startswith(folder) else 0, 512):
            rig.files.spoil(path, at)
    rig.store = MessageStore(rig.files, rig.settings, rig.clock)
    assert bodies(rig.store) == rig.sent
    assert rig.store.queries.damage == []


def test_what_is_refused_while_all_is_built_anew_is_not_passed_over(rig: Rig) -> None:
    for path, size in rig.files.paths().items():
        for at in range(0, size if path.startswith(("index/", "runs/", "queue/")) else 0, 512):
            rig.files.spoil(path, at)
    bad = spoil(rig.files, b"9 " + bytes(100))
    with pytest.raises(StorageError, match="Input/output error"):
        rig.store.queries.read("orders", 0, 27)
    assert rig.store.queries.damage == []
    rig.files.mend(bad)
    assert bodies(rig.store) == rig.sent


# --- a start ----------------------------------------------------------------------------------------------------------


def test_a_start_passes_over_a_block_in_the_middle_of_the_journal(rig: Rig) -> None:
    rig.store.close()
    for name in [path for path in rig.files.paths() if path.startswith(("checkpoint", "index/", "runs/", "queue/"))]:
        rig.files.remove(name)
    spoil(rig.files, b"9 " + bytes(100))
    rig.store = MessageStore(rig.files, rig.settings, rig.clock)
    assert len(rig.store.queries.damage) == 1
    with pytest.raises(Damaged):
        rig.store.queries.read("orders", 0, 27)
    found = [record.body for record in rig.store.queries.read("orders", 0, 30, max_bytes=1 << 20).records()]
    assert found == rig.sent[30 : 30 + len(found)]


def test_a_start_does_not_cut_an_end_that_the_disk_refuses() -> None:
    rig = Rig()
    rig.store.append([batch(b"acknowledged" + bytes(2000))])
    rig.store.flush()
    rig.files = rig.files.kill()
    path = spoil(rig.files, b"acknowledged" + bytes(2000))
    before = rig.files.read_file(path)
    with pytest.raises(StorageError, match="where acknowledged messages may stand") as caught:
        MessageStore(rig.files, rig.settings, rig.clock)
    assert "ddrescue" in str(caught.value)
    assert rig.files.read_file(path) == before
    rig.files.mend(path)
    with MessageStore(rig.files, rig.settings, rig.clock) as store:
        assert bodies(store) == [*rig.sent, b"acknowledged" + bytes(2000)]


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_start_that_need_not_read_a_segment_head_goes_on_without_it(which: int) -> None:
    rig = Rig()
    rig.store.close()
    path = [path for path in rig.files.paths() if path.startswith("journal/")][which]
    rig.files.spoil(path, 0)
    rig.store = MessageStore(rig.files, rig.settings, rig.clock)
    found = rig.store.queries.read("orders", 0, len(rig.sent) - 3)
    assert [record.body for record in found.records()] == rig.sent[-3:]
    rig.store.close()


# --- a broker ---------------------------------------------------------------------------------------------------------


def broker_on(files: MemoryFiles, clock: RunningClock) -> ServedBroker:
    settings = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, scrub_hours=0)
    return ServedBroker(files, clock=clock, store=settings, heartbeat_seconds=4_000_000.0)


def send(broker: ServedBroker, count: int) -> None:
    with dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        producer = client.producer(compression="none")
        for number in range(count):
            producer.send("orders", b"order %03d" % number + bytes(2000))


def take(consumer: dmq.Consumer, wait: float = 30.0) -> bytes | None:
    """The name of the next message, which is acked."""
    for message in consumer.pull(1, wait=wait):
        message.ack()
        return bytes(message.body[:9])
    return None


def test_a_group_waits_for_a_block_that_is_refused_and_misses_nothing_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files, clock = MemoryFiles(), RunningClock()
    broker = broker_on(files, clock)
    with broker:
        send(broker, 20)
        broker.stop()
        path = spoil(files, b"order 005" + bytes(10))
        broker.start()
        with dmq.connect(broker.url) as client, client.consumer("orders", group="shop") as consumer:
            got = [take(consumer) for _ in range(5)]
            assert take(consumer, wait=0.5) is None
            assert client.admin.stats()["store_doubtful"] == 1
            assert client.admin.stats()["store_damage"] == 0
            files.mend(path)
            clock.advance(5)
            got += [take(consumer) for _ in range(15)]
    assert got == [b"order %03d" % number for number in range(20)]
    assert "messages wait for a disk that refuses them" in caplog.text
    assert "messages passed over" not in caplog.text
    assert "Traceback" not in caplog.text


def test_a_group_goes_on_behind_a_block_that_is_refused_for_long(caplog: pytest.LogCaptureFixture) -> None:
    files, clock = MemoryFiles(), RunningClock()
    broker = broker_on(files, clock)
    with broker:
        send(broker, 20)
        broker.stop()
        spoil(files, b"order 005" + bytes(10))
        broker.start()
        with dmq.connect(broker.url) as client, client.consumer("orders", group="shop") as consumer:
            got: list[bytes] = []
            while len(got) < 19:
                if (name := take(consumer, wait=0.5)) is not None:
                    got.append(name)
                else:
                    clock.advance(PATIENCE_SECONDS / 4)
            assert client.admin.stats()["store_damage"] == 1
            assert client.admin.stats()["store_doubtful"] == 0
    assert got == [b"order %03d" % number for number in range(20) if number != 5]
    assert "messages passed over" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_delayed_message_waits_for_a_block_that_is_refused() -> None:
    files, clock = MemoryFiles(), RunningClock()
    broker = broker_on(files, clock)
    with broker:
        with dmq.connect(broker.url) as client:
            client.admin.create_topic("orders", queues=1)
            client.producer(compression="none").send("orders", b"late order" + bytes(2000), delay=600)
        broker.stop()
        path = spoil(files, b"late order" + bytes(10))
        broker.start()
        clock.advance(601)
        with dmq.connect(broker.url) as client, client.consumer("orders", group="shop") as consumer:
            eventually(lambda: client.admin.stats()["store_read_failures"] > 0)
            files.mend(path)
            clock.advance(10)
            assert take(consumer) == b"late orde"
