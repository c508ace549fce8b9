"""Coverage-guided fuzzing of everything that reads what a stranger sent: `python -m tests.fault.fuzz_parser`.

Run by ./scripts/soak, which installs atheris; arguments go to libFuzzer. Whatever comes, nothing but an error of DMQ's
own tree is raised, and memory follows what was received.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports():
    from dmq.errors import DMQError
    from dmq.protocol import FRAME_BYTES_MAX, Command, FrameParser, decode_request, decode_response, unpack_batch
    from dmq.protocol.producing import Produce
    from dmq.records import verify_batch
    from tests.unit.protocol.samples import examples


def read(data: bytes) -> None:
    """What a broker does with bytes, short of doing what they ask."""
    parser = FrameParser(FRAME_BYTES_MAX)
    try:
        frames = parser.feed(data[1:]) if data[:1] != b"\x01" else [*parser.feed(data[1:9]), *parser.feed(data[9:])]
    except DMQError:
        return
    for frame in frames:
        for decode in (decode_request, decode_response):
            try:
                header = decode(frame)
                if frame.command == Command.PRODUCE and isinstance(header, Produce):
                    batch = unpack_batch(frame.body, header.count, header.keys)
                    verify_batch(batch.data, batch.lengths, header.topic, body_bytes_max=1 << 20, flags_allowed=0)
            except DMQError:
                pass


def main() -> None:
    for frame in examples().values():
        read(b"\0" + frame)
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
