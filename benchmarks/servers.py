"""nginx over a folder, and in front of it a proxy that adds latency and faults; both on loopback.

    with nginx(folder) as port, proxy(port, latency=0.03) as url: ...
    with far_nginx(folder, latency=0.03) as url: ...

`far_nginx` waits in nginx itself (its Lua module, `libnginx-mod-http-lua`) and passes only listings on to a proxy: this
takes 60 to 100 us of CPU time for a request of 80 KiB, with the proxy for all requests 170 to 250, of the same cores
that the readers use. Without that module it is the proxy.

The proxy is a process of its own, `python benchmarks/servers.py UPSTREAM '{"latency": 0.03}'`. It holds each request
back for `latency` seconds and passes answers on by splice(2), so that it takes little of the cores that the readers
share with it. Which fault befalls a request is drawn from a seed. It makes nginx a bucket server as far as reading
goes: it answers S3's ListObjectsV2, the first part of a path being the bucket. Signatures are not checked, except that
with `expire` S3's access key must be the time of its issue, `key-SECONDS`, and not older than so many seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIPE = 1 << 20
_MODULES = [Path("/usr/lib/nginx/modules", name) for name in ("ndk_http_module.so", "ngx_http_lua_module.so")]
_CONFIGURATION = """
worker_processes 1; daemon off; pid {place}/pid; error_log {place}/errors;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; keepalive_timeout 300; keepalive_requests 100000000;
  types {{ }} default_type application/octet-stream;
  client_body_temp_path {place}/1; proxy_temp_path {place}/2; fastcgi_temp_path {place}/3;
  uwsgi_temp_path {place}/4; scgi_temp_path {place}/5;
  server {{ listen 127.0.0.1:{port} backlog=1024; root {folder}; {more} }}
}}
"""


def nginx_program() -> str | None:
    """Return the path of nginx, if it is installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def nginx(folder: Path, more: str = "") -> Iterator[int]:
    """Serve a folder, with more of nginx's configuration; give the port."""
    program = nginx_program()
    if program is None:
        raise FileNotFoundError("nginx is not installed: apt-get install nginx-light")
    with tempfile.TemporaryDirectory(prefix="energon-nginx-") as place, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        os.chmod(place, 0o755)
        text = _CONFIGURATION.format(place=place, port=port, folder=folder.resolve(), more=more)
        if more:
            text = f"{''.join(f'load_module {path}; ' for path in _MODULES)}{text}"
        if os.getuid() == 0:
            text = f"user root;{text}"  # the data may lie where nobody else reads
        Path(place, "conf").write_text(text)
        with subprocess.Popen([program, "-c", f"{place}/conf", "-p", place, "-e", f"{place}/errors"]) as server:
            try:
                _wait_for(port)
                yield port
            finally:
                server.terminate()


@contextlib.contextmanager
def far_nginx(folder: Path, latency: float) -> Iterator[str]:
    """Serve a folder as a bucket with this latency; give the URL."""
    with nginx(folder) as port:
        if not all(path.exists() for path in _MODULES):
            with proxy(port, folder=str(folder), latency=latency) as url:
                yield url
            return
        with proxy(port, folder=str(folder)) as listed:
            wait = f"access_by_lua_block {{ ngx.sleep({latency}) }}" if latency else ""
            listing = f'if ($args ~ "list-type=2") {{ proxy_pass {listed}; }}'
            with nginx(folder, f"location / {{ {wait} {listing} }}") as far:
                yield f"http://127.0.0.1:{far}"


