"""Where things stand in the registry of a cluster.

    /dmq                            the root, as the registry's URL names it
    /dmq/cluster                    which cluster this is
    /dmq/node/<broker>              ephemeral: a broker that runs
    /dmq/shard/<shard>              the record of a shard: members, leader, epoch, in-sync set
    /dmq/shard/<shard>/leader       ephemeral: the leader holds it
    /dmq/topic/<topic>              a topic: incarnation, settings, slots
    /dmq/topic/<topic>/<client>     a group that may consume it
    /dmq/limit/<app>                limits of an app
    /dmq/kv/<namespace>/<key>       the key-value space
    /dmq/change                     touched by each write of metadata: one watch, one read

What always holds: a name becomes exactly one part of a path, and `name_of` gives the name back. Names of topics,
shards, brokers and groups stand as they are; keys may hold any character, and those that a path does not take are
percent-encoded.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

from dmq.errors import InvalidName
from dmq.registry.registry import Create, check_path

__all__ = ["DEFAULT_ROOT", "Paths", "name_of"]

DEFAULT_ROOT: Final = "/dmq"
_SAFE: Final = "!$&'()*+,:;=@ "  # beside letters, digits and _.-~


class Paths:
    """The paths below one root."""

    def __init__(self, root: str = DEFAULT_ROOT) -> None:
        if check_path(root) == "/":
            raise InvalidName("a registry holds a cluster below a root of its own: name one, as /dmq", path=root)
        self.root = root
        self.cluster = f"{root}/cluster"
        self.nodes = f"{root}/node"
        self.shards = f"{root}/shard"
        self.topics = f"{root}/topic"
        self.limits = f"{root}/limit"
        self.key_values = f"{root}/kv"
        self.change = f"{root}/change"

    def node(self, broker: str) -> str:
        return _join(self.nodes, broker)

    def shard(self, shard: str) -> str:
        return _join(self.shards, shard)

    def leader(self, shard: str) -> str:
        return f"{self.shard(shard)}/leader"

    def topic(self, topic: str) -> str:
        return _join(self.topics, topic)

    def consumer(self, topic: str, client: str) -> str:
        """A group of a topic."""
        return _join(self.topics, topic, client)

    def limit(self, app: str) -> str:
        return _join(self.limits, app)

    def namespace(self, namespace: str) -> str:
        return _join(self.key_values, namespace)

    def key_value(self, namespace: str, key: str) -> str:
        return _join(self.key_values, namespace, key)

    def folders(self) -> list[Create]:
        """The entries that hold others, and nothing themselves, in the order in which they can be created."""
        parts = self.root.split("/")[1:]
        above = ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]
        below = [self.nodes, self.shards, self.topics, self.limits, self.key_values]
        return [Create(path, b"") for path in above + below]


def name_of(path: str) -> str:
    """The name that the last part of a path stands for."""
    return unquote(path.rpartition("/")[2])


def _join(folder: str, *names: str) -> str:
    """
    Raises:
        InvalidName: a name is empty, or the path becomes too long.
    """
    return check_path("/".join((folder, *map(_part, names))))


def _part(name: str) -> str:
    part = quote(name, safe=_SAFE, errors="strict")
    # A part of dots would be another path.
    return part.replace(".", "%2E") if part in (".", "..") else part
