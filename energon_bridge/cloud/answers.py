"""Connections to servers, and one GET on an open one: the request as bytes, and the head of its answer.

Responses of the usual form (200 or 206 with a length) are parsed here: http.client, which parses each head as an e-mail
message, takes twice the CPU time per request of 80 KiB (docs/measured/object-storage.md). All others are left to
http.client from their first byte on. A *server* is host and port here, as a URL has them.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MOST_HEAD_BYTES = 16 << 10
_IDLE_SECONDS = 50.0
"""Servers close idle connections after a minute or more; one that is older is not tried."""
_USUAL = {b"200", b"206"}
_ONCE = {"content-length", "content-range", "transfer-encoding", "etag"}
"""Headers that a response of the usual form has at most once."""
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a server is reached: directly, or by the proxy that the environment names.

    Attributes:
        address: Host and port to connect to.
        tunnel: Host and port for which a proxy is asked to open a tunnel, for HTTPS.
        full_url: Requests name the full URL instead of the path, as proxies of plain HTTP want it.
        headers: For the proxy: of each request, or of the one for a tunnel.
    """

    address: str
    tunnel: tuple[str, int] | None = None
    full_url: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


class Connections:
    """HTTP connections of one process: idle ones by scheme and server, and new ones, by a proxy if one is set."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[tuple[float, http.client.HTTPConnection]]] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self._context: ssl.SSLContext | None = None

    def route(self, scheme: str, server: str) -> Route:
        """Return how a server is reached."""
        route = self._routes.get((scheme, server))
        if route is None:
            route = self._routes[scheme, server] = _route_to(scheme, server)
        return route

    def take(self, scheme: str, server: str, silence: float) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection to a server, and whether it is new: not connected yet."""
        idle = self._idle.get((scheme, server), [])
        while idle:
            try:
                since, connection = idle.pop()  # no lock: it would make threads wait for one another
            except IndexError:
                break
            if time.monotonic() - since < _IDLE_SECONDS and connection.sock is not None:
                if connection.timeout != silence:
                    allow_silence(connection, silence)
                return connection, False
            connection.close()
        route = self.route(scheme, server)
        if scheme == "http":
            return http.client.HTTPConnection(route.address), True
        if self._context is None:
            names = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
            bundle = next((os.environ[name] for name in names if os.environ.get(name)), None)
            self._context = ssl.create_default_context(cafile=bundle)
        secured = http.client.HTTPSConnection(route.address, context=self._context)
        if route.tunnel is not None:
            secured.set_tunnel(*route.tunnel, headers=dict(route.headers))
        return secured, True

    def keep(self, url: str, connection: http.client.HTTPConnection) -> None:
        """Keep a connection to the server of a URL for reuse; its last answer must be read to the end."""
        self._idle.setdefault(server_of(url), []).append((time.monotonic(), connection))

    def close(self) -> None:
        """Close the idle connections."""
        for connections in self._idle.values():
            for _, connection in connections:
                connection.close()


def server_of(url: str) -> tuple[str, str]:
    """Return scheme and server of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _route_to(scheme: str, server: str) -> Route:
    """Return the route to a server by the environment (`https_proxy`, `no_proxy`, …)."""
    parts = urlsplit(f"//{server}")
    host = parts.hostname or ""
    url = urllib.request.getproxies_environment().get(scheme)
    if not url or urllib.request.proxy_bypass(host):
        return Route(address=server)
    proxy = urlsplit(url if "://" in url else f"http://{url}")
    address = f"{proxy.hostname}:{proxy.port or 80}"
    headers = {}
    if proxy.username:
        secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        headers = {"Proxy-Authorization": f"Basic {b64encode(secret.encode()).decode()}"}
    if scheme == "http":
        return Route(address=address, full_url=True, headers=headers)
    return Route(address=address, tunnel=(host, parts.port or 443), headers=headers)


def allow_silence(connection: http.client.HTTPConnection, seconds: float) -> None:
    """Make reads and writes of an open connection raise TimeoutError after some seconds without a byte.

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
    """Read once into a buffer; return the number of bytes, 0 at the end."""
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


class HttpAnswer:
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
    connection: http.client.HTTPConnection, scheme: str, server: str, target: str, headers: Mapping[str, str]
) -> HttpAnswer | http.client.HTTPResponse:
    """Send a request and read the head of the response.

    Args:
        connection: An open one.
        scheme: `http` or `https`.
        server: Host and port, as in the URL.
        target: Path and query, or the full URL if a proxy is asked.
        headers: Further headers.

    Raises:
        OSError, http.client.HTTPException: The connection breaks, or the response is not HTTP.
        ValueError: A header has a line break.
    """
    lines = [f"GET {target} HTTP/1.1", f"Host: {server.removesuffix(_DEFAULT_PORTS[scheme])}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines).encode("latin-1")
    if head.count(b"\n") != len(lines) - 1:
        raise ValueError(f"the target or a header of a request to {server} contains a line break")
    sock: socket.socket = connection.sock
    sock.sendall(head + b"\r\n\r\n")
    buffer = bytearray(_MOST_HEAD_BYTES)
    view = memoryview(buffer)
    got = 0
    end = -1
    while end < 0 and got < len(buffer):
        count = _received(sock, view[got:])
        if not count:
            if got:
                break
            raise http.client.RemoteDisconnected("Remote end closed connection without response")
        end = buffer.find(b"\r\n\r\n", max(0, got - 3), got + count)
        got += count
    # What came with the head begins the body.
    answer = _usual(sock, bytes(view[:end]), view[end + 4 : got]) if end >= 0 else None
    if answer is not None:
        return answer
    response = http.client.HTTPResponse(_Replayed(view[:got], sock), method="GET")  # type: ignore[arg-type]
    response.begin()
    return response


def _usual(sock: socket.socket, head: bytes, rest: memoryview) -> HttpAnswer | None:
    """Return a response of the usual form, or None: in doubt http.client decides what it means."""
    first, *lines = head.split(b"\r\n")
    version, _, status = first.partition(b" ")
    if version != b"HTTP/1.1" or status[:3] not in _USUAL or status[3:4] not in (b" ", b""):
        return None
    headers = Headers()
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name = name.lower()
        value = value.strip()
        if not colon or name[:1] in " \t" or (name in headers and name in _ONCE):
            return None
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    length = headers.get("content-length")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
        return None
    return HttpAnswer(sock, int(status[:3]), headers, int(length), rest)


class _Replayed:
    """A socket for http.client that gives some bytes again that were already read."""

    def __init__(self, seen: memoryview, sock: socket.socket) -> None:
        self._seen = seen
        self._sock = sock

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a stream that starts with these bytes."""
        return io.BufferedReader(_AnswerStream(self._seen, self._sock))


class _AnswerStream(io.RawIOBase):
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
