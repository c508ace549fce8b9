"""The network of a shard on real sockets: what one member pushes, another has as it was, or knows that it ended."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dmq.clock import SystemClock
from dmq.errors import NotAllowed, NotConnected, NotInCluster, NotLeader, PortTaken, StaleEpoch, TimedOut, Unsupported
from dmq.net.address import parse_address
from dmq.net.link import Link
from dmq.protocol.cluster.replication import Confirm, Follow, Handover, Journal, Repair, Standing
from dmq.protocol.commands import Command, one_way_head, request_head
from dmq.protocol.frame import FrameParser
from dmq.protocol.session import Hello, Stats
from dmq.protocol.status import Status
from dmq.shard.feed import WINDOW_BYTES
from dmq.shard.network import SILENCE_SECONDS, Network
from dmq.shard.peers import Following, Seat
from dmq.testing import FakeClock
from dmq.testing.processes import free_port
from tests.bit_proxy import BitProxy, some_of
from tests.integration.shard.members import (
    FollowingMember,
    LeadingMember,
    Silent,
    eventually,
    journal_of,
    new_network,
    run,
)

ASKED = Standing("c", "s", 1, 5)


async def drain(following: Following) -> int:
    """Take frames until the connection ends; returns how many bytes they had."""
    taken = 0
    try:
        while True:
            taken += len((await following.next())[1])
    except NotConnected:
        return taken


class Pair:
    """A leader and a follower with a network each."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.leader = LeadingMember()
        self.member = FollowingMember(self.leader.journal_id)
        self._clock = clock

    async def __aenter__(self) -> Pair:
        self.theirs, self.ours = await new_network("b1", self._clock), await new_network("b2", self._clock)
        self.theirs.hearing = self.leader
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ours.stop()
        await self.theirs.stop()

    @property
    def address(self) -> str:
        return self.theirs.address

    def end(self) -> int:
        return self.leader.store.queries.end

    def check_equal(self) -> None:
        assert journal_of(self.leader.files) == self.member.journal


def test_a_follower_has_what_the_leader_pushes_byte_for_byte() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.leader.write(300, 2000)
            pair.leader.write(3, 4 << 20)  # units that span several frames
            pair.leader.write(1, 0)
            follower, following = await pair.member.follow(pair.ours, pair.address)
            assert following.reply.epoch == 1
            while pair.member.replica.end < pair.end():
                await pair.member.take(follower, following)
            pair.check_equal()
            pair.leader.write(1, 10)  # a unit that is live
            await pair.member.take(follower, following)
            pair.check_equal()
            await eventually(lambda: pair.leader.confirms[-1].flushed == pair.end())
            following.close()
            await eventually(lambda: len(pair.leader.left_seats) == 1)
            assert not pair.leader.seats

    run(main)


def test_turned_bits_end_the_connection_and_nothing_of_them_is_taken() -> None:
    async def main() -> None:
        async with Pair() as pair:
            host, port = parse_address(pair.address)
            with BitProxy((host, port), seed=11) as proxy:
                journal = some_of([Command.JOURNAL, Command.FOLLOW], 0.4, is_to_broker=False)
                proxy.choose = lambda passage, rng: journal(passage, rng) if len(proxy.turned) < 12 else None
                pair.leader.write(120, 150_000, seed=3)
                ended = await pair.member.follow_to(pair.end, pair.ours, f"127.0.0.1:{proxy.port}")
                assert ended >= 1
                assert len(proxy.turned) >= ended
                pair.check_equal()

    run(main)


def test_turned_bits_in_a_confirmation_end_the_connection() -> None:
    async def main() -> None:
        async with Pair() as pair:
            host, port = parse_address(pair.address)
            with BitProxy((host, port)) as proxy:
                proxy.choose = some_of([Command.CONFIRM], 1.0, is_to_broker=True)
                follower, following = await pair.member.follow(pair.ours, f"127.0.0.1:{proxy.port}")
                await pair.member.take(follower, following)
                await drain(following)
                assert proxy.turned
                assert not pair.leader.confirms
                await eventually(lambda: pair.leader.left_seats)

    run(main)


