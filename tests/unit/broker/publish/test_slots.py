"""A producer that goes by slots that are others now is refused, and nothing is written."""

from __future__ import annotations

import pytest

from dmq.broker.publish.publisher import PublishRequest
from dmq.errors import DMQError, StaleRoute
from dmq.model import Message
from dmq.protocol.batch import pack_batch, unpack_batch
from dmq.protocol.produce import Produce
from dmq.records import encode_batch
from dmq.storage.journal.unit_draft import Placement
from tests.unit.broker.leading import LeadingRig, leading, on_a_loop


async def publish(rig: LeadingRig, sequence: int, slots_version: int) -> Placement:
    encoded = encode_batch("orders", "app", [Message(b"x")], sent_at_ms=1)
    packed = unpack_batch(b"".join(pack_batch(encoded)), 1, len(encoded.hashes), False)
    asked = Produce("orders", 1, 1, len(encoded.hashes), 77, 0, sequence, slots_version=slots_version)
    answers: list[Placement | DMQError] = []

    def done(request: PublishRequest, placement: Placement | None, error: DMQError | None) -> None:
        answers.append(placement or error)  # type: ignore[arg-type]

    broker = rig.dispatcher.broker
    assert broker is not None
    broker.publisher.publish(PublishRequest(asked, packed), done)
    await rig.until(lambda: answers)
    (answer,) = answers
    assert isinstance(answer, Placement), answer
    return answer


async def put(rig: LeadingRig, slots_version: int, *, is_removed: bool = False) -> None:
    broker = rig.dispatcher.broker
    assert broker is not None
    config = broker.catalog.topic("orders").config
    await broker.catalog.put_slot("orders", config, (9, slots_version, is_removed))


@on_a_loop
async def test_an_older_version_of_the_slots_is_refused_and_nothing_is_written() -> None:
    async with leading() as rig:
        await put(rig, 3)
        assert (await publish(rig, 1, slots_version=3)).first_offset == 0
        assert (await publish(rig, 2, slots_version=0)).first_offset == 1  # one that goes by none
        assert (await publish(rig, 3, slots_version=4)).first_offset == 2  # it knows more than we do
        end = rig.store.queries.end
        with pytest.raises(StaleRoute, match="has other slots now: nothing was written"):
            await publish(rig, 4, slots_version=2)
        assert rig.store.queries.end == end


@on_a_loop
async def test_a_slot_that_was_removed_takes_nothing_new() -> None:
    async with leading() as rig:
        await put(rig, 3)
        await publish(rig, 1, slots_version=3)
        await put(rig, 4, is_removed=True)
        for version in (0, 3, 4):
            with pytest.raises(StaleRoute, match="takes no more messages in this shard"):
                await publish(rig, 2, slots_version=version)


@on_a_loop
async def test_what_was_stored_by_older_slots_and_comes_again_is_a_duplicate() -> None:
    async with leading() as rig:
        await put(rig, 3)
        first = await publish(rig, 1, slots_version=3)
        await put(rig, 4, is_removed=True)
        again = await publish(rig, 1, slots_version=3)
        assert again.duplicate
        assert again.first_offset == first.first_offset
