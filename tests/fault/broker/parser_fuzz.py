"""Coverage-guided fuzzing of every parser of foreign bytes: `python -m tests.fault.broker.parser_fuzz CORPUS`.

Run by ./scripts/soak, which installs atheris; arguments go to libFuzzer. Whatever comes, nothing but an error of DMQ's
own tree is raised, and memory follows what was received.

What always holds: only DMQ is instrumented, which takes seconds; and the corpus starts with whole frames of every
command, because what is behind the head of a frame, and behind a MessagePack decoder, is not found by chance.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import atheris
import hypothesis
from hypothesis.configuration import set_hypothesis_home_dir

with atheris.instrument_imports(include=["dmq"]):
    from dmq.errors import DMQError
    from dmq.protocol import (
        FRAME_BYTES_MAX,
        SPECS,
        Frame,
        FrameParser,
        decode_request,
        decode_response,
        unpack_batch,
        unpack_records,
    )
    from dmq.protocol.consume import Lease, PullReply, Push
    from dmq.protocol.produce import Produce
    from dmq.records import batch_rules, check_batch, iter_records

from tests.unit.protocol.samples import batch_of, examples, frames, produce_frame

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 10 * len(SPECS)
SEED_BYTES_MAX = 4096
BODY_BYTES_MAX = 1 << 20

WHOLE, IN_TWO, WITH_LENGTH = 0, 1, 2
"""The first byte of an input: the rest is what arrives, at once or in two pieces, or is a frame but for its length."""


def read(data: bytes) -> None:
    """What a broker and a client do with bytes, short of doing what they ask."""
    way, rest = data[:1], data[1:]
    pieces = [rest]
    if way == bytes([IN_TWO]):
        pieces = [rest[:8], rest[8:]]
    elif way == bytes([WITH_LENGTH]):
        pieces = [struct.pack(">I", len(rest)), rest]
    parser = FrameParser(FRAME_BYTES_MAX)
    try:
        arrived = [frame for piece in pieces for frame in parser.feed(piece)]
    except DMQError:
        return
    for frame in arrived:
        for look in (_serve, _take):
            try:
                look(frame)
            except DMQError:
                pass


def _serve(frame: Frame) -> None:
    header = decode_request(frame)
    if isinstance(header, Produce):
        batch = unpack_batch(frame.body, header.count, header.keys)
        rules = batch_rules(header.topic, body_bytes_max=BODY_BYTES_MAX, flags_allowed=1)
        check_batch(batch.data, batch.lengths, rules)
    elif isinstance(header, Push):
        _open(frame, header.leases)


def _take(frame: Frame) -> None:
    header = decode_response(frame)
    if isinstance(header, PullReply):
        _open(frame, header.leases)


def _open(frame: Frame, leases: Sequence[Lease]) -> None:
    """Look at everything that messages have."""
    _, records = unpack_records(frame.body, sum(lease.count for lease in leases))
    for record in iter_records(records):
        record.verify()
        record.names()
        record.attributes  # noqa: B018  decoded here
        record.body_within(BODY_BYTES_MAX)


def seeds() -> Iterator[bytes]:
    """Frames of every command, and the documented ones, with and without their length."""
    found = [*examples().values(), *(produce_frame(batch_of(count, keys=bool(count % 2))) for count in (1, 2, 40, 41))]

    # However busy the machine is: none of these limits says anything about what is fuzzed.
    @hypothesis.settings(
        max_examples=SEEDS,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(frames())
    def collect(frame: bytes) -> None:
        found.append(frame)

    collect()
    for frame in found:
        if len(frame) <= SEED_BYTES_MAX:
            yield bytes([WHOLE]) + frame
            yield bytes([WITH_LENGTH]) + frame[4:]


def main() -> None:
    set_hypothesis_home_dir(ROOT / ".venv" / "cache" / "hypothesis")
    for folder in filter(Path.is_dir, map(Path, sys.argv[1:])):
        for seed in seeds():
            read(seed)
            (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