def test_a_connection_that_ends_within_a_unit_leaves_nothing_of_it() -> None:
    async def main() -> None:
        async with Pair() as pair:
            await pair.member.follow_to(pair.end, pair.ours, pair.address)
            before = pair.member.replica.end
            follower, following = await pair.member.follow(pair.ours, pair.address)
            pair.leader.write(1, 4 << 20)
            while (frame := await following.next())[0].start + len(frame[1]) <= before:  # type: ignore[union-attr]
                pass
            follower.take(*frame)  # type: ignore[arg-type]
            for seat in [*pair.leader.seats]:
                seat.close()
            await drain(following)
            assert pair.member.replica.end == before
            await pair.member.follow_to(pair.end, pair.ours, pair.address)
            pair.check_equal()

    run(main)


def test_a_follower_that_takes_nothing_costs_the_leader_a_window() -> None:
    async def main() -> None:
        async with Pair() as pair:
            follower, following = await pair.member.follow(pair.ours, pair.address)
            pair.leader.write(30, 1 << 20)
            (seat,) = pair.leader.seats
            feed = pair.leader.leader._feeds[pair.leader.seats[seat]]
            for _ in range(50):
                await asyncio.sleep(0.002)
                pair.leader.pump()
            held = feed.next_offset
            assert held <= WINDOW_BYTES + (2 << 20)
            while pair.member.replica.end < pair.end():  # it goes on where it stood
                await pair.member.take(follower, following)
            pair.check_equal()
            following.close()

    run(main)


def test_a_leader_that_forgets_the_window_does_not_fill_a_follower() -> None:
    async def main() -> None:
        theirs, ours = await new_network("b1"), await new_network("b2")
        leader = theirs.hearing = LeadingMember()
        following = await ours.follow(theirs.address, Follow("c", "s", leader.journal_id, 7, 1, end=0))
        (seat,) = leader.seats
        body = bytes(1 << 20)
        frame = Journal(1, 0, 0, 0, sent=0.0)
        for _ in range(200):
            seat.send(frame, body)
            await asyncio.sleep(0.001)
            if leader.left_seats:
                break
        await eventually(lambda: leader.left_seats)
        assert await drain(following) <= 64 << 20
        await ours.stop()
        await theirs.stop()

    run(main)


def test_what_is_pushed_before_the_answer_follows_it() -> None:
    class Eager(LeadingMember):
        def follow(self, request: Follow, seat: Seat):  # type: ignore[no-untyped-def]
            seat.send(Handover(9))
            return super().follow(request, seat)

    async def main() -> None:
        async with Pair() as pair:
            eager = Eager()
            pair.theirs.hearing = eager
            following = await pair.ours.follow(pair.address, Follow("c", "s", eager.journal_id, 7, 1, end=0))
            assert (await following.next())[0] == Handover(9)
            frame, body = await following.next()
            assert isinstance(frame, Journal)
            assert frame.start == 0
            assert len(body)
            following.close()

    run(main)


def test_a_refusal_says_why() -> None:
    async def main() -> None:
        async with Pair() as pair:
            journal_id = pair.leader.journal_id
            with pytest.raises(NotInCluster):
                await pair.ours.follow(pair.address, Follow("other", "s", journal_id, 7, 1, end=0))
            with pytest.raises(StaleEpoch) as stale:
                await pair.ours.follow(pair.address, Follow("c", "s", journal_id, 7, 9, end=0))
            assert stale.value.detail["epoch"] == 1
            pair.theirs.hearing = Silent()
            with pytest.raises(NotLeader) as refused:
                await pair.ours.follow(pair.address, Follow("c", "s", journal_id, 7, 1, end=0))
            assert refused.value.detail["leader"] == "elsewhere:9611"
            pair.theirs.hearing = None
            with pytest.raises(NotLeader, match="starts"):
                await pair.ours.follow(pair.address, Follow("c", "s", journal_id, 7, 1, end=0))
            assert not pair.leader.left_seats

    run(main)


