"""Tests of the page of ``mmnmt serve`` in Chromium: it is typed into, and what it shows is read."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.served import serving
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe".split()
WIDTH = 360
TEXT = "Ein Haus. " * 20
ARABIC = "العربية · Arabic · ar"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


class Tab:
    """A tab of a browser that is told what to do through two pipes (DevTools protocol)."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb")
        self._number, self._session = 0, {}  # type: int, dict[str, str]
        self.requested: list[str] = []
        """Addresses that the page has asked for."""
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def tell(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            said = json.loads(b"".join(iter(lambda: self._answers.read(1), b"\0")))
            if said.get("method") == "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])
            if said.get("id") == self._number:
                return said["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression; wait for it if it is a promise."""
        done = self.tell(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        return done["result"].get("value")

    def wait_for(self, condition: str) -> None:
        self.run(f"new Promise(then => setInterval(() => {{ if ({condition}) then() }}, 20))")


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


def test_text_typed_into_the_page_is_translated_on_a_dark_phone(tmp_path: Path) -> None:
    spec = byte_spec(max_positions=40).model_copy(update={"languages": ("ar", "de", "en", "fr")})
    checkpoint = make_checkpoint(tmp_path / "one", tiny_model(spec))
    with serving(str(checkpoint)) as (served, _), browser(tmp_path / "profile") as tab:
        tab.tell("Network.enable")
        phone = {"width": WIDTH, "height": 700, "deviceScaleFactor": 1, "mobile": True}
        tab.tell("Emulation.setDeviceMetricsOverride", **phone)
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        tab.tell("Emulation.setEmulatedMedia", features=dark)
        tab.tell("Page.navigate", url=served.address)
        tab.wait_for("document.getElementById('to')?.value && document.activeElement.id === 'text'")
        for field, typed in {"from": "Deutsch · German · de", "to": ARABIC, "text": TEXT}.items():
            tab.run(f"document.getElementById('{field}').select()")
            tab.tell("Input.insertText", text=typed)
        shown = "document.querySelector('article p')"
        tab.wait_for(f"{shown}.textContent")
        colors = "getComputedStyle(document.body)"
        width = "document.documentElement.scrollWidth"
        found = tab.run(f"[{shown}.textContent, {shown}.dir, {width}, {colors}.backgroundColor]")
        expected = served.post(q=TEXT, target="ar").json()["translatedText"]
        assert found == [expected, "rtl", WIDTH, "rgb(21, 24, 28)"]
        word = f"{shown}.querySelector('span')"
        tab.run(f"{word}.focus()")
        told = tab.run(f"[{word}.textContent, document.querySelector('article .note').textContent]")
        first, arrow, *sources = told[1].split()
        assert (first, arrow) == (told[0], "←")
        assert sources
        assert set(sources) <= set(TEXT.split())
        assert tab.requested
        assert all(url.startswith((served.address, "data:")) for url in tab.requested)
