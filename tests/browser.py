"""A headless Chromium, driven over the WebDriver protocol. Both are Debian's: chromium, chromium-driver."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from running_server import free_port

_DEADLINE = 60.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--no-proxy-server", "--hide-scrollbars"),
)


class Browser:
    """``with Browser(folder) as browser``; skips the test where there is no Chromium."""

    def __init__(self, folder: Path, *flags: str) -> None:
        for program in ("chromium", "chromedriver"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        port = free_port()
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._url = f"http://127.0.0.1:{port}"
        self._session = ""
        self._arguments = [*_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags]

    def __enter__(self) -> Browser:
        try:
            self.until(self._up)
            options = {"binary": shutil.which("chromium"), "args": self._arguments}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options}
            wanted["goog:loggingPrefs"] = {"browser": "ALL"}
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self._driver.kill()
            self._driver.wait(_DEADLINE)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._driver.kill()
            self._driver.wait(_DEADLINE)

    def open(self, url: str) -> None:
        """Go there."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a function with this body returns in the page."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.run(f"return document.querySelector({json.dumps(selector)}).innerText"))

    def log(self) -> list[str]:
        """What the browser has complained of since it was asked last."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def resize(self, width: int, height: int) -> None:
        """The window, in pixels."""
        self._ask("POST", f"{self._session}/window/rect", {"width": width, "height": height})

    def emulate(self, method: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": method, "params": parameters})

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def until(self, condition: Callable[[], Any]) -> Any:
        """Ask until it is true; what it was then."""
        deadline = time.monotonic() + _DEADLINE
        while not (found := condition()):
            assert time.monotonic() < deadline, "the browser did not get there"
            time.sleep(0.02)
        return found

    def _up(self) -> bool:
        try:
            return bool(self._ask("GET", "/status")["ready"])
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_DEADLINE) as response:
            return json.loads(response.read())["value"]
