"""Chromium without a window, used as a person does: with keys and a mouse (DevTools protocol)."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe".split()
WAITS = 3000
"""Most times that a condition is looked at, every 20 ms."""
CTRL, SHIFT = 2, 8
"""Modifiers of a key."""
KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
"""Key → its virtual key code."""


class Tab:
    """A tab of a browser that is told what to do through two pipes."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb")
        self._number, self._target, self._session = 0, "", {}  # type: int, str, dict[str, str]
        self.requests: list[dict[str, Any]] = []
        """Requests of the page in order, as the protocol describes them."""
        self.problems: list[dict[str, Any]] = []
        """Exceptions of the page's script, and what its security policy has refused."""

    def open(self) -> None:
        """Leave the open page for an empty one in a new tab, with no settings of the last one."""
        self._session, last = {}, self._target
        self._target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        if last:
            self.tell("Target.closeTarget", targetId=last)
        attached = self.tell("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.requests, self.problems = [], []
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.tell(f"{domain}.enable")
        self.tell("Page.bringToFront")

    def tell(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            said = json.loads(b"".join(iter(lambda: self._answers.read(1), b"\0")))
            if said.get("sessionId") == self._session.get("sessionId"):
                self._note(said.get("method"), said.get("params", {}))
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        if event == "Runtime.exceptionThrown" or (
            event == "Log.entryAdded" and params["entry"]["source"] == "security"
        ):
            self.problems.append(params)

    def run(self, script: str) -> Any:
        """Return the value of an expression; wait for it if it is a promise."""
        done = self.tell(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, f"{script}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def wait_for(self, condition: str) -> None:
        is_met = self.run(
            f"new Promise(end => {{ let waits = {WAITS}; const timer = setInterval(() => {{"
            f"const isMet = !!({condition}); if (!isMet && --waits) return;"
            "clearInterval(timer); end(isMet) }, 20) })"
        )
        assert is_met, (
            f"{condition} is not met. The page shows: {self.run('document.body.innerText')}"
        )

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key, which types itself if it is a character."""
        typed = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        is_plain = len(key) == 1 and key.isascii() and key.isalnum()
        code = KEYS.get(key, ord(key.upper()) if is_plain else 0)
        for kind in ("keyDown" if typed else "rawKeyDown", "keyUp"):
            text = {"text": typed} if kind == "keyDown" and not modifiers & CTRL else {}
            named = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers, **text}
            self.tell("Input.dispatchKeyEvent", type=kind, **named)

    def type(self, text: str) -> None:
        for character in text:
            self.press(character)

    def hover(self, element: str) -> tuple[float, float]:
        """Move the mouse to the middle of what an expression gives, scrolled into view."""
        x, y = self.run(
            f"(element => {{ element.scrollIntoView({{ block: 'nearest' }});"
            "const { x, y, width, height } = element.getClientRects()[0];"
            f"return [x + width / 2, y + height / 2] }})({element})"
        )
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, element: str) -> None:
        x, y = self.hover(element)
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.tell("Input.dispatchMouseEvent", type=kind, **at)

    def picture(self, element: str = "document.documentElement") -> bytes:
        """Return what a person sees of an element, as a PNG."""
        box = self.run(
            f"(({{ x, y, width, height }}) => ({{ x: x + scrollX, y: y + scrollY, width, height,"
            f" scale: 1 }}))({element}.getBoundingClientRect())"
        )
        taken = self.tell("Page.captureScreenshot", clip=box, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    (their_commands, commands), (answers, their_answers) = os.pipe(), os.pipe()
    shell = f'exec "$@" 3<&{their_commands} 4>&{their_answers}'
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}"]
    with subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=[their_commands, their_answers],
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(their_commands)
        os.close(their_answers)
        try:
            yield Tab(commands, answers)
        finally:
            process.kill()
