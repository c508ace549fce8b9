"""A multi: how ZooKeeper carries out a write, and why it refuses one.

What always holds: operations go in their order, in one request; an error that is returned here means that nothing was
written, unless it is `WriteUnknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kazoo import exceptions
from kazoo.client import KazooClient

from dmq.errors import DMQError, InvalidName, RegistryDown, WriteUnknown
from dmq.registry.registry import Check, Create, Delete, Operation, Put, Reason, conflict, parent_of

__all__ = ["failure", "refusal", "send_multi", "unanswered", "version_of"]

_LARGE_BYTES: Final = 16 << 10  # a server whose jute.maxbuffer is below that would serve nobody


def send_multi(kazoo: KazooClient, operations: Sequence[Operation]) -> Any:
    """Send a multi; the result comes later."""
    transaction = kazoo.transaction()
    for operation in operations:
        match operation:
            case Check(path, version):
                transaction.check(path, _any(version))
            case Create(path, value, ephemeral):
                transaction.create(path, value, ephemeral=ephemeral)
            case Put(path, value, version):
                transaction.set_data(path, value, _any(version))
            case Delete(path, version):
                transaction.delete(path, _any(version))
    return transaction.commit_async()


def _any(version: int | None) -> int:
    return -1 if version is None else version


def version_of(operation: Operation, result: Any) -> int | None:
    """The version that an operation made."""
    if isinstance(operation, Create):
        return 0
    return int(result.version) if isinstance(operation, Put) else None


def unanswered(operations: Sequence[Operation]) -> WriteUnknown:
    """The error of a write that was sent and not answered."""
    size = sum(len(operation.value) for operation in operations if isinstance(operation, Create | Put))
    hint = (
        f" It has {size} bytes: if that comes again, the servers' jute.maxbuffer is too small for it; set it to 1 MiB "
        "or more on all of them."
    )
    return WriteUnknown(
        "ZooKeeper did not answer a write, which may have been carried out, or still will be: settle it by another "
        f"write that is answered, and then read.{hint if size >= _LARGE_BYTES else ''}"
    )


def refusal(index: int, operation: Operation, error: Exception, user: str | None) -> DMQError:
    """Why an operation, and with it the write, was not carried out."""
    path = operation.path
    match error:
        case exceptions.NodeExistsError():
            return conflict(index, path, Reason.EXISTS)
        case exceptions.NoNodeError():
            return conflict(index, parent_of(path) if isinstance(operation, Create) else path, Reason.ABSENT)
        case exceptions.BadVersionError():
            return conflict(index, path, Reason.VERSION)
        case exceptions.NotEmptyError():
            return conflict(index, path, Reason.CHILDREN)
        case exceptions.NoChildrenForEphemeralsError():
            return conflict(index, parent_of(path), Reason.EPHEMERAL)
    # Creating and deleting needs a right to the parent.
    asked = parent_of(path) if isinstance(operation, Create | Delete) else path
    return failure(error, asked, user) or RegistryDown(f"nothing was written: ZooKeeper refuses {path}: {error!r}")


def failure(error: Exception, path: str, user: str | None) -> DMQError | None:
    """The error that ZooKeeper answered, if it means that nothing was done.

    Parameters:
        user: as whom this client has come; None if it gave no credentials.
    """
    match error:
        case exceptions.NoAuthError() | exceptions.InvalidACLError():
            return RegistryDown(_no_right(path, user), path=path)
        case exceptions.AuthFailedError():
            return RegistryDown(
                "ZooKeeper takes no requests without credentials of the kind it is set to (enforce.auth.schemes): give "
                "zk://user:password@… for digest, or have it take those",
                path=path,
            )
        case exceptions.BadArgumentsError():
            return InvalidName(
                f"ZooKeeper takes no path {path!r}: use letters, digits and signs of the basic plane of Unicode",
                path=path,
            )
        case exceptions.QuotaExceededError():
            return RegistryDown(
                f"a quota of ZooKeeper is used up at {path}: look with 'listquota' in zkCli.sh, and raise it", path=path
            )
        case exceptions.SessionMovedError():
            return RegistryDown("the session has moved to another ZooKeeper server: ask again")
        case exceptions.ThrottledOpError():
            return RegistryDown("ZooKeeper has too much to do and put a request off: ask again")
        case exceptions.NotReadOnlyCallError():
            return RegistryDown(
                "this ZooKeeper server serves reads only, since it has lost its quorum: start the others"
            )
    return None


def _no_right(path: str, user: str | None) -> str:
    look = f"look with 'getAcl {path}' in zkCli.sh"
    if user is None:
        return (
            f"ZooKeeper gives this broker no right to {path}, and it gave no credentials: its ACL is for others; "
            f"{look}, and give those of its user as zk://user:password@host/…, or open the node to all with setAcl"
        )
    return (
        f"ZooKeeper gives this broker no right to {path} as user {user!r}: the password is not the one that the node "
        f"was created with, or its ACL is for others; {look}, and correct the URL, or give read, write, create, delete "
        "and admin to this user with setAcl"
    )
