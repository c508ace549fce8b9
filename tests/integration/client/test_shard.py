"""A client of a shard: it follows the leader."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dmq
import dmq.aio
from dmq.errors import NotEnoughReplicas, NotLeader
from dmq.protocol import Command, Flag, Frame, Header, response_head
from dmq.protocol.session import ShardInfo
from dmq.testing.processes import free_port
from tests.integration.client.servers import Peer, usual
from tests.integration.client.shard_servers import StandInShard
from tests.integration.client.test_pool import Heard
from tests.patience import eventually


@pytest.fixture
def shard() -> Iterator[StandInShard]:
    with StandInShard(offline_delay_ms=0) as running:
        yield running


def bodies(client: dmq.Client, topic: str, count: int, group: str = "check") -> list[bytes]:
    """What a new group gets of a topic: so many messages, and whatever comes behind them."""
    found: list[bytes] = []
    with client.consumer(topic, group) as consumer:
        while len(found) < count:
            batch = consumer.pull(max_messages=1000, wait=10)
            assert batch, f"{len(found)} of {count} came"
            found += [message.body for message in batch]
            consumer.ack(batch)
        found += [message.body for message in consumer.pull(wait=0)]
    return found


# --- finding the leader ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [(0,), (1,), (2, 1), (1, 2, 0)])
def test_any_member_leads_to_the_leader(shard: StandInShard, named: tuple[int, ...]) -> None:
    with dmq.connect(shard.url_of(*named)) as client:
        assert client.producer().send("orders", b"x", durability="flushed").topic == "orders"
        assert client._router.home.connection().address.port == shard.members[0].server.port
        assert client.admin.cluster()[0].is_leader
        # A leader that hangs is noticed soon after another one was elected.
        assert client._router.home.connection().limits.heartbeat_ms == 4000


def test_members_that_the_url_does_not_name_are_found_after_the_one_that_it_names_is_gone(shard: StandInShard) -> None:
    with dmq.connect(shard.url_of(0)) as client, client.producer(timeout=30) as producer:
        producer.send("orders", b"a")
        shard.kill()
        shard.take_over(2)
        assert producer.send("orders", b"b").topic == "orders"
        assert sorted(bodies(client, "orders", 2)) == [b"a", b"b"]


def test_a_shard_without_a_leader_is_waited_for_if_told_so(shard: StandInShard) -> None:
    shard.lead(None)
    with pytest.raises(dmq.NotConnected, match=r"shard 's1' has no leader .*dmq shard show s1"):
        dmq.connect(shard.url)
    with pytest.raises(dmq.NotConnected, match="shard 's1' has no leader"):
        dmq.connect(shard.url, timeout=0.1)
    threading.Timer(0.1, lambda: shard.lead(1)).start()
    with dmq.connect(shard.url, timeout=30) as client:
        assert client.admin.topics() == []


def test_a_leader_at_an_address_that_nobody_reaches_is_named() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with Peer() as peer:
        peer.shard = ShardInfo("s1", 3, False, nowhere)
        with pytest.raises(dmq.NotConnected, match=f"leader of shard 's1' is advertised at {nowhere}") as caught:
            dmq.connect(peer.url)
        assert caught.value.detail["leader"] == nowhere
    with Peer() as peer:
        peer.shard = ShardInfo("s1", 3, True)
        with dmq.connect(peer.url, timeout=0.4) as client:
            peer.shard = ShardInfo("s1", 4, False, nowhere)
            peer.cut()
            eventually(lambda: client._router.home.current() is None)
            with pytest.raises(dmq.NotConnected, match=f"leader of shard 's1' is advertised at {nowhere}"):
                client.admin.topics()


def test_a_leader_of_a_lower_epoch_is_not_used() -> None:
    with Peer() as old, Peer() as new:
        old.shard = ShardInfo("s1", 7, True)
        new.shard = ShardInfo("s1", 8, True)
        with dmq.connect(f"{new.url},127.0.0.1:{old.port}") as client, client.producer(timeout=30) as producer:
            producer.send("t", b"1")
            new.shard = ShardInfo("s1", 8, False)
            new.cut()
            threading.Timer(0.3, lambda: setattr(new, "shard", ShardInfo("s1", 9, True))).start()
            producer.send("t", b"2")
            assert len(new.produced()) == 2
            assert not old.produced()


def test_a_member_of_another_shard_is_refused() -> None:
    with Peer() as one, Peer() as other:
        one.shard, other.shard = ShardInfo("s1", 1, False), ShardInfo("s2", 1, True)
        with pytest.raises(dmq.NotConnected, match=r"member of shard 's2', and the leader of 's1' is looked for"):
            dmq.connect(f"{one.url},127.0.0.1:{other.port}")


def test_any_member_will_do_for_what_needs_no_leader(shard: StandInShard) -> None:
    with dmq.connect(shard.url_of(1), timeout=5, any_member=True) as client:
        (me,) = client.admin.cluster()
        assert (me.shard, me.is_leader) == ("s1", False)
        with pytest.raises(NotLeader) as caught:
            client.admin.topics()
        assert caught.value.detail["leader"] == shard.address(0)
        assert client.admin.cluster()


# --- from one leader to the next --------------------------------------------------------------------------------------


def test_requests_go_to_the_next_leader_and_listeners_hear_of_it_once(shard: StandInShard) -> None:
    heard = Heard()
    with heard.connect(shard.url) as client, client.producer(timeout=30) as producer:
        client.admin.create_topic("orders", queues=2)
        for at in (1, 2, 0):
            producer.send("orders", b"%d" % at)
            shard.lead(at)
        assert [topic.name for topic in client.admin.topics()] == ["orders"]
        eventually(lambda: heard.events.count("resumed") == 3)
        assert heard.events == ["NotLeader", "interrupted", "resumed"] * 3
        assert sorted(bodies(client, "orders", 3)) == [b"0", b"1", b"2"]


def test_what_must_not_be_done_twice_is_asked_of_the_next_leader_all_the_same(shard: StandInShard) -> None:
    with dmq.connect(shard.url, timeout=30) as client:
        client.admin.create_topic("a")
        shard.lead(1)
        client.admin.create_topic("b")  # NOT_LEADER: nothing was done
        shard.lead(2)
        client.admin.delete_topic("a")
        assert [topic.name for topic in client.admin.topics()] == ["b"]


def test_without_reconnect_a_member_that_is_deposed_ends_the_client(shard: StandInShard) -> None:
    with dmq.connect(shard.url_of(1, 2, 0), reconnect=False) as client:
        client.admin.create_topic("a")
        shard.lead(1)
        with pytest.raises(NotLeader):
            client.admin.topics()
        with pytest.raises(dmq.NotConnected, match="reconnect=False"):
            client.admin.topics()


def test_a_hint_that_leads_in_a_circle_does_not_keep_anybody_busy() -> None:
    def refuse(peer: Peer, frame: Frame) -> Header | Exception:
        return NotLeader("not now", leader=f"127.0.0.1:{peer.port}", epoch=5)

    with Peer(refuse) as one, Peer(refuse) as other:
        for peer in (one, other):
            peer.shard = ShardInfo("s1", 5, True, f"127.0.0.1:{peer.port}")
        url = f"{one.url},127.0.0.1:{other.port}"
        with dmq.connect(url, timeout=0.8) as client, pytest.raises((NotLeader, dmq.NotConnected)):
            client.admin.topics()
        assert len(one.frames) + len(other.frames) < 40


def test_too_few_replicas_are_waited_for_until_the_timeout() -> None:
    refusals = [NotEnoughReplicas("1 of 2 in sync")] * 4

    def answer(peer: Peer, frame: Frame) -> Header | Exception | None:
        if frame.command == Command.PRODUCE and refusals:
            return refusals.pop()
        return usual(frame)

    with Peer(answer) as peer:
        peer.shard = ShardInfo("s1", 1, True)
        with dmq.connect(peer.url) as client, client.producer(timeout=60, retries=0) as producer:
            producer.send("t", b"x", durability="flushed")
            assert not refusals
            assert not any(frame.flags & Flag.RESEND for frame in peer.produced())
            refusals += [NotEnoughReplicas("1 of 2 in sync")] * 1000
            with client.producer(timeout=0.2) as impatient, pytest.raises(NotEnoughReplicas):
                impatient.send("t", b"y", durability="flushed")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_flood_survives_leaders_that_die_and_leaders_that_hand_over(shard: StandInShard, ordered: bool) -> None:
    count = 4000
    with dmq.connect(shard.url) as client:
        client.admin.create_topic("orders", queues=3)
        with client.producer(timeout=60) as producer:
            futures = []
            for number in range(count):
                options = {"business_id": f"b{number % 7}", "ordered": True} if ordered else {}
                futures.append(producer.send_async("orders", b"%d" % number, durability="flushed", **options))  # type: ignore[arg-type]
                if number == count // 4:
                    shard.lead(1)
                elif number == count // 2:
                    shard.kill()
                    shard.take_over(2)
            producer.flush(60)
            places = {(receipt.queue, receipt.offset) for receipt in (future.result(60) for future in futures)}
        assert len(places) == count
        found = bodies(client, "orders", count)
        assert sorted(map(int, found)) == [*range(count)]
        if ordered:
            for rest in range(7):
                numbers = [int(body) for body in found if int(body) % 7 == rest]
                assert numbers == sorted(numbers)


def test_lone_sends_go_on_and_none_is_stored_twice(shard: StandInShard) -> None:
    with dmq.connect(shard.url) as client, client.producer(timeout=30) as producer:
        for number in range(60):
            producer.send("orders", b"%d" % number, durability="flushed")
            if number == 20:
                shard.lead(2)
            elif number == 40:
                shard.kill()
                shard.take_over(1)
        assert sorted(map(int, bodies(client, "orders", 60))) == [*range(60)]


def test_a_leader_that_dies_with_an_answer_outstanding_leaves_a_resend_to_the_next() -> None:
    """Also for an ordered message, which no other broker may take."""
    with Peer(lambda _, frame: None if frame.command == Command.PRODUCE else usual(frame)) as one, Peer() as two:
        one.shard, two.shard = ShardInfo("s1", 1, True), ShardInfo("s1", 1, False, f"127.0.0.1:{one.port}")
        with dmq.connect(f"{one.url},127.0.0.1:{two.port}") as client, client.producer(timeout=60) as producer:
            future = producer.send_async("t", b"x", ordered=True, business_id="b", durability="flushed")
            eventually(one.produced)
            two.shard = ShardInfo("s1", 2, True)
            one.close()
            future.result(60)
        first, again = one.produced()[0], two.produced()[0]
        assert again.flags & Flag.RESEND
        assert first.body == again.body


def test_what_a_leader_still_answers_is_heard_after_it_is_deposed() -> None:
    """One request says NOT_LEADER; the answer to another, which must not be sent twice, comes behind it."""
    waiting: list[Frame] = []

    def answer(peer: Peer, frame: Frame) -> Header | Exception | None:
        if frame.command == Command.TOPIC_DELETE:
            waiting.append(frame)
            return None
        return NotLeader("not any more", leader=f"127.0.0.1:{new.port}", epoch=2)

    with Peer(answer) as old, Peer() as new:
        old.shard, new.shard = ShardInfo("s1", 1, True), ShardInfo("s1", 2, True)
        with dmq.connect(old.url, timeout=30) as client:
            deleted: list[Exception | None] = []

            def delete() -> None:
                try:
                    client.admin.delete_topic("t")
                except dmq.DMQError as error:
                    deleted.append(error)
                else:
                    deleted.append(None)

            thread = threading.Thread(target=delete)
            thread.start()
            eventually(lambda: waiting)
            client.producer().send("t", b"x")
            for sock in old.sockets:
                old.send(sock, response_head(Command.TOPIC_DELETE, Header(), waiting[0].correlation))
            thread.join(30)
            assert deleted == [None]
            eventually(lambda: len(client._router.home.standing.connections()) == 1)


# --- consumers ------------------------------------------------------------------------------------------------------


def test_a_consumer_goes_on_at_the_next_leader(shard: StandInShard) -> None:
    seen: list[bytes] = []
    with dmq.connect(shard.url) as client, client.producer(timeout=30) as producer:
        consumer = client.consumer("orders", "g")
        thread = threading.Thread(target=lambda: consumer.run(lambda message: seen.append(message.body), workers=2))
        thread.start()
        for number, at in enumerate((1, 2, 0)):
            producer.send("orders", b"%d" % number)
            told = number + 1
            eventually(lambda told=told: len({*seen}) == told)  # type: ignore[misc]
            shard.lead(at)
        shard.kill()
        shard.take_over(1)
        producer.send("orders", b"last")
        eventually(lambda: b"last" in seen)
        consumer.close()
        thread.join(30)
        assert {*seen} == {b"0", b"1", b"2", b"last"}
        lag = client.admin.lag("orders", "g").total
        assert lag == 0


def test_the_ack_of_a_handler_that_outlives_its_leader_counts(shard: StandInShard) -> None:
    begun, go_on = threading.Event(), threading.Event()
    handled: list[bytes] = []

    def handle(message: dmq.ReceivedMessage) -> None:
        handled.append(message.body)
        begun.set()
        assert go_on.wait(60)

    with dmq.connect(shard.url) as client, client.producer(timeout=30) as producer:
        producer.send("orders", b"slow")
        consumer = client.consumer("orders", "g")
        thread = threading.Thread(target=lambda: consumer.run(handle, workers=1))
        thread.start()
        assert begun.wait(60)
        shard.lead(2)
        client.admin.topics()
        go_on.set()
        eventually(lambda: client.admin.lag("orders", "g").total == 0)
        consumer.close()
        thread.join(30)
        assert handled == [b"slow"]


def test_a_pull_goes_on_at_the_next_leader(shard: StandInShard) -> None:
    with (
        dmq.connect(shard.url) as client,
        client.consumer("orders", "g") as consumer,
        client.producer(timeout=30) as producer,
    ):
        producer.send("orders", b"a")
        batch = consumer.pull(wait=10)
        assert [message.body for message in batch] == [b"a"]
        shard.lead(1)
        consumer.ack(batch)
        producer.send("orders", b"b")
        again = consumer.pull(wait=30)
        assert [message.body for message in again] == [b"b"]
        consumer.ack(again)
        shard.kill()
        threading.Timer(0.2, lambda: shard.take_over(2)).start()
        threading.Timer(0.5, lambda: producer.send("orders", b"c")).start()
        assert [message.body for message in consumer.pull(wait=60)][-1:] == [b"c"]


# --- others -----------------------------------------------------------------------------------------------------------


def test_a_transaction_is_ended_and_a_group_answers_for_it_at_the_next_leader(shard: StandInShard) -> None:
    with dmq.connect(shard.url) as client:
        producer = client.producer(group="shop", check=lambda message: "commit", timeout=30)
        with producer.transaction("orders", b"a"):
            shard.lead(1)
        producer.send("orders", b"b")
        assert list(shard.members[1].broker.transactions._members) == ["shop"]
        assert sorted(bodies(client, "orders", 2)) == [b"a", b"b"]


def test_a_send_that_waits_for_its_consumer_does_so_at_the_next_leader(shard: StandInShard) -> None:
    with dmq.connect(shard.url) as client, client.producer(timeout=60) as producer:
        client.admin.create_topic("orders")
        client.admin.create_group("g", "orders")
        done = threading.Event()

        def send() -> None:
            producer.send("orders", b"x", durability="consumed", consumed_by="g")
            done.set()

        thread = threading.Thread(target=send)
        thread.start()
        eventually(lambda: client.admin.lag("orders", "g").total == 1)
        shard.kill()
        shard.take_over(1)
        assert bodies(client, "orders", 1, "g") == [b"x"]
        thread.join(60)
        assert done.is_set()


def test_a_spool_drains_to_the_next_leader(shard: StandInShard, tmp_path: Path) -> None:
    with dmq.connect(shard.url) as client, client.producer(spool=tmp_path / "spool", timeout=30) as producer:
        producer.send("orders", b"0")
        shard.lead(None)
        for number in range(1, 20):
            producer.send_async("orders", b"%d" % number, ordered=True, business_id="b")
        shard.lead(2)
        producer.flush(60)
        assert sorted(map(int, bodies(client, "orders", 20))) == [*range(20)]


def test_the_same_on_an_event_loop(shard: StandInShard) -> None:
    async def run() -> None:
        heard: list[str] = []
        client = await dmq.aio.connect(
            shard.url_of(2),
            timeout=30,
            on_interrupted=lambda: heard.append("interrupted"),
            on_resumed=lambda: heard.append("resumed"),
        )
        async with client:
            producer = client.producer(timeout=30)
            seen: list[bytes] = []

            async def consume() -> None:
                async with client.consumer("orders", "g") as consumer:
                    async for message in consumer:
                        seen.append(message.body)
                        await message.ack()
                        if len({*seen}) == 501:
                            return

            task = asyncio.create_task(consume())
            sends = []
            for number in range(500):
                sends.append(asyncio.create_task(producer.send("orders", b"%d" % number, durability="flushed")))
                if number == 150:
                    await asyncio.sleep(0)
                    await asyncio.to_thread(shard.lead, 1)
                    await client.admin.topics()  # it is there
                elif number == 300:
                    await asyncio.sleep(0)
                    await asyncio.to_thread(shard.kill)
                    await asyncio.to_thread(shard.take_over, 2)
            await asyncio.gather(*sends)
            await client.admin.create_topic("after")
            await producer.send("orders", b"last")
            await asyncio.wait_for(task, 60)
            assert heard == ["interrupted", "resumed"] * 2

    asyncio.run(run())


def test_a_leader_that_hangs_does_not_hold_up_the_others() -> None:
    """Its port takes connections and nobody answers: the first round gives it little time."""
    with Peer() as one, Peer() as two:
        one.shard, two.shard = ShardInfo("s1", 1, True), ShardInfo("s1", 1, False)
        with dmq.connect(f"{one.url},127.0.0.1:{two.port}") as client, client.producer(timeout=60) as producer:
            producer.send("t", b"a")
            one.is_mute = True
            one.cut()
            time.sleep(0.2)
            two.shard = ShardInfo("s1", 2, True)
            producer.send("t", b"b")
            assert len(two.produced()) == 1
