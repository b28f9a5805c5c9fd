"""Read ranges of objects by HTTP: many at once, retried, resumed where they broke off, and hedged.

`Client` serves all remote stores of a process: it keeps connections alive and has threads that wait for responses. An
`Origin` (`buckets.py`) supplies URLs and credentials. Plain sockets and threads survive a fork, which libraries with a
runtime of their own do not (obstore 0.12 hangs in a forked child if the parent has used it): a child has none of the
threads, opens its own connections, and shares nothing that holds a lock. Speed is not the reason: both take 0.4 to
0.9 s of CPU per GB in pieces of 1 MiB (without TLS).

Invariant: a body has exactly the bytes requested, all from one version of the object, or an error is raised. Temporary
failures are retried with growing, random pauses until a deadline; permanent ones raise `Refused` at once. A request
that takes much longer than others is hedged: a second one starts, and the first response wins. None of this changes
the order of samples.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import queue
import random
import re
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urljoin, urlsplit

from energon_bridge.cloud.answers import Connections, HttpAnswer, allow_silence, get, server_of
from energon_bridge.core.storage.forks import PerProcess
from energon_bridge.core.storage.stalls import DaemonThreads, Stalls
from energon_bridge.core.storage.store import MADE

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 30.0
"""Seconds without a byte after which a connection is closed."""
_GIVE_UP_SECONDS = 180.0
_MOST_TRIES = 20
_UNREACHED_TRIES = 4
"""Attempts to reach a server that this process has never reached: its name is probably wrong."""
_PAUSE = 0.1
_MOST_PAUSE = 8.0
_MOST_RETRY_AFTER = 30.0
_MOST_IN_FLIGHT, _BYTES_IN_FLIGHT = 128, 128 << 20
"""Requests of a process that are under way, and bytes asked for, at most."""
_HEDGE_SECONDS, _HEDGE_TIMES = 0.3, 4.0
"""A hedge starts after this many seconds, or after this multiple of the usual duration, whichever is later."""
_HEDGES = 16
_HEDGED_SHARE = 0.05
"""Hedges of a process, at most: so many, and one for so many of its requests."""
_RIVALS = 3
"""Requests for one piece that are under way, at most."""
_EXPIRED_SECONDS = 15.0
"""How long a process that has read before waits for new credentials if they are renewed late."""
_TOLD_SECONDS, _TOLD_AGAIN = 5.0, 60.0
"""Seconds of waiting for a piece before the first warning, and between warnings."""
_CHUNK = 256 << 10
_HOPS = 6
_ERROR_BYTES = 4096
_BUSY = {408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529}
_OVERLOADED = {429, 503, 509, 529}
_OVERLOADED_SHARE = 0.1
"""Fewer requests go out at once if more than this share of the last 64 or so met a server that has too much to do."""
_MOVED = {301, 302, 303, 307, 308}
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>|\"message\":\s*\"([^\"]+)\"")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to read an object: a URL, signed if necessary, and headers."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Origin(Protocol):
    """Supplies the URLs and headers for the objects of a bucket."""

    def target(self, key: str, *, fresh: bool) -> Target:
        """Return how to read an object; `fresh`: the last signature was refused, so get the credentials again."""

    def recover(self, refused: Refused) -> bool:
        """Learn from a response, such as the region of a bucket; return whether to try again."""


class Refused(Exception):  # noqa: N818 - a response, which the store turns into an error
    """A response that a retry would not change."""

    def __init__(self, status: int, headers: Mapping[str, str], body: str, reason: str) -> None:
        code = _CODE.search(body)
        message = _MESSAGE.search(body)
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.code = code[1] if code else self.headers.get("x-ms-error-code", "")
        self.said = (message[1] or message[2]) if message else reason
        super().__init__(f"HTTP {status} {' '.join(part for part in (self.code, self.said) if part)}".rstrip())


class TooShort(Exception):  # noqa: N818
    """The object of `total` bytes ends before the range does."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total = total


class WholeFile(TooShort):
    """The server ignores ranges and would send all `total` bytes."""


class GaveUp(Exception):  # noqa: N818
    """All attempts failed; the message is the last failure."""


class _Busy(Exception):  # noqa: N818
    """A failure that a retry may fix."""

    def __init__(self, reason: str, *, pause: float = 0.0, overloaded: bool = False, unreached: bool = False) -> None:
        super().__init__(reason)
        self.pause = pause
        self.overloaded = overloaded
        self.unreached = unreached


@dataclass(slots=True)
class RequestedPiece:
    """Bytes [start, start + length) of an object; with `upto`, as many of them as exist."""

    origin: Origin
    key: str
    start: int
    length: int
    upto: bool = False


