"""Drive a headless Chromium over its DevTools protocol: open a page, run scripts in it, move the pointer, take pictures."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0  # seconds: the limit for the start of the browser, and for a condition in a page


def find_browser() -> str | None:
    """Find the command of a Chromium on this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page in the browser.

    Attributes:
        complaints: errors and warnings on the page's console, and uncaught exceptions.
        requests: addresses of everything that the page loaded.
    """

    def __init__(self, address: str) -> None:
        from websocket import create_connection

        self._socket = create_connection(address, timeout=PATIENCE, suppress_origin=True)
        self._number = 0
        self._fingers = 0
        self._events: list[str] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv())
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']['message']}")
                return said["result"]
            self._heard(said)

    def _heard(self, said: dict[str, Any]) -> None:
        method, params = said.get("method", ""), said.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def look(self, width: int, height: int, dark: bool = False, still: bool = False) -> None:
        """Set the size of the window in pixels, the theme, and whether the reader prefers no motion (`still`)."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features.append({"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"})
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Open a page, and wait until it is drawn."""
        self._load("about:blank")  # else the same page with another #fragment would not be loaded
        self.complaints.clear()
        self.requests.clear()
        self._load(address)
        self.drawn()

    def _load(self, address: str) -> None:
        self._events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._heard(json.loads(self._socket.recv()))

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page, and return its value. Wait if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", "?"))
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.run(f"document.querySelector('{selector}').textContent"))

    def press(self, selector: str) -> None:
        """Click an element, wherever it is."""
        self.run(f"document.querySelector('{selector}').click()")

    def drawn(self) -> None:
        """Wait for two frames. Then everything requested before is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(script)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.drawn()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event at a place in the window. `kind`: "mouseMoved", "mousePressed", "mouseReleased" or "mouseWheel"."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.drawn()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        self.mouse("mousePressed", *start, **held)
        for share in (0.3, 0.6, 1.0):
            place = [a + share * (b - a) for a, b in zip(start, end, strict=True)]
            self.mouse("mouseMoved", place[0], place[1], button="left", buttons=1)
        self.mouse("mouseReleased", *end, **held)

    def touch(self, *places: tuple[float, float]) -> None:
        """Put fingers on these places in the window. Without places, lift all fingers. Call `touching(True)` first."""
        kind = "touchEnd" if not places else "touchMove" if len(places) == self._fingers else "touchStart"
        points = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(places)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        self._fingers = len(places)
        self.drawn()

    def touching(self, enabled: bool) -> None:
        """Turn touch input on or off."""
        self.call("Emulation.setTouchEmulationEnabled", enabled=enabled, maxTouchPoints=2 if enabled else 1)

    def tap(self, x: float, y: float) -> None:
        self.touch((x, y))
        self.touch()

    def click(self, x: float, y: float) -> None:
        self.drag((x, y), (x, y))

    def close(self) -> None:
        self._socket.close()

    def picture(self) -> np.ndarray:
        """Return the pixels of the window: [height, width, 3], bytes."""
        return np.asarray(Image.open(io.BytesIO(self.png())).convert("RGB"))

    def png(self, whole: bool = False) -> bytes:
        """Return the window as a PNG file. `whole`: include the part of the page below the window."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a Chromium with one tab, and end it after the `with` block. It writes its files to `folder`."""
    command = find_browser()
    assert command is not None
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--hide-scrollbars",
    ]
    process = subprocess.Popen(
        [command, *options, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        tab = Tab(_address(folder / "DevToolsActivePort", process))
        yield tab
        with suppress(Exception):
            tab.call("Browser.close")
        tab.close()
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address of the first page. The browser prints it when it listens."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) > 1:
            with urlopen(f"http://127.0.0.1:{lines[0]}/json") as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise RuntimeError("the browser did not start")
