"""Drive a headless Chromium over its debugging pipe: nothing but the standard library and an installed browser."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)
NO_BROWSER = "there is no Chromium on this machine (apt-get install chromium)"


class Page:
    """One tab."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from, self._buffer, self._number = to, answers, b"", 0
        self._session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Page.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def open(self, file: Path) -> None:
        """Load a file and wait for it."""
        self("Page.navigate", url=file.resolve().as_uri())
        self.wait(f"document.readyState === 'complete' && location.pathname.endsWith({json.dumps(file.name)})")

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < end, f"{expression} never came true"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        named = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
        code = named.get(key, ord(key.upper()[0]))
        text = {} if key in ("Tab", "ArrowRight") else {"text": "\r" if key == "Enter" else key}
        self("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def size(self, width: int, height: int) -> None:
        """The size of the screen, in pixels; a narrow one is a telephone's."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        found = self("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], 60)
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """A browser with one tab, ended afterwards."""
    assert BROWSER is not None, NO_BROWSER
    read, to = os.pipe()
    answers, write = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]  # out of the way of 3 and 4
    for end in (read, write):
        os.close(end)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--mute-audio", "--autoplay-policy=no-user-gesture-required", f"--user-data-dir={profile}"]
        # the browser reads descriptor 3 and writes 4
        connected = ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", BROWSER]
        process = subprocess.Popen(
            [*connected, *options, "--remote-debugging-pipe", "about:blank"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in high:
            os.close(end)
        try:
            yield Page(to, answers)
        finally:
            process.terminate()
            process.wait(30)
            os.close(to)
            os.close(answers)
