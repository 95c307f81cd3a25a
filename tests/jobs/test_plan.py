"""Tests of pipeline/jobs/: plan, freshness, runner; three tiny stages stand in for real ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.folder_listing import names_in
from support.small_plans import TINY, as_child

from pipeline.artifacts.artifact import (
    MANIFEST_NAME,
    InputRecord,
    new_artifact,
    open_artifact,
    raw_digest,
    read_manifest,
    stage_key,
)
from pipeline.artifacts.locks import exclusive, sole_writer
from pipeline.artifacts.raw_input import HubDataset, RawInput
from pipeline.config.ds_config import AUTO, load_ds_config
from pipeline.config.recipe import load_recipe
from pipeline.errors import EXIT_RUN_AGAIN, ArtifactError, ConfigError, Interrupted
from pipeline.jobs.freshness import reason_to_run
from pipeline.jobs.launch import StopRequests
from pipeline.jobs.plan import ResolvedPlan, load_plan, plan_names, resolve_plan, stage_order
from pipeline.jobs.runner import MAX_RERUNS, dry_run, run_plan, stage_arguments, status_rows
from pipeline.machine import Gpus
from pipeline.registry import STAGES
from pipeline.stage import Input, Stage, stage_config
from pipeline.terminal import text_table

CORPORA = {"corpus": Input("corpus", "text"), "extra": Input("corpus", "more", False)}
SHARDS = {"shards": Input("shards", "lengths", many=True)}
TABLE = {
    "read": Stage("read", "tiny", "corpus", "", ("corpus",), {"raw": Input("raw", "a folder")}),
    "count": Stage("count", "tiny", "shards", "", ("shards",), CORPORA, "workers"),
    "train": Stage("train", "tiny", "checkpoint", "", ("training",), SHARDS, "ranks", True),
}

PLAN = """
description = "tiny"
[inputs]
text = "a folder of text"
[stages.corpus]
run = "read"
recipe = "{recipe}"
inputs = {{ raw = "$text" }}
[stages.shards]
run = "count"
recipe = "{recipe}"
inputs = {{ corpus = "corpus" }}
[stages.model]
run = "train"
recipe = "{recipe}"
processes = 3
threads = 2
[stages.model.inputs.shards]
only = "shards"
"""

RECIPE = """
[corpus]
max_train_lines = 5
[shards]
max_tokens = 16
[optimizer]
warmup_updates = 1

[training]
updates = 10
"""


STAGES_OF_PLAN = ["corpus", "shards", "model"]


class Workshop:
    """A launcher that builds the artifacts in this process, and remembers what it was told.

    The corpus holds the sorted set of characters of the raw text, so different text can give the
    same corpus; the other stages copy what they read.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.told: list[tuple[int, int]] = []
        self.gpus: list[str | None] = []
        self.commands: list[list[str]] = []
        self.codes: list[int] = []
        """Exit codes of the next starts that are to do nothing; then all succeed."""

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        processes: int,
        threads: int,
        requests: StopRequests,
        gpu: str | None,
    ) -> int:
        assert isinstance(requests, StopRequests)
        self.gpus.append(gpu)
        options = [argument for argument in arguments if argument.startswith("--")]
        named = dict(option[2:].partition("=")[::2] for option in options)
        out_dir = Path(named["out"])
        self.started.append(out_dir.name)
        self.told.append((processes, threads))
        self.commands.append(list(arguments))
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            self._build(TABLE[arguments[2]], named, list(arguments), out_dir)
        return code

    def _build(
        self, stage: Stage, named: dict[str, str], arguments: list[str], out_dir: Path
    ) -> None:
        records = {}
        text = ""
        for name, wanted in stage.inputs.items():
            given = {name: named.get(name, "")}
            if wanted.many:
                entry, _, path = arguments[arguments.index(f"--{name}") + 1].partition("=")
                given = {f"{name}/{entry}": path}
            for key, value in given.items():
                if value:
                    path_in = Path(value)
                    text += _read(path_in)
                    digest = (
                        raw_digest(path_in)
                        if wanted.kind == "raw"
                        else open_artifact(path_in, kind=wanted.kind).digest
                    )
                    records[key] = InputRecord(kind=wanted.kind, path=value, digest=digest)
        recipe = load_recipe(named["recipe"])
        config = stage_config(stage, recipe=recipe, ds_config=named.get("ds-config", ""))
        with new_artifact(
            out_dir,
            kind=stage.makes,
            stage=stage.name,
            config=config,
            inputs=records,
            overwrite="overwrite" in named,
        ) as writer:
            writer.path("text").write_text("".join(sorted(set(text))))
            if stage.trains:
                writer.statistics["updates"] = recipe.training.updates


def _read(path: Path) -> str:
    return "".join(entry.read_text() for entry in sorted(path.iterdir()) if entry.name == "text")


class Setup:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe_path = folder / "recipe.toml"
        self.plan_path = folder / "tiny.toml"
        self.text_path = folder / "raw" / "text"
        self.out_dir = folder / "out"
        self.workshop = Workshop()
        self.jobs = 1
        self.lines: list[str] = []
        """What the last run said."""
        self.text_path.parent.mkdir()
        self.text_path.write_text("banana")
        self.recipe_path.write_text(RECIPE)
        self.plan_path.write_text(PLAN.format(recipe=self.recipe_path))

    def resolved(
        self, *, only: Collection[str] = (), until: Collection[str] = (), **options: Any
    ) -> ResolvedPlan:
        options = {"given": {"text": RawInput((self.text_path.parent,))}, **options}
        plan = load_plan(str(self.plan_path))
        resolved = resolve_plan(plan, out_dir=self.out_dir, **options)
        return resolved.chosen(only=only, until=until)

    def run(self, *, rebuild: Collection[str] = (), **options: Any) -> tuple[int, str]:
        """Exit code and output of a run; ``workshop.started`` holds what this run started."""
        self.workshop.started.clear()
        self.lines.clear()
        resolved = self.resolved(**options)
        code = run_plan(
            resolved, rebuild=rebuild, jobs=self.jobs, launcher=self.workshop, say=self.lines.append
        )
        return code, "\n".join(self.lines)

    def starts(self, **options: Any) -> list[str]:
        """What a run starts that succeeds."""
        code, said = self.run(**options)
        assert code == 0, said
        return self.workshop.started

    def forecast(self, *, rebuild: Collection[str] = (), **options: Any) -> list[str]:
        lines: list[str] = []
        dry_run(self.resolved(**options), rebuild=rebuild, say=lines.append)
        return lines

    def status(self, **options: Any) -> str:
        return text_table(["stage", "state", ""], status_rows(self.resolved(**options)))


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    with mock.patch.dict(STAGES, TABLE, clear=True):
        yield Setup(tmp_path)


def _plan_with(setup: Setup, old: str, new: str) -> str:
    text = setup.plan_path.read_text()
    assert old in text
    setup.plan_path.write_text(text.replace(old, new, 1))
    return str(setup.plan_path)


# ---------------------------------------------------------------- reading


def test_the_plans_that_ship_name_no_ds_config_for_gpus_of_one_kind() -> None:
    """V100 and T4 do not compute in bf16: ``auto`` takes fp16 there. A study may ask for a CPU."""
    chosen = {stage.ds_config for name in plan_names() for stage in load_plan(name).stages.values()}
    assert AUTO in chosen
    assert chosen <= {AUTO, "cpu_bf16"}


