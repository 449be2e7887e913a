"""Drive a headless Chromium over its debugging pipe; needs nothing but Chromium.

Used by look.py and by the tests of the rendered book. The browser reaches only this
machine: every other host name fails to resolve, and each request is written down.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers and CI often run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4.
TRAMPOLINE = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(RuntimeError):
    """Chromium did not do what it was asked to do."""


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One headless Chromium with one tab.

    Attributes:
        requests: The addresses the current page asked for.
        errors: Uncaught exceptions and console errors of the current page.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        program = find_chromium()
        if program is None:
            raise BrowserError(
                "no Chromium found (looked for " + ", ".join(NAMES) + "): "
                "install it, on Debian with apt-get install chromium"
            )
        self.timeout_s = timeout_s
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._buffer = b""
        self._last_id = 0
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command_end, self._to = os.pipe()
        self._from, answer_end = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", TRAMPOLINE),
                *(str(command_end), str(answer_end), program, *FLAGS),
                *(f"--user-data-dir={self._profile.name}", "about:blank"),
            ],
            pass_fds=(command_end, answer_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._to)  # Chromium ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the Chrome DevTools protocol and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        sent = self._last_id
        answer = self._read_until(lambda message: message.get("id") == sent, method)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(
        self, url: str, *, width: int, height: int = 900, dark: bool = False
    ) -> None:
        """Load a page at a window size and wait until its formulas are drawn."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.errors.clear()
        self.send("Page.navigate", url=url)
        self._read_until(
            lambda message: message.get("method") == "Page.loadEventFired", url
        )
        self.run("window.MathJax?.startup?.promise?.then(() => true)")
        self.run("document.fonts.ready.then(() => true)")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(_describe(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, file: Path, clip: tuple[int, int, int, int]) -> None:
        """Write a part of the page (left, top, width, height) as a PNG file."""
        box = dict(zip(("x", "y", "width", "height"), clip, strict=True), scale=1)
        answer = self.send(
            "Page.captureScreenshot", clip=box, captureBeyondViewport=True
        )
        file.write_bytes(base64.b64decode(answer["data"]))

    def _read_until(
        self, wanted: Callable[[dict[str, Any]], bool], what: str
    ) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            message = self._read(deadline, what)
            self._note(message)
            if wanted(message):
                return message

    def _read(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise BrowserError(f"no answer within {self.timeout_s:.0f} s: {what}")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise BrowserError(f"Chromium ended during {what}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(_describe(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                values = (a.get("value", a.get("description")) for a in params["args"])
                self.errors.append(" ".join(map(str, values)))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}".strip())


def _describe(details: dict[str, Any]) -> str:
    """Return what a JavaScript exception says."""
    return details.get("exception", {}).get("description", details["text"])
