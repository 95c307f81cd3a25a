"""A profile of a window of updates: what it holds, and that it changes nothing else."""

import gzip
import json
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folder_listing import names_in
from support.process_pool import ProcessPool
from support.stage_runs import make_call
from support.tiny_training import (
    Inputs,
    assert_same_runs,
    make_recipe,
    pretrain,
)

from pipeline.artifacts.artifact import open_artifact
from pipeline.cli.stage_commands import stage_parser
from pipeline.distributed import process
from pipeline.errors import ConfigError
from pipeline.registry import STAGES
from pipeline.stage import StageCall
from pipeline.training.metrics import Profiling

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """Return the events of a trace that have a duration."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        found = json.load(stream)["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def updates_in(events: list[Event]) -> list[Event]:
    """Return the spans of updates in order of time."""
    found = [event for event in events if event["name"].startswith("update ")]
    return sorted(found, key=lambda event: event["ts"])


def call_with(profile: tuple[int, int] | None, out_dir: Path) -> StageCall:
    return replace(make_call("pretrain", make_recipe(), {}, out_dir), profile=profile)


def make_updates(profiling: Profiling, *updates: int) -> None:
    """Make updates of an operator each: ``add`` in odd ones, ``mul`` in even ones."""
    ones = torch.ones(2)
    with profiling:
        for update in updates:
            with profiling.update(update):
                _ = ones + ones if update % 2 else ones * ones


def test_a_profile_holds_the_updates_of_its_window_and_no_other(tmp_path: Path) -> None:
    make_updates(Profiling(call_with((2, 4), tmp_path / "model"), rank=0), *range(1, 7))
    assert names_in(tmp_path / "model.profile") == ["updates-2-4.json.gz", "updates-2-4.txt"]
    events = events_of(tmp_path / "model.profile" / "updates-2-4.json.gz")
    assert [event["name"] for event in updates_in(events)] == ["update 2", "update 3", "update 4"]
    names = [event["name"] for event in events]
    assert (names.count("aten::add"), names.count("aten::mul")) == (1, 2)
    table = (tmp_path / "model.profile" / "updates-2-4.txt").read_text(encoding="utf-8")
    assert "aten::mul" in table


def test_a_window_that_begins_before_an_attempt_or_outlasts_it_has_its_updates(
    tmp_path: Path,
) -> None:
    for updates in ((2, 3), (4, 5, 6)):
        make_updates(Profiling(call_with((3, 9), tmp_path / "model"), rank=0), *updates)
    found = [name for name in names_in(tmp_path / "model.profile") if name.endswith(".txt")]
    assert found == ["updates-3-3.txt", "updates-4-6.txt"]


def test_what_was_recorded_is_written_where_training_fails(tmp_path: Path) -> None:
    with ExitStack() as stack:
        profiling = stack.enter_context(Profiling(call_with((2, 4), tmp_path / "model"), rank=0))
        stack.enter_context(pytest.raises(ValueError, match="spoilt"))
        with profiling:
            for update in (1, 2, 3):
                with profiling.update(update):
                    if update == 3:
                        raise ValueError("spoilt")
    assert "updates-2-3.txt" in names_in(tmp_path / "model.profile")


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    make_updates(Profiling(call_with((2, 4), tmp_path / "model"), rank=1), 1, 2, 3, 4, 5)
    assert not names_in(tmp_path)


def test_a_profile_of_updates_that_were_made_before_is_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_updates(Profiling(call_with((2, 4), tmp_path / "model"), rank=0), 5, 6)
    assert not names_in(tmp_path)
    assert capsys.readouterr().err == (
        "--profile: nothing was profiled: no update from 2 to 4 was made now.\n"
    )


def test_a_profile_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.profile").write_text("mine")
    make_updates(Profiling(call_with((2, 3), tmp_path / "model"), rank=0), 1, 2, 3, 4)
    assert (tmp_path / "model.profile").read_text() == "mine"
    assert "--profile: the profile was not written: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_profile_that_takes_long_to_write_is_no_hang_for_the_watchdog(tmp_path: Path) -> None:
    """The table is a pipe, which nobody reads until steps were counted."""
    pipe = tmp_path / "model.profile" / ".updates-2-3.unfinished.txt"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    read: list[str] = []

    def read_late() -> None:
        while not (tmp_path / "model.profile" / "updates-2-3.json.gz").exists():
            time.sleep(0.01)
        until, deadline = process.steps() + 2, time.monotonic() + 20
        while process.steps() < until and time.monotonic() < deadline:
            time.sleep(0.01)
        read.append("late" if process.steps() < until else "in time")
        read.append(pipe.read_text(encoding="utf-8"))

    reader = threading.Thread(target=read_late)
    reader.start()
    make_updates(Profiling(call_with((2, 3), tmp_path / "model"), rank=0), 1, 2, 3)
    reader.join()
    assert read[0] == "in time"
    assert "aten::mul" in read[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_after_the_last_update_is_refused_on_all_ranks(tmp_path: Path, rank: int) -> None:
    with pytest.raises(ConfigError, match="begins after the last update, which is 6"):
        Profiling(call_with((7, 8), tmp_path / "model"), rank=rank)


BAD_WINDOWS = ("", "5", "5:", ":5", "0:3", "4:3", "1:2:3", "-1:2", "a:b", "1:21", "²:3", "1.5:2")


@pytest.mark.parametrize("text", BAD_WINDOWS)
def test_a_window_that_is_none_gets_one_sentence(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        stage_parser(STAGES["pretrain"]).parse_args([f"--profile={text}"])
    assert ended.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"{text!r} is not FIRST:LAST, at most 20 updates, for example 100:110")
    )


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.trains])
def test_every_stage_that_trains_takes_a_window(name: str) -> None:
    assert "--profile FIRST:LAST" in stage_parser(STAGES[name]).format_help()


# Whole trainings


@pytest.mark.slow
def test_a_run_with_a_profile_is_that_of_one_without_bit_for_bit(
    inputs: Inputs, pool2: ProcessPool, tmp_path: Path
) -> None:
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert pool2.run(pretrain, inputs, plain, make_recipe()) == ["done"] * 2
    assert pool2.run(pretrain, inputs, profiled, make_recipe(), profile=(3, 4)) == ["done"] * 2
    assert_same_runs(profiled, plain, state=6)
    kept = [open_artifact(path, kind="checkpoint").manifest for path in (plain, profiled)]
    assert kept[0].key == kept[1].key
    assert kept[0].config == kept[1].config
    events = events_of(tmp_path / "profiled.profile" / "updates-3-4.json.gz")
    spans = updates_in(events)
    assert [span["name"] for span in spans] == ["update 3", "update 4"]
    steps = [event["ts"] for event in events if event["name"].startswith("Optimizer.step")]
    counts = [sum(s["ts"] <= at <= s["ts"] + s["dur"] for at in steps) for s in spans]
    assert counts[0] == counts[1] == len(steps) / 2 > 0