def test_systems_of_the_demo_have_equally_many_new_updates(tmp_path: Path) -> None:
    plan = load_plan("demo")
    tasks = {task.name: task for task in resolve_plan(plan, out_dir=tmp_path).tasks}

    def new_updates(name: str) -> int:
        sources = {
            source
            for key, source in plan.stages[name].sources().items()
            if key in ("checkpoint", "embeddings", "encoder", "decoder") and source != "dense"
        }
        own = tasks[name].config.get("training", {}).get("updates", 0)
        return int(own) + sum(map(new_updates, sources))

    assert plan.stages["evaluation"].inputs["given"] == {"dense": "dense"}
    systems = ("dense_longer", "moe", "mmnmt")
    assert {new_updates(name) for name in systems} == {new_updates("dense")}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('run = "train"', 'run = "tarin"', r"no stage 'tarin'. Did you mean 'train'\?"),
        ('only = "shards"', 'only = "shard"', r"no stage 'shard'. Did you mean 'shards'\?"),
        ('only = "shards"', 'only = "corpus"', "a corpus artifact where a shards artifact is want"),
        ('only = "shards"', 'a = "shards"\nA = "shards"', "names 'A' and 'a', .*. Rename one"),
        ('only = "shards"', '"a/b" = "shards"', "the name 'a/b' has a slash.*. Write 'a-b'"),
        ('corpus = "corpus"', 'corpse = "corpus"', "needs input 'corpus'"),
        ('corpus = "corpus" }', 'corpus = "corpus", more = "corpus" }', "no input 'more'"),
        ('corpus = "corpus"', 'corpus = { a = "corpus" }', "takes one stage name"),
        ('corpus = "corpus"', 'corpus = ["corpus"]', r"corpus is \['corpus'\]\. Write the name"),
        ('corpus = "corpus"', "corpus = { a = 3 }", r"shards\.inputs\.corpus: Write the name"),
        ('raw = "$text"', 'raw = "$txt"', r"'\$txt' is not declared. Did you mean '\$text'\?"),
        ('raw = "$text"', 'raw = "$memories"', r"'\$memories' is not declared. Add it"),
        ('raw = "$text"', 'raw = "shards"', "raw data comes from outside"),
        ("threads = 2", "threads = 0", "threads is 0. Choose a whole number from 1 to 1,024"),
        ("processes = 3", "processes = 99999", "processes is 99999. Choose a whole number"),
        ("processes = 3", 'processes = "3"', 'processes is "3". Choose a whole number'),
        ("threads = 2", "thread = 2", r"model\.thread'. Did you mean 'threads'\?"),
        *(
            ("[stages.model]", f"{before}[stage.model]{own}", r"'stage'. Did you mean 'stages'\?")
            for before, own in (
                ("", ""),
                ("[defaults.train]\nthreads = 1\n", ""),
                ("[matrix.m.rows]\na = {}\n", '\nmatrix = "m"'),
            )
        ),
        ('corpus = "corpus" }', 'corpus = "corpus", corpse = "x" }', r"Did you mean 'corpus'\?"),
        ("[stages.shards]", '[stages."../shards"]', "it names a folder"),
        ('"tiny"', '"tiny"\nname = "../../x"', "its name '../../x' leads out of the folder"),
        ('"tiny"', '"tiny"\nname = "/x"', "its name '/x' is absolute"),
        ('"tiny"', '"tiny"\nname = ""', "its name '' is absolute, or has an empty part"),
        ('only = "shards"', '".." = "shards"', "the name '..' leads out of the folder"),
        ("processes = 3", "processes = 3 3", "not valid TOML"),
        ('recipe = "{recipe}"\n', "", "stage 'corpus': read reads settings"),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused_with_the_place(
    setup: Setup, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(_plan_with(setup, old.replace("{recipe}", str(setup.recipe_path)), new))
    with pytest.raises(ConfigError, match=r"bible24, .*demo, "):
        load_plan("nowhere")


def test_files_that_a_plan_names_lie_beside_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the command line in the current folder, where others have their names."""
    plans, here = setup.folder / "plans c++/a+b", setup.folder / "here"
    for place, limit in ((plans / "recipes", 7), (here / "recipes", 9)):
        place.mkdir(parents=True)
        (place / "own.toml").write_text(RECIPE)
        (place / "over.toml").write_text(f"shards.max_tokens = {limit}")
        (place / "own.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(here)
    text = PLAN.format(recipe="recipes/own.toml+recipes/over.toml")
    ranks = 'processes = 3\nds_config = "recipes/own.json"'
    (plans / "plan.toml").write_text(text.replace("processes = 3", ranks))
    (here / "recipes" / "own.toml").unlink()
    (here / "recipes" / "own.json").unlink()
    plan = load_plan("../plans c++/a+b/plan.toml")
    resolved = [resolve_plan(plan, overlay=one) for one in ("", "recipes/over.toml")]
    limits = [one.tasks[1].config["shards"]["max_tokens"] for one in resolved]
    assert limits == [7, 9]
    assert resolved[0].tasks[2].config["ds_config"]["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize("name", ["a+b.toml", "demo_moe+b.toml"])
def test_a_recipe_beside_a_plan_may_have_a_plus_in_its_name(setup: Setup, name: str) -> None:
    (setup.folder / name).write_text(RECIPE.replace("max_tokens = 16", "max_tokens = 7"))
    setup.plan_path.write_text(PLAN.format(recipe=name))
    assert setup.resolved().tasks[1].config["shards"]["max_tokens"] == 7
    overlay = setup.resolved(overlay="smoke").tasks[2]
    assert overlay.config["training"]["updates"] == load_recipe("demo_moe+smoke").training.updates


def test_stages_that_form_a_circle_are_named(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with setup.plan_path.open("a") as stream:
        for name, stage, inputs in (("a", "count", 'corpus = "b"'), ("b", "loop", 'shards = "a"')):
            stream.write(f'[stages.{name}]\nrun = "{stage}"\nrecipe = "{setup.recipe_path}"\n')
            stream.write(f"inputs = {{ {inputs} }}\n")
    shards = {"shards": Input("shards", "")}
    monkeypatch.setitem(STAGES, "loop", Stage("loop", "tiny", "corpus", "", ("corpus",), shards))
    with pytest.raises(ConfigError, match=r"stages (a → b → a|b → a → b) form a circle"):
        load_plan(str(setup.plan_path))


def test_stages_written_out_of_order_are_run_in_order(setup: Setup) -> None:
    head, corpus, shards, model, only = setup.plan_path.read_text().split("[stages.")
    setup.plan_path.write_text("[stages.".join([head, model, only, shards, corpus]))
    plan = load_plan(str(setup.plan_path))
    assert list(plan.stages) == ["model", "shards", "corpus"]
    assert stage_order(plan) == ["corpus", "shards", "model"]


def test_an_input_that_is_not_given_is_asked_for_by_what_it_means(setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"wants a folder of text\. Pass --input text=PATH"):
        setup.run(given={})
    with pytest.raises(ConfigError, match="has no input 'txt'"):
        setup.resolved(given={"txt": RawInput((setup.folder,))})


# ---------------------------------------------------------------- what runs


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere", "does not exist"), ("raw", "has no manifest.json"), ("corpus", "wanted")],
)
def test_an_input_that_a_later_stage_cannot_read_is_refused_before_any_runs(
    setup: Setup, name: str, problem: str
) -> None:
    text = setup.plan_path.read_text().replace("[inputs]\n", '[inputs]\nother = "shards"\n')
    setup.plan_path.write_text(text.replace('only = "shards"', 'only = "shards"\nmore = "$other"'))
    with new_artifact(setup.folder / "corpus", kind="corpus", stage="read", config={}, inputs={}):
        pass
    raw, other = RawInput((setup.text_path.parent,)), RawInput((setup.folder / name,))
    given = {"text": raw, "other": other}
    for act in (setup.forecast, setup.run):
        with pytest.raises(ArtifactError, match=problem):
            act(given=given)
    assert setup.workshop.started == []
    assert not setup.out_dir.exists()


def test_a_run_starts_every_stage_once_and_a_second_run_none(setup: Setup) -> None:
    assert setup.forecast() == [f"{name}: would run (missing)" for name in STAGES_OF_PLAN]
    assert not setup.out_dir.exists()
    assert setup.starts() == STAGES_OF_PLAN
    assert setup.workshop.told == [(1, 1), (1, 1), (3, 2)]
    assert setup.forecast() == [f"{name}: done" for name in STAGES_OF_PLAN]
    code, said = setup.run()
    assert (code, setup.workshop.started) == (0, [])
    assert said.count("already done") == 6
    assert names_in(setup.out_dir) == sorted(STAGES_OF_PLAN)


def test_a_changed_setting_rebuilds_the_stages_that_read_it_and_says_from_what_to_what(
    setup: Setup,
) -> None:
    setup.run()
    setup.recipe_path.write_text(RECIPE.replace("max_tokens = 16", "max_tokens = 32"))
    _, said = setup.run(rebuild=["model"])
    assert setup.workshop.started == ["shards", "model"]
    assert "shards: running count (shards.max_tokens: 16 → 32)" in said
    assert ["--overwrite" in command for command in setup.workshop.commands[-2:]] == [True, False]


def _made_before(path: Path, section: str, setting: str) -> None:
    """Have an artifact's manifest say nothing of a setting, as before there was one."""
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    del manifest["config"][section][setting]
    manifest["key"] = stage_key(
        stage=manifest["stage"],
        kind=manifest["kind"],
        config=manifest["config"],
        inputs={name: record["digest"] for name, record in manifest["inputs"].items()},
    )
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))


