"""Headers of SHARD_MEMBER: what one member's data directory says of itself.

Any member answers on the port of clients, also while it cannot join its shard because the registry is an old copy or
lacks the record: it is from these answers that a registry is built anew.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dmq.protocol.header import U32, Amount, Header, Name, OptionalName

__all__ = ["MemberQuery", "MemberState"]

RECORD_BYTES_MAX = 128 << 10


class MemberQuery(Header, frozen=True):
    """Ask a member for its own state."""


class MemberState(Header, frozen=True):
    """A member, by its own directory and process. Ids are 16 hexadecimal digits."""

    broker: OptionalName
    cluster: Name
    shard: Name
    journal: Name
    replica: Name
    life: Amount
    revision: Amount  # the highest one of the record that it has seen
    last_epoch: U32
    end: Amount
    committed: Amount
    is_doubtful: bool = False
    role: OptionalName = ""
    right: OptionalName = ""  # why it may serve if it leads
    mark: OptionalName = ""  # of this start; "" while it has not joined
    record: Annotated[bytes, Meta(max_length=RECORD_BYTES_MAX)] = b""  # the newest one that it has seen, as JSON
