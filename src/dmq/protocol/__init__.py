"""The protocol: frames and commands. Bytes in, bytes out; no sockets, no event loop.

`frame` draws the bytes of a frame, writes them and takes them apart (`strangers` guesses who sent something else);
`commands` numbers the commands and turns headers into bytes and back. `header` is the base of the headers, which stand
in `session`, `produce`, `consume`, `read`, `admin`, `dead_letters`, `key_values` and `message_history`, in `cluster`
for name servers, and in `replication` for the members of a shard. `batch` divides bodies into records; `status` joins
statuses and exceptions. docs/internals/protocol.md tells it to a client's author.
"""

from dmq.protocol.batch import Batch, pack_batch, pack_lone, pack_records, place_records, unpack_batch, unpack_records
from dmq.protocol.commands import (
    SPECS,
    Command,
    Spec,
    Way,
    decode_request,
    decode_response,
    error_frame,
    one_way_head,
    request_head,
    response_head,
)
from dmq.protocol.frame import (
    CORRELATION_MAX,
    FRAME_BYTES_CEILING,
    FRAME_BYTES_MAX,
    HEAD_BYTES,
    HEADER_BYTES_MAX,
    HELLO_FRAME_BYTES_MAX,
    WIRE_FORMAT,
    Buffer,
    Flag,
    Frame,
    FrameParser,
    Kind,
    frame_head,
    seal_frame,
)
from dmq.protocol.header import Header
from dmq.protocol.status import CLASSES, ErrorHeader, Status, error_from_status, status_of

__all__ = [
    "CLASSES",
    "CORRELATION_MAX",
    "FRAME_BYTES_CEILING",
    "FRAME_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "HEAD_BYTES",
    "HELLO_FRAME_BYTES_MAX",
    "SPECS",
    "WIRE_FORMAT",
    "Batch",
    "Buffer",
    "Command",
    "ErrorHeader",
    "Flag",
    "Frame",
    "FrameParser",
    "Header",
    "Kind",
    "Spec",
    "Status",
    "Way",
    "decode_request",
    "decode_response",
    "error_frame",
    "error_from_status",
    "frame_head",
    "one_way_head",
    "pack_batch",
    "pack_lone",
    "pack_records",
    "place_records",
    "request_head",
    "response_head",
    "seal_frame",
    "status_of",
    "unpack_batch",
    "unpack_records",
]
