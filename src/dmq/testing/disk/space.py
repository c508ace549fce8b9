"""What the files of a memory disk take, and how much it has."""

from __future__ import annotations

from dmq.testing.disk.nodes import FileNode

__all__ = ["Space"]


class Space:
    """What a disk has and what is taken of it, in bytes; a file takes its size, until no name and no handle is left."""

    __slots__ = ("capacity_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int | None, used_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = used_bytes

    def lacking(self, growth: int) -> int:
        """How many of `growth` more bytes do not fit."""
        if growth <= 0 or self.capacity_bytes is None:
            return 0
        return min(growth, max(0, self.used_bytes + growth - self.capacity_bytes))

    def unlinked(self, node: FileNode) -> None:
        node.links -= 1
        if not node.links and not node.handles:
            self.used_bytes -= len(node.data)

    def closed(self, node: FileNode) -> None:
        node.handles -= 1
        if not node.links and not node.handles:
            self.used_bytes -= len(node.data)