def test_a_new_setting_makes_stale_only_if_not_at_its_default(setup: Setup) -> None:
    setup.run()
    _made_before(setup.out_dir / "model", "training", "expert_parallel_size")
    assert setup.forecast()[-1] == "model: done"
    assert setup.starts() == []
    setup.recipe_path.write_text(f"{RECIPE}expert_parallel_size = 2\n")
    change = "training.expert_parallel_size: 1 → 2"
    assert setup.forecast()[-1].startswith(f"model: would run ({change}; ")
    path = setup.out_dir / "model" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"updates"', '"up_dates"'))
    assert "training.up_dates: 10 → unset" in setup.forecast()[-1], "a setting that is no more"


def test_a_stage_rebuilt_with_another_result_rebuilds_what_follows(setup: Setup) -> None:
    setup.run()
    setup.text_path.write_text("bananas")
    assert setup.forecast() == [
        "corpus: would run (input raw changed)",
        "shards: would run (because corpus will run)",
        "model: would run (because shards will run; 10 updates (0.0 hours) of training would be "
        "lost: it is refused without --rebuild model)",
    ]
    _, said = setup.run(rebuild=["model"])
    assert setup.workshop.started == ["corpus", "shards", "model"]
    assert "shards: running count (input corpus changed)" in said
    assert "model: running train (input shards/only changed)" in said


def test_a_stage_rebuilt_with_the_same_result_leaves_what_follows_alone(setup: Setup) -> None:
    setup.run()
    before = open_artifact(setup.out_dir / "corpus", kind="corpus").digest
    shutil.rmtree(setup.out_dir / "corpus")
    code, said = setup.run()
    assert open_artifact(setup.out_dir / "corpus", kind="corpus").digest == before
    assert (code, setup.workshop.started) == (0, ["corpus"])
    assert "corpus: running read (missing)" in said


def test_an_overlay_is_laid_over_every_recipe(setup: Setup) -> None:
    overlay_path = setup.folder / "short.toml"
    overlay_path.write_text("[training]\nupdates = 2\n")
    setup.run()
    assert setup.starts(overlay=str(overlay_path), rebuild=["model"]) == ["model"]
    manifest = open_artifact(setup.out_dir / "model", kind="checkpoint").manifest
    assert manifest.config["training"]["updates"] == 2


def test_of_a_ds_config_only_what_decides_the_result_makes_stale(setup: Setup) -> None:
    setup.run()
    ds_config = load_ds_config("cpu_fp32")
    ds_config["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": 1000}
    ds_config |= {"tensorboard": {"enabled": True}, "wall_clock_breakdown": True}
    path = setup.folder / "machine.json"
    path.write_text(json.dumps(ds_config))
    _plan_with(setup, "threads = 2", f'threads = 2\nds_config = "{path}"')
    assert setup.forecast()[-1] == "model: done"
    ds_config["data_types"] = {"grad_accum_dtype": "fp32"}
    ds_config["zero_optimization"]["stage"] = 2
    path.write_text(json.dumps(ds_config))
    assert "ds_config.data_types.grad_accum_dtype: unset → fp32" in setup.forecast()[-1]
    assert "ds_config.zero_optimization.stage: 1 → 2" in setup.run(rebuild=["model"])[1]
    assert setup.workshop.started == ["model"]


def test_more_processes_change_no_result(setup: Setup) -> None:
    resolved = setup.resolved(processes=5)
    assert [task.planned.processes for task in resolved.tasks] == [1, 5, 5]
    assert "--processes=5" in stage_arguments(resolved, resolved.tasks[1])
    setup.run()
    assert setup.starts(processes=5) == []


def test_raw_data_is_hashed_once_per_run(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    again = f'[stages.again]\nrun = "read"\nrecipe = "{setup.recipe_path}"\n'
    again += 'inputs = { raw = "$text" }\n[stages.shards]'
    _plan_with(setup, "[stages.shards]", again)
    hashed: list[Path] = []

    def count(path: Path) -> str:
        hashed.append(path)
        return raw_digest(path)

    monkeypatch.setattr("pipeline.artifacts.raw_input.raw_digest", count)
    assert setup.starts() == ["corpus", "again", "shards", "model"]
    assert hashed == [setup.text_path.parent]


def test_several_raw_folders_reach_the_stage_and_decide_with_their_order(setup: Setup) -> None:
    folders = setup.text_path.parent, setup.folder / "more"
    folders[1].mkdir()
    (folders[1] / "text").write_text("cherry")
    given = {"text": RawInput(folders)}
    resolved = setup.resolved(given=given)
    arguments = stage_arguments(resolved, resolved.tasks[0])
    start = arguments.index("--raw")
    assert arguments[start + 1 : start + 3] == [str(folder) for folder in folders]
    digests = {name: record.digest for name, record in given["text"].records("raw").items()}
    assert resolved.digests(resolved.tasks[0]) == digests
    dataset = RawInput(dataset=HubDataset("owner/pairs", "0" * 40))
    resolved = setup.resolved(given={"text": dataset})
    assert f"--raw={dataset.dataset}" in stage_arguments(resolved, resolved.tasks[0])
    assert resolved.digests(resolved.tasks[0]) == {"raw": dataset.records("raw")["raw"].digest}


# ---------------------------------------------------------------- what was trained


LOST = "8 updates (2.0 hours) of training would be lost: it is refused without --rebuild model"


def _leave_state(setup: Setup, update: int, *, seconds: float = 7200) -> None:
    """An unfinished run of the model, of the settings and inputs as they are."""
    task = setup.resolved().tasks[-1]
    shards = open_artifact(setup.out_dir / "shards", kind="shards")
    with new_artifact(
        setup.out_dir / "model.run" / "states" / f"update-{update:07d}",
        kind="training_state",
        stage="train",
        config=task.config,
        inputs={"shards/only": shards.as_input},
    ) as writer:
        writer.write_json("progress.json", {"update": update})
    (setup.out_dir / "model.run" / ".made-by-mmnmt").touch()
    with (setup.out_dir / "model.run" / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "train", "update": update, "seconds": seconds}) + "\n")


def _change(setup: Setup, setting: str, *, section: str = "training") -> None:
    name = setting.partition("=")[0]
    lines = setup.recipe_path.read_text().splitlines()
    lines = [line for line in lines if not line.startswith(name)]
    lines.insert(lines.index(f"[{section}]") + 1, setting)
    setup.recipe_path.write_text("\n".join(lines) + "\n")


def _train(setup: Setup, finishes: bool) -> None:
    setup.workshop.codes = [] if finishes else [0, 0, 3]
    assert setup.run()[0] == (0 if finishes else 3)


