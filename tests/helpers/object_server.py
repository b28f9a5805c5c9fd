"""A web server on loopback that serves ranges of the files of a folder, and fails as networks and servers do."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Fault = Callable[[int], str]
"""Says by the number of a request what befalls it: one of the names in `ObjectServer.answer`, or nothing."""


def no_fault(number: int) -> str:
    return ""


def every(step: int, *faults: str) -> Fault:
    """Let the faults, in turn, befall each `step`-th request."""
    return lambda number: "" if (number + 1) % step else faults[(number + 1) // step % len(faults)]


class ObjectServer(http.server.ThreadingHTTPServer):
    """The server.

    Attributes:
        latency: Seconds before each answer.
        fault: What befalls requests.
        asked: Path and Range of each request.
        stall: Seconds that a stalled answer takes.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.latency = 0.0
        self.fault: Fault = no_fault
        self.asked: list[tuple[str, str]] = []
        self.stall = 20.0
        self.most_at_once = 0
        self.stopped = threading.Event()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._now = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients hang up

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Answer one GET."""
        path, span = unquote(urlsplit(handler.path).path), handler.headers.get("Range", "")
        with self._lock:
            number = next(self._numbers)
            self.asked.append((path, span))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self.latency:
                time.sleep(self.latency)
            self._answer(handler, path, span, self.fault(number))
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, handler: http.server.BaseHTTPRequestHandler, path: str, span: str, fault: str) -> None:
        if fault == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
            handler.close_connection = True
            return
        if fault == "stall":
            self.stopped.wait(self.stall)
        if fault.isdecimal():
            return _say(handler, int(fault), b"<Error><Code>Trouble</Code><Message>for a test</Message></Error>")
        if fault.startswith("to:"):
            handler.send_response(302)
            handler.send_header("Location", fault[3:] + handler.path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        file = self.folder / path.lstrip("/")
        if not file.is_file():
            return _say(handler, 200 if file.is_dir() else 404, b"a folder" if file.is_dir() else b"not here")
        total, status, low = file.stat().st_size, 200, 0
        count = total
        if span and fault != "whole":
            low, high = (int(end) for end in span.removeprefix("bytes=").split("-"))
            if low >= total:
                return _say(handler, 416, b"", {"Content-Range": f"bytes */{total}"})
            count, status = min(total, high + 1) - low, 206
        with file.open("rb") as opened:
            opened.seek(low)
            data = opened.read(count)
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("ETag", f'"{total}-{file.stat().st_mtime_ns}"')
        if status == 206:
            handler.send_header("Content-Range", f"bytes {low}-{low + len(data) - 1}/{total}")
        handler.end_headers()
        if fault == "short":
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
            return
        handler.wfile.write(data)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectServer

    def do_GET(self) -> None:
        self.server.answer(self)

    def log_message(self, *arguments: Any) -> None:
        pass


def _say(
    handler: http.server.BaseHTTPRequestHandler, status: int, text: bytes, headers: dict[str, str] | None = None
) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


@contextlib.contextmanager
def serving(folder: Path, kind: type[ObjectServer] = ObjectServer) -> Iterator[ObjectServer]:
    """Serve a folder until the end of the block."""
    with kind(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join()