@contextlib.contextmanager
def proxy(upstream: int, **settings: Any) -> Iterator[str]:
    """Start a proxy with settings of `Settings`; give its URL."""
    command = [sys.executable, str(Path(__file__).resolve()), str(upstream), json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait()


def counts(url: str) -> dict[str, int]:
    """Return what a proxy has seen: requests, and how many each fault befell."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 80)) as asked:
        asked.sendall(b"GET /-counts HTTP/1.1\r\nHost: here\r\n\r\n")
        with asked.makefile("rb") as answer:
            while answer.readline().strip():
                pass
            found: dict[str, int] = json.loads(answer.readline())
    return found


def _wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise TimeoutError(f"nothing listens on port {port}")


# The proxy -----------------------------------------------------------------------------------------------------------


class Proxy:
    """All connections of one process, a thread each.

    Args:
        upstream: Port of the server.
        latency: Seconds by which each request is held back.
        faults: Share of the requests that each befalls: `reset`, `503`, `short` (the body is cut in half), `stall`
            (`stall_seconds` before the answer).
        dead: Number of the one request that is answered after ten minutes; 0: none.
        expire: Seconds for which an access key is good; 0: for ever.
        folder: What the server serves, for listings.
    """

    def __init__(
        self,
        upstream: int,
        *,
        latency: float = 0.0,
        faults: dict[str, float] | None = None,
        stall_seconds: float = 5.0,
        dead: int = 0,
        expire: float = 0.0,
        folder: str = "",
        seed: int = 0,
    ) -> None:
        self._upstream = upstream
        self._folder = folder
        self._latency = latency
        self._faults = faults or {}
        self._stall = stall_seconds
        self._dead = dead
        self._expire = expire
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()

    def serve(self, connection: socket.socket) -> None:
        """Pass on what comes by a connection until either side closes it."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIPE)
        try:
            with connection, socket.create_connection(("127.0.0.1", self._upstream)) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while head := _head(connection):
                    if not self._pass(head, connection, server, out, into):
                        return
        except OSError:
            pass  # somebody hung up
        finally:
            os.close(out)
            os.close(into)

    def _pass(self, head: bytes, connection: socket.socket, server: socket.socket, out: int, into: int) -> bool:
        """Answer a request; say whether the connection goes on."""
        if head.startswith(b"GET /-counts "):
            connection.sendall(_answer(200, json.dumps(self._seen).encode() + b"\n"))
            return True
        fault = self._next_fault()
        if self._latency:
            time.sleep(self._latency)
        if self._expire and (age := _age_of_key(head)) is not None and age > self._expire:
            with self._lock:
                self._seen["expired"] += 1
            body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            connection.sendall(_answer(403, body))
            return True
        if fault == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault == "503":
            connection.sendall(_answer(503, b"<Error><Code>SlowDown</Code><Message>Reduce</Message></Error>"))
            return True
        if fault in ("stall", "dead"):
            time.sleep(self._stall if fault == "stall" else 600.0)
        if b"list-type=2" in head.split(b"\r\n", 1)[0]:
            connection.sendall(_answer(200, _listing(self._folder, head)))
            return True
        server.sendall(head)
        answer = _head(server)
        connection.sendall(answer)
        length = 0 if head.startswith(b"HEAD ") else _length_of(answer)
        left = length // 2 if fault == "short" else length
        while left:
            moved = os.splice(server.fileno(), into, min(left, _PIPE), flags=os.SPLICE_F_MOVE)
            if not moved:
                return False
            left -= moved
            while moved:
                moved -= os.splice(out, connection.fileno(), moved, flags=os.SPLICE_F_MOVE)
        return fault != "short"

    def _next_fault(self) -> str:
        with self._lock:
            self._seen["requests"] += 1
            place, fault = self._random.random(), ""
            for name, share in self._faults.items():
                if 0 <= place < share:
                    fault = name
                place -= share
            if self._seen["requests"] == self._dead:
                fault = "dead"
            if fault:
                self._seen[fault] += 1
        return fault


def _head(stream: socket.socket) -> bytes:
    """Read up to the empty line that ends a head, and no further."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        seen = stream.recv(8192, socket.MSG_PEEK)
        if not seen:
            return b""
        end = (data[-3:] + seen).find(b"\r\n\r\n")
        data += stream.recv(len(seen) if end < 0 else end + 4 - len(data[-3:]))
    return data


def _length_of(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _age_of_key(head: bytes) -> float | None:
    """Return how many seconds ago the key of a signed request was issued, if it says so."""
    target = urlsplit(head.split(b" ", 2)[1].decode())
    credential = parse_qs(target.query).get("X-Amz-Credential", [""])[0]
    if not credential and (found := head.partition(b"Credential=")[2]):
        credential = unquote(found.split(b",", 1)[0].decode())
    name, _, issued = credential.partition("/")[0].partition("-")
    return time.time() - float(issued) if name == "key" and issued else None


def _listing(folder: str, head: bytes) -> bytes:
    """Answer a ListObjectsV2 request; ETags are those of nginx."""
    target = urlsplit(head.split(b" ", 2)[1].decode())
    query = {name: values[0] for name, values in parse_qs(target.query, keep_blank_values=True).items()}
    bucket = Path(folder, unquote(target.path).strip("/"))
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    most = int(query.get("max-keys", "1000"))
    entries: dict[str, str] = {}
    for key, size, changed in _files(bucket, prefix):
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        name = key if end < 0 else key[: end + 1]
        if name <= after:
            continue
        if end >= 0:
            entries[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        else:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(changed))
            entries[name] = (
                f"<Contents><Key>{escape(name)}</Key><LastModified>{stamp}</LastModified>"
                f"<ETag>&quot;{changed:x}-{size:x}&quot;</ETag><Size>{size}</Size></Contents>"
            )
    names = sorted(entries)[:most]
    more = len(names) < len(entries)
    token = f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>" if more and names else ""
    return (
        f"<ListBucketResult><Name>{escape(bucket.name)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(names)}</KeyCount><MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        f"{token}{''.join(entries[name] for name in names)}</ListBucketResult>"
    ).encode()


@lru_cache(maxsize=16)
def _files(bucket: Path, prefix: str) -> list[tuple[str, int, int]]:
    """Return key, size and time of what has a prefix; nothing changes while a proxy runs."""
    found = []
    for folder, _, names in os.walk(bucket / prefix.rpartition("/")[0]):
        for name in names:
            path = Path(folder, name)
            key = path.relative_to(bucket).as_posix()
            if key.startswith(prefix):
                status = path.stat()
                found.append((key, status.st_size, int(status.st_mtime)))
    return sorted(found)


def _answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Fault\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def main() -> None:
    """Serve until standard input ends."""
    served = Proxy(int(sys.argv[1]), **json.loads(sys.argv[2]))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)

        def accept() -> None:
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=served.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()
        os._exit(0)  # without waiting for those that stall


if __name__ == "__main__":
    main()