def test_a_finished_model_is_kept_when_a_setting_changes(setup: Setup) -> None:
    setup.run()
    _leave_state(setup, 8)
    before = open_artifact(setup.out_dir / "model", kind="checkpoint").digest
    _change(setup, "dropout = 0.25")
    words = r"Stage model would throw away 10 updates \(0\.0 hours\) of training in .*/out/model "
    words += r"\(training\.dropout: 0\.3 → 0\.25\). Undo that change, or pass --rebuild model, "
    words += r"which trains anew and keeps it as .*/model\.before-1\."
    with pytest.raises(ArtifactError, match=words):
        setup.run()
    assert setup.workshop.started == []
    done = "0.3 → 0.25; 10 updates (0.0 hours) of training would be"
    refused = f"{done} lost: it is refused without --rebuild model"
    assert setup.forecast()[-1].endswith(f"{refused})")
    assert setup.forecast(rebuild=["model"])[-1].endswith(f"{done} set aside)")
    assert setup.status().endswith(refused)
    assert setup.status().splitlines()[-1].startswith("model   stale")
    code, said = setup.run(rebuild=["model"])
    assert (code, setup.workshop.started) == (0, ["model"])
    assert "model: 10 updates (0.0 hours) of training set aside as " in said
    assert open_artifact(setup.out_dir / "model.before-1", kind="checkpoint").digest == before
    assert names_in(setup.out_dir / "model.before-1.run" / "states") == ["update-0000008"]
    assert not (setup.out_dir / "model.run").exists()
    assert setup.forecast()[-1] == "model: done"
    _change(setup, "seed = 2")
    setup.workshop.codes = [EXIT_RUN_AGAIN]
    assert setup.run(rebuild=["model"])[0] != 0
    _leave_state(setup, 4)
    code, said = setup.run(rebuild=["model"])
    assert (code, setup.workshop.started) == (0, ["model"])
    assert "set aside" not in said, "the same command after a stop goes on"
    assert not (setup.out_dir / "model.before-3").exists()


@pytest.mark.parametrize("edited", ["", '{"seconds": "x"}\n', '{"seconds": [9000]}\n'])
def test_an_unfinished_run_is_kept_when_a_setting_changes(setup: Setup, edited: str) -> None:
    _train(setup, False)
    _leave_state(setup, 8)
    with (setup.out_dir / "model.run" / "metrics.jsonl").open("a") as metrics:
        metrics.write(edited)
    _change(setup, "seed = 2")
    assert setup.forecast()[-1] == f"model: would run (missing; {LOST})"
    assert setup.status().splitlines()[-1] == f"model   in progress  {LOST}"
    kept = setup.out_dir / "model.before-1.run"
    words = rf"8 updates \(2\.0 hours\).*training\.seed: 1 → 2.* keeps it as {kept}\."
    with pytest.raises(ArtifactError, match=words):
        setup.run()
    code, said = setup.run(rebuild=["model"])
    assert code == 0
    assert f"of training set aside as {kept} (training" in said
    assert names_in(setup.out_dir) == [*("corpus", "model", "model.before-1.run", "shards")]


@pytest.mark.parametrize("damaged", ["other.run/states/update-0000008", "other"])
def test_an_unreadable_training_hides_no_loss_of_another(setup: Setup, damaged: str) -> None:
    _train(setup, False)
    _leave_state(setup, 8)
    _change(setup, "seed = 2")
    plan = setup.plan_path.read_text()
    other = plan[plan.index("[stages.model]") :].replace("stages.model", "stages.other")
    setup.plan_path.write_text(plan.replace("[stages.model]", f"{other}\n[stages.model]", 1))
    (setup.out_dir / damaged).mkdir(parents=True)
    (setup.out_dir / damaged / "manifest.json").write_text("damaged")
    for lines in (setup.status().splitlines(), setup.forecast()):
        said = {line.partition(" ")[0].rstrip(":"): line for line in lines}
        assert LOST in said["model"]
        assert f"it is refused: {setup.out_dir / damaged}/manifest.json is no" in said["other"]
    with pytest.raises(ArtifactError, match=f"{damaged}/manifest.json is no"):
        setup.run()
    assert setup.workshop.started == []


def test_a_finished_model_is_done_though_a_state_that_was_kept_is_damaged(setup: Setup) -> None:
    setup.run()
    _leave_state(setup, 8)
    (setup.out_dir / "model.run/states/update-0000008/manifest.json").write_text("damaged")
    assert setup.forecast()[-1] == "model: done"
    assert setup.run()[0] == 0


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ("", "stage corpus changes: input raw changed"),
        ("max_train_lines = 6", r"stage corpus changes: corpus.max_train_lines: 5 → 6"),
        ("max_tokens = 32", r"stage shards changes: shards.max_tokens: 16 → 32"),
    ],
)
def test_training_that_changed_inputs_make_useless_is_kept_until_told(
    setup: Setup, setting: str, cause: str, finished: bool
) -> None:
    """The refusal comes before anything is built; undoing the change is all that it takes."""
    _train(setup, finished)
    if not finished:
        _leave_state(setup, 10, seconds=0)
    if setting:
        _change(setup, setting, section="shards" if "tokens" in setting else "corpus")
    else:
        setup.text_path.write_text("bananas")
    with pytest.raises(ArtifactError, match=rf"10 updates .*\({cause}\)"):
        setup.run()
    assert setup.workshop.started == []
    assert "of training would be lost: it is refused" in setup.forecast()[-1]
    assert (setup.out_dir / "model" / MANIFEST_NAME).is_file() == finished
    place = "model.before-2" if finished else "model.before-2.run"
    (setup.out_dir / "model.before-1.run").mkdir()
    assert setup.run(rebuild=["model"])[0] == 0
    assert (setup.out_dir / place).is_dir(), "the first place is taken"


def test_training_fits_again_once_a_change_of_its_inputs_is_undone(setup: Setup) -> None:
    setup.run()
    _change(setup, "max_tokens = 32", section="shards")
    setup.run(until=["shards"])
    words = "input shards/only changed"
    with pytest.raises(ArtifactError, match=rf"10 updates .*\({words}\)"):
        setup.run()
    _change(setup, "max_tokens = 16", section="shards")
    assert "would be lost if its inputs change" in setup.forecast()[-1]
    assert setup.starts() == ["shards"]
    shutil.rmtree(setup.out_dir / "shards")
    assert setup.starts() == ["shards"]


