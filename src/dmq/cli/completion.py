"""Names that the shell completes: topics, groups, shards and members of the broker, and contexts.

What always holds: a broker that does not answer within half a second completes nothing, and nothing is said about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["complete", "completes"]

_SECONDS = 0.5
_SHOWN_MAX = 200
_KINDS = ("TOPIC", "GROUP", "SHARD", "MEMBER", "CONTEXT")


def completes(metavar: str | None) -> bool:
    """Whether there are names for what the help calls so."""
    return metavar in _KINDS


def complete(metavar: str, begun: str, params: Mapping[str, Any]) -> list[str]:
    """The names that begin so.

    Parameters:
        params: what stands on the command line already.
    """
    try:
        names = _contexts() if metavar == "CONTEXT" else _asked(metavar, begun, params)
    except Exception:  # whatever it is, it must not fill a person's line
        return []
    return sorted(name for name in names if name.startswith(begun))[:_SHOWN_MAX]


def _contexts() -> list[str]:
    from dmq.cli.contexts import Contexts

    return [*Contexts().urls]


def _asked(metavar: str, begun: str, params: Mapping[str, Any]) -> list[str]:
    from dmq.cli.options import APP, DEFAULT_URL
    from dmq.client.client import connect

    url, any_member = params.get("url") or DEFAULT_URL, metavar in ("SHARD", "MEMBER")
    with connect(url, app=APP, timeout=_SECONDS, reconnect=False, any_member=any_member) as client:
        client.admin.timeout = _SECONDS
        if metavar == "TOPIC":
            return [topic.name for topic in client.admin.topics(begun)]
        if metavar == "GROUP":
            return [group.name for group in client.admin.groups()]
        shards = client.admin.shards()
        if metavar == "SHARD":
            return [shard.name for shard in shards]
        return [member.name for shard in shards for member in shard.members]
