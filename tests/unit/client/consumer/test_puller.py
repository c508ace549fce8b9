"""What is read ahead between two pulls: when, how much, and what becomes of it if it is not wanted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Unpack

import pytest

from dmq.client.connection.session import OnAnswer, Pending
from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.message import Batch, ReceivedMessage
from dmq.client.consumer.options import ConsumerOptions, SubscribeOptions
from dmq.client.consumer.puller import Ask, Puller
from dmq.errors import DMQError, NotConnected
from dmq.model import Message
from dmq.protocol import Command, FrameParser, Header, response_head
from dmq.protocol.consume import Pull as PullHeader
from dmq.protocol.consume import PullReply, Settle
from dmq.protocol.session import ServerReboot
from tests.unit.client.deliveries import bodies, book, frame, said
from tests.unit.client.links import FakeConsumer, FakeLink


class PullLink(FakeLink):
    """A link that keeps what was told before a request, too."""

    def __init__(self, host: str = "one", shard: int = 0) -> None:
        super().__init__(host, shard)
        self.together: list[tuple[PullHeader, list[Settle]]] = []
        self.on_answer: OnAnswer = lambda answer: None

    def tell_and_submit(
        self,
        told: Sequence[tuple[int, Header]],
        command: int,
        header: Header,
        *,
        on_answer: OnAnswer,
        attended: bool = True,
    ) -> Pending:
        pending = super().tell_and_submit(told, command, header, on_answer=on_answer, attended=attended)
        assert command == Command.PULL
        assert isinstance(header, PullHeader)
        self.together.append((header, [said for _, said in told if isinstance(said, Settle)]))
        self.on_answer = on_answer
        return pending


class Pull(FakeConsumer):
    """A consumer whose pulls a test answers itself."""

    def __init__(self, **options: Unpack[SubscribeOptions]) -> None:
        self.link = PullLink()
        super().__init__(ConsumerOptions("orders", "billing", {"prefetch": 10, **options}), self.link)
        self.puller = Puller(self.subscriptions)
        (self.subscription,) = self.subscriptions
        self.numbers = itertools.count(1)

    def answered(self, *texts: str, queue: int = 0) -> Any:
        """What a broker answers to a pull: one lease."""
        number = next(self.numbers)
        leases, body = frame(number, bodies(*texts), first=100 * number, queue=queue)
        return leases, body

    def pull(self, ask: Ask, *texts: str) -> Batch[ReceivedMessage]:
        """A pull; the broker has these if nothing was read ahead."""
        parts = self.puller.from_stock(ask)
        if not parts:
            self.flush()
            parts = self.core.pulled(book(self.core), *self.answered(*texts)) if texts else []
        batch = Batch(ReceivedMessage, parts)
        self.puller.read_ahead(ask, len(batch))
        return batch

    def arrive(self, *texts: str, queue: int = 0) -> None:
        """What was read ahead arrives."""
        leases, body = self.answered(*texts, queue=queue)
        head = response_head(Command.PULL, PullReply(leases), 1, len(body))
        (answer,) = FrameParser(1 << 20).feed(head + bytes(body))
        self.link.on_answer(answer)

    @property
    def told(self) -> list[tuple[int, str, list[tuple[int, int]]]]:
        """What the broker was told, apart from what went with requests."""
        return said(self.link.told)

    def repeat(self, ask: Ask) -> Batch[ReceivedMessage]:
        """Two pulls that got all they asked for: the next batch is asked for then."""
        self.pull(ask, *"abcdef"[: ask.max_messages]).ack()
        return self.pull(ask, *"ghijkl"[: ask.max_messages])


TWO = Ask(2)


def texts(batch: Batch[ReceivedMessage]) -> list[bytes]:
    return [message.body for message in batch]


def test_the_third_pull_of_the_same_is_asked_for_with_the_second() -> None:
    pulls = Pull()
    pulls.pull(TWO, "a", "b").ack()
    assert pulls.link.together == []
    batch = pulls.pull(TWO, "c", "d")
    ((asked, _),) = pulls.link.together
    assert (asked.max_messages, asked.wait_ms) == (2, 0)
    batch.ack()
    pulls.arrive("e", "f")
    assert texts(pulls.pull(TWO)) == [b"e", b"f"]


def test_words_about_a_batch_leave_with_the_next_request() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.arrive("e", "f")
    told = pulls.told
    pulls.pull(TWO)
    (_, words) = pulls.link.together[-1]
    assert said(words) == [(2, "ACK", [(200, 2)])]
    assert pulls.told == told  # nothing else was said


def test_a_pull_that_gets_less_than_it_asked_for_reads_nothing_ahead() -> None:
    pulls = Pull()
    pulls.pull(TWO, "a", "b").ack()
    pulls.pull(TWO, "c").ack()
    pulls.pull(TWO, "d", "e")
    assert pulls.link.together == []


@pytest.mark.parametrize(("got", "reads_ahead"), [(8, True), (2, True), (1, False)])
def test_with_a_filter_a_good_part_of_what_was_asked_for_is_enough(got: int, reads_ahead: bool) -> None:
    pulls = Pull(tags="paid", prefetch=20)
    eight = Ask(8)
    for number in (1, 2):
        leases, body = frame(number, [Message(b"%d" % index, tag="paid") for index in range(got)], first=100 * number)
        batch = Batch(ReceivedMessage, pulls.core.pulled(book(pulls.core), leases, body))
        pulls.puller.read_ahead(eight, len(batch))
        assert bool(pulls.link.together) == (reads_ahead and number == 2)
        batch.ack()


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (Ask(6), {}),  # twice as many would be more than the prefetch
        (TWO, {"ordered": True}),
        (TWO, {"parallel": 4}),
    ],
)
def test_nothing_is_read_ahead_where_it_would_be_too_much(ask: Ask, options: dict[str, Any]) -> None:
    pulls = Pull(**options)
    pulls.repeat(ask)
    assert pulls.link.together == []


def test_nothing_is_read_ahead_while_an_earlier_batch_is_in_hand() -> None:
    pulls = Pull()
    pulls.pull(TWO, "a", "b")
    pulls.pull(TWO, "c", "d")
    assert pulls.link.together == []


def test_a_pause_gives_back_what_was_read_ahead_and_stops_it() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.arrive("e", "f")
    pulls.subscriptions.set_paused(True)
    assert (3, "RELEASE", [(300, 2)]) in pulls.told
    pulls.pull(TWO, "g", "h").ack()
    pulls.pull(TWO, "i", "j")
    assert len(pulls.link.together) == 1


def test_what_arrives_after_the_end_goes_back_untried() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.subscriptions.is_closing = True
    pulls.arrive("e", "f")
    assert (3, "RELEASE", [(300, 2)]) in pulls.told


def test_a_pull_from_another_queue_gives_back_what_was_read_ahead() -> None:
    pulls = Pull()
    pulls.repeat(Ask(2, queue=1)).ack()
    pulls.arrive("e", "f", queue=1)
    assert texts(pulls.pull(Ask(2, queue=2), "g")) == [b"g"]
    assert (3, "RELEASE", [(300, 2)]) in pulls.told


def test_a_smaller_pull_takes_a_part_of_what_was_read_ahead() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.arrive("e", "f")
    assert texts(pulls.pull(Ask(1))) == [b"e"]
    assert texts(pulls.pull(Ask(5))) == [b"f"]


def test_leases_of_what_was_read_ahead_run_from_when_it_was_asked_for() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.clock.advance(31)  # the answer lay unread for so long
    pulls.arrive("e", "f")
    assert texts(pulls.pull(TWO, "g", "h")) == [b"g", b"h"]


def test_a_consumer_that_does_not_get_on_gives_back_what_was_read_ahead() -> None:
    pulls = Pull()
    pulls.repeat(TWO)  # and never says a word of it
    pulls.arrive("e", "f")
    pulls.router.advance(29)
    assert (3, "RELEASE", [(300, 2)]) in pulls.told
    assert pulls.core.prefetched == (0, 0)


def test_a_seek_drops_what_was_read_ahead() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.arrive("e", "f")
    pulls.core.sought(book(pulls.core))
    assert texts(pulls.pull(TWO, "a", "b")) == [b"a", b"b"]
    assert not any(outcome == "RELEASE" for _, outcome, _ in pulls.told)


def test_a_broker_that_drains_gets_back_what_was_read_ahead() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.arrive("e", "f")
    pulls.subscription.pushed(pulls.link, Pushed(Command.SERVER_REBOOT, ServerReboot("one"), b"", 0.0))
    assert (3, "RELEASE", [(300, 2)]) in pulls.told


@pytest.mark.parametrize("error", [NotConnected("the connection broke")])
def test_a_request_that_is_lost_is_asked_again_by_the_next_pull(error: DMQError) -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.link.on_answer(error)
    assert texts(pulls.pull(TWO, "e", "f")) == [b"e", b"f"]
    assert len(pulls.link.together) == 2


def test_words_that_could_not_leave_are_kept() -> None:
    pulls = Pull()
    pulls.repeat(TWO).ack()
    pulls.arrive("e", "f")
    pulls.link.is_usable = False
    pulls.pull(TWO)
    assert said(pulls.core.reports(book(pulls.core))) == [(2, "ACK", [(200, 2)])]


# --- several brokers --------------------------------------------------------------------------------------------------


class PullShards(FakeConsumer):
    """A consumer that pulls at some shards, whose answers a test gives."""

    def __init__(self, count: int = 3, **options: Unpack[SubscribeOptions]) -> None:
        self.links = [PullLink(f"shard-{number}", number) for number in range(1, count + 1)]
        super().__init__(ConsumerOptions("orders", "billing", {"prefetch": 12, **options}), *self.links, named=count)
        self.puller = Puller(self.subscriptions)
        self._numbers = itertools.count(1)

    @property
    def asked(self) -> list[list[tuple[int, int]]]:
        """What each shard was asked ahead since this was looked at last: messages, and milliseconds to wait."""
        found = [[(header.max_messages, header.wait_ms) for header, _ in link.together] for link in self.links]
        for link in self.links:
            link.together.clear()
        return found

    def pull(self, ask: Ask, *had: int, after: float = 0.1) -> list[int]:
        """A pull that asks in turn for whole batches: how many messages each shard has that is asked; the batch's.

        Parameters:
            after: so many seconds pass before more is asked for; by default longer than the turn of a shard.
        """
        parts = self.puller.from_stock(ask)
        for one, count in zip(self.puller.rich() if not parts else (), had, strict=False):
            number = next(self._numbers)
            leases, body = frame(number, bodies(*map(str, range(count))), first=100 * number)
            self.puller.got(one, ask.max_messages, count)
            if count:
                parts = self.core.pulled(one.book, leases, body)
                break
        batch = Batch(ReceivedMessage, parts)
        brokers = [delivery.broker for delivery, indexes in parts for _ in indexes]
        self.clock.advance(after)
        self.puller.read_ahead(ask, len(batch))
        batch.ack()
        return brokers

    def arrive(self, shard: int, count: int) -> None:
        """What a shard was asked ahead arrives."""
        number = next(self._numbers)
        leases, body = frame(number, bodies(*map(str, range(count))), first=100 * number)
        head = response_head(Command.PULL, PullReply(leases if count else []), 1, len(body) if count else 0)
        (answer,) = FrameParser(1 << 20).feed(head + (bytes(body) if count else b""))
        self.links[shard].on_answer(answer)


def test_each_of_several_brokers_gives_a_whole_batch_in_turn() -> None:
    pulls = PullShards()
    assert [pulls.pull(TWO, 2), pulls.pull(TWO, 2)] == [[0, 0], [1, 1]]
    assert pulls.asked == [[], [], [(2, 0)]]
    pulls.arrive(2, 2)
    assert pulls.pull(TWO) == [2, 2]
    assert pulls.asked == [[(2, 0)], [], []]
    pulls.arrive(0, 2)
    assert pulls.pull(TWO) == [0, 0]
    assert pulls.asked == [[], [(2, 0)], []]


def test_a_quick_program_takes_several_batches_of_one_broker_before_it_goes_to_the_next() -> None:
    pulls = PullShards()
    assert [pulls.pull(TWO, 2, after=0.01), pulls.pull(TWO, 2, after=0.01)] == [[0, 0], [0, 0]]
    found = []
    for _ in range(30):
        (shard,) = (number for number, asked in enumerate(pulls.asked) if asked)
        found.append(shard)
        pulls.arrive(shard, 2)
        assert pulls.pull(TWO, after=0.01) == [shard, shard]
    turns = [(shard, len([*group])) for shard, group in itertools.groupby(found)]
    assert [shard for shard, _ in turns[:6]] == [0, 1, 2, 0, 1, 2]
    assert {count for _, count in turns[1:-1]} == {5}, "each has the same share of a round"


def test_a_broker_that_was_the_only_one_with_whole_batches_has_no_further_turn_before_the_others() -> None:
    pulls = PullShards(2, prefetch=24)
    assert pulls.pull(Ask(4), 0, 4) == [1] * 4
    assert pulls.pull(Ask(4), 4) == [1] * 4
    pulls.arrive(1, 4)
    assert pulls.asked[0] == [(3, 1000)]
    pulls.arrive(0, 3)  # it has messages again
    assert len(pulls.pull(Ask(4), after=0.001)) == 4
    assert len(pulls.pull(Ask(4), after=0.001)) == 3
    assert pulls.pull(Ask(4), 4, after=0.001) == [0] * 4


def test_what_is_said_of_a_batch_leaves_with_the_next_request_to_its_own_broker() -> None:
    pulls = PullShards()
    pulls.pull(TWO, 2)
    pulls.pull(TWO, 2)
    for shard in (2, 0, 1):
        pulls.arrive(shard, 2)
        pulls.pull(TWO)
    told = [[words for _, words in link.together] for link in pulls.links]
    assert [said(words) for words in told[2]] == [[], [(3, "ACK", [(300, 2)])]]


def test_a_broker_without_a_whole_batch_is_asked_meanwhile_for_a_small_one_and_may_wait() -> None:
    pulls = PullShards(prefetch=24)
    assert pulls.pull(Ask(4), 0, 4) == [1] * 4  # the first has nothing
    assert pulls.asked == [[(2, 1000)], [], []]
    assert pulls.pull(Ask(4), 4) == [2] * 4
    assert pulls.asked == [[], [(4, 0)], []]
    pulls.arrive(0, 2)  # all that it was asked for: there may be more
    pulls.arrive(1, 4)
    assert sorted(pulls.pull(Ask(4))) == [0, 0, 1, 1]


def test_whoever_has_a_whole_batch_again_has_its_turn_again() -> None:
    pulls = PullShards(2)
    assert pulls.pull(TWO, 0, 2) == [1, 1]
    ((_, wait_ms),) = pulls.asked[0]
    assert wait_ms > 0
    pulls.arrive(0, 1)
    assert pulls.pull(TWO) == [0]
    assert pulls.pull(TWO, 2) == [1, 1]
    assert pulls.pull(TWO, 2) == [0, 0]


def test_of_several_brokers_too_nothing_beyond_the_prefetch_is_asked_for() -> None:
    pulls = PullShards(prefetch=8)
    pulls.pull(Ask(5), 5)
    pulls.pull(Ask(5), 5)
    ((asked, _),) = pulls.asked[2]
    assert asked == 3  # with the five in hand
    pulls.arrive(2, 3)
    assert len(pulls.pull(Ask(5))) == 3


def test_a_broker_that_takes_long_is_read_by_another_thread_and_others_are_asked() -> None:
    pulls = PullShards()
    pulls.pull(TWO, 2)
    pulls.pull(TWO, 2)
    pulls.puller.give_up_ahead()
    assert pulls.attended == [pulls.links[2]]
    assert pulls.pull(TWO, 2) == [0, 0]
    pulls.arrive(2, 2)
    assert pulls.pull(TWO) == [2, 2]
