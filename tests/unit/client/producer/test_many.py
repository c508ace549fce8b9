"""What one call of `send_many` becomes: as few batches as window, frames and spool allow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dmq.client.producer.core import MANY_BYTES, MANY_MESSAGES, SPOOLED_BYTES, Core, ProducerOptions
from dmq.client.producer.message import SendOptions
from dmq.client.producer.routes import Route, Routes
from dmq.client.spool.sender import make_core
from dmq.client.spool.spool import Spool
from dmq.errors import InvalidSettings
from dmq.model import Message
from dmq.protocol import unpack_batch
from dmq.testing import FakeClock, MemoryFiles
from tests.unit.client.links import LIMITS, FakeLink, FakeLinks

KIB = 1 << 10


class Rig:
    """A producer's core, connected to a broker that takes frames of so many bytes."""

    def __init__(
        self, frame_bytes_max: int = LIMITS.frame_bytes_max, spool: Spool | None = None, **options: Any
    ) -> None:
        clock, link = FakeClock(), FakeLink()
        link.limits = msgspec.structs.replace(LIMITS, frame_bytes_max=frame_bytes_max)
        self.route = Route(4, False, clock.monotonic())
        chosen, links = ProducerOptions(**options), FakeLinks(clock, link)
        if spool is None:
            self.core = Core.make("shop", chosen, Routes(), links, clock)
        else:
            self.core = make_core(spool, "shop", chosen, Routes(), links, clock)
        self.core.sender.connected(link)

    def counts(self, messages: list[Message]) -> list[int]:
        """How many messages each batch has; together they are all, in order."""
        made = [*self.core.many(self.route, messages, SendOptions("orders", "stored"))]
        assert [index for _, indexes in made for index in indexes] == [*range(len(messages))]
        for batch, indexes in made:
            assert batch.body is not None
            body = b"".join(batch.body)
            assert len(unpack_batch(body, batch.count, batch.key_count).lengths) == len(indexes) == batch.count
        return [batch.count for batch, _ in made]


def bodies(count: int, size: int, **more: Any) -> list[Message]:
    return [Message(bytes(size), f"k-{number}", **more) for number in range(count)]


@pytest.mark.parametrize("more", [{}, {"tag": "t"}])
def test_batches_are_as_large_as_they_may_be(more: dict[str, Any]) -> None:
    rig = Rig(compression="none")
    assert rig.counts(bodies(500, KIB, **more)) == [500]
    assert rig.counts(bodies(1030, KIB, **more)) == [MANY_BYTES // KIB, 6]
    assert rig.counts(bodies(4 * MANY_MESSAGES + 2, 10, **more)) == [*[MANY_MESSAGES] * 4, 2]
    assert rig.counts(bodies(3, MANY_BYTES + 1, **more)) == [1, 1, 1], "one that is too large is alone"


def test_a_large_call_is_cut_so_that_the_broker_has_something_to_do_meanwhile() -> None:
    rig = Rig(compression="none")
    assert rig.counts(bodies(1999, 10)) == [1999]
    assert rig.counts(bodies(2000, 10)) == [1000, 1000]
    assert rig.counts(bodies(4003, 10)) == [1001, 1001, 1001, 1000]


def test_they_stay_within_the_window() -> None:
    assert Rig(compression="none", window_bytes=100 * KIB).counts(bodies(150, KIB)) == [100, 50]


def test_they_fit_the_frames_of_a_broker_with_small_ones() -> None:
    assert Rig(256 * KIB, compression="none").counts(bodies(100, KIB)) == [64, 36]


def test_they_fit_the_smallest_spool() -> None:
    spool = Spool(MemoryFiles(), SPOOLED_BYTES)
    try:
        assert Rig(spool=spool, compression="none").counts(bodies(300, KIB)) == [SPOOLED_BYTES // KIB, 44]
    finally:
        spool.close()


def test_no_spool_is_smaller_than_such_a_batch() -> None:
    with pytest.raises(InvalidSettings):
        Spool(MemoryFiles(), SPOOLED_BYTES - 1)
