"""Send one GET on an open connection and parse the head of the response.

Responses of the usual form (200 or 206 with a length) are parsed here, because http.client parses each head as an
e-mail message, a third of the CPU time of a request. All others are left to http.client from their first byte on.

Invariant: no byte after a response is read from the connection, so it can be reused.
"""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_HEAD = 16 << 10
_USUAL = {b"200", b"206"}
_ONCE = {"content-length", "content-range", "transfer-encoding", "etag"}
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Headers(dict[str, str]):
    """Headers by their names in lower case."""

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        """Return a header; the case of its name does not matter."""
        return dict.get(self, name.lower(), default)


class Answer:
    """A response with a body of known length: the part of `http.client.HTTPResponse` that is used here."""

    def __init__(self, sock: socket.socket, status: int, headers: Headers, length: int, rest: memoryview) -> None:
        self.status = status
        self.reason = ""
        self.headers = headers
        self.length = length
        self.will_close = headers.get("connection").lower() == "close"
        self._sock = sock
        self._rest = rest[:length]
        self._left = length

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer with the bytes that have arrived; return their number, 0 at the end."""
        view = memoryview(buffer)[: self._left]
        count = len(self._rest)
        if count:
            count = min(count, len(view))
            view[:count] = self._rest[:count]
            self._rest = self._rest[count:]
        elif view:
            count = self._sock.recv_into(view)
        self._left -= count
        return count

    def read(self, most: int | None = None) -> bytes:
        """Return the rest of the body, at most `most` bytes; fewer if the connection ends."""
        data = bytearray(self._left if most is None else min(most, self._left))
        got = 0
        while got < len(data) and (count := self.readinto(memoryview(data)[got:])):
            got += count
        return bytes(data[:got])

    def isclosed(self) -> bool:
        """Return whether the whole body was read."""
        return self._left == 0

    def close(self) -> None:
        """Do nothing: a caller that has not read everything closes the connection."""


def get(
    connection: http.client.HTTPConnection, scheme: str, place: str, target: str, headers: Mapping[str, str]
) -> Answer | http.client.HTTPResponse:
    """Send a request and read the head of the response.

    Args:
        connection: An open one.
        scheme: `http` or `https`.
        place: Host and port, as in the URL.
        target: Path and query, or the full URL if a proxy is asked.
        headers: Further headers.

    Raises:
        OSError, http.client.HTTPException: The connection breaks, or the response is not HTTP.
        ValueError: A header has a line break.
    """
    lines = [f"GET {target} HTTP/1.1", f"Host: {place.removesuffix(_DEFAULT_PORTS[scheme])}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines).encode("latin-1")
    if head.count(b"\n") != len(lines) - 1:
        raise ValueError(f"the target or a header of a request to {place} contains a line break")
    sock: socket.socket = connection.sock
    sock.sendall(head + b"\r\n\r\n")
    buffer = bytearray(_HEAD)
    view, got, end = memoryview(buffer), 0, -1
    while end < 0 and got < _HEAD:
        count = sock.recv_into(view[got:])
        if not count:
            if got:
                break
            raise http.client.RemoteDisconnected("Remote end closed connection without response")
        end = buffer.find(b"\r\n\r\n", max(0, got - 3), got + count)
        got += count
    answer = _usual(sock, bytes(view[:end]), view[end + 4 : got]) if end >= 0 else None
    if answer is not None:
        return answer
    response = http.client.HTTPResponse(_Replayed(view[:got], sock), method="GET")  # type: ignore[arg-type]
    response.begin()
    return response


def _usual(sock: socket.socket, head: bytes, rest: memoryview) -> Answer | None:
    """Return a response of the usual form, or None."""
    first, *lines = head.split(b"\r\n")
    version, _, status = first.partition(b" ")
    if version != b"HTTP/1.1" or status[:3] not in _USUAL or status[3:4] not in (b" ", b""):
        return None
    headers = Headers()
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name, value = name.lower(), value.strip()
        if not colon or name[:1] in " \t" or (name in headers and name in _ONCE):
            return None
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    length = headers.get("content-length")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
        return None
    return Answer(sock, int(status[:3]), headers, int(length), rest)


class _Replayed:
    """A socket for http.client that gives some bytes again that were already read."""

    def __init__(self, seen: memoryview, sock: socket.socket) -> None:
        self._seen = seen
        self._sock = sock

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a stream that starts with these bytes."""
        return io.BufferedReader(_Stream(self._seen, self._sock))


class _Stream(io.RawIOBase):
    def __init__(self, seen: memoryview, sock: socket.socket) -> None:
        self._seen = seen
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._seen))
        if not count:
            return self._sock.recv_into(view)
        view[:count] = self._seen[:count]
        self._seen = self._seen[count:]
        return count