@pytest.mark.parametrize("setting", ["dropout = 0.25", "updates = 20"])
def test_training_that_starts_from_training_that_changes_is_kept_until_told(
    setup: Setup, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first of the two begins, which may take days."""
    inputs = {"checkpoint": Input("checkpoint", "")}
    tune = Stage("tune", "tiny", "checkpoint", "", ("training",), inputs, "ranks", True)
    for table in (TABLE, STAGES):
        monkeypatch.setitem(table, "tune", tune)
    setup.run()
    _leave_state(setup, 8)
    own = setup.folder / "own.toml"
    own.write_text(RECIPE)
    with setup.plan_path.open("a") as stream:
        stream.write(f'[stages.tuned]\nrun = "tune"\nrecipe = "{own}"\n')
        stream.write('inputs = { checkpoint = "model" }\n')
    assert setup.run()[0] == 0
    _change(setup, setting)
    rebuild = ["model"] if "dropout" in setting else []
    with pytest.raises(ArtifactError, match=r"Stage tuned .* \(stage model changes: training\."):
        setup.run(rebuild=rebuild)
    assert setup.workshop.started == []
    assert setup.starts(rebuild=[*rebuild, "tuned"]) == ["model", "tuned"]


@pytest.mark.parametrize("finished", [False, True])
def test_more_updates_go_on_from_the_last_state(setup: Setup, finished: bool) -> None:
    _train(setup, finished)
    _leave_state(setup, 8)
    _change(setup, "updates = 20")
    assert "training goes on after update 8)" in setup.forecast()[-1]
    assert setup.starts() == ["model"]
    assert ("--overwrite" in setup.workshop.commands[-1]) == finished
    assert names_in(setup.out_dir / "model.run" / "states") == ["update-0000008"]
    assert setup.forecast()[-1] == "model: done"


@pytest.mark.parametrize(
    ("is_finished", "state", "setting", "words"),
    [
        (True, 8, "updates = 7", r"throw away 10 updates .*updates: 10 → 7"),
        (False, 8, "updates = 7", r"throw away 8 updates .*updates: 10 → 7"),
        (True, 8, "validate_every = 3", r"10 updates .*validate_every: 1000 → 3"),
        (True, None, "updates = 20", r"10 → 20; .*run has no training state to go on from, .*keep"),
    ],
)
def test_settings_with_which_training_could_not_go_on_are_refused(
    setup: Setup, is_finished: bool, state: int | None, setting: str, words: str
) -> None:
    _train(setup, is_finished)
    if state is not None:
        _leave_state(setup, state)
    _change(setup, setting)
    with pytest.raises(ArtifactError, match=words):
        setup.run()
    if state is not None:
        assert names_in(setup.out_dir / "model.run" / "states") == ["update-0000008"]


@pytest.mark.parametrize("setting", ["keep_last = 5", "checkpoint_every = 7", "validate_every = 3"])
def test_an_unfinished_run_goes_on_with_other_intervals(setup: Setup, setting: str) -> None:
    _train(setup, False)
    _leave_state(setup, 8)
    _change(setup, setting)
    assert setup.forecast()[-1] == "model: would run (missing; training goes on after update 8)"
    assert setup.run()[0] == 0
    assert "--overwrite" not in setup.workshop.commands[-1]


# ---------------------------------------------------------------- other test lines

TRAINED_PLAN = """
[inputs]
text = "a tree"
[stages.corpus]
run = "import_corpus"
recipe = "{recipe}"
inputs = {{ raw = "$text" }}
[stages.clean]
run = "clean"
recipe = "{recipe}"
inputs = {{ corpus = "corpus" }}
[stages.tokenizer]
run = "train_tokenizer"
recipe = "{recipe}"
inputs = {{ corpus = "clean" }}
[stages.shards]
run = "make_shards"
recipe = "{recipe}"
inputs = {{ corpus = "clean", tokenizer = "tokenizer" }}
[stages.mixture]
run = "mix"
recipe = "{recipe}"
inputs = {{ shards = "shards" }}
[stages.model]
run = "pretrain"
recipe = "{recipe}"
ds_config = "cpu_fp32"
inputs = {{ shards = "shards", mixture = "mixture" }}
[stages.translations]
run = "translate"
recipe = "{recipe}"
inputs = {{ checkpoint = "model", corpus = "clean" }}
"""
SPLIT_STAGES = ("tokenizer", "shards", "mixture", "model")


class Trained:
    """A tree, and a plan of real stages that trains a tiny model on it and translates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.raw = folder, folder / "raw"
        recipe = folder / "recipe.toml"
        tiny = TINY.replace("{thresholds}", "[10, 30]")
        recipe.write_text(tiny.replace("[corpus]", '[corpus]\nsource = "tree"'))
        (folder / "plan.toml").write_text(TRAINED_PLAN.format(recipe=recipe))
        self.write("de-en", "train", *range(30))
        self.write("de-en", "valid", *range(100, 103))
        self.write("de-en", "test", 200, 201, 7)  # a training line, which clean leaves out
        self.write("en-fr", "train", *range(5))

    def write(self, pair: str, split: str, *lines: int) -> None:
        for code in pair.split("-"):
            path = self.raw / pair / f"{split}.{code}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"word {number} of {code}\n" for number in lines))

    def resolved(self) -> ResolvedPlan:
        given = {"text": RawInput((self.raw,))}
        return resolve_plan(
            load_plan(str(self.folder / "plan.toml")), out_dir=self.folder / "out", given=given
        )

    def run(self, **chosen: Collection[str]) -> tuple[int, dict[str, str]]:
        """Exit code, and stage → what the run says of it first."""
        lines: list[str] = []
        code = run_plan(self.resolved().chosen(**chosen), launcher=as_child, say=lines.append)
        said: dict[str, str] = {}
        for line in lines:
            stage, _, words = line.partition(": ")
            said.setdefault(stage, words)
        return code, said

    def digests(self) -> dict[str, str]:
        found = {}
        for stage in SPLIT_STAGES:
            manifest = read_manifest(self.folder / "out" / stage)
            assert manifest is not None
            found[stage] = manifest.digest
        return found

    def test_lines(self) -> list[str]:
        """The sources that were translated, as the numbers of their lines."""
        corpus = self.folder / "out" / "clean" / "test" / "de-en" / "de.txt"
        return corpus.read_text().split("\n")[:-1]


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained = Trained(tmp_path_factory.mktemp("trained"))
    assert trained.run()[0] == 0
    return trained.folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Trained:
    made = Trained(tmp_path)
    shutil.copytree(trained_once / "out", tmp_path / "out")
    return made


@pytest.mark.slow
def test_other_test_lines_are_translated_by_the_model_that_is_there(trained: Trained) -> None:
    before = trained.digests()
    trained.write("de-en", "test", 300, 301, 7)
    trained.write("de-fr", "test", 300)
    code, said = trained.run()
    assert code == 0
    assert {said[stage] for stage in SPLIT_STAGES} == {"already done"}
    assert trained.digests() == before
    assert trained.test_lines() == [f"word {number} of de" for number in (300, 301, 7)]
    assert said["translations"].startswith("running translate (input corpus changed")
    hypotheses = trained.folder / "out" / "translations" / "hypotheses"
    assert len((hypotheses / "de-en.jsonl").read_text().splitlines()) == 3
    assert len((hypotheses / "fr-de.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "valid"])
def test_other_training_or_validation_lines_are_still_noticed(trained: Trained, split: str) -> None:
    trained.write("de-en", split, *range(400, 405))
    with pytest.raises(ArtifactError, match=r"2 updates .* \(stage \w+ changes: input corpus chan"):
        trained.run()
    _, said = trained.run(only=["corpus", "clean", "translations"])
    assert said["translations"] == "already done"


@pytest.mark.slow
@pytest.mark.parametrize("lines", [[200, 201], [7, 8]], ids=["leaves", "comes"])
def test_a_dropped_training_line_is_noticed(trained: Trained, lines: list[int]) -> None:
    """Before anything is built for a training that is refused, whether it comes or leaves."""
    before = trained.digests()
    trained.write("de-en", "test", *lines)
    with pytest.raises(ArtifactError, match=r"2 updates .* \(stage \w+ changes: input corpus chan"):
        trained.run()
    assert trained.digests() == before
    code, said = trained.run(only=["translations"])
    assert code == 0
    assert said["translations"].startswith("running translate (input corpus changed")
    assert trained.test_lines() == [f"word {number} of de" for number in lines]
    assert trained.digests() == before


@pytest.mark.slow
def test_shards_with_other_test_lines_are_the_same_artifact(trained: Trained) -> None:
    before = trained.digests()
    trained.write("de-en", "test", 300, 7)
    shutil.rmtree(trained.folder / "out" / "shards")
    shutil.rmtree(trained.folder / "out" / "tokenizer")
    code, said = trained.run()
    assert code == 0
    assert said["shards"] == "running make_shards (missing)"
    assert said["model"] == "already done"
    assert trained.digests() == before


@pytest.mark.slow
def test_shards_of_an_earlier_version_go_by_the_whole_corpus(trained: Trained) -> None:
    path = trained.folder / "out" / "shards" / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    assert manifest["inputs"]["corpus"].pop("splits") == ["train", "valid"]
    corpus = open_artifact(trained.folder / "out" / "clean", kind="corpus")
    manifest["inputs"]["corpus"]["digest"] = corpus.digest
    path.write_text(json.dumps(manifest))
    resolved = trained.resolved()
    (shards,) = (task for task in resolved.tasks if task.name == "shards")
    assert reason_to_run(resolved, shards) is None
    trained.write("de-en", "test", 300, 7)
    trained.run(only=["corpus", "clean"])
    assert reason_to_run(trained.resolved(), shards) == "input corpus changed"


# ---------------------------------------------------------------- some stages of a plan


def test_until_a_stage_runs_all_that_it_needs_and_only_a_stage_itself(setup: Setup) -> None:
    assert setup.starts(until=["shards"]) == ["corpus", "shards"]
    assert setup.forecast(until=["shards"]) == ["corpus: done", "shards: done"]
    assert setup.starts() == ["model"]
    setup.text_path.write_text("bananas")
    assert setup.starts(only=["shards"]) == []
    assert setup.starts(only=["corpus"]) == ["corpus"]
    _change(setup, "max_tokens = 32", section="shards")
    setup.text_path.write_text("bandanas")
    code, said = setup.run(only=["shards"])
    assert (code, setup.workshop.started) == (0, ["shards"])
    assert "shards: takes corpus as it is (input raw changed)" in said
    _change(setup, "dropout = 0.25")
    assert setup.run(only=["shards"], given={})[0] == 0, "no training and no input is at stake"
    with pytest.raises(ConfigError, match="Pass --input text=PATH"):
        setup.run(only=["corpus"], given={})
    with pytest.raises(ConfigError, match="--rebuild model: --only or --until leaves that stage"):
        setup.run(only=["shards"], rebuild=["model"])


def test_only_a_stage_whose_inputs_are_not_made_is_refused_with_what_to_run(setup: Setup) -> None:
    words = "Stage shards needs corpus, which is not made yet. Pass --only corpus, too, or --until "
    for look in (setup.run, setup.forecast):
        with pytest.raises(ArtifactError, match=words + "shards"):
            look(only=["shards"])
    with pytest.raises(ArtifactError, match="Stage model needs shards, which is not made yet"):
        setup.forecast(only=["model"])
    needs = "shards  missing  needs corpus, which is not made yet"
    assert setup.status(only=["shards"]).splitlines()[2:] == [needs]


@pytest.mark.parametrize("option", ["only", "until", "rebuild"])
def test_a_stage_that_an_option_names_is_one_of_the_plans(setup: Setup, option: str) -> None:
    said = rf"--{option}: plan .* no stage 'modle'. Did you mean 'model'"
    for look in (setup.run, setup.forecast):
        with pytest.raises(ConfigError, match=said):
            look(**{option: ["modle"]})


# ---------------------------------------------------------------- changed since they were made


def test_an_artifact_whose_file_only_looks_changed_is_checked_and_done(setup: Setup) -> None:
    setup.run()
    later = time.time() + 5
    os.utime(setup.out_dir / "corpus" / "text", (later, later))
    assert setup.forecast() == ["corpus: done", "shards: done", "model: done"]
    assert "changed" not in setup.status()
    assert setup.starts() == []
    os.utime(setup.out_dir / "corpus" / "text", (later - 100, later - 100))
    assert setup.run()[0] == 0
    assert setup.forecast() == ["corpus: done", "shards: done", "model: done"]


def test_a_copy_of_a_plans_folder_is_done_and_an_edit_of_it_is_noticed(setup: Setup) -> None:
    setup.run()
    long_ago = time.time() - 1000
    for name in STAGES_OF_PLAN:
        os.utime(setup.out_dir / name / MANIFEST_NAME, (long_ago, long_ago))
    subprocess.run(["cp", "-r", str(setup.out_dir), str(setup.folder / "copy")], check=True)
    for name in STAGES_OF_PLAN:  # as if cp had come to it before the other files
        os.utime(setup.folder / "copy" / name / MANIFEST_NAME, (long_ago, long_ago))
    setup.out_dir = setup.folder / "copy"
    assert "changed" not in setup.status()
    assert setup.forecast() == ["corpus: done", "shards: done", "model: done"]
    assert setup.starts() == []
    path = setup.out_dir / "shards" / "text"
    path.write_text("z" * path.stat().st_size)
    assert "shards  changed  its file text changed since it was made" in setup.status()
    refused = "shards: would be refused (its file text"
    assert setup.forecast()[1] == f"{refused} changed since it was made)"
    path.unlink()
    assert setup.forecast()[1] == f"{refused} is missing)"
    with pytest.raises(ArtifactError, match=r"shards/text is missing, .* move the folder"):
        setup.run()


@pytest.mark.parametrize("stale", [False, True])
def test_edits_are_neither_passed_on_nor_thrown_away(setup: Setup, stale: bool) -> None:
    setup.run()
    path = setup.out_dir / "corpus" / "text"
    path.write_text("xyz")
    os.utime(path, (time.time() + 5, time.time() + 5))
    if stale:
        setup.recipe_path.write_text(RECIPE.replace("max_train_lines = 5", "max_train_lines = 6"))
    refused = "corpus: would be refused (its file text changed since it was made)"
    assert setup.forecast()[0] == refused
    with pytest.raises(ArtifactError) as caught:
        setup.run(rebuild=["model"])
    assert f"{path} is damaged" in str(caught.value)
    assert f"Restore it from a copy, or move the folder {path.parent} away" in str(caught.value)
    assert path.read_text() == "xyz"
    assert setup.workshop.started == []
    shutil.rmtree(path.parent)
    assert setup.run(rebuild=["model"])[0] == 0
    assert setup.workshop.started[0] == "corpus"


@pytest.mark.parametrize("damaged", ["manifest.json", "text"])
def test_a_damaged_trained_model_is_kept(setup: Setup, damaged: str) -> None:
    setup.run()
    path = setup.out_dir / "model" / damaged
    path.write_text("{}")
    with pytest.raises(ArtifactError, match=r"Restore\s*it from a copy, or move") as caught:
        setup.run(rebuild=["model"])
    assert "remove" not in str(caught.value)
    assert path.read_text() == "{}"


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("corpus/thesis.txt", "holds thesis.txt and no manifest.json"),
        ("shards/manifest.json", "has a manifest.json that cannot be used"),
        ("shards", "is not a folder"),
    ],
)
def test_what_lies_in_the_place_of_an_artifact_is_kept_and_refused_before_a_stage_runs(
    setup: Setup, place: str, problem: str
) -> None:
    path = setup.out_dir / place
    path.parent.mkdir(parents=True)
    path.write_text("thesis")
    [line] = [line for line in setup.forecast() if problem in line]
    assert line.startswith(f"{Path(place).parts[0]}: would be refused (its folder {problem}")
    with pytest.raises(ArtifactError, match=f"{problem}.* never replaced"):
        setup.run()
    assert setup.workshop.started == []
    assert path.read_text() == "thesis"


@pytest.mark.parametrize("name", ["taken", "taken/below"])
def test_a_file_in_the_place_of_the_folder_is_refused_whatever_is_asked(
    setup: Setup, name: str
) -> None:
    taken, setup.out_dir = setup.folder / "taken", setup.folder / name
    taken.write_text("thesis")
    for ask in (setup.forecast, setup.status, setup.run):
        with pytest.raises(
            ConfigError, match=f"--out .*{name}: .*/taken is no folder. Name another"
        ):
            ask()
    assert taken.read_text() == "thesis"


def test_what_a_killed_stage_left_aside_is_put_back_before_a_plan_looks(setup: Setup) -> None:
    setup.run()
    (setup.out_dir / "corpus").rename(setup.out_dir / ".corpus.replaced")
    assert setup.starts() == []
    assert names_in(setup.out_dir) == ["corpus", "model", "shards"]


def test_what_a_job_sets_aside_to_replace_it_is_not_put_back_before_its_eyes(setup: Setup) -> None:
    setup.run()
    aside = (setup.out_dir / "corpus").rename(setup.out_dir / ".corpus.replaced")
    with (
        sole_writer(setup.out_dir / "corpus"),
        pytest.raises(ArtifactError, match="corpus is being written by process"),
    ):
        setup.run()
    assert aside.is_dir()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("raw", "The plan's folder .* is the input text"),
        (".", "The plan's folder .* holds the input text"),
        ("raw/runs/tiny", "The plan's folder .* lies within the input text"),
    ],
)
def test_a_plan_never_writes_over_its_inputs(setup: Setup, out: str, words: str) -> None:
    setup.out_dir = setup.folder / out
    with pytest.raises(ConfigError, match=words):
        setup.resolved()
    assert setup.text_path.read_text() == "banana"
    setup.out_dir = setup.folder / "elsewhere"
    setup.out_dir.mkdir()
    (setup.out_dir / "corpus").symlink_to(setup.text_path.parent)
    with pytest.raises(ConfigError, match=r"Stage corpus's folder .* is the input text"):
        setup.resolved()


