"""Dividing a read: everything once, whatever the shape of the queues."""

from __future__ import annotations

import itertools
import pickle
import random

from hypothesis import given
from hypothesis import strategies as st

from dmq.pipeline.source.offsets import TopicPartition
from dmq.pipeline.source.partition_plan import JournalPiece, QueuePiece, QueueRange, Wanted, plan, share_out


def wanted(queue: int, count: int, start: int, end: int, size: float = 100.0, topic: str = "orders") -> Wanted:
    return Wanted(QueueRange(topic, 7, queue, 10, 10 + count), start, end, size)


def test_nothing_wanted_is_no_piece() -> None:
    assert plan([]) == []


def test_queues_that_fill_the_journal_are_read_as_ranges_of_it() -> None:
    parts = [wanted(queue, 1000, 5000, 405_000) for queue in range(4)]
    pieces = plan(parts, piece_bytes=100_000)
    assert [(piece.start, piece.end) for piece in pieces if isinstance(piece, JournalPiece)] == [
        (5000, 105_000),
        (105_000, 205_000),
        (205_000, 305_000),
        (305_000, 405_000),
    ]
    assert all(
        isinstance(piece, JournalPiece)
        and not piece.ranges
        and piece.whole_keys().tolist() == [7 << 8 | n for n in range(4)]
        for piece in pieces
    )


def test_a_piece_knows_only_the_queues_that_reach_into_it() -> None:
    pieces = plan([wanted(0, 1000, 0, 100_000), wanted(1, 1000, 100_000, 200_000)], 2)
    assert [(piece.whole_keys() & 255).tolist() for piece in pieces if isinstance(piece, JournalPiece)] == [[0], [1]]


def test_a_queue_that_begins_or_ends_within_a_piece_is_bounded_there_alone() -> None:
    pieces = plan([wanted(0, 1000, 0, 200_000, 200), wanted(1, 1000, 50_000, 150_000)], 4)
    assert [
        ((piece.whole_keys() & 255).tolist(), [part.queue for part in piece.ranges])
        for piece in pieces
        if isinstance(piece, JournalPiece)
    ] == [([0], []), ([0, 1], []), ([0, 1], []), ([0], [])]
    pieces = plan([wanted(0, 1000, 0, 200_000, 200), wanted(1, 1000, 60_000, 140_000)], 4)
    assert [
        ((piece.whole_keys() & 255).tolist(), [part.queue for part in piece.ranges])
        for piece in pieces
        if isinstance(piece, JournalPiece)
    ] == [([0], []), ([0], [1]), ([0], [1]), ([0], [])]


def test_one_topic_of_several_has_as_many_pieces_as_alone() -> None:
    parts = [wanted(queue, 1000, 0, 400_000) for queue in range(4)]
    among_others = [part._replace(journal_end=1_600_000) for part in parts]
    assert len(plan(parts, piece_bytes=50_000)) == len(plan(among_others, piece_bytes=50_000)) == 8


def test_a_plan_of_very_many_queues_is_small() -> None:
    end = 10**12
    parts = [
        Wanted(QueueRange(f"t{topic}", topic + 3, queue, 5, 10**6), topic * 1000 + queue, end - queue, 1000.0)
        for topic in range(100)
        for queue in range(10)
    ]
    pieces = plan(parts)
    assert len(pieces) == 10_000
    assert sum(len(pickle.dumps(piece)) for piece in pieces) < 5_000_000


def test_a_few_messages_far_apart_are_gathered_queue_by_queue() -> None:
    pieces = plan([wanted(0, 100, 0, 10**9), wanted(1, 100, 0, 10**9)])
    assert pieces == [QueuePiece(QueueRange("orders", 7, queue, 10, 110)) for queue in (0, 1)]


def test_as_many_partitions_as_are_asked_for() -> None:
    assert len(plan([wanted(0, 1000, 0, 100_000)], 7)) == 7
    assert len(plan([wanted(0, 1000, 0, 10**9)], 7)) == 7
    assert len(plan([wanted(0, 3, 0, 10**9)], 7)) == 3, "a message is not divided"


def test_each_shard_is_divided_by_itself_and_has_its_part_of_the_pieces() -> None:
    parts = [wanted(queue, 1000, 0, 400_000) for queue in range(4)]
    others = [part._replace(range=part.range._replace(shard=2)) for part in parts]
    pieces = plan([*others, *parts], 6)
    assert [piece.shard for piece in pieces] == [0, 0, 0, 2, 2, 2]
    few = plan([wanted(0, 100, 0, 10**9), *others], 1)
    assert [(piece.shard, type(piece)) for piece in few] == [(0, QueuePiece), (2, JournalPiece)]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1000, 10**6),
)
def test_every_offset_is_in_one_piece(shapes: list[tuple[int, int, int]], least: int, piece_bytes: int) -> None:
    parts = [wanted(queue, count, at, at + size, 50) for queue, (count, at, size) in enumerate(shapes)]
    pieces = plan(parts, least, piece_bytes=piece_bytes)
    assert pieces == plan([*reversed(parts)], least, piece_bytes=piece_bytes), "a function of what is wanted"
    if isinstance(pieces[0], QueuePiece):
        for part in parts:
            mine = sorted(
                offset
                for piece in pieces
                if isinstance(piece, QueuePiece) and piece.range.queue == part.range.queue
                for offset in range(piece.range.start, piece.range.end)
            )
            assert mine == [*range(part.range.start, part.range.end)]
    else:
        for part in parts:
            spans = sorted(
                (piece.start, piece.end)
                for piece in pieces
                if isinstance(piece, JournalPiece)
                and (part.range in piece.ranges or part.range.key in piece.whole_keys())
            )
            bounded = [piece for piece in pieces if isinstance(piece, JournalPiece) and part.range in piece.ranges]
            for piece in pieces:
                if isinstance(piece, JournalPiece) and part.range.key in piece.whole_keys():
                    assert part.journal_start <= piece.start < piece.end <= part.journal_end
                    assert piece not in bounded
            assert spans[0][0] <= part.journal_start < spans[0][1]
            assert spans[-1][0] < part.journal_end <= spans[-1][1]
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans)), "no gap and no overlap"


def place(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def test_a_limit_is_shared_in_proportion_to_what_waits() -> None:
    start, end = {place(0): 0, place(1): 100}, {place(0): 900, place(1): 200, place(2): 1000}
    assert share_out(start, end, 2000) == end
    assert share_out(start, end, 200) == {place(0): 90, place(1): 110, place(2): 100}
    assert share_out(start, end, 1) == {place(0): 0, place(1): 100, place(2): 1}


def test_a_queue_that_fell_back_is_left_where_it_is() -> None:
    assert share_out({place(0): 9, place(1): 0}, {place(0): 3, place(1): 50}, 10) == {place(0): 3, place(1): 10}


def test_a_limited_reader_gets_everything_in_the_end() -> None:
    rng = random.Random(5)
    start = {place(number): rng.randrange(100) for number in range(9)}
    end = {at: offset + rng.choice([0, 1, 1000, 30_000]) for at, offset in start.items()}
    rounds = 0
    while start != end:
        following = share_out(start, end, 777)
        read = sum(following[at] - start[at] for at in start)
        assert all(start[at] <= following[at] <= end[at] for at in start)
        assert read == min(777, sum(end[at] - start[at] for at in start))
        start = following
        rounds += 1
        assert rounds < 500
