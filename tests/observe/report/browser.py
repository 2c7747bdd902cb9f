"""A headless Chromium, driven through chromedriver by the WebDriver protocol: JSON over HTTP on this machine."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

DRIVER: Final = shutil.which("chromedriver")
_SECONDS: Final = 30
_READY: Final = "document.documentElement.dataset.ready === 'yes'"
"""Of a report: its charts are drawn."""
_STARTED: Final = re.compile(r"started successfully on port (\d+)")


class Browser:
    """One window. A context manager: at its end, driver and browser are gone."""

    def __init__(self, folder: Path) -> None:
        assert DRIVER is not None
        self._log = folder / "chromedriver.log"
        with self._log.open("wb") as log:
            # Its own home: else Chromium writes into the user's, or finds none.
            environment = {**os.environ, "HOME": str(folder)}
            self._driver = subprocess.Popen(
                [DRIVER, "--port=0"], stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment
            )
        try:
            self._address = f"http://127.0.0.1:{self._port()}"
            flags = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars")
            options = {"args": [*(f"--{flag}" for flag in flags), f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
            self._session = ""
            session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{session['sessionId']}"
        except BaseException:
            self._driver.kill()
            raise

    def __enter__(self) -> Browser:  # noqa: PYI034 - nobody derives from it
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(_SECONDS)

    def show(
        self, page: Path | str, width: int, scheme: str = "light", ready: str = _READY, *, touches: bool = False
    ) -> None:
        """Show a file or an address in a window of this width, to a reader who prefers this colour scheme.

        Args:
            ready: what is true of the page when it is there.
            touches: whether the screen is one for fingers.
        """
        self.devtools("Emulation.setTouchEmulationEnabled", {"enabled": touches, "maxTouchPoints": 2})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})
        self._ask("POST", "/url", {"url": page if isinstance(page, str) else page.absolute().as_uri()})
        self.wait_until(ready)

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait_until(self, condition: str) -> None:
        """Wait for a condition and for the frame after it, in which what it has changed is drawn."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(f"return {condition}"):
            assert time.monotonic() < deadline, f"{condition} never came; {self.log('browser')}"
            time.sleep(0.05)
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(1)))"
        self._ask("POST", "/execute/async", {"script": script, "args": []})

    def mouse(self, *actions: dict[str, Any]) -> None:
        """Do something with the mouse, as the WebDriver protocol has it."""
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._ask("POST", "/actions", {"actions": [pointer]})

    def touch(self, *places: tuple[float, float]) -> None:
        """Put a finger on the screen, move it along places, and lift it."""
        first, *moves = ({"type": "pointerMove", "x": round(x), "y": round(y), "origin": "viewport"} for x, y in places)
        actions = [first, {"type": "pointerDown", "button": 0}, *moves, {"type": "pointerUp", "button": 0}]
        finger = {"type": "pointer", "id": "finger", "parameters": {"pointerType": "touch"}, "actions": actions}
        self._ask("POST", "/actions", {"actions": [finger]})

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of a log since the last time: `browser` or `performance`."""
        entries: list[dict[str, Any]] = self._ask("POST", "/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last time, but for those of Chromium's own pages."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if not each["documentURL"].startswith("chrome")]

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """Call Chromium's own protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        width, height = self.run("const it = document.documentElement; return [it.clientWidth, it.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _port(self) -> int:
        deadline = time.monotonic() + _SECONDS
        while not (found := _STARTED.search(self._log.read_text(errors="replace"))):
            assert time.monotonic() < deadline, "chromedriver did not start"
            assert self._driver.poll() is None, self._log.read_text(errors="replace")
            time.sleep(0.05)
        return int(found[1])

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + self._session + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2 * _SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode(errors='replace')[:500]}") from None