# ---------------------------------------------------------------- failures and stops


def test_a_failing_stage_stops_the_plan_and_the_next_run_goes_on_there(setup: Setup) -> None:
    setup.workshop.codes = [0, 3]
    code, said = setup.run()
    assert (code, setup.workshop.started) == (3, ["corpus", "shards"])
    assert "stage shards failed (exit code 3)" in said
    assert setup.starts() == ["shards", "model"]


class Saving(Workshop):
    """Saves a new state of the corpus before each start."""

    def __init__(self, out_dir: Path, *, times: int) -> None:
        super().__init__()
        self.states, self.codes = out_dir / "corpus.run" / "states", [EXIT_RUN_AGAIN] * times

    def __call__(self, arguments: Sequence[str], **options: Any) -> int:
        state = self.states / f"update-{len(self.codes)}" / "manifest.json"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text("{}")
        return super().__call__(arguments, **options)


def test_a_stage_runs_again_for_a_while_if_it_saves_something_new(setup: Setup) -> None:
    setup.workshop = Saving(setup.out_dir, times=100)
    assert setup.run()[0] == 1
    assert setup.workshop.started == ["corpus"] * (MAX_RERUNS + 1)
    setup.workshop = Saving(setup.out_dir, times=MAX_RERUNS)
    assert setup.starts() == ["corpus"] * (MAX_RERUNS + 1) + ["shards", "model"]


