"""Connections to servers, and one GET on an open one: the request as bytes, and the head of its answer.

Responses of the usual form (200 or 206 with a length) are parsed here, because http.client parses each head as an
e-mail message, a third of the CPU time of a request. All others are left to http.client from their first byte on.

Invariant: no byte after a response is read from the connection, so it can be reused.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import struct
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_HEAD = 16 << 10
_IDLE_SECONDS = 50.0
_USUAL = {b"200", b"206"}
_ONCE = {"content-length", "content-range", "transfer-encoding", "etag"}
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Connections:
    """HTTP connections of one process: idle ones by scheme and server, and new ones, by a proxy if one is set."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[tuple[float, http.client.HTTPConnection]]] = {}
        self._ways: dict[tuple[str, str], tuple[str, Any]] = {}
        self._context: ssl.SSLContext | None = None

    def take(
        self, scheme: str, place: str, silence: float
    ) -> tuple[http.client.HTTPConnection, bool, bool, dict[str, str]]:
        """Return a connection, whether it is new, whether it asks by full URL (a proxy does), and headers for that."""
        try:
            host, proxy = self._ways[scheme, place]
        except KeyError:
            host = urlsplit(f"//{place}").hostname or ""
            host, proxy = self._ways[scheme, place] = host, _proxy_for(scheme, host)
        absolute = proxy is not None and scheme == "http"
        more = {} if proxy is None else _proxy_headers(proxy)
        idle = self._idle.get((scheme, place), [])
        while idle:
            try:
                since, connection = idle.pop()  # no lock: the threads would queue for it
            except IndexError:
                break
            if time.monotonic() - since < _IDLE_SECONDS and connection.sock is not None:
                if connection.timeout != silence:
                    allow_silence(connection, silence)
                return connection, False, absolute, more if absolute else {}
            connection.close()
        by = place if proxy is None else f"{proxy.hostname}:{proxy.port or 80}"
        if scheme == "http":
            return http.client.HTTPConnection(by), True, absolute, more
        if self._context is None:
            names = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
            bundle = next((os.environ[name] for name in names if os.environ.get(name)), None)
            self._context = ssl.create_default_context(cafile=bundle)
        secured = http.client.HTTPSConnection(by, context=self._context)
        if proxy is not None:
            secured.set_tunnel(host, urlsplit(f"//{place}").port or 443, headers=more)
        return secured, True, False, {}

    def keep(self, url: str, connection: http.client.HTTPConnection) -> None:
        """Keep a connection to the server of a URL, all of whose last answer has been read."""
        self._idle.setdefault(place_of(url), []).append((time.monotonic(), connection))

    def close(self) -> None:
        """Close those that are idle."""
        for connections in self._idle.values():
            for _, connection in connections:
                connection.close()


def place_of(url: str) -> tuple[str, str]:
    """Return scheme and server of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _proxy_for(scheme: str, host: str) -> Any:
    """Return the proxy of the environment (`https_proxy`, `no_proxy`, …) for a host, if there is one."""
    url = urllib.request.getproxies_environment().get(scheme)
    if not url or urllib.request.proxy_bypass(host):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def _proxy_headers(proxy: Any) -> dict[str, str]:
    if not proxy.username:
        return {}
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(secret.encode()).decode()}"}


def allow_silence(connection: http.client.HTTPConnection, seconds: float) -> None:
    """Have reads and writes of an open connection fail with TimeoutError after so many seconds without a byte.

    By the kernel if possible: Python's own time-outs cost a poll(2) for each read, and forbid to read all of a body by
    one call.
    """
    sock: socket.socket = connection.sock
    connection.timeout = seconds
    if type(sock) is not socket.socket or not sys.platform.startswith("linux"):
        sock.settimeout(seconds)
        return
    sock.settimeout(None)
    whole, part = divmod(seconds, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), max(1, int(part * 1e6))))


def _received(sock: socket.socket, view: memoryview, *, all_of_it: bool = False) -> int:
    """Fill a buffer with what comes; return how many bytes, 0 at the end."""
    try:
        if all_of_it and type(sock) is socket.socket and sock.gettimeout() is None:
            return sock.recv_into(view, 0, socket.MSG_WAITALL)
        return sock.recv_into(view)
    except BlockingIOError:
        raise TimeoutError("timed out") from None


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
            count = _received(self._sock, view, all_of_it=True)
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
        count = _received(sock, view[got:])
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
            return _received(self._sock, view)
        view[:count] = self._seen[:count]
        self._seen = self._seen[count:]
        return count
