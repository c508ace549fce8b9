"""Who is it that speaks to us, if it does not speak DMQ? For error messages only.

What always holds: nothing is decided here. The parser has refused the bytes already; this finds the sentence that saves
somebody an hour: a browser on the broker's port, a client with TLS against a broker without, a port mixed up.
"""

from __future__ import annotations

from typing import Final

__all__ = ["describe_stranger"]

_HTTP: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"TRAC", b"PRI ", b"HTTP")
_STARTS: Final = (
    (b"SSH-", "an SSH client", "check the port"),
    (b"AMQP", "an AMQP client", "check the port, or use a DMQ client"),
    (b"PROXY", "a proxy that sends the PROXY protocol", "turn that off for this port"),
    (b"\r\n\r\n\x00\r\nQUIT", "a proxy that sends the PROXY protocol", "turn that off for this port"),
    (b"CONN", "a STOMP client or an HTTP proxy", "use the STOMP port, 61613 by default"),
    (b"STOM", "a STOMP client", "use the STOMP port, 61613 by default"),
    (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", "a PostgreSQL client", "check the port"),
)
_SHOWN_BYTES: Final = 16


def describe_stranger(head: bytes, wire_format: int) -> str:
    """One sentence on what these bytes, the first that were not a frame, seem to be, and what to do.

    Parameters:
        head: at least four bytes, and as many more as there are, up to some dozens.
        wire_format: the byte that stands behind the length of a DMQ frame.
    """
    who, advice = _guess(head, wire_format)
    return f"this is not the DMQ protocol; {who} seems to be speaking ({_shown(head)}): {advice}"


def _guess(head: bytes, wire_format: int) -> tuple[str, str]:
    if head[:4] in _HTTP:
        return "an HTTP client", "the console and the metrics have ports of their own, 9680 and 9690 by default"
    if head[0] == 0x16 and head[1] == 0x03:
        return "a TLS client", "connect without TLS, or to the port that has it"
    for start, who, advice in _STARTS:
        if head.startswith(start):
            return who, advice
    if head[0] == 0xFF and head[1] >= 0xF0:
        return "a telnet client", "the telnet port is 9612 by default"
    if head[0] == 0x10 and b"MQ" in head:
        return "an MQTT client", "check the port, or use a DMQ client"
    if head[0] in b"*$+:-" and head[1:2].isdigit():
        return "a Redis client", "check the port"
    if len(head) > 4 and head[4] & 0xF0 == wire_format & 0xF0:
        return "a DMQ peer with a damaged or far too large frame", "check its frame limit, and what stands between us"
    if all(byte in b"\t\r\n" or 0x20 <= byte < 0x7F for byte in head):
        return "somebody typing text", "the telnet port is 9612 by default"
    if head[0] == 0 and len(head) > 4 and head[4] == 0:
        return "a Kafka or RocketMQ client", "use a DMQ client, or the port of the gateway"
    return "something unknown", "check the port and the client"


def _shown(head: bytes) -> str:
    shown = head[:_SHOWN_BYTES]
    return f"it began with {shown!r}" + (" …" if len(head) > _SHOWN_BYTES else "")