def test_a_stage_that_saves_nothing_new_or_makes_no_artifact_fails(setup: Setup) -> None:
    log_path = setup.out_dir / "corpus.run" / "metrics.jsonl"
    log_path.parent.mkdir(parents=True)
    log_path.write_text("{}\n")
    setup.workshop.codes = [EXIT_RUN_AGAIN]
    code, said = setup.run()
    assert (code, setup.workshop.started) == (1, ["corpus"])
    assert "saved nothing new" in said
    with mock.patch.object(Workshop, "_build"):
        code, said = setup.run()
    assert (code, setup.workshop.started) == (1, ["corpus"])
    assert "left no finished artifact" in said


TWIN = """
[stages.{name}]
run = "count"
recipe = "{recipe}"
inputs = {{ corpus = "corpus" }}
"""


def _add_twins(setup: Setup, *names: str) -> None:
    twins = "".join(TWIN.format(name=name, recipe=setup.recipe_path) for name in names)
    setup.plan_path.write_text(setup.plan_path.read_text() + twins)


class Meeting(Workshop):
    """Holds the stages that are named until all of them have started."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.barrier = names, threading.Barrier(len(names))

    def __call__(self, arguments: Sequence[str], **options: Any) -> int:
        (out_dir,) = [argument for argument in arguments if argument.startswith("--out=")]
        if Path(out_dir).name in self.names:
            self.barrier.wait(timeout=30)
        return super().__call__(arguments, **options)


def test_stages_run_side_by_side_with_the_same_result(setup: Setup) -> None:
    _add_twins(setup, "twin")
    assert setup.run()[0] == 0
    assert setup.workshop.told[2:3] == [(3, 2)], "ranks and threads of the model"
    names = [*STAGES_OF_PLAN, "twin"]

    def made() -> list[tuple[object, ...]]:
        manifests = [read_manifest(setup.out_dir / name) for name in names]
        return [(one.key, one.digest, one.files) for one in manifests if one is not None]

    alone = made()
    assert len(alone) == len(names)
    setup.jobs = 5
    assert setup.starts() == [], "all are done whatever the number of jobs"
    setup.jobs = 2
    shutil.rmtree(setup.out_dir)
    setup.workshop = Meeting("shards", "twin")
    code, said = setup.run()
    assert code == 0, said
    assert made() == alone
    assert setup.workshop.started[0] == "corpus"
    assert set(setup.workshop.told) == {(1, 1)}
    rows = said.splitlines()[-len(names) :]
    assert [row.split()[:2] for row in rows] == [[name, "done"] for name in names]


@pytest.mark.parametrize(
    ("visible", "named", "shown"),
    [
        (4, None, {"0", "1"}),
        (6, "5, 3", {"5", "3"}),
        (6, "MIG-a,MIG-b", {"MIG-a", "MIG-b"}),
        (1, None, {"0"}),
        (0, None, {None}),
    ],
)
def test_stages_side_by_side_have_different_gpus(
    visible: int,
    named: str | None,
    shown: set[str | None],
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.machine._capabilities", lambda: (9.0,) * visible)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    _add_twins(setup, "twin")
    assert setup.run(only=["corpus"])[0] == 0
    assert setup.workshop.gpus == [None], "one stage at a time sees all"
    setup.workshop, setup.jobs = Meeting("shards", "twin"), 2
    assert setup.run(only=["shards", "twin"])[0] == 0
    assert {*setup.workshop.gpus} == shown


def test_a_stage_that_fails_lets_its_neighbors_end_and_nothing_else_begins(setup: Setup) -> None:
    _add_twins(setup, "twin", "third")
    assert setup.run(only=["corpus"])[0] == 0
    setup.workshop = Meeting("shards", "twin")
    setup.workshop.codes, setup.jobs = [3], 2
    code, said = setup.run()
    assert code == 3
    assert set(setup.workshop.started) == {"shards", "twin"}
    (failed,) = [name for name in ("shards", "twin") if not (setup.out_dir / name).exists()]
    assert f"stage {failed} failed" in said
    setup.workshop = Workshop()
    assert setup.run()[0] == 0
    assert set(setup.workshop.started) == {failed, "third", "model"}


class Stopping(Workshop):
    """Shards fail, and their twin ends after they did and a signal came, in either order."""

    def __init__(self, setup: Setup, *, signal_first: bool, **ends: int) -> None:
        super().__init__()
        self.lines, self.signal_first, self.ends = setup.lines, signal_first, ends

    def __call__(self, arguments: Sequence[str], *, requests: StopRequests, **options: Any) -> int:
        name = arguments[arguments.index("--overwrite") - 1].rpartition("/")[2]
        if name == "twin":
            if not self.signal_first:
                _wait_until(lambda: "mmnmt run: shards failed; waiting for twin" in self.lines)
            if self.ends:
                os.kill(os.getpid(), signal.SIGTERM)
        if self.ends and (name == "twin" or self.signal_first):
            _wait_until(lambda: requests.received is not None)
        return self.ends.get(name) or super().__call__(arguments, requests=requests, **options)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("signal_first", "shards", "twin"),
    [(False, 3, 130), (False, 137, EXIT_RUN_AGAIN), (True, 3, 143), (True, 1, EXIT_RUN_AGAIN)],
)
def test_a_stage_that_failed_is_named_though_a_signal_stops_its_neighbor(
    setup: Setup, signal_first: bool, shards: int, twin: int
) -> None:
    _add_twins(setup, "twin")
    assert setup.run(only=["corpus"])[0] == 0
    setup.workshop = Stopping(setup, signal_first=signal_first, shards=shards, twin=twin)
    setup.jobs = 2
    code, said = setup.run()
    assert code == shards
    assert "mmnmt run: stage shards failed (" in said
    assert "run: stopped" not in said
    assert [row.split()[:2] for row in said.splitlines()[-2:]] == [
        ["shards", "failed"],
        ["twin", "stopped"],
    ]


def test_a_refusal_is_said_while_neighbors_run_and_raised_after_the_summary(setup: Setup) -> None:
    setup.run()
    _add_twins(setup, "twin")
    (setup.out_dir / "shards" / "text").write_text("edited")
    setup.workshop, setup.jobs = Stopping(setup, signal_first=False), 2
    with pytest.raises(ArtifactError, match="shards") as caught:
        setup.run()
    assert f"shards: {caught.value}" in setup.lines[:-1]
    rows = [row.split()[:2] for row in setup.lines[-1].splitlines()[-3:]]
    assert rows == [["corpus", "already"], ["shards", "refused"], ["twin", "done"]]


def test_a_signal_ends_the_plan_after_the_stage_it_reached(setup: Setup) -> None:
    class Interrupting(Workshop):
        def __call__(self, arguments: Sequence[str], **options: Any) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(arguments, **options)

    setup.workshop = Interrupting()
    with pytest.raises(Interrupted, match="stopped by SIGTERM in shards"):
        setup.run()
    assert setup.workshop.started == ["corpus"]
    setup.workshop = Workshop()
    assert setup.starts() == ["shards", "model"]


def test_a_second_run_of_the_same_folder_says_who_holds_it(setup: Setup) -> None:
    with (
        exclusive(setup.out_dir / ".lock", what="out"),
        pytest.raises(ArtifactError, match=f"being written by process {os.getpid()} on"),
    ):
        setup.run()
    assert setup.run()[0] == 0
    assert not (setup.out_dir / ".lock").exists()


# ---------------------------------------------------------------- status


def test_status_tells_done_from_stale_from_missing_from_in_progress(setup: Setup) -> None:
    setup.workshop.codes = [0, 0, 1]
    setup.run()
    setup.recipe_path.write_text(RECIPE.replace("max_tokens = 16", "max_tokens = 32"))
    rows = [line.split(None, 2) for line in setup.status().split("\n")[2:]]
    assert [row[:2] for row in rows] == [
        ["corpus", "done"],
        ["shards", "stale"],
        ["model", "missing"],
    ]
    assert rows[1][2] == "shards.max_tokens: 16 → 32"
    (setup.out_dir / "model.run").mkdir()
    assert "in progress" in setup.status().split("\n")[-1]


def test_status_without_the_raw_data_takes_it_as_unchanged(setup: Setup) -> None:
    setup.run()
    setup.text_path.unlink()
    assert [line.split()[1] for line in setup.status(given={}).split("\n")[2:]] == ["done"] * 3


# ---------------------------------------------------------------- real processes

DRIVER = """
import sys
from pipeline import cli
from pipeline import registry
from pipeline.stage import Input, Stage

