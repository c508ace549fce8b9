"""The departure: makes the directory of a shard's member that of a broker by itself, while no broker runs on it.

What always holds: everything in the journal stays, committed or not; an epoch is begun that no shard has, so that what
is written from then on can never be taken for the shard's if the directory should join it again.
"""

from __future__ import annotations

from typing import NamedTuple

from dmq.errors import InvalidSettings
from dmq.settings import StoreSettings
from dmq.storage.files import Files
from dmq.storage.replica import Replica
from dmq.storage.store import Leading, MessageStore
from dmq.storage.upkeep.identity import FORMAT, RECORD, Identity, Membership, read_identity, write_identity

__all__ = ["Departure", "depart"]


class Departure(NamedTuple):
    """What left.

    Attributes:
        member: as what the directory belonged to its shard.
        committed: up to where of its journal it knew that it was committed.
        end: where its journal ended.
    """

    member: Membership
    committed: int
    end: int


def depart(files: Files, settings: StoreSettings | None = None) -> Departure:
    """
    Raises:
        InvalidSettings: the directory belongs to no shard, or cannot be read.
        DirectoryInUse: a broker runs on it.
        StorageError, WrongFormat: it cannot be used.
    """
    try:
        identity = read_identity(files)
    except ValueError as error:
        raise InvalidSettings(f"{files.describe('STORE')} cannot be used, {error}: restore it first") from error
    if identity is None or identity.member is None:
        raise InvalidSettings(f"{files.describe('')} belongs to no shard: start a broker on it without --registry")
    replica = Replica(files, settings, new_life=False)
    try:
        if replica.flushed < replica.end:
            replica.flush()
        left = Departure(replica.membership, replica.applied, replica.end)
        epoch = 1 if replica.last is None else replica.last.epoch + 1
        store = MessageStore(Leading(replica, epoch), settings)
    except BaseException:
        replica.close()
        raise
    try:
        store.flush()
        store.confirm_replicated(store.queries.end)
    finally:
        store.close()
    files.lock()
    try:
        write_identity(files, Identity(FORMAT, identity.journal_id))
        if files.exists(RECORD):
            files.unlink(RECORD)
    finally:
        files.unlock()
    return left
