"""Questions to one member, without a client: a client follows the leader by itself."""

from __future__ import annotations

from dmq.errors import DMQError
from dmq.protocol.commands import Command, decode_response
from dmq.protocol.header import Header
from tests.integration.frame_client import RawClient

__all__ = ["ask"]


def ask(port: int, command: Command, header: Header, body: bytes = b"", *, raises: bool = False) -> Header | None:
    """What a member answers; None if it does not.

    Parameters:
        raises: an error that it answers is raised.
    """
    try:
        client = RawClient(port)
        try:
            answer = decode_response(client.ask(command, header, body))
        finally:
            client.sock.close()
        assert isinstance(answer, Header)
        return answer
    except (OSError, TimeoutError):
        return None
    except DMQError:
        if raises:
            raise
        return None
