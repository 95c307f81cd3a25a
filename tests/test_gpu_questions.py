"""The script that measures on a GPU, as far as a machine without one can tell."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import run_script, started_code

from pipeline.cli.parser import chosen_recipe
from pipeline.cli.stage_commands import stage_parser
from pipeline.config.ds_config import load_ds_config
from pipeline.registry import STAGES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "bench" / "gpu.py"
NOT_ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the script's neighbors as it does itself."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.mark.parametrize(
    ("goal", "good", "bad"),
    [("<= 25", 25, 25.1), (">= 0.45", 0.45, 0.44), ("0.9 to 1.1", 0.9, 1.2), ("", 3.0, None)],
)
def test_a_measurement_holds_within_its_goal(goal: str, good: float, bad: float | None) -> None:
    from gpu_goals import row

    assert row("pass", "ms", goal, good).holds is True
    assert bad is None or row("pass", "ms", goal, bad).holds is False
    assert not goal or row("pass", "ms", goal, float("nan")).holds is False
    assert row("pass", "ms", goal, "failed: no memory").holds == "not measured"


def test_every_section_has_cases_and_every_goal_can_be_read() -> None:
    from gpu import SECTIONS
    from gpu_goals import GOALS, row

    assert GOALS.keys() == SECTIONS.keys()
    cases = [case for known in GOALS.values() for case in known]
    assert len(set(cases)) == len(cases)
    goals = [goal for known in GOALS.values() for _, goal in known.values() if goal]
    assert all(row("", "", goal, float("nan")).holds is False for goal in goals)


@pytest.mark.parametrize(
    ("name", "file", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989e12),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb", 312e12),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090", None),
        ("Tesla T4", "tesla-t4", None),
        ("NVIDIA H100 PCIe", "h100-pcie", None),
    ],
)
def test_every_card_has_a_result_file_and_utilization_of_its_own(
    name: str, file: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu
    import gpu_steps

    monkeypatch.setattr(gpu_steps, "card_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(gpu_steps, "operations", lambda *_: 1e12)
    assert gpu.result_path().name == f"gpu-nvidia-{file}.json"
    found: object = gpu_steps.utilization(None, [], 2.0)  # type: ignore[arg-type]
    unknown = f"not measured: the peak of {name} is not known"
    assert found == (unknown if peak is None else 0.5e12 / peak)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "loads"),
    [("deepspeed", "gpu"), ("transformers", "gpu"), ("pytest", "support.tiny_training")],
)
def test_the_script_does_without_packages_that_no_section_or_only_others_need(
    absent: str, loads: str
) -> None:
    code = f"import sys; sys.modules[{absent!r}] = None; import gpu, {loads}; "
    code += "print(gpu.result_path().name)"
    paths = os.pathsep.join(map(str, (SCRIPT.parent, SCRIPT.parents[1], ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("gpu-nvidia-"), done.stderr


def test_a_section_without_time_keeps_its_rows_for_another_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gpu import kept, missing
    from gpu_steps import Asked

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = Asked(quick=False, demo=tmp_path)
    for name in ("m2m100", "moe"):
        assert missing(name, asked, left=21) == ""
        lacks = missing(name, asked, left=1)
        assert lacks == "more than 9 minutes"
        assert kept({"a": 1}, {name: f"not measured: needs {lacks}"}, name)["a"] == 1


def _absent(_asked: object) -> Iterator[tuple[str, Any]]:
    yield "search step / mmnmt estimate", 1.0
    raise ModuleNotFoundError("No module named 'ctranslate2'")


def _broken(_asked: object) -> Iterator[tuple[str, Any]]:
    yield "search step / mmnmt estimate", 1.0
    raise RuntimeError("no memory")


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (_absent, "not measured: No module named 'ctranslate2'"),
        (_broken, "failed: RuntimeError('no memory')"),
    ],
)
def test_a_section_that_ends_early_keeps_its_rows_and_says_why(
    section: Callable[[Any], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu
    from gpu_goals import rows_of
    from gpu_steps import Asked

    monkeypatch.setitem(gpu.SECTIONS, "search", section)
    rows = rows_of("search", dict(gpu.outcome("search", Asked(quick=True, demo=ROOT))))
    assert [one.measured for one in rows] == [why, 1.0]


@pytest.mark.parametrize(("section", "cases"), [("search", 1), ("passes", 4)])
def test_an_estimate_that_fails_loses_nothing_that_was_measured(
    section: str, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu
    import gpu_steps
    from gpu_goals import rows_of

    def failing(*_: object) -> None:
        raise OSError("no mmnmt")

    monkeypatch.setattr(gpu_steps, "estimates", failing)
    monkeypatch.setattr(gpu_steps, "seconds", lambda *_, **works: [1.0] * len(works))
    monkeypatch.setattr(gpu_steps, "kernels_by_name", lambda _: {})
    found = dict(gpu.outcome(section, gpu_steps.Asked(quick=True, demo=ROOT)))
    measured = [one.measured for one in rows_of(section, found)]
    assert sum(not str(one).startswith("failed") for one in measured) == cases
    assert found[section] == "failed: OSError('no mmnmt')"


def test_rows_that_were_measured_before_keep_their_commit_on_the_same_card(tmp_path: Path) -> None:
    from gpu import earlier
    from gpu_goals import rows_of

    step, to_estimate = (
        "search step, 25 sentences x beam 5, bfloat16",
        "search step / mmnmt estimate",
    )
    path = tmp_path / "gpu.json"
    rows = [asdict(row) for row in rows_of("search", {step: 0.7}, commit="old")]
    path.write_text(json.dumps({"processor": "H100", "rows": rows, "a table": {"a": "1 ms"}}))
    assert earlier(path, {"processor": "H200"}) == {}
    found = earlier(path, {"processor": "H100"})
    assert found["a table"] == {"a": "1 ms"}
    first, second = rows_of("search", found | {to_estimate: 1.0}, commit="new")
    assert (first.measured, first.holds, first.commit) == (0.7, True, "old")
    assert (second.measured, second.commit) == (1.0, "new")


@pytest.mark.slow
@NOT_ON_A_GPU
@pytest.mark.parametrize(("section", "options"), [("ranks", []), ("moe", ["--quick"])])
def test_rows_that_this_machine_cannot_measure_stay(
    section: str, options: list[str], tmp_path: Path
) -> None:
    from gpu import about_this_machine
    from gpu_goals import GOALS, rows_of

    card, before = about_this_machine()["processor"], dict.fromkeys(GOALS[section], 1.5)
    rows = [asdict(row) for row in rows_of(section, before, commit="old")]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"processor": card, "rows": rows}))
    arguments = [*options, "--only", section, "--json", "gpu.json"]
    assert run_script(SCRIPT, arguments, folder=tmp_path, timeout=300).returncode == 0
    assert [row for row in json.loads(path.read_text())["rows"] if row["commit"]] == rows


@pytest.mark.parametrize(
    ("name", "told"),
    [("nosuch/gpu.json", "no folder nosuch"), ("text", "no result file"), (".", "no result file")],
)
def test_a_result_file_that_cannot_be_is_refused_before_anything_is_measured(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import result_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("[]")
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        result_file(name)
    assert result_file("new.json") == Path("new.json")


@pytest.mark.slow
def test_rows_of_a_process_that_fails_or_hangs_are_kept() -> None:
    from gpu import MARK, in_a_process

    line = MARK + json.dumps(["dense", 3.5])
    endings = {
        "raise SystemExit(3)": "failed: exit code 3",
        "time.sleep(60)": "failed: stopped after 2 seconds",
    }
    for ending, why in endings.items():
        code = f"import time; print('noise'); print({line!r}, flush=True); {ending}"
        found = in_a_process([sys.executable, "-c", code], name="passes", limit=2)
        assert dict(found) == {"dense": 3.5, "passes": why}


def test_a_section_s_process_ends_when_the_script_is_asked_to_end(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    section = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    asks = (
        "import gpu, sys; gpu.end_sections_on_request(); "
        f"list(gpu.in_a_process([sys.executable, '-c', {section!r}], name='passes', limit=99))"
    )
    paths = os.pathsep.join(map(str, (SCRIPT.parent, SCRIPT.parents[1])))
    asks = f"import sys; sys.path[:0] = {paths!r}.split(':'); {asks}"
    with started_code(asks, [], environment=os.environ) as started:
        until = time.monotonic() + 120
        while not (noted.is_file() and noted.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        started.process.terminate()
        assert started.end()[0] == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_the_stages_of_two_cards_have_options_and_recipes_that_exist() -> None:
    from gpu import stage_options
    from gpu_steps import Asked

    arguments = stage_options(Asked(quick=False, demo=Path("demo")), "run")
    options = stage_parser(STAGES["pretrain"]).parse_args(arguments)
    assert chosen_recipe(options).training.dropout == 0
    assert load_ds_config(options.ds_config)


@pytest.mark.slow
@NOT_ON_A_GPU
@pytest.mark.parametrize(
    ("section", "options", "why"),
    [
        ("ctranslate2", ["--quick"], "not measured: --quick"),  # has a process that must end, too
        ("kernels", [], "not measured: needs a GPU"),
    ],
)
def test_the_script_ends_and_its_result_file_has_a_row_for_every_case(
    section: str, options: list[str], why: str, tmp_path: Path
) -> None:
    from gpu_goals import GOALS

    arguments = [*options, "--only", section, "--json", "gpu.json"]
    done = run_script(SCRIPT, arguments, folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {"processor", "torch", "commit", "clocks before", "clocks after"} <= found.keys()
    measured = {row["case"]: row["measured"] for row in found["rows"]}
    expected = {case: "not measured" for known in GOALS.values() for case in known}
    assert measured == expected | dict.fromkeys(GOALS[section], why)
