"""Compression happens where it pays, and expanding never exceeds its bound."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import RecordCorrupt
from dmq.model import Message
from dmq.records import (
    Attributes,
    Compressor,
    EncodeOptions,
    RecordView,
    decompress,
    encode_attributes,
    encode_batch,
    layout,
)
from dmq.records import compression as module
from dmq.records.builder import build_record, record_head
from tests.unit.records.samples import noise

LIMIT = 1 << 20


class CountingCompressor(Compressor):
    """Counts how often it really runs a codec."""

    tries = 0

    def _run(self, codec: int, body: bytes) -> tuple[int, bytes]:
        self.tries += 1
        return super()._run(codec, body)


@given(st.binary(min_size=101, max_size=2000), st.integers(1, 40), st.sampled_from(["auto", "lz4", "zstd"]))
def test_a_compressed_body_expands_to_itself(piece: bytes, times: int, mode: Any) -> None:
    """J-08."""
    body = piece * times
    codec, data = Compressor(mode).compress("t", body)
    if codec:
        assert len(data) < len(body) * 0.9
        assert decompress(codec, len(body), data, len(body)) == body
    else:
        assert data is body


def test_bodies_up_to_100_bytes_are_left_alone() -> None:
    """J-08."""
    compressor = CountingCompressor("lz4")
    assert compressor.compress("t", bytes(100)) == (0, bytes(100))
    assert compressor.tries == 0
    assert compressor.compress("t", bytes(101))[0] == module.CODEC_LZ4
    bodies = [bytes(100)] * 500
    assert compressor.compress_together("t", bodies, LIMIT) == []
    (run,) = compressor.compress_together("t", [*bodies, *[bytes(101)] * 500], LIMIT)
    assert [*run.indexes] == [*range(500, 1000)]


def test_a_body_that_goes_alone_is_compressed_from_4_kib_on() -> None:
    """J-08."""
    compressor = Compressor()
    assert compressor.compress("t", bytes(4095))[0] == module.CODEC_NONE
    assert compressor.compress("t", bytes(4096))[0] == module.CODEC_ZSTD


def test_bodies_of_more_than_512_bytes_on_average_are_compressed_together_only_if_asked_for() -> None:
    """J-08."""
    bodies = [b"ab" * 300] * 100
    assert Compressor().compress_together("t", bodies, LIMIT) == []
    assert Compressor("lz4").compress_together("t", bodies, LIMIT)
    assert Compressor().compress_together("t", [b"ab" * 250] * 100, LIMIT)


def test_large_bodies_are_not_compressed_together_with_others() -> None:
    """J-08."""
    bodies = [bytes(200)] * 100 + [bytes(32 * 1024 + 1)] + [bytes(200)]
    (run,) = Compressor().compress_together("t", bodies, LIMIT)
    assert [*run.indexes] == [*range(100), 101]
    (run,) = Compressor().compress_together("t", [bytes(200)] * 100 + [bytes(600)], 500)
    assert [*run.indexes] == [*range(100)], "no body over the broker's limit"


def test_what_does_not_pay_is_tried_ever_more_rarely_but_never_given_up() -> None:
    """J-08."""
    compressor = CountingCompressor()
    tries = []
    for seed in range(20_000):
        before = compressor.tries
        assert compressor.compress("t", noise(5_000, seed % 7))[0] == 0
        if compressor.tries > before:
            tries.append(seed)
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert len(tries) < 20
    assert gaps == sorted(gaps)
    assert gaps[-1] == 4097


def test_what_begins_to_pay_is_compressed_again() -> None:
    """J-08."""
    compressor = Compressor()
    for seed in range(2_000):
        compressor.compress("t", noise(5_000, seed % 7))
    kept = [compressor.compress("t", b"ab" * 2_500)[0] for _ in range(20_000)]
    assert all(kept[-1_000:])


def test_one_topic_and_one_size_say_nothing_about_another() -> None:
    """J-08."""
    compressor = CountingCompressor()
    for seed in range(100):
        compressor.compress("noise", noise(5_000, seed % 7))
    before = compressor.tries
    assert compressor.compress("text", b"ab" * 2_500)[0]
    assert compressor.compress("noise", b"ab" * 50_000)[0]
    assert compressor.tries == before + 2


def test_what_a_compressor_remembers_is_bounded() -> None:
    compressor = Compressor()
    for number in range(3_000):
        compressor.compress(f"topic-{number}", bytes(5_000))
    assert len(compressor._estimates) == 1_024


@given(st.lists(st.integers(0, 300), max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_batch_is_compressed_as_its_bodies_one_by_one_would_be(sizes: list[int], noisy: list[bool]) -> None:
    """J-08."""
    bodies = [noise(size, size) if loud else bytes(size) for size, loud in zip(sizes, noisy, strict=False)]
    one, many = Compressor(), Compressor()
    for _ in range(3):
        alone = [one.compress("t", body) for body in bodies]
        together = many.compress_many("t", bodies, body_bytes_max=LIMIT)
        assert (together or [(0, body) for body in bodies]) == alone


def test_a_body_over_the_limit_is_compressed_whatever_was_learnt_and_kept_for_any_gain() -> None:
    """J-08."""
    body = noise(5_000) + bytes(300)
    compressor = Compressor()
    for seed in range(50):
        compressor.compress("t", noise(5_000, seed % 7))
    assert compressor.compress("t", body)[0] == 0
    codec, data = compressor.compress("t", body, must_shrink=True)
    assert codec
    assert len(data) < len(body)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="use auto, none, lz4 or zstd"):
        Compressor("gzip")  # type: ignore[arg-type]


LZ4 = lz4.block.compress(bytes(10_000), store_size=False)
ZSTD = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10_000))
SIZED = zstandard.ZstdCompressor().compress(bytes(10_000))


@pytest.mark.parametrize(
    ("codec", "raw_size", "data"),
    [
        (0, 10, b"0123456789"),
        (3, 10_000, ZSTD),
        (1, 0, LZ4),
        (1, LIMIT + 1, LZ4),
        (1, LIMIT, LZ4),  # 10,000 bytes cannot come to a mebibyte from so few
        (1, 9_999, LZ4),
        (1, 10_001, LZ4),
        (1, 10_000, LZ4[:-1]),
        (1, 10_000, b""),
        (2, 0, ZSTD),
        (2, LIMIT + 1, ZSTD),
        (2, 9_999, ZSTD),
        (2, 10_001, ZSTD),
        (2, 9_999, SIZED),
        (2, 10_000, ZSTD[:-1]),
        (2, 10_000, ZSTD + b"x"),
        (2, 10_000, b""),
        (2, 10_000, b"no frame"),
    ],
)
def test_bombs_and_damaged_bodies_are_corrupt(codec: int, raw_size: int, data: bytes) -> None:
    """J-08."""
    with pytest.raises(RecordCorrupt):
        decompress(codec, raw_size, data, LIMIT)


@given(st.sampled_from([(1, LZ4), (2, ZSTD), (2, SIZED)]), st.data())
def test_damaged_bodies_expand_to_the_declared_size_or_are_corrupt(
    sample: tuple[int, bytes], data: st.DataObject
) -> None:
    """J-08."""
    codec, raw = sample[0], bytearray(sample[1])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert len(decompress(codec, 10_000, bytes(raw), LIMIT)) == 10_000
    except RecordCorrupt:
        pass


def test_a_frame_that_claims_a_huge_size_is_refused_before_anything_is_allocated() -> None:
    """J-08."""
    frame = bytes.fromhex("28b52ffd") + bytes((0b1110_0000,)) + (1 << 40).to_bytes(8, "little") + bytes(3)
    with pytest.raises(RecordCorrupt, match="differs from the size"):
        decompress(2, 10_000, frame, LIMIT)


def test_a_record_that_is_marked_compressed_but_does_not_say_how_is_corrupt() -> None:
    """J-08."""
    parts: dict[str, Any] = {
        "head": record_head(layout.COMPRESSED, 0, 0),
        "sent_at_ms": 0,
        "body": LZ4,
        "body_crc": 0,
        "names": bytes(3),
    }
    silent = build_record(attributes=b"", **parts)
    with pytest.raises(RecordCorrupt, match="codec 0"):
        _ = RecordView(silent).body
    told = encode_attributes(Attributes(codec=1, raw_size=10_000))
    spoken = RecordView(build_record(attributes=told, **parts))
    assert spoken.body == bytes(10_000)
    with pytest.raises(RecordCorrupt, match="9999 are allowed"):
        spoken.body_within(9_999)


def test_compression_shrinks_a_batch_of_text_and_leaves_noise_as_it_is() -> None:
    """J-08."""
    text = [Message(b'{"state": "paid", "state_before": "paid"}' * 10)] * 40
    loud = [Message(noise(800, seed)) for seed in range(20)]
    for messages, smaller in ((text, True), (loud, False)):
        plain = encode_batch("t", "a", messages, sent_at_ms=0)
        packed = encode_batch(
            "t", "a", messages, sent_at_ms=0, options=EncodeOptions(compressor=Compressor(), blocks=True)
        )
        assert (len(packed.data) < 0.5 * len(plain.data)) is smaller
        assert smaller or packed.data == plain.data