def test_a_member_says_how_far_it_is_and_gives_bytes() -> None:
    async def main() -> None:
        async with Pair() as pair:
            pair.leader.write(20, 30_000)
            reply = await pair.ours.standing(pair.address, ASKED, 5.0)
            assert (reply.end, reply.now_ms) == (pair.end(), 5)
            asked = Repair("c", "s", pair.leader.journal_id, start=0, end=500_000)
            repaired, body = await pair.ours.repair(pair.address, asked)
            assert bytes(body) == bytes(pair.leader.store.journal_bytes(0, 500_000))
            assert repaired.end == len(body)
            pair.theirs.hearing = Silent()
            with pytest.raises(NotConnected, match="stops"):
                await pair.ours.standing(pair.address, ASKED, 5.0)

    run(main)


def test_dead_addresses_and_mute_ones_give_clear_errors() -> None:
    async def main() -> None:
        async with Pair() as pair:
            with pytest.raises(NotConnected, match="check that it runs"):
                await pair.ours.standing(f"127.0.0.1:{free_port()}", ASKED, 5.0)
            with pytest.raises(NotConnected, match="is not an address"):
                await pair.ours.follow("127.0.0.1", Follow("c", "s", 1, 7, 1, end=0))
            with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never says anything
                address = f"127.0.0.1:{mute.getsockname()[1]}"
                with pytest.raises(TimedOut):
                    await pair.ours.standing(address, ASKED, 0.05)
                with pytest.raises(NotConnected, match="within 1 s"):
                    await pair.ours.follow(address, Follow("c", "s", 1, 7, 1, end=0))

    run(main)


def test_silence_of_either_side_ends_the_connection() -> None:
    async def main() -> None:
        clock = FakeClock()
        async with Pair(clock) as pair:
            _, following = await pair.member.follow(pair.ours, pair.address)
            await following.next()
            clock.advance(SILENCE_SECONDS + 1)
            with pytest.raises(NotConnected, match=r"silent|closed|broke"):
                await following.next()
            await eventually(lambda: pair.leader.left_seats)
            assert len(pair.leader.left_seats) == 1

    run(main)


def test_a_member_that_restarts_on_its_port_is_found_again() -> None:
    async def main() -> None:
        async with Pair() as pair:
            _, following = await pair.member.follow(pair.ours, pair.address)
            host, port = parse_address(pair.address)
            await pair.theirs.stop()
            await drain(following)
            assert len(pair.leader.left_seats) == 1
            pair.theirs = Network("b1", host=host, port=port)
            pair.theirs.hearing = pair.leader
            await pair.theirs.start()
            with pytest.raises(PortTaken):
                await Network("b3", host=host, port=port).start()
            await pair.member.follow_to(pair.end, pair.ours, pair.address)
            pair.check_equal()

    run(main)


def test_strangers_are_told_what_this_port_is() -> None:
    async def main() -> None:
        async with Pair() as pair:
            address = parse_address(pair.address)
            link = await Link.open(address, "client", clock=SystemClock(), peer="member", on_push=lambda _: None)
            with pytest.raises(Unsupported, match="replication port"):
                await link.request(Command.STATS, Stats())
            link.send(one_way_head(Command.CONFIRM, Confirm(1, 0, 0, sent=0.0)))  # without FOLLOW
            await link.closed
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request_head(Command.HELLO, Hello("dmq"), 1))  # a hello without a checksum
            (frame,) = FrameParser().feed(await reader.read())
            assert frame.status == Status.UNSUPPORTED
            writer.close()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()

    run(main)


def test_it_listens_on_ipv6_too_and_on_strange_addresses_only_if_that_is_meant() -> None:
    async def main() -> None:
        with pytest.raises(NotAllowed):
            Network("b1", host="0.0.0.0")
        network = Network("b1", host="::1", port=0)
        try:
            await network.start()
        except OSError:
            pytest.skip("this machine has no IPv6")
        assert network.address.startswith("[::1]:")
        network.hearing = LeadingMember()
        other = await new_network("b2")
        assert (await other.standing(network.address, ASKED, 5.0)).now_ms == 5
        await other.stop()
        await network.stop()

    run(main)
