"""A real browser for tests: Chromium without a window, driven over its DevTools protocol.

Whatever the page says on the console, throws, or is refused by its security policy is kept in `Tab.errors`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from waiting import PATIENCE_SECONDS, wait_until

T = TypeVar("T")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
START_SECONDS = PATIENCE_SECONDS
ANSWER_SECONDS = PATIENCE_SECONDS
KEY_CODES = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "ArrowDown": ("ArrowDown", 40, "")}


class Browser:
    """One Chromium with a profile of its own, which reaches this machine only."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = Path(tempfile.mkdtemp(prefix="browser-"))
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-sync",
            "--disable-quic",
        ]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        options += ["--remote-debugging-port=0", "--window-size=1400,1000", f"--user-data-dir={self._folder}"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = self._wait_for_port()
        self._tabs: list[Tab] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for tab in self._tabs:
            tab.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, url: str = "about:blank") -> Tab:
        """A new tab; with an address it is there when the page has loaded."""
        tab = self.do(Tab.connect(self, self._port))
        self._tabs.append(tab)
        if url != "about:blank":
            tab.go(url)
        return tab

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=START_SECONDS)

    def _wait_for_port(self) -> int:
        path, deadline = self._folder / "DevToolsActivePort", time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if path.exists() and (text := path.read_text()).count("\n"):
                return int(text.splitlines()[0])
            assert self._process.poll() is None, f"chromium ended with code {self._process.returncode}"
            time.sleep(0.02)
        raise TimeoutError("chromium opened no DevTools port")


class Tab:
    """One page."""

    def __init__(
        self, browser: Browser, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse
    ) -> None:
        self._browser, self._session, self._socket = browser, session, socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.errors: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def connect(cls, browser: Browser, port: int) -> Tab:
        session = aiohttp.ClientSession()
        async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        tab = cls(browser, session, socket)
        for domain in ("Page", "Runtime", "Log"):
            await tab._send(f"{domain}.enable")
        return tab

    def go(self, url: str) -> None:
        """Loads a page; back when the document is complete."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.do(self._send(method, **parameters))

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Until JavaScript gives something true, also on a page that is loaded meanwhile."""

        def value() -> Any:
            try:
                answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
            except AssertionError as error:
                if "Inspected target navigated" not in str(error):
                    raise
                return None
            return None if "exceptionDetails" in answer else answer["result"].get("value")

        return wait_until(value, lambda: f"{expression}; console: {self.errors}")

    def press(self, key: str) -> None:
        name, code, text = KEY_CODES.get(key, (key, ord(key.upper()[0]), key))
        sent = {"key": name, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **sent)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A click where the element is, as a person would."""
        found = self.wait_for(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); if (!it || it.hidden) return null;"
            " it.scrollIntoView({block: 'center', behavior: 'instant'}); const box = it.getBoundingClientRect();"
            " return box.width ? [box.x + box.width / 2, box.y + box.height / 2] : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1)

    def move_to(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system would say."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, full: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """The page goes too, with the streams that it has open."""
        if not self._socket.closed:
            self._browser.do(self._close())

    async def _close(self) -> None:
        await self._send("Page.close")
        await self._socket.close()
        await self._session.close()
        self._reader.cancel()

    async def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, ANSWER_SECONDS)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]  # type: ignore[no-any-return]

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue
            document = json.loads(message.data)
            if (number := document.get("id")) is not None:
                future = self._answers.pop(number, None)
                if future is not None and not future.done():
                    future.set_result(document)
            else:
                self._note(document["method"], document.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            words = [str(each.get("value", each.get("description", ""))) for each in told["args"]]
            self.errors.append(f"console: {' '.join(words)}")
        elif method == "Runtime.exceptionThrown":
            detail = told["exceptionDetails"]
            self.errors.append(f"thrown: {detail.get('exception', {}).get('description', detail['text'])}")
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"log: {told['entry']['text']} {told['entry'].get('url', '')}")