registry.STAGES.clear()
registry.STAGES["read"] = Stage(
    "read", "tiny_stage", "corpus", "reads", ("corpus",), {"raw": Input("raw", "folder")})
registry.STAGES["count"] = Stage(
    "count", "tiny_stage", "shards", "counts", ("shards",), {"corpus": Input("corpus", "text")},
    parallel="ranks")
if __name__ == "__main__":
    sys.exit(cli.main())
"""

TINY_STAGE = """
import os, time
from pathlib import Path
from pipeline.artifacts.artifact import new_artifact

def run(call):
    folder = Path(__file__).parent
    if (folder / "slow").exists() and call.stage.name == "count":
        (folder / f"rank{os.environ['RANK']}{call.out_dir.name}").write_text("")
        time.sleep(60)
    if os.environ["RANK"] == "0":
        with new_artifact(
            call.out_dir, kind=call.stage.makes, stage=call.stage.name, config=call.config,
            inputs=call.records, overwrite=call.overwrite,
        ) as writer:
            writer.write_json("world.json", os.environ["WORLD_SIZE"])
"""

RUNNER = """
import driver, sys
from pathlib import Path
from pipeline.artifacts.raw_input import RawInput
from pipeline.jobs.plan import load_plan, resolve_plan
from pipeline.cli.ending import guarded
from pipeline.jobs.runner import run_plan
resolved = resolve_plan(
    load_plan("tiny.toml"), out_dir=Path("out dir"), given={"text": RawInput((Path("raw"),))})
jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 1
sys.exit(guarded("run", lambda: run_plan(resolved, jobs=jobs, program=("driver.py",))))
"""

AGAIN = "run the same command again to go on."


@pytest.fixture
def real(setup: Setup) -> Path:
    plan = PLAN.format(recipe="recipe.toml").partition("[stages.model]")[0]
    setup.plan_path.write_text(plan + "processes = 2\n")
    for name, text in (("driver", DRIVER), ("tiny_stage", TINY_STAGE), ("runner", RUNNER)):
        (setup.folder / f"{name}.py").write_text(text)
    return setup.folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "jobs", "first"), [(signal.SIGTERM, 1, "rank*"), (signal.SIGINT, 2, "rank0*")]
)
def test_a_signal_to_the_run_stops_its_stages_and_leaves_nothing_that_looks_finished(
    real: Path, number: signal.Signals, jobs: int, first: str
) -> None:
    """Two ranks of one stage, or two stages side by side; the same command goes on."""
    (real / "slow").touch()
    plan = real / "tiny.toml"
    if jobs > 1:
        plan.write_text(plan.read_text() + TWIN.format(name="twin", recipe="recipe.toml"))
    command = [sys.executable, "runner.py", str(jobs)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runner = subprocess.Popen(command, cwd=real, **streams)
    try:
        deadline = time.monotonic() + 60
        while len(list(real.glob(first))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        runner.send_signal(number)
        said, _ = runner.communicate(timeout=30)
    finally:
        runner.kill()
    assert runner.returncode == EXIT_RUN_AGAIN, said
    last = said.splitlines()[-1]
    assert last.startswith(f"mmnmt run: stopped by {number.name} in ")
    assert last.endswith(f": {AGAIN}")
    assert jobs > 1 or last.removesuffix(f": {AGAIN}").endswith(" in shards")
    assert names_in(real / "out dir") == ["corpus"]
    (real / "slow").unlink()
    again = subprocess.run(command, cwd=real, timeout=60, **streams)
    assert again.returncode == 0, again.stdout
    shards = open_artifact(real / "out dir" / "shards", kind="shards")
    assert json.loads(shards.file("world.json").read_text()) == ("2" if jobs == 1 else "1")


GROUPS_PLAN = """
name = "grouped"
[stages]
shards = {{ run = "make_shards", recipe = "smoke", inputs = {{ corpus = "c", tokenizer = "t" }} }}
mixture = {{ run = "mix", recipe = "smoke", inputs = {{ shards = "shards" }} }}
t = {{ run = "train_tokenizer", recipe = "smoke", inputs = {{ corpus = "c" }} }}
c = {{ run = "import_corpus", recipe = "smoke", inputs = {{ raw = "$raw" }} }}
groups = {{ run = "group_languages", recipe = "smoke", inputs = {{ shards = "shards" }} }}
[stages.dense]
run = "pretrain"
recipe = "dense_opus100"
inputs = {{ shards = "shards", mixture = "mixture" }}
[stages.routed]
run = "pretrain"
recipe = "moe_lgr_opus100"
set = {{ model.moe.num_groups = {number} }}
inputs = {{ shards = "shards", mixture = "mixture", groups = "groups" }}
[inputs]
raw = "text"
"""


@pytest.mark.parametrize(("number", "found"), [(4, 3), (2, 5), (3, 3)])
def test_groups_that_a_later_stage_would_refuse_stop_a_plan_before_it_trains(
    number: int, found: int, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(GROUPS_PLAN.format(number=number))
    for kind in ("shards", "mixture"):
        with new_artifact(tmp_path / "out" / kind, kind=kind, stage="x", config={}, inputs={}):
            pass
    started = []

    def launcher(arguments: Sequence[str], **_: object) -> int:
        started.append(arguments[2])
        if arguments[2] != "group_languages":
            return 9
        made = tmp_path / "out" / "groups"
        with new_artifact(made, kind="groups", stage="x", config={}, inputs={}) as writer:
            writer.statistics["groups"] = {f"group {n}": [f"l{n}"] for n in range(found)}
        return 0

    resolved = resolve_plan(load_plan(str(tmp_path / "plan.toml")), out_dir=tmp_path / "out")
    chosen = resolved.chosen(only=["groups", "dense", "routed"])
    if number == found:
        assert run_plan(chosen, launcher=launcher, say=lambda _: None) == 9
        assert started == ["group_languages", "pretrain"]
        return
    said = f"routed expects {number} language groups .* groups has {found}. Change"
    with pytest.raises(ConfigError, match=said):
        run_plan(chosen, launcher=launcher, say=lambda _: None)
    assert started == ["group_languages"]


@pytest.mark.parametrize(
    ("processes", "overrides", "said"),
    [
        (999, {}, "Stage 'dense': 999 ranks are more than the"),
        (
            2,
            {"model": {"moe": {"num_experts": 7}}, "training": {"expert_parallel_size": 2}},
            "Stage 'dense': 7 experts cannot be spread over 2 ranks",
        ),
    ],
)
def test_ranks_that_a_training_would_refuse_stop_a_plan_before_its_first_stage(
    processes: int,
    overrides: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.jobs.runner.visible_gpus", lambda: Gpus(0, has_bf16=False))
    plan = load_plan("demo")
    resolved = resolve_plan(plan, out_dir=tmp_path, processes=processes, overrides=overrides)
    for start in (run_plan, dry_run):
        with pytest.raises(ConfigError, match=said):
            start(resolved)
    dry_run(resolved, jobs=2)  # then each training has one process


@pytest.mark.parametrize("name", plan_names())
def test_groups_that_need_no_model_are_made_before_any_training(name: str) -> None:
    plan = load_plan(name)
    order = [plan.stages[stage] for stage in stage_order(plan)]
    trained = next((i for i, one in enumerate(order) if STAGES[one.run].trains), len(order))
    late = [one for one in order[trained:] if one.run == "group_languages"]
    assert all("checkpoint" in one.inputs for one in late)
