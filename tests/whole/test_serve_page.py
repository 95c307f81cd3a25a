"""Run the commands of docs/how-to/serve.md: a server of small models, and requests to it."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.page_commands import ROOT, blocks
from support.served import make_model, serving

BLOCKS = blocks([ROOT / "docs" / "how-to" / "serve.md"])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]


def form(value: Any) -> Any:
    """A JSON value without its texts and numbers."""
    match value:
        case dict():
            return {name: form(one) for name, one in value.items()}
        case list():
            return [form(one) for one in value]
    return type(value)


def test_the_pages_requests_to_its_server_get_the_answers_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, *requests = (one for block in BLOCKS if block.tag == "demo" for one in block.commands())
    (shown,) = (block.commands() for block in BLOCKS if block.info == "json")
    program, command, *arguments = shlex.split(start)
    assert (program, command, *arguments[-2:]) == ("mmnmt", "serve", "--port", "8080")
    runs = tmp_path / "runs" / "demo"
    runs.mkdir(parents=True)
    for name in ("moe", "dense_longer"):
        make_model(runs / name)
    monkeypatch.chdir(tmp_path)
    question = {"q": "3 hours ago", "target": "de"}
    fields: list[dict[str, Any]] = [{"source": "en"}, {"source": "auto", "alternatives": 2}]
    with serving(*arguments[:-2]) as (served, _):
        assert served.ask("/frontend/settings").json()["systems"] == ["moe", "dense"]
        for request, line, others in zip(requests, shown, fields, strict=True):
            asked = shlex.split(request.replace("http://127.0.0.1:8080", served.address))
            environment = {**os.environ, "no_proxy": "*"}
            done = subprocess.run(
                asked, env=environment, capture_output=True, text=True, timeout=60, check=True
            )
            answer = json.loads(done.stdout)
            assert form(answer) == form(json.loads(line))
            assert answer == served.post(**question, **others).json()
