"""Answers of web servers: read as http.client reads them, in whatever pieces they come, and not a byte further."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from energon_bridge.cloud.answers import HttpAnswer, allow_silence, get

BODY = bytes(range(256)) * 40
USUAL = b'HTTP/1.1 206 Partial Content\r\nETag: "a"\r\nX-Goog-Hash: crc32c=1\r\nx-goog-hash: md5=2\r\n'
ANSWERS = {
    "usual": USUAL + b"Content-Range: bytes 0-10239/99999\r\nContent-Length: 10240\r\n\r\n" + BODY,
    "closing": USUAL + b"Connection: Close\r\nContent-Length: 10240\r\n\r\n" + BODY,
    "without a reason": b"HTTP/1.1 200\r\ncontent-length:10240\r\n\r\n" + BODY,
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "in chunks": USUAL + b"Transfer-Encoding: chunked\r\n\r\n2800\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a folded header": USUAL + b"X-Long: one\r\n two\r\nContent-Length: 10240\r\n\r\n" + BODY,
    "of an old server": b"HTTP/1.0 200 OK\r\nContent-Length: 10240\r\n\r\n" + BODY,
    "refused": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 10\r\n\r\n" + BODY[:10],
    "after a 100": b"HTTP/1.1 100 Continue\r\n\r\n" + USUAL + b"Content-Length: 10240\r\n\r\n" + BODY,
    "a long head": USUAL + b"X-A: " + b"a" * 20_000 + b"\r\nContent-Length: 10240\r\n\r\n" + BODY,
}


def ask(sent: bytes, cuts: list[int], silence: float | None = None) -> tuple[Any, list[Any], bytes]:
    """Return the answer to a request, its facts and its body, which comes in pieces and is followed by another."""
    here, there = socket.socketpair()
    if silence is not None:
        here.settimeout(silence)
    edges = [0, *sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]

    def serve() -> None:
        for low, high in itertools.pairwise(edges):
            there.sendall(sent[low:high])

    with here, there:
        thread = threading.Thread(target=serve)
        thread.start()
        answer = get(SimpleNamespace(sock=here), "http", "host:80", "/x", {"Range": "bytes=0-1"})  # type: ignore[arg-type]
        length = answer.length
        body = bytearray(len(BODY) if length is None else length)
        got = 0
        while got < len(body):
            count = answer.readinto(memoryview(body)[got : got + 3000])
            assert count
            got += count
        thread.join()
        there.sendall(b"next")
        assert length is None or here.recv(10) == b"next"
        names = ("ETag", "Content-Range", "content-length", "Missing")
        facts = [answer.status, length, bool(answer.will_close)]
        facts += [answer.headers.get(name, "") for name in names]
        assert length is None or answer.isclosed()
    return answer, facts, bytes(body)


def by_http_client(sent: bytes) -> tuple[list[Any], bytes]:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(sent)
        response = http.client.HTTPResponse(here, method="GET")
        response.begin()
        names = ("ETag", "Content-Range", "content-length", "Missing")
        facts = [response.status, response.length, response.will_close]
        facts += [response.headers.get(name, "") for name in names]
        body = response.read(len(BODY))
        response.close()
    return facts, body


@pytest.mark.parametrize("kind", ANSWERS)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 40_000), max_size=4), silence=st.sampled_from([None, 60.0]))
def test_answers_are_read_as_http_client_reads_them(kind: str, cuts: list[int], silence: float | None) -> None:
    answer, *found = ask(ANSWERS[kind], cuts, silence)
    assert tuple(found) == by_http_client(ANSWERS[kind])
    assert isinstance(answer, HttpAnswer) == (kind in ("usual", "closing", "without a reason", "empty"))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", http.client.RemoteDisconnected),
        (b"nonsense\r\n\r\n", http.client.BadStatusLine),
        (b"HTTP/1.1 20", http.client.BadStatusLine),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 70_000, http.client.LineTooLong),
    ],
)
def test_what_is_no_answer_is_an_error(sent: bytes, error: type[Exception]) -> None:
    here, there = socket.socketpair()
    with here, there:
        sending = threading.Thread(target=there.sendall, args=(sent,))
        sending.start()
        sending.join(0.2)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            get(SimpleNamespace(sock=here), "https", "host:443", "/x", {})  # type: ignore[arg-type]
        sending.join()


def test_the_request_names_the_host_and_takes_no_line_breaks() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(ANSWERS["empty"])
        connection: Any = SimpleNamespace(sock=here)
        get(connection, "https", "host:443", "/a%20b?c", {"Range": "bytes=1-2"})
        assert there.recv(1000) == b"GET /a%20b?c HTTP/1.1\r\nHost: host\r\nRange: bytes=1-2\r\n\r\n"
        with pytest.raises(ValueError, match="a line break"):
            get(connection, "http", "host", "/x", {"A": "b\r\nC: d"})


def read_whole(connection: Any) -> None:
    answer, body, got = get(connection, "http", "host", "/x", {}), memoryview(bytearray(len(BODY))), 0
    while got < len(BODY):
        got += answer.readinto(body[got:])


@pytest.mark.parametrize("sent", [b"", USUAL, USUAL + b"Content-Length: 10240\r\n\r\n", ANSWERS["usual"][:-1]])
def test_silence_ends_with_an_error_and_not_with_fewer_bytes(sent: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(sent)
        connection: Any = SimpleNamespace(sock=here)
        allow_silence(connection, 0.2)
        with pytest.raises(TimeoutError):
            read_whole(connection)
        assert connection.timeout == 0.2
        there.sendall(BODY[-1:])
        assert sent != ANSWERS["usual"][:-1] or here.recv(10) == BODY[-1:]
