"""The script that answers the open questions on a GPU, as far as a machine without one can tell."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from support.forked import run_script

from pipeline.cli.parser import chosen_recipe
from pipeline.cli.stage_commands import stage_parser
from pipeline.config.ds_config import load_ds_config
from pipeline.stages.registry import STAGES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "bench" / "gpu.py"
PAGE = ROOT / "docs" / "how-to" / "gpu.md"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the script's neighbors as it does itself."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def test_the_page_lists_the_questions_of_the_script() -> None:
    from gpu import HEAD, QUESTIONS, table

    listed = table(HEAD, [question.cells() for question in QUESTIONS])
    assert listed in PAGE.read_text(encoding="utf-8"), (
        "docs/how-to/gpu.md is out of date: copy what `python tests/bench/gpu.py --list` prints"
    )


def test_all_questions_together_take_no_longer_than_they_promise() -> None:
    from gpu import MINUTES, QUESTIONS

    assert sum(question.seconds for question in QUESTIONS) <= 60 * MINUTES
    assert f"at most {MINUTES} minutes" in PAGE.read_text(encoding="utf-8")


def test_rows_of_a_question_that_fails_or_hangs_are_kept() -> None:
    from gpu import MARK, answer, row

    found = row("dense", "number", 2, 3, most=1.5)
    line = MARK + json.dumps(vars(found))
    endings = {"raise SystemExit('no memory')": "failed", "time.sleep(60)": "stopped after 5 s"}
    for ending, status in endings.items():
        code = f"import time; print('noise'); print({line!r}, flush=True); {ending}"
        how, rows = answer([sys.executable, "-c", code], seconds=5)
        assert how.startswith(status)
        assert rows == [found]
    assert answer([sys.executable, "-c", ""], seconds=300) == ("measured", [])


def test_a_question_s_process_ends_when_the_script_is_asked_to_end(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    question = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    asks = (
        f"import sys; sys.path[:0] = {[str(SCRIPT.parent), str(SCRIPT.parents[1])]}; import gpu; "
        "gpu.end_questions_on_request(); "
        f"gpu.answer([sys.executable, '-c', {question!r}], seconds=99)"
    )
    process = subprocess.Popen([sys.executable, "-c", asks])
    try:
        until = time.monotonic() + 120
        while not (noted.is_file() and noted.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_a_measurement_that_is_no_number_does_not_hold() -> None:
    from gpu import row

    assert row("dense", "number", 1, 1, most=1).holds
    assert row("dense", "number", 0, 0, most=1).holds
    assert not row("dense", "number", 0, 1, most=1).holds
    assert not row("dense", "number", 1, float("nan"), most=1).holds


def test_the_stages_of_questions_have_options_and_recipes_that_exist() -> None:
    from gpu import DS_CONFIGS, PAPER, Asked, stage_options

    for recipe, name, quick in product(("demo_moe", PAPER[0]), DS_CONFIGS, (False, True)):
        arguments = stage_options(Asked(quick=quick, demo=Path("demo")), recipe, name)
        options = stage_parser(STAGES["pretrain"]).parse_args([*arguments, "--out", "run"])
        assert chosen_recipe(options).training.dropout == 0
        assert load_ds_config(options.ds_config)


def test_the_process_of_a_question_prints_its_rows(tmp_path: Path) -> None:
    arguments = ["--here", "--quick", "--only", "vocabulary"]
    done = run_script(SCRIPT, arguments, folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '"case": "logits and gradients"' in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_result_says_so_for_every_question(tmp_path: Path) -> None:
    done = run_script(SCRIPT, ["--json", "gpu.json"], folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {"processor", "torch", "commit", "date"} <= found.keys()
    assert found["rows"] == []
    assert all("GPU" in status for status in found["status"].values())
    written = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert all(command in written for command in found["status"])
