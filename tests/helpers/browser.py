"""Headless Chromium for tests of pages, by its DevTools protocol over two pipes: no driver, no server, no package.

Where there is no Chromium, tests that need it skip and say so (`apt-get install chromium`, or CHROMIUM=PATH).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0
READY = "document.getElementById('main')?.dataset.ready === 'yes'"


class Page:
    """A page in a browser that runs headless."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a page of a preview and wait until it is shown."""
        self.events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.wait(READY)

    def go(self, fragment: str) -> None:
        """Go to another view of the page, and wait until it is shown."""
        self.run(f"delete document.getElementById('main').dataset.ready; location.hash = {json.dumps(fragment)}; 0")
        self.wait(READY)

    def click(self, selector: str) -> None:
        """Click an element that leads to another view."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"delete document.getElementById('main').dataset.ready; {find}.click(); 0")
        self.wait(READY)

    def enter(self, selector: str, value: str) -> None:
        """Give a field a value, as somebody who types or chooses it."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(
            f"delete document.getElementById('main').dataset.ready; {find}.value = {json.dumps(value)}; "
            f"{find}.dispatchEvent(new Event('change')); 0"
        )
        self.wait(READY)

    def run(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of the elements that a selector finds."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never so: {condition}\n{self.problems()}"
            time.sleep(0.01)

    def dark(self, dark: bool) -> None:
        """Make the user one who prefers dark pages, or light ones."""
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def screenshot(self, width: int = 1280, height: int = 900) -> bytes:
        """Return what is seen, as a PNG."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.wait("[...document.images].every((one) => one.loading === 'lazy' || one.complete)")
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def problems(self) -> list[str]:
        """Return what the page complained of since it was opened: exceptions, refused scripts, failed loads."""
        self.run("0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed", "Page.javascriptDialogOpening")
        found = [event for event in self.events if event.get("method") in kinds]
        # What a page that is left no longer wants of a video is no problem.
        return [json.dumps(event) for event in found if not event["params"].get("canceled")]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert connection.wait([self._back], SECONDS), "the browser does not answer"
            some = os.read(self._back, 1 << 20)
            assert some, "the browser has ended"
            self._buffer += some
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def find_chromium() -> str:
    """Return the path of a Chromium, or skip the test."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no Chromium here: install it (apt-get install chromium), or set CHROMIUM to its path")
    return found


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser that keeps all it writes in a folder, and end it with everything that it started."""
    chromium = find_chromium()
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    flags = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync", "--no-zygote"),
        *("--window-size=1280,900", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", "about:blank"),
    ]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{back_write}', "bash", chromium, *flags],
        pass_fds=(to_read, back_write),
        env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(back_write)
    try:
        page = Page(to, back)
        yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to)
        os.close(back)
