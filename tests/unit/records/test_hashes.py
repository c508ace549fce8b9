"""Hashes are part of the stored format, and none of them is zero."""

from __future__ import annotations

import random
import zlib

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dmq.model import MessageId
from dmq.records import business_hash, id_hash, key_hash, tag_hash
from dmq.records.hashes import key_hashes
from tests.unit.records.samples import slow_crc32c

U64 = st.integers(0, 2**64 - 1)


@given(st.text())
def test_tag_and_key_hashes_are_the_documented_crcs(text: str) -> None:
    raw = text.encode()
    assert tag_hash(text) == (slow_crc32c(raw) & 0xFFFF or 1)
    assert key_hash(text) == (slow_crc32c(raw) << 32 | zlib.crc32(raw) or 1)


def test_the_hashes_of_known_texts_never_change() -> None:
    assert slow_crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert tag_hash("123456789") == 0x9283
    assert key_hash("123456789") == 0xE3069283_CBF43926
    assert (tag_hash(""), key_hash("")) == (1, 1)
    assert business_hash("123456789") == 15113591299804922862


def test_an_id_hash_is_splitmix64_of_the_producers_and_the_sequence() -> None:
    first = 0xE220_A839_7B1D_CDAF  # what splitmix64 is published to give first from the seed 0
    assert id_hash(MessageId(0, first)) == first
    assert id_hash(MessageId(0, 0)) != id_hash(MessageId(0, 1)) != id_hash(MessageId(1, 0))


@given(U64, U64)
def test_an_id_hash_is_a_u64_and_never_zero(producer_id: int, sequence: int) -> None:
    assert 0 < id_hash(MessageId(producer_id, sequence)) < 2**64


def test_ids_of_one_producer_do_not_collide_and_spread_over_the_low_bits() -> None:
    hashes = [id_hash(MessageId(7, sequence)) for sequence in range(20_000)]
    assert len(set(hashes)) == len(hashes)
    buckets = [0] * 16
    for value in hashes:
        buckets[value & 15] += 1
    assert min(buckets) > 1_100
    assert max(buckets) < 1_400


def test_business_ids_that_differ_in_one_digit_spread_over_queues() -> None:
    for queues in (3, 4, 7, 8):
        counts = [0] * queues
        for number in range(4_000):
            counts[business_hash(f"customer-{number}") % queues] += 1
        assert min(counts) > 0.85 * 4_000 / queues


def test_keys_that_collide_in_one_half_differ_in_the_other() -> None:
    rng = random.Random(3)
    by_high: dict[int, str] = {}
    pairs = 0
    for key in {rng.randbytes(8).hex() for _ in range(250_000)}:
        high = key_hash(key) >> 32
        if high in by_high:
            pairs += 1
            assert key_hash(by_high[high]) != key_hash(key)
        by_high[high] = key
    assert pairs


@given(st.integers(0, 40).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1)))
def test_the_hashes_of_many_keys_are_those_of_each(keys: list[bytes]) -> None:
    wanted = [crc32c(key) << 32 | zlib.crc32(key) for key in keys]
    assert key_hashes(b"".join(keys), len(keys)).tolist() == wanted