@dataclass(slots=True)
class Body:
    """Bytes of a piece, `data[:got]`, and the size (if the server sent it) and version of its object."""

    data: bytearray
    got: int = 0
    total: int | None = None
    version: str = ""


class _Attempt:
    """One request for a piece."""

    __slots__ = ("again", "asked", "body", "call", "cancelled", "connection", "error")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.body = Body(bytearray()) if call.broken is None else call.broken
        call.broken = None
        self.connection: http.client.HTTPConnection | None = None
        self.cancelled = False
        self.asked = self.again = 0
        self.error: BaseException | None = None

    def cancel(self) -> None:
        """Stop the thread that waits for the response."""
        self.cancelled = True
        sock = getattr(self.connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # the TLS layer's own would not wake its reader


@dataclass(slots=True, eq=False)
class _Call:
    """A piece that is being fetched."""

    fetch: _Fetch
    number: int
    piece: RequestedPiece
    attempts: list[_Attempt] = field(default_factory=list)
    broken: Body | None = None
    failures: int = 0
    server: str = ""
    since: float = 0.0
    due: float = 0.0
    hedge_at: float = 0.0
    patience: float = 0.0


class _Fetch:
    """Pieces that one caller waits for. The threads that read them take the next one themselves.

    Attributes:
        silence: Seconds without a byte after which a connection is given up.
        waiting: Calls that nobody has started.
        running: Calls of which an attempt is under way.
        left: Number of bodies that are missing.
        news: Attempts that failed, and None if nothing is left, or if more can be started.
    """

    __slots__ = ("bodies", "left", "news", "running", "seconds", "silence", "waiting")

    def __init__(self, pieces: Sequence[RequestedPiece], seconds: float | None) -> None:
        self.seconds = seconds
        self.silence = _SILENCE_SECONDS if seconds is None else min(_SILENCE_SECONDS, seconds)
        self.bodies: list[Body | None] = [None] * len(pieces)
        self.waiting = deque(_Call(self, number, piece) for number, piece in enumerate(pieces))
        self.running: set[_Call] = set()
        self.left = len(pieces)
        self.news: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()


class Client:
    """Fetches pieces for all threads of a process."""

    def __init__(self) -> None:
        self._helpers = DaemonThreads("energon-http")
        self._lock = threading.Lock()
        self._connections = Connections()
        self._reached: set[str] = set()
        self._in_flight = self._bytes = 0
        self._limit = float(_MOST_IN_FLIGHT)
        self._lowered = self._overloaded = 0.0
        self._typical = self._tell_at = 0.0
        weakref.finalize(self, self._connections.close)

    def fetch(self, pieces: Sequence[RequestedPiece], stalls: Stalls) -> list[Body]:
        """Fetch pieces of objects.

        Args:
            pieces: They are fetched concurrently, as many as the servers can take.
            stalls: Gives the silence after which a connection is dropped (a piece, after three times as long), and
                counts the requests that took too long.

        Raises:
            Refused, TooShort, WholeFile, GaveUp: The first piece that fails; also what an origin raises.
        """
        began = time.monotonic()
        fetch = _Fetch(pieces, stalls.seconds)
        paused: list[_Call] = []
        try:
            while fetch.left:
                now = time.monotonic()
                for call in [call for call in paused if call.due <= now]:
                    paused.remove(call)
                    fetch.waiting.appendleft(call)
                while (attempt := self._next(fetch)) is not None:
                    self._start(attempt)
                wake = min([call.due for call in paused], default=math.inf)
                try:
                    news = fetch.news.get(timeout=max(0.0, min(wake - now, self._until_hedge(fetch, now))))
                except queue.Empty:
                    stalls.count += self._hedge(fetch)
                    continue
                if news is None:
                    continue
                call = news.call
                with self._lock:
                    if call not in fetch.running or (call.attempts and isinstance(news.error, _Busy)):
                        continue  # its rival was faster, or is still on the way
                    fetch.running.discard(call)
                    rivals = list(call.attempts)
                for rival in rivals:
                    rival.cancel()
                call.due = time.monotonic() + self._pause_after(news)
                paused.append(call)
        finally:
            with self._lock:
                fetch.waiting.clear()
                MADE.request_seconds += time.monotonic() - began
                under_way = [attempt for call in fetch.running for attempt in call.attempts]
            for attempt in under_way:
                attempt.cancel()
        return [body for body in fetch.bodies if body is not None]

    # Which request goes out, and when --------------------------------------------------------------------------------

    def _next(self, fetch: _Fetch) -> _Attempt | None:
        """Take the next piece of a fetch, if there is one and the server bears another request."""
        if not fetch.waiting:
            return None
        with self._lock:
            return self._taken(fetch)

    def _taken(self, fetch: _Fetch) -> _Attempt | None:
        """Do what `_next` does, under the lock; a fetch of which nothing is under way always gets its next piece."""
        if not fetch.waiting or (fetch.running and self._is_full()):
            return None
        call = fetch.waiting.popleft()
        now = time.monotonic()
        self._in_flight += 1
        self._bytes += call.piece.length
        fetch.running.add(call)
        call.since = call.since or now
        call.patience = max(_HEDGE_SECONDS, _HEDGE_TIMES * self._typical)
        call.patience = call.patience if fetch.seconds is None else min(call.patience, fetch.seconds)
        call.hedge_at = now + call.patience
        attempt = _Attempt(call)
        call.attempts.append(attempt)
        return attempt

    def _is_full(self) -> bool:
        return self._in_flight >= self._limit or self._bytes >= _BYTES_IN_FLIGHT

    def _start(self, attempt: _Attempt) -> None:
        """Have a thread make an attempt, and then those that nobody has begun."""
        fetch = attempt.call.fetch
        news: list[_Attempt | None] = []

        def job() -> None:
            following: _Attempt | None = attempt
            while following is not None:
                began = time.monotonic()
                made = following
                try:
                    self._get(made, fetch.silence)
                except BaseException as error:
                    made.error = error
                following = self._finished(made, time.monotonic() - began)
            if made.error is not None or not fetch.left:
                news.append(None if made.error is None else made)

        def done() -> None:
            if news:
                fetch.news.put(news.pop())

        self._helpers.start(job, done)

    def _finished(self, attempt: _Attempt, seconds: float) -> _Attempt | None:
        """Note the body or error of an attempt that has ended; return the next attempt of the same fetch, if any."""
        call = attempt.call
        error = attempt.error
        fetch = call.fetch
        with self._lock:
            self._in_flight -= 1
            self._bytes -= call.piece.length
            MADE.requests += attempt.asked
            MADE.request_retries += attempt.again
            call.attempts.remove(attempt)
            if error is not None:
                now = time.monotonic()
                if not isinstance(error, _Busy) or not error.overloaded:
                    return None
                # As TCP does: half as many requests at once where a server has too much to do, and then again one more
                # for each round of them that comes through.
                self._overloaded += (1 - self._overloaded) / 64
                if self._overloaded > _OVERLOADED_SHARE and now - self._lowered > self._typical:
                    self._limit = max(1.0, self._limit / 2)
                    self._lowered = now
                return None
            MADE.request_bytes += attempt.body.got
            self._overloaded -= self._overloaded / 64
            self._typical += (seconds - self._typical) / 16
            self._limit = min(_MOST_IN_FLIGHT, self._limit + 1 / self._limit)
            if call not in fetch.running:
                return None  # its rival was faster
            fetch.running.discard(call)
            fetch.bodies[call.number] = attempt.body
            fetch.left -= 1
            following = self._taken(fetch)
            if fetch.waiting and not self._is_full():
                fetch.news.put(None)  # another fetch has ended: there is room for more of this one
        for rival in call.attempts:
            rival.cancel()
        return following

    def _until_hedge(self, fetch: _Fetch, now: float) -> float:
        """Return the seconds until a request takes too long; less if none does, because more of them may begin."""
        with self._lock:
            return min([_HEDGE_SECONDS, *(call.hedge_at - now for call in fetch.running)])

    def _hedge(self, fetch: _Fetch) -> int:
        """Start rivals of requests that take too long; return how many do."""
        now = time.monotonic()
        rivals = []
        with self._lock:
            late = [call for call in fetch.running if call.hedge_at <= now]
            for call in late:
                call.patience *= 2
                call.hedge_at = now + call.patience
                few = MADE.request_hedges < _HEDGES + _HEDGED_SHARE * MADE.requests
                if few and len(call.attempts) < _RIVALS:
                    self._in_flight += 1
                    self._bytes += call.piece.length
                    MADE.request_hedges += 1
                    rivals.append(_Attempt(call))
                    call.attempts.append(rivals[-1])
        for rival in rivals:
            self._start(rival)
        for call in late:
            self._tell(call, "no complete answer yet")
        return len(late)

    def _tell(self, call: _Call, why: str) -> None:
        """Warn, at most once a minute, of a piece that has been awaited for some seconds."""
        now = time.monotonic()
        with self._lock:
            if now - call.since < _TOLD_SECONDS or now < self._tell_at:
                return
            self._tell_at = now + _TOLD_AGAIN
        logger.warning(
            "waiting for %s: %s (%.0f s for one range of a file, at most %.0f s; %d requests failed)",
            call.server.rpartition("@")[2] or "a server",
            why,
            now - call.since,
            _limit(call.fetch),
            call.failures,
        )

    def _pause_after(self, attempt: _Attempt) -> float:
        """Return how long to wait after a failure; raises what is not worth another try."""
        call = attempt.call
        error = attempt.error
        assert error is not None
        if not isinstance(error, _Busy):
            raise error
        body = attempt.body
        progress = body.got > 0
        call.broken = body if progress else None
        call.failures += 1
        with self._lock:
            MADE.request_retries += 1
        took = time.monotonic() - call.since
        most = _UNREACHED_TRIES if error.unreached else _MOST_TRIES
        if call.failures >= most or took > _limit(call.fetch):
            raise GaveUp(f"{error} (tried {call.failures} times in {took:.1f} s)") from error
        self._tell(call, str(error))
        if progress and call.failures == 1:
            return 0.0
        pause = random.uniform(0.5, 1.0) * min(_MOST_PAUSE, _PAUSE * 2**call.failures)
        return max(pause, error.pause)

    # One request -----------------------------------------------------------------------------------------------------

    def _get(self, attempt: _Attempt, silence: float) -> None:
        """Fill the body of an attempt; raises `_Busy` and what `fetch` raises."""
        piece = attempt.call.piece
        fresh = False
        moved = ""
        origin = piece.origin
        for _ in range(_HOPS):
            target = origin.target(piece.key, fresh=fresh)
            if moved:
                same = server_of(moved) == server_of(target.url)
                target = Target(moved, target.headers if same else {})  # credentials are for one server
            try:
                location = self._ask(attempt, target, silence)
            except Refused as refused:
                moved = ""
                if origin.recover(refused):
                    continue
                if not _is_of_credentials(refused):
                    raise
                if fresh:
                    waited = time.monotonic() - attempt.call.since
                    if self._typical and "xpired" in str(refused) and waited < _EXPIRED_SECONDS:
                        raise _Busy(str(refused), pause=1.0) from refused
                    raise
                fresh = True
                continue
            if not location:
                return
            moved = urljoin(target.url, location)
        raise GaveUp(f"redirected {_HOPS} times in a row, last to {moved.partition('?')[0] or 'the same URL'}")

    def _ask(self, attempt: _Attempt, target: Target, silence: float) -> str:
        """Send one request and read the response; return the URL it redirects to, if any."""
        piece = attempt.call.piece
        body = attempt.body
        first = piece.start + body.got
        headers = {
            **target.headers,
            "Range": f"bytes={first}-{piece.start + piece.length - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": "energon-bridge",
        }
        connection, response = self._send(attempt, target.url, headers, silence)
        done = False
        try:
            if response.status in (200, 206):
                done = self._read(attempt, response, first)
                return ""
            return self._other(piece, body, response)
        except (OSError, http.client.HTTPException) as error:
            raise _Busy(f"the response broke off: {_named(error)}") from error
        finally:
            if done and response.isclosed() and not response.will_close and not attempt.cancelled:
                self._connections.keep(target.url, connection)
            else:
                response.close()
                connection.close()

    def _read(self, attempt: _Attempt, response: HttpAnswer | http.client.HTTPResponse, first: int) -> bool:
        """Read a body; return whether the whole response was read."""
        piece = attempt.call.piece
        body = attempt.body
        version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        if body.got and (version != body.version or response.status == 200):
            body.got = 0  # a new version, or the whole object again
            if response.status == 206:
                raise _Busy("the object changed while it was read")
        if response.status == 200 and piece.upto and piece.start == 0:
            if response.length is None:
                data = response.read()
                body.data = bytearray(data)
                body.got = body.total = len(data)
                return True
            if piece.length < response.length and piece.length == 1:
                body.total = response.length
                body.version = version
                return False  # only the size was requested
        end = self._end_of_body(piece, body, response, first)
        if end is None:
            return True
        body.version = version
        length = end - piece.start
        if len(body.data) != length:
            body.data = body.data[:length].ljust(length, b"\0") if body.got else bytearray(length)
        view = memoryview(body.data)
        while body.got < length:
            count = response.readinto(view[body.got : min(length, body.got + _CHUNK)])
            if not count or attempt.cancelled:
                raise _Busy(f"the response ended after {body.got} of {length} bytes")
            body.got += count
        return True

    def _end_of_body(
        self, piece: RequestedPiece, body: Body, response: HttpAnswer | http.client.HTTPResponse, first: int
    ) -> int | None:
        """Return where the bytes of a response end in the object, None for an empty object; notes its size."""
        end = piece.start + piece.length
        if response.status == 200:
            whole = piece.upto and piece.start == 0
            if not whole and (piece.start or response.length != piece.length):
                raise WholeFile(-1 if response.length is None else response.length)
            body.total = response.length
            return response.length if whole else end
        said = response.headers.get("Content-Range", f"bytes {first}-{first + (response.length or 0) - 1}/*")
        if said.endswith("/0") and response.length == 0 and piece.upto and first == 0:
            body.data, body.got, body.total = bytearray(), 0, 0  # Azurite's answer for an empty object
            return None
        match = _CONTENT_RANGE.fullmatch(said.strip())
        if match is None or match[1] is None or int(match[1]) != first:
            raise Refused(206, {}, "", f"requested bytes from {first} on, got Content-Range: {said!r}")
        body.total = None if match[3] == "*" else int(match[3])
        if body.total is not None and end > body.total:
            if not piece.upto:
                raise TooShort(body.total)
            return body.total
        return int(match[2]) + 1 if piece.upto and body.total is None else end

    def _other(self, piece: RequestedPiece, body: Body, response: HttpAnswer | http.client.HTTPResponse) -> str:
        """Return the URL that a response without data redirects to; raise an error for all others."""
        status = response.status
        headers = response.headers
        if status in _BUSY:
            after = headers.get("Retry-After", "")
            pause = min(_MOST_RETRY_AFTER, float(after)) if after.isdecimal() else 0.0
            raise _Busy(f"HTTP {status} {response.reason}", pause=pause, overloaded=status in _OVERLOADED)
        if status == 416:
            match = _CONTENT_RANGE.search(headers.get("Content-Range", ""))
            total = int(match[3]) if match and match[3] != "*" else 0
            if piece.upto and piece.start == 0:
                body.data = bytearray()
                body.got = 0
                body.total = 0
                return ""
            raise TooShort(total)
        text = response.read(_ERROR_BYTES).decode(errors="replace")
        refused = Refused(status, dict(headers.items()), text, response.reason)
        if refused.code == "RequestTimeout":
            raise _Busy(str(refused))
        if status in _MOVED and headers.get("Location") and not headers.get("x-amz-bucket-region"):
            return headers["Location"]
        raise refused

    # Connections -----------------------------------------------------------------------------------------------------

    def _send(
        self, attempt: _Attempt, url: str, headers: Mapping[str, str], silence: float
    ) -> tuple[http.client.HTTPConnection, HttpAnswer | http.client.HTTPResponse]:
        """Send a request on an idle connection or a new one; return it with the head of the response."""
        parts = urlsplit(url)
        scheme = parts.scheme
        server = parts.netloc
        attempt.call.server = server
        route = self._connections.route(scheme, server)
        asked = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        if route.full_url:
            asked = url
            headers = {**headers, **route.headers}
        while True:
            connection, is_new = self._connections.take(scheme, server, silence)
            attempt.connection = connection
            try:
                if connection.sock is None:
                    connection.timeout = min(_CONNECT_SECONDS, silence)
                    connection.connect()
                    allow_silence(connection, silence)
                    self._reached.add(server)
                attempt.asked += 1
                return connection, get(connection, scheme, server, asked, headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not is_new and not isinstance(error, TimeoutError) and not attempt.cancelled:
                    attempt.again += 1
                    continue  # the server had closed the idle connection
                unreached = server not in self._reached
                what = f"cannot connect to {server.rpartition('@')[2]}" if unreached else "no answer"
                raise _Busy(f"{what}: {_named(error)}", unreached=unreached) from error


def _limit(fetch: _Fetch) -> float:
    """Return the seconds after which a piece that fails is given up."""
    return _GIVE_UP_SECONDS if fetch.seconds is None else 3 * fetch.seconds


def _is_of_credentials(refused: Refused) -> bool:
    return refused.status in (401, 403) or (refused.status == 400 and "xpired" in str(refused))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Shared:
    """The client of this process, while something refers to it, and the lock under which it is made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Callable[[], Client | None] = lambda: None


_shared = PerProcess(_Shared)


def shared_client() -> Client:
    """Return the client of this process; it lives as long as it is referenced."""
    shared = _shared()
    with shared.lock:
        client = shared.client()
        if client is None:
            client = Client()
            shared.client = weakref.ref(client)
        return client
