"""Tests of pipeline/cli/ and pipeline/config/ds_config.py."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from support.folder_listing import names_in
from support.forked import Started, started_code

from pipeline import cli
from pipeline.artifacts.artifact import new_artifact, open_artifact, raw_digest
from pipeline.artifacts.locks import exclusive, sole_writer
from pipeline.artifacts.manifest import MANIFEST_NAME, run_dir
from pipeline.artifacts.places import plan_lock_path
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.run_folders import announce_removal, claim_run_folder
from pipeline.cli.ending import EXIT_BROKEN_PIPE, EXIT_LOST, FIRST_SPEAKS_SECONDS, guarded
from pipeline.cli.stage_commands import commands_of_stages
from pipeline.config.documents import write_whole
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import load_recipe, recipe_names
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import (
    EXIT_RUN_AGAIN,
    EXIT_USER_ERROR,
    AgreedStop,
    ConfigError,
    DataError,
    Interrupted,
    RankLost,
)
from pipeline.jobs.job_endings import REPORTS, read_ends
from pipeline.model.parameters import count_parameters
from pipeline.registry import STAGES
from pipeline.stage import Input, Stage, StageCall

READ = Stage(
    name="read",
    module="tiny_stages",
    makes="corpus",
    help="raw text into a corpus",
    sections=("corpus",),
    inputs={"raw": Input("raw", "a folder", required=False)},
)
TRAIN = Stage(
    name="train",
    module="tiny_stages",
    makes="checkpoint",
    help="corpora into a model",
    sections=("training",),
    inputs={
        "corpus": Input("corpus", "text"),
        "others": Input("corpus", "more", required=False, many=True),
    },
    parallel="ranks",
    trains=True,
)

OTHER_VERBS = (
    *("run", "status", "submit", "cancel", "logs", "doctor", "describe"),
    *("estimate", "report", "serve", "checkpoint", "export"),
)


class Bench:
    """Two tiny stages; ``calls`` holds what their code was told, ``action`` is what it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[StageCall] = []
        self.action: Callable[[StageCall], None] = _build
        self.recipe_path = folder / "recipe.toml"
        self.recipe_path.write_text("[optimizer]\nwarmup_updates = 1\n[training]\nupdates = 10\n")

    def run(self, call: StageCall) -> None:
        self.calls.append(call)
        self.action(call)

    def read(self, *options: str, out: str = "corpus") -> int:
        return cli.main(
            ["read", "--recipe", str(self.recipe_path), *options, "--out", self.at(out)]
        )

    def train(self, *options: str, out: str = "model") -> int:
        given = {"--recipe": str(self.recipe_path), "--corpus": self.at("corpus")}
        kept = [word for option in given.items() if option[0] not in options for word in option]
        return cli.main(["train", *kept, *options, "--out", self.at(out)])

    def at(self, name: str) -> str:
        return str(self.folder / name)


def _build(call: StageCall) -> None:
    with new_artifact(
        call.out_dir,
        kind=call.stage.makes,
        stage=call.stage.name,
        config=call.config,
        inputs=call.records,
        overwrite=call.overwrite,
    ) as writer:
        writer.write_json("text.json", call.stage.name)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path)
    module = types.ModuleType("tiny_stages")
    monkeypatch.setattr(module, "run", bench.run, raising=False)
    monkeypatch.setitem(sys.modules, "tiny_stages", module)
    monkeypatch.setitem(STAGES, "read", READ)
    monkeypatch.setitem(STAGES, "train", TRAIN)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    return bench


# ---------------------------------------------------------------- options


def test_help_lists_every_command_and_version_is_the_packages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            cli.main([option])
        assert ended.value.code == 0
    assert cli.main([]) == 0
    said, _, bare = capsys.readouterr().out.partition("mmnmt 0.")
    assert said.strip() == bare.partition("\n")[2].strip()
    assert all(f"    {name}" in said for name in [*commands_of_stages(), *OTHER_VERBS])
    assert "translate_text" not in said


def test_commands_of_a_clone_that_is_not_installed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == "mmnmt (not installed)\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--recipe x --out y", "--corpus"),
        ("--corpus x --out y", "--recipe"),
        ("--corpus x --recipe y", "--out"),
        ("--corpus x --recipe y --out z --processes 0", "--processes"),
        ("--corpus x --recipe y --out z --process 2", "--process"),
    ],
)
def test_options_that_are_missing_or_wrong_end_with_the_usage(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments.split()])
    assert ended.value.code == EXIT_USER_ERROR
    assert named in capsys.readouterr().err.split("error:")[1]
    assert bench.calls == []


def test_an_unknown_command_is_answered_with_a_list_that_has_each_command_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["xyzzy"])
    listed = capsys.readouterr().err.partition("Choose from ")[2].strip(". \n").split(", ")
    assert len(listed) == len(set(listed)), listed
    assert {"upcycle", "run", "mix"} <= set(listed)


@pytest.mark.parametrize(
    ("command", "rest", "said"),
    [
        ("", "trane", "there is no command 'trane'. Did you mean 'train'?"),
        ("", "descrbe", "there is no command 'descrbe'. Did you mean 'describe'?"),
        ("", "checkpoint flod", "there is no command 'flod'. Did you mean 'fold'?"),
        ("", "checkpoint export x", "there is no command 'export'. Did you mean 'mmnmt export'?"),
        ("", "prune x", "there is no command 'prune'. Did you mean 'mmnmt checkpoint prune'?"),
        (
            *("analyze", "lenghts"),
            "argument scales|vectors|languages|lengths: invalid choice: "
            "'lenghts' (choose from 'scales', 'vectors', 'languages', 'lengths')",
        ),
        (
            *("analyze", "--corpus lengths"),
            "there is no option '--corpus' before scales|vectors|languages|lengths. Write one of "
            "them before it",
        ),
        (
            *("analyze", "--out=x vectors"),
            "there is no option '--out' before scales|vectors|languages|lengths. Write one of "
            "them before it",
        ),
        ("analyze lengths", "--copus x", "there is no option '--copus'. Did you mean '--corpus'?"),
        (
            "translate --text",
            "x --corpus y",
            "there is no option '--corpus'. Did you mean '--out'?",
        ),
        ("train", "--recipie=x", "there is no option '--recipie'. Did you mean '--recipe'?"),
        ("describe", "--recipie x", "there is no option '--recipie'. Did you mean '--recipe'?"),
        ("run", "demo --dry", "there is no option '--dry'. Did you mean '--dry-run'?"),
        ("checkpoint fold", "x --ouput y", "there is no option '--ouput'. Did you mean '--out'?"),
        (
            *("status", "demo --stages clean"),
            "there is no option '--stages'. Did you mean '--only STAGE' or '--until STAGE'?",
        ),
        ("run", "x --overlay y", "there is no option '--overlay'. Did you mean '--with OVERLAY'?"),
        (
            *("export", "--checkpoint x"),
            "there is no option '--checkpoint' before CHECKPOINT. Leave it out.",
        ),
        ("run", "demo --with a --with=b", "--with is there twice. Pass it once"),
        ("train", "--recipe a --recipe b --out y", "--recipe is there twice. Pass it once"),
        ("run", "demo --only corpus clean", "nothing reads 'clean'. Repeat --only before it"),
        (
            *("submit", "demo --set=training.updates=9 training.seed=2 --site x"),
            "nothing reads 'training.seed=2'. Repeat --set before it",
        ),
        ("run", "demo --only corpus --out x clean", "nothing reads 'clean'. Leave it out"),
        (
            *("translate", "--from en --to de a b"),
            "nothing reads 'a b'. Text comes from standard input: write < before the name of a "
            "file",
        ),
        (
            *("translate", "letters.en --from=en --to=de"),
            "nothing reads 'letters.en'. Text comes from standard input: write < before the name "
            "of a file",
        ),
        ("describe", "demo_dense", "nothing reads 'demo_dense'. Pass --recipe demo_dense"),
        (
            *("translate", "--from en --to de --out x"),
            "there is no option '--out' beside --from and --to, which translate standard input to "
            "standard output. Leave it out.",
        ),
        (
            *("translate", "--from en --to de --processes 2"),
            "there is no option '--processes' beside --from and --to, which translate standard "
            "input to standard output. Leave it out.",
        ),
        (
            *("translate --text", "x --from en"),
            "there is no option '--from' here. Write --set text.source=CODE.",
        ),
        (
            *("translate --text", "x --to=de"),
            "there is no option '--to' here. Write --set 'decoding.targets=[\"CODE\"]'.",
        ),
        (
            *("report", "=x --out y"),
            "argument RUN: it has no name before =. Write a name or a path; . is the current "
            "folder",
        ),
    ],
)
def test_a_slip_in_a_command_or_an_option_is_answered_with_the_nearest(
    bench: Bench, capsys: pytest.CaptureFixture[str], command: str, rest: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), *rest.split()])
    assert ended.value.code == EXIT_USER_ERROR
    called = f"mmnmt {command}".strip()
    assert capsys.readouterr().err.splitlines()[-1] == f"{called}: error: {said}"
    assert bench.calls == []


def test_a_value_that_looks_like_an_option_is_taken_as_a_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["describe", "--recipe=--smoke"]) == EXIT_USER_ERROR
    assert "There is no recipe '--smoke'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*STAGES, *OTHER_VERBS[:-2], "checkpoint fold", "export"])
def test_help_marks_every_option_that_is_required_and_no_other(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its required options a command ends with their names."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    entries = re.findall(r"^  (--[\w-]+)(.*?)(?=^  \S|^\S|^$|\Z)", text, re.MULTILINE | re.DOTALL)
    marked = {name for name, about in entries if "(required" in " ".join(about.split())}
    try:
        cli.main(command.split())
        said = ""
    except SystemExit:
        said = capsys.readouterr().err.partition("error:")[2].partition(";")[0]
    assert marked == set(re.findall(r"--[\w-]+", said))


# ---------------------------------------------------------------- one stage


def test_a_stage_is_told_its_settings_inputs_and_place(bench: Bench) -> None:
    raw = bench.folder / "raw"
    raw.mkdir()
    (raw / "a.txt").write_text("hello")
    assert bench.read("--raw", str(raw)) == 0
    assert bench.read(out="second") == 0
    others = ["--others", f"b={bench.at('second')}", f"a={bench.at('corpus')}"]
    assert bench.train(*others, "--ds-config", "cpu_bf16", "--local_rank=0") == 0
    reading, _, training = bench.calls
    assert reading.raw == {"raw": RawInput((raw,))}
    assert reading.records["raw"].digest == raw_digest(raw)
    assert training.recipe.training.updates == 10
    assert list(training.many("others")) == ["b", "a"]
    assert training.records["others/b"].digest == training.artifacts["others/b"].digest
    assert training.config["ds_config"] == load_ds_config("cpu_bf16")
    assert training.config["training"] == training.recipe.model_dump(mode="json")["training"]
    assert training.ds_config == training.config["ds_config"]
    model = open_artifact(Path(bench.at("model")), kind="checkpoint")
    assert set(model.manifest.inputs) == {"corpus", "others/a", "others/b"}


def test_a_finished_result_of_the_same_inputs_is_built_again_only_on_demand(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --if-stale, a job that is started again after its end makes nothing twice."""
    replaces = ("--overwrite", "--if-stale")
    assert bench.read() == bench.read() == bench.read(*replaces) == 0
    assert len(bench.calls) == 1
    assert capsys.readouterr().err.count("already done") == 2
    assert bench.read("--overwrite") == 0
    assert len(bench.calls) == 2
    assert bench.train(*replaces) == bench.train(*replaces) == 0
    assert len(bench.calls) == 3, "a trained model is not trained again"
    assert bench.train("--set", "training.updates=11", *replaces) == 0
    assert len(bench.calls) == 4


def test_a_finished_training_that_was_killed_before_its_run_folder_was_gone_removes_it(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.read()
    bench.train()
    folder = Path(bench.at("model.run"))
    claim_run_folder(folder, work="training")
    key = open_artifact(Path(bench.at("model")), kind="checkpoint").manifest.key
    announce_removal(folder, key=key)
    (folder / "metrics.jsonl").write_text("{}\n")
    capsys.readouterr()
    assert bench.train() == 0
    assert len(bench.calls) == 2
    assert not folder.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "already done" in line


@pytest.mark.parametrize("edited", ['"rewritten"\n', '"READ"\n', None])
def test_a_finished_result_that_was_edited_is_not_called_done_and_not_thrown_away(
    bench: Bench, capsys: pytest.CaptureFixture[str], edited: str | None
) -> None:
    bench.read()
    path = Path(bench.at("corpus")) / "text.json"
    if edited is None:
        path.unlink()
    else:
        path.write_text(edited)
        os.utime(path, (time.time() + 5, time.time() + 5))
    capsys.readouterr()
    assert bench.read() == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert str(path) in said
    assert f"move the folder {path.parent} away" in said
    assert said.count("\n") == 1
    assert (path.read_text() if path.exists() else None) == edited
    assert len(bench.calls) == 1


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_an_artifact_is_never_replaced_by_one_of_another_kind(
    bench: Bench, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    bench.read()
    bench.train()
    before = open_artifact(Path(bench.at("model")), kind="checkpoint").digest
    capsys.readouterr()
    assert bench.read(*flags, out="model") == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said == (
        f"mmnmt read: {bench.at('model')} holds a checkpoint artifact made by train, which a "
        "corpus artifact never replaces. Name another --out, or move it away.\n"
    )
    assert open_artifact(Path(bench.at("model")), kind="checkpoint").digest == before
    assert len(bench.calls) == 2


def test_a_longer_training_is_said_to_go_on_and_not_to_keep_the_shorter_one(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.read()
    bench.action = _leave_state
    assert bench.train() == EXIT_RUN_AGAIN
    bench.action = _build
    assert bench.train() == 0
    capsys.readouterr()
    longer = ("--set", "training.updates=20")
    assert bench.train(*longer) == EXIT_USER_ERROR
    assert capsys.readouterr().err.endswith(
        "(training.updates: 10 → 20). Name another --out, or pass --overwrite to replace it by "
        "going on from its last state.\n"
    )
    assert bench.train(*longer, "--overwrite") == 0
    assert not Path(bench.at("model.before-1")).exists()


def test_overwriting_a_trained_model_keeps_it_beside_the_new_one(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.read()
    bench.train()
    before = open_artifact(Path(bench.at("model")), kind="checkpoint").digest
    bench.recipe_path.write_text("[optimizer]\nwarmup_updates = 1\n[training]\nseed = 20\n")
    capsys.readouterr()
    assert bench.train() == EXIT_USER_ERROR
    assert "pass --overwrite to replace it, which keeps that one beside it" in (
        capsys.readouterr().err
    )
    assert bench.train("--overwrite") == 0
    place = bench.at("model.before-1")
    assert open_artifact(Path(place), kind="checkpoint").digest == before
    said = capsys.readouterr().err
    assert f"0 updates (0.0 hours) of training set aside as {place} (training." in said
    assert bench.train("--overwrite") == 0
    assert f"set aside as {bench.at('model.before-2')} (it is trained again)" in (
        capsys.readouterr().err
    )


def test_overwriting_an_unfinished_training_of_other_settings_keeps_its_states(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.read()
    bench.action = _leave_state
    assert bench.train() == EXIT_RUN_AGAIN
    assert bench.train("--overwrite") == EXIT_RUN_AGAIN
    assert not Path(bench.at("model.before-1.run")).exists(), "it goes on"
    bench.recipe_path.write_text("[optimizer]\nwarmup_updates = 1\n[training]\nseed = 20\n")
    bench.action = _build
    capsys.readouterr()
    assert bench.train("--overwrite") == 0
    place = Path(bench.at("model.before-1.run"))
    assert f"of training set aside as {place} (training" in capsys.readouterr().err
    assert names_in(place / "states") == ["update-0000005"]
    assert not Path(bench.at("model.run")).exists()


def _leave_state(call: StageCall) -> None:
    """What a training that is stopped after update 5 leaves."""
    claim_run_folder(run_dir(call.out_dir), work="training")
    with new_artifact(
        run_dir(call.out_dir) / "states" / "update-0000005",
        kind="training_state",
        stage=call.stage.name,
        config=call.config,
        inputs=call.records,
        overwrite=True,
    ) as writer:
        writer.write_json("progress.json", {"update": 5})
    raise Interrupted("stopped")


def test_a_folder_with_other_files_is_never_replaced_unasked(bench: Bench) -> None:
    (bench.folder / "corpus").mkdir()
    (bench.folder / "corpus" / "thesis.tex").touch()
    assert bench.read() == EXIT_USER_ERROR
    assert (bench.folder / "corpus" / "thesis.tex").exists()
    assert bench.calls == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--recipe", "nowhere"], "There is no recipe 'nowhere'"),
        (["--corpus", "nowhere"], "nowhere does not exist. Run the stage that makes the corpus"),
        (["--corpus", "no\nwhere"], r"no\nwhere does not exist. Run the stage"),
        (["--corpus", "\x1b[2Jnowhere"], r"\x1b[2Jnowhere does not exist. Run the stage"),
        (["--others", "corpus"], "--others 'corpus' is not of the form NAME=PATH"),
        (["--others", "a=x", "a=y"], "--others names 'a' twice"),
        (["--others", "a=x", "--others", "a=y"], "--others names 'a' twice"),
        (
            ["--others", "MoE/LGR=x"],
            "--others 'MoE/LGR=x': the name 'MoE/LGR' has a slash, and names become directories. "
            "Write 'MoE-LGR'.",
        ),
        (
            ["--others", "moe=x", "MoE=y"],
            "--others names 'MoE' and 'moe', which are the same",
        ),
        (["--others", "straße=x", "STRASSE=y"], "--others names 'STRASSE' and 'straße', which"),
        (["--recipe", "demo_dens"], "There is no recipe 'demo_dens'. Did you mean 'demo_dense'?"),
        (["--ds-config", "cpu"], "There is no ds_config 'cpu'. Choose from cpu_bf16, cpu_fp32"),
        (["--ds-config", "cpu_bf61"], "There is no ds_config 'cpu_bf61'. Did you mean 'cpu_bf16'?"),
    ],
)
def test_what_a_user_can_mend_is_one_line_that_says_what_and_where(
    bench: Bench, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    bench.read()
    assert bench.train(*options) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith(f"mmnmt train: {said}")
    assert error.count("\n") == 1


def _raise(error: BaseException) -> Callable[[StageCall], None]:
    def action(_call: StageCall) -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("Line 3 is bad: mend it."), 2, "mmnmt read: Line 3 is bad: mend it.\n"),
        (Interrupted(), EXIT_RUN_AGAIN, "mmnmt read: stopped as asked: run the same command again"),
        (KeyboardInterrupt(), 130, "mmnmt read: stopped by Ctrl-C.\n"),
    ],
)
def test_how_a_stage_ends_decides_the_exit_code(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    bench.action = _raise(error)
    assert bench.read() == code
    assert capsys.readouterr().err.startswith(said)


def test_an_error_that_is_a_bug_keeps_its_traceback(bench: Bench) -> None:
    bench.action = _raise(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        bench.read()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("The same everywhere."), ""),
        (ConfigError("There is no such recipe."), ""),
        (DataError("Mine alone."), "mmnmt train: rank 1: Mine alone.\n"),
        (Interrupted(), ""),
    ],
)
def test_a_rank_other_than_zero_reports_only_what_can_be_its_own(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: str,
) -> None:
    """What it leaves to the first rank it leaves time for: torchrun ends that when this ends."""
    waited: list[float] = []
    monkeypatch.setattr("pipeline.cli.ending.time.sleep", waited.append)
    bench.read()
    bench.action = _raise(error)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert bench.train() in (EXIT_USER_ERROR, EXIT_RUN_AGAIN)
    assert capsys.readouterr().err == said
    assert (FIRST_SPEAKS_SECONDS in waited) == isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("[gloo/pair.cc:553] Connection closed by peer [::1]:5. Check. GLHF!", "by peer [::1]:5"),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited", "process exited"),
    ],
)
def test_a_rank_that_lost_another_has_no_traceback_whichever_launcher_started_it(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: str,
    cause: str,
) -> None:
    bench.read()
    bench.action = _raise(RuntimeError(error))
    capsys.readouterr()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError):
        bench.train()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.train() == EXIT_LOST
    said = capsys.readouterr().err
    assert said.startswith("mmnmt train: A connection to another rank was lost (RuntimeError: ")
    assert f"{cause}). Look for the rank" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "end", "cause"),
    [
        (None, "done", ""),
        (AgreedStop("saved"), "again", "saved"),
        (Interrupted("stopped by SIGTERM"), "lost", "stopped by SIGTERM"),
        (RankLost("Rank 0 is gone."), "lost", "Rank 0 is gone."),
        (
            RuntimeError("[third_party/gloo/pair.cc:538] Connection closed by peer"),
            "lost",
            "RuntimeError: [third_party/gloo/pair.cc:538] Connection closed by peer",
        ),
        (
            type("DistStoreError", (RuntimeError,), {})("wait timeout after 300000ms"),
            "lost",
            "DistStoreError: wait timeout after 300000ms",
        ),
        (ConfigError("The recipe\nis wrong."), "failed", "The recipe is wrong."),
        (SystemExit(2), "failed", "the command line cannot be used; the log says why"),
        (MemoryError(), "crashed", "MemoryError"),
        (
            RuntimeError("CUDA out of memory. Restore some."),
            "crashed",
            "RuntimeError: CUDA out of memory. Restore some.",
        ),
        (OSError(errno.EIO, "No answer"), "crashed", "OSError: [Errno 5] No answer"),
    ],
)
def test_a_rank_reports_its_end_to_the_launcher_that_asks_for_it(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: BaseException | None,
    end: str,
    cause: str,
) -> None:
    bench.read()
    if error is not None:
        bench.action = _raise(error)
    reports = tmp_path / "reports"
    reports.mkdir()
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "SLURMD_NODENAME": "node7"}
    for name, value in {**place, REPORTS: str(reports)}.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    with suppress(MemoryError, RuntimeError, OSError, SystemExit):
        bench.train()
    (found,) = read_ends(reports)
    assert (found.rank, found.size, found.node, found.stage) == (1, 2, "node7", "train")
    assert (found.end, found.cause) == (end, cause)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("asked", "end"), [("SIGUSR1", "again"), ("SIGTERM", "lost")])
def test_a_rank_that_leads_others_stops_as_agreed_unless_one_of_them_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, end: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", REPORTS: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)

    def stop() -> int:
        raise Interrupted(f"stopped by {asked}")

    assert guarded("clean", stop, is_rank=True, leads=True) == EXIT_RUN_AGAIN
    (found,) = read_ends(tmp_path)
    assert (found.end, found.cause) == (end, f"stopped by {asked}")


@contextmanager
def unread_output() -> Iterator[None]:
    """Make standard output a pipe that is closed before the first line is written."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, redirect_stdout(stream):
        yield


def test_a_rank_whose_launcher_has_ended_reports_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))

    def write() -> int:
        print("x" * 100_000)
        return 0

    with unread_output():
        assert guarded("train", write, is_rank=True) == EXIT_BROKEN_PIPE
    (found,) = read_ends(tmp_path)
    assert (found.end, found.cause) == ("lost", "the reader of its output has ended")


def test_a_rank_that_cannot_reach_the_reports_prints_its_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.read()
    bench.action = _raise(DataError("Mine alone."))
    monkeypatch.setenv(REPORTS, bench.at("not there"))
    capsys.readouterr()
    assert bench.train() == EXIT_USER_ERROR
    assert capsys.readouterr().err == "mmnmt train: Mine alone.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_a_stage_handles_it_ends_it_cleanly(
    bench: Bench, number: signal.Signals
) -> None:
    def interrupted(call: StageCall) -> None:
        with new_artifact(call.out_dir, kind="corpus", stage="read", config=call.config, inputs={}):
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    bench.action = interrupted
    assert bench.read() == EXIT_RUN_AGAIN
    assert signal.getsignal(number) == before
    assert names_in(bench.folder) == ["recipe.toml"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_that_is_removed_under_a_stage_is_named_without_a_traceback(
    bench: Bench, capsys: pytest.CaptureFixture[str], is_new: bool
) -> None:
    def work(call: StageCall) -> None:
        with call.new_artifact() as writer:
            folder = writer.directory if is_new else run_dir(call.out_dir)
            folder.mkdir(exist_ok=True)
            folder.rmdir()
            (folder / "part").write_text("")

    bench.action = work
    assert bench.read() == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "/part was removed while the stage worked. Remove nothing meanwhile, and run" in said
    assert said.count("\n") == 1
    bench.action = lambda _: (bench.folder / "other").unlink()
    with pytest.raises(FileNotFoundError):
        bench.read()


SIGNALED = """
import os, sys
_, module, number, *sys.argv[1:] = sys.argv

class Asking:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Asking)
from pipeline.__main__ import command
assert not sys.modules.keys() & {"importlib.metadata", "typing"}, "imported while signals come in"
command()
"""
"""Run the command line, and send a signal when a module is imported."""


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        ("import_corpus --recipe demo_dense", "data_prep.import_corpus", signal.SIGUSR1),
        ("run demo --only corpus", "pipeline.config.recipe", signal.SIGINT),
        ("checkpoint average c --last 2", "pipeline.cli", signal.SIGTERM),
    ],
)
def test_a_signal_says_the_same_from_the_first_import_to_the_work_of_a_command(
    tmp_path: Path, command: str, module: str, number: signal.Signals
) -> None:
    words = [*command.split(), "--out", "out"]
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALED, module, str(int(number)), *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    name = " ".join(words[: 1 + (words[0] == "checkpoint")])
    again = f"stopped by {number.name}: run the same command again to go on."
    said = "stopped by Ctrl-C." if number == signal.SIGINT else again
    assert ended.stderr == f"mmnmt {name}: {said}\n"
    assert ended.returncode == (130 if number == signal.SIGINT else EXIT_RUN_AGAIN)
    assert (ended.stdout, names_in(tmp_path)) == ("", [])


def test_a_second_writer_of_the_same_artifact_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []

    def meanwhile(call: StageCall) -> None:
        bench.action = _build
        codes.append(bench.read())
        _build(call)

    bench.action = meanwhile
    assert bench.read() == 0
    assert codes == [EXIT_USER_ERROR]
    assert f"is being written by process {os.getpid()} on" in capsys.readouterr().err


# ---------------------------------------------------------------- several processes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, int]]:
    """What was launched instead of being run: arguments, processes, threads."""
    launches: list[tuple[list[str], int, int]] = []

    def remember(arguments: Sequence[str], *, processes: int, threads: int) -> int:
        launches.append((list(arguments), processes, threads))
        return EXIT_RUN_AGAIN

    monkeypatch.setattr("pipeline.cli.stage_commands.launch", remember)
    return launches


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_stage_of_ranks_is_refused_among_ranks_that_wait_for_tasks(
    bench: Bench,
    launched: list[tuple[list[str], int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: str,
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mpi4py.futures", "-m", "pipeline"])
    bench.read()
    assert bench.train("--processes", processes) == EXIT_USER_ERROR
    assert "futures starts only stages with --mpi. Start mpirun -n N" in capsys.readouterr().err
    assert launched == []
    assert len(bench.calls) == 1


def test_a_stage_of_ranks_launches_itself_once_per_process_if_nothing_is_wrong(
    bench: Bench,
    launched: list[tuple[list[str], int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert bench.train("--processes", "2") == EXIT_USER_ERROR, "there is no corpus"
    assert launched == []
    bench.read()
    assert bench.train("--processes", "2") == EXIT_RUN_AGAIN
    ((arguments, processes, threads),) = launched
    assert arguments[:3] == ["-m", "pipeline", "train"]
    assert arguments[-4:] == ["--processes", "2", "--out", bench.at("model")]
    assert (processes, threads) == (2, 3)
    assert len(bench.calls) == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "a launcher started 4 ranks. Leave it out"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, ""),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1"},
            "a launcher started 1 rank.",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}, "started 8 ranks"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ""),
    ],
)
def test_under_a_launcher_a_stage_runs_in_this_process_and_says_which_processes_are_unused(
    bench: Bench,
    launched: list[tuple[list[str], int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    said: str,
) -> None:
    bench.read()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bench.train(out="unasked") == 0
    assert capsys.readouterr().err == ""
    bench.train("--processes", "2")
    assert bool(launched) == ("SLURM_NTASKS" in environment), "a batch script is no step"
    error = capsys.readouterr().err
    assert error.count("--processes 2 is not used") == bool(said)
    assert said in error
    assert len(error.splitlines()) == bool(said)


LAUNCHED = [
    [{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "node1"} for rank in (0, 1)],
    [
        {"SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        for rank in (0, 1)
    ],
    [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"} for rank in (0, 1)],
]
LAUNCHERS = ("torchrun", "srun", "mpirun")
PHRASES = '[corpus]\nsource = "cldr"\n[corpus.cldr]\ntrain_pairs = { de = 20 }\n'


def started_rank(
    environment: dict[str, str], arguments: Sequence[str]
) -> AbstractContextManager[Started]:
    """Start ``mmnmt ARGUMENTS`` as a launcher does; nothing else of a launcher is there."""
    names = ("RANK", "SLURM_PROCID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    cleared = {name: value for name, value in os.environ.items() if name not in names}
    code = "from pipeline.cli import command; command()"
    return started_code(code, arguments, environment=cleared | environment)


@pytest.mark.parametrize("environments", LAUNCHED, ids=LAUNCHERS)
def test_ranks_but_the_first_leave_a_command_of_one_process_at_once(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environments: list[dict[str, str]],
) -> None:
    """They do not wait for the locks that rank zero holds meanwhile."""
    plan_path, out_dir = reading_plan(bench), bench.folder / "out"
    arguments = ["run", str(plan_path), "--out", str(out_dir), "--input", f"text={plan_path}"]
    for name, value in environments[1].items():
        monkeypatch.setenv(name, value)
    with sole_writer(Path(bench.at("corpus"))), exclusive(plan_lock_path(out_dir), what="out"):
        assert bench.read() == 0
        assert capsys.readouterr() == ("", "")
        assert cli.main(arguments) == 0
    assert bench.calls == []
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("mmnmt: rank 1 does nothing, since rank 0 runs the command. If no ")
    for name, value in environments[0].items():
        monkeypatch.setenv(name, value)
    assert bench.read() == 0
    assert len(bench.calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("environments", LAUNCHED, ids=LAUNCHERS)
def test_a_plan_runs_its_stages_on_rank_zero_of_a_launcher(
    tmp_path: Path, environments: list[dict[str, str]]
) -> None:
    recipe_path, plan_path, out_dir = (tmp_path / name for name in ("r.toml", "p.toml", "out"))
    recipe_path.write_text(PHRASES)
    plan_path.write_text(
        f'[stages.corpus]\nrun = "import_corpus"\nrecipe = "{recipe_path}"\ninputs = {{}}\n'
    )
    with started_rank(environments[0], ["run", str(plan_path), "--out", str(out_dir)]) as first:
        code, said, error = first.end()
    assert code == 0
    assert "corpus: running import_corpus" in said
    (line,) = error.splitlines()
    assert line.startswith("mmnmt run: a launcher started 2 ranks, and only rank 0 runs the ")
    assert open_artifact(out_dir / "corpus", kind="corpus").manifest.stage == "import_corpus"


# ---------------------------------------------------------------- translate as a filter


@pytest.fixture
def translate(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """A translator that turns lines round; what it was told, per call."""
    told: list[dict[str, Any]] = []
    module = types.ModuleType("pipeline.decoding.line_filter")

    def filter_lines(checkpoint: object, **options: Any) -> types.SimpleNamespace:
        told.append({"checkpoint": checkpoint, **options})
        lines = options["lines"].take(256)
        for line in lines:
            options["write"](line.text[::-1])
        options["say"]("done.")
        return types.SimpleNamespace(unreadable=sum(bool(line.problem) for line in lines))

    monkeypatch.setattr(module, "filter_lines", filter_lines, raising=False)
    monkeypatch.setitem(sys.modules, "pipeline.decoding.line_filter", module)
    monkeypatch.chdir(tmp_path)
    bench.read()
    return told


def _pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> io.BytesIO:
    written = io.BytesIO()
    Path("input").write_bytes(data)
    given = os.open("input", os.O_RDONLY)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.FileIO(given)))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written))
    return written


def test_a_filter_translates_standard_input_and_says_the_rest_on_standard_error(
    bench: Bench,
    translate: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.train()
    written = _pipe(monkeypatch, "ab\n\nüx".encode())
    code = cli.main(["translate", "--checkpoint", bench.at("model"), "--from", "en", "--to", "de"])
    assert code == 0
    assert written.getvalue().decode() == "ba\n\nxü\n"
    assert translate[0]["decoding"] == DecodingConfig()
    assert (translate[0]["source"], translate[0]["target"]) == ("en", "de")
    assert capsys.readouterr().err == "mmnmt translate: done.\n"


@pytest.mark.parametrize("environments", LAUNCHED, ids=LAUNCHERS)
def test_of_the_ranks_of_a_launcher_only_the_first_reads_lines(
    bench: Bench,
    translate: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    environments: list[dict[str, str]],
) -> None:
    bench.train()
    for environment, told in ((environments[1], 0), (environments[0], 1)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        _pipe(monkeypatch, b"ab\n")
        given = ["translate", "--checkpoint", bench.at("model"), "--from", "en", "--to", "de"]
        assert cli.main(given) == 0
        assert len(translate) == told


@pytest.mark.parametrize(("moe", "mmnmt", "best"), [(2.03, 2.98, "moe"), (3.5, 2.9, "mmnmt")])
def test_a_filter_without_a_checkpoint_takes_the_demos_best_by_validation(
    bench: Bench,
    translate: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moe: float,
    mmnmt: float,
    best: str,
) -> None:
    assert cli.main(["translate", "--from", "en", "--to", "de"]) == EXIT_USER_ERROR
    assert "There is no trained model in runs/demo" in capsys.readouterr().err
    for name, perplexity in {"moe": moe, "mmnmt": mmnmt, "moe.before-1": 1.0, "copied": 0}.items():
        bench.train(out=f"runs/demo/{name}")
        path = Path("runs/demo", name, MANIFEST_NAME)
        manifest = json.loads(path.read_text())
        manifest["statistics"] = {"perplexity": perplexity} if perplexity else {}
        path.write_text(json.dumps(manifest))
    for name, kind in {"damaged": "checkpoint", "scores": "evaluation"}.items():
        path = Path("runs/demo", name, MANIFEST_NAME)
        path.parent.mkdir()
        path.write_text(json.dumps({**manifest, "kind": kind, "statistics": {"perplexity": 1.0}}))
    Path("runs/demo/damaged", MANIFEST_NAME).write_text("{")
    _pipe(monkeypatch, b"")
    capsys.readouterr()
    assert cli.main(["translate", "--from", "en", "--to", "de"]) == 0
    assert translate[0]["checkpoint"].directory == Path("runs/demo", best)
    assert f"runs/demo/{best}, whose validation perplexity" in capsys.readouterr().err


@pytest.mark.usefixtures("translate")
def test_a_filter_that_could_not_read_a_line_says_so_by_its_exit_code(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.train()
    written = _pipe(monkeypatch, b"good\nb\xffd\n")
    given = ["translate", "--checkpoint", bench.at("model"), "--from", "en", "--to", "de"]
    assert cli.main(given) == EXIT_USER_ERROR
    assert written.getvalue() == b"doog\n\n"


@pytest.mark.parametrize("options", [["--from", "en"], ["--to", "de"]])
def test_a_filter_needs_two_languages(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["translate", *options])
    assert ended.value.code == EXIT_USER_ERROR


# ---------------------------------------------------------------- plans and recipes


def reading_plan(bench: Bench) -> Path:
    path = bench.folder / "tiny.toml"
    path.write_text(
        f'[inputs]\ntext = "a file"\n[stages.corpus]\nrun = "read"\n'
        f'recipe = "{bench.recipe_path}"\ninputs = {{ raw = "$text" }}\n'
    )
    return path


def test_run_and_status_read_the_plan_its_inputs_and_its_overlay(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path, overlay_path = reading_plan(bench), tmp_path / "short.toml"
    overlay_path.write_text("[corpus]\nmax_train_lines = 1\n")
    bench.read("--raw", str(plan_path), out="out/corpus")
    given = [str(plan_path), "--out", bench.at("out"), "--input", f"text={plan_path}"]
    capsys.readouterr()
    assert cli.main(["run", *given, "--dry-run"]) == 0
    assert cli.main(["run", *given, "--dry-run", "--with", str(overlay_path)]) == 0
    assert cli.main(["status", *given]) == 0
    assert cli.main(["run", *given]) == 0
    said = capsys.readouterr().out.split("\n")
    assert said[:2] == [
        "corpus: done",
        "corpus: would run (corpus.max_train_lines: None → 1)",
    ]
    assert said[4].startswith("corpus  done")
    assert "corpus: already done" in said
    assert cli.main(["run", str(plan_path)]) == EXIT_USER_ERROR
    assert "Pass --input text=PATH" in capsys.readouterr().err


def test_an_input_of_a_plan_is_named_once_per_path_or_as_a_data_set_of_the_hub(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path = reading_plan(bench)
    given = [str(plan_path), "--out", bench.at("out"), "--input"]
    bench.read("--raw", str(plan_path), str(bench.recipe_path), out="out/corpus")
    capsys.readouterr()
    assert cli.main(["run", *given, f"text={plan_path}", f"text={bench.recipe_path}"]) == 0
    assert "corpus: already done" in capsys.readouterr().out
    bench.read("--raw", f"hub:a/b@{'0' * 40}", "--overwrite", out="out/corpus")
    assert cli.main(["run", *given, f"text=hub:a/b@{'0' * 40}"]) == 0
    assert cli.main(["run", *given, "text=hub:a/b@main"]) == EXIT_USER_ERROR
    assert "hub:a/b@main does not say which text it is" in capsys.readouterr().err


def test_describe_without_a_recipe_lists_those_that_ship(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["describe"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert set(recipe_names()) <= set(listed)
    assert cli.main(["describe", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)] == recipe_names()
    assert cli.main(["describe", "--vocabulary", "9"]) == EXIT_USER_ERROR
    assert "Name it with --recipe." in capsys.readouterr().err


def test_describe_shows_the_resolved_recipe_and_counts_with_the_vocabulary_asked_for(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["describe", "--recipe", str(bench.recipe_path)]
    assert cli.main([*arguments, "--vocabulary", "32", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    model = load_recipe(str(bench.recipe_path)).model
    expected = count_parameters(model, vocabulary_size=32, num_groups=0)
    assert described["parameters"] == expected
    assert described["recipe"]["training"]["updates"] == 10
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert f"{expected['total'] + (64_000 - 32) * 1024:,}" in said
    pasted = bench.folder / "pasted.toml"
    pasted.write_text(said)
    assert load_recipe(str(pasted)) == load_recipe(str(bench.recipe_path)).model_copy(
        update={"name": str(pasted)}
    )
    bench.recipe_path.write_text('[model.moe]\ndecoder_router = "language_group"\n')
    assert cli.main(arguments) == EXIT_USER_ERROR
    assert "Pass --groups N" in capsys.readouterr().err
    assert cli.main([*arguments, "--groups", "4", "--json"]) == 0
    grouped = load_recipe(str(bench.recipe_path)).model
    expected = count_parameters(grouped, vocabulary_size=64_000, num_groups=4)
    assert json.loads(capsys.readouterr().out)["parameters"] == expected


def test_a_reader_that_has_enough_ends_a_command_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unread_output():
        assert cli.main(["describe"]) == EXIT_BROKEN_PIPE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [["--recipe", "nowhere"], []])
def test_a_log_on_a_full_disk_changes_no_exit_code(options: list[str]) -> None:
    command = [sys.executable, "-m", "pipeline", "describe", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    with Path("/dev/full").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=120)
    assert done.returncode == EXIT_USER_ERROR


def test_a_place_that_cannot_be_written_to_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "mean")
    assert cli.main(["checkpoint", "average", str(tmp_path), "--out", out]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"mmnmt checkpoint average: {out} cannot be written (")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "run demo --dry-run --out _",
        "import_corpus --recipe demo_dense --out corpus --raw _",
        "clean --recipe demo_dense --out clean --corpus _",
        "checkpoint average a _ --out mean",
        "checkpoint verify _",
        "run demo --dry-run --with _",
        "report _ --out x",
        "serve _",
        "describe --recipe _",
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([word.strip("_") for word in arguments.split()])
    assert ended.value.code == EXIT_USER_ERROR
    assert "it is empty. Write a name or a path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "left",
    [
        *({"RANK": "5"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1"}),
        *({"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}),
    ],
)
def test_a_rank_that_no_launcher_gave_does_not_silence_a_command(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: dict[str, str],
) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    bench.read()
    assert len(bench.calls) == 1
    assert cli.main(["run", "demo", "--dry-run", "--out", "runs/none"]) == 0
    assert "corpus: would run (missing)" in capsys.readouterr().out


NOT_UTF_8 = os.fsdecode(b"o\xff")


@pytest.mark.parametrize(
    "arguments",
    [
        ["import_corpus", "--recipe", "demo", "--raw", "raw", "--out", NOT_UTF_8],
        ["import_corpus", "--recipe", "demo", "--raw", NOT_UTF_8, "--out", "corpus"],
        ["clean", "--recipe", "demo", "--corpus", NOT_UTF_8, "--out", "clean"],
        ["clean", "--recipe", f"{NOT_UTF_8}.toml", "--corpus", "corpus", "--out", "clean"],
        ["clean", "--recipe", "demo", "--corpus", "a", "--tests", f"b={NOT_UTF_8}", "--out", "c"],
        ["pretrain", "--recipe", "demo", "--shards", "s", "--mixture", "m", "--out", NOT_UTF_8],
        ["run", "demo", "--out", NOT_UTF_8],
        ["run", "demo", "--input", f"text={NOT_UTF_8}"],
        ["checkpoint", "inspect", NOT_UTF_8],
        ["checkpoint", "average", "a", NOT_UTF_8, "--out", "mean"],
        ["export", "model", "--to", "hf-m2m100", "--out", NOT_UTF_8],
        ["report", NOT_UTF_8, "--out", "page.html"],
        ["serve", NOT_UTF_8],
    ],
)
def test_a_path_that_is_not_utf_8_is_refused_before_any_work(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "o\\xff" in said
    assert "is not UTF-8" in said
    assert said.count("\n") == 1
    assert names_in(tmp_path) == []


def test_an_output_below_a_folder_that_is_not_utf_8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NOT_UTF_8).mkdir()
    monkeypatch.chdir(tmp_path / NOT_UTF_8)
    assert cli.main(["import_tests", "--raw", "raw", "--out", "corpus"]) == EXIT_USER_ERROR
    assert "o\\xff/corpus is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["import_tests", "--raw", "raw", "--out", "corpus"], ["run", "demo"], ["describe"]],
)
def test_a_current_folder_that_was_removed_is_named(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(arguments) == EXIT_USER_ERROR
    assert "The current folder was removed. Change to another one." in capsys.readouterr().err


def test_a_raw_file_whose_name_is_not_utf_8_is_named_before_any_work(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.folder / "raw").mkdir()
    (bench.folder / "raw" / NOT_UTF_8).write_text("text")
    assert bench.read("--raw", bench.at("raw")) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "raw/o\\xff has a name that is not UTF-8. Rename it, or move it away." in said
    assert bench.calls == []


def test_the_longest_name_of_an_output_has_room_for_what_lies_beside_it(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    for length, unit in ((234, "a"), (234, "é")):  # of two bytes
        assert bench.read(out=unit * (length // len(unit.encode()))) == 0
    assert bench.train(out="m" * 234) == EXIT_USER_ERROR, "there is no corpus"
    capsys.readouterr()
    for length in (235, 247, 256, 5000):
        assert bench.read(out="b" * length) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert f"has a name of {length} bytes, where at most 234 fit. Choose a shorter" in said
    assert len(bench.calls) == 2
    deep = "/".join(["folder"] * 1000)
    assert bench.read(out=deep) == EXIT_USER_ERROR
    assert "(File name too long): shorten the path, or name another place" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_the_encoding_of_the_output_lacks_is_written_as_escapes(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, codes = io.BytesIO(), list[int]()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr("sys.argv", ["mmnmt", "describe"])
    monkeypatch.setattr(cli, "leave", codes.append)
    cli.command()
    assert codes == [0]
    assert b"\\u0394" in written.getvalue()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "mount that disk for writing"),
        (errno.EACCES, "see to it that it can be"),
        (errno.EISDIR, "see to it that it can be"),
    ],
)
def test_a_disk_that_cannot_be_written_is_called_full_only_where_it_is(
    bench: Bench, capsys: pytest.CaptureFixture[str], number: int, remedy: str
) -> None:
    def fail(call: StageCall) -> None:
        with call.new_artifact():
            raise OSError(number, os.strerror(number), "somewhere")

    bench.action = fail
    assert bench.read() == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert f"({os.strerror(number)}), nothing was changed: {remedy}, or choose another" in said
    assert ("make room" in said) == (number == errno.ENOSPC)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_record_that_a_disk_fails_to_take_is_one_sentence_that_names_it(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    bench.action = lambda _: write_whole(bench.folder / ".jobs.json", "{}")
    monkeypatch.setattr(os, "fsync", fail)
    assert bench.read() == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert f"/.jobs.json could not be read or written ({os.strerror(number)}): " in said
    assert said.count("\n") == 1
    assert ".jobs.json" not in "".join(names_in(bench.folder))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["sentencepiece", "pydantic", "pipeline.machine"])
def test_a_required_package_that_is_not_installed_is_one_sentence(
    tmp_path: Path, module: str
) -> None:
    script = f"import sys; sys.modules[{module!r}] = None; import pipeline.__main__ as main"
    words = "export model --to hf-m2m100 --out exported".split()
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; main.command()", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = f"mmnmt: The package {module} is not installed for {sys.executable}. Run pip install "
    is_bug = module.startswith("pipeline")
    assert (is_bug and "Traceback" in done.stderr) or done.stderr.startswith(told)
    assert (done.returncode, done.stderr.count("\n") == 1) == (1 if is_bug else 2, not is_bug)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_a_stage_with_workers_is_one_sentence(tmp_path: Path) -> None:
    lines = 20_000
    for pair in ("de-en", "en-fr", "en-ru"):
        (tmp_path / "raw" / pair).mkdir(parents=True)
        for code in pair.split("-"):
            text = "".join(f"line {number} of {code}\n" for number in range(lines))
            (tmp_path / "raw" / pair / f"train.{code}").write_text(text)
    (tmp_path / "recipe.toml").write_text('[corpus]\nsource = "tree"\n')
    options = ["--recipe", "recipe.toml", "--raw", "raw", "--out", "corpus", "--processes", "2"]
    command = [sys.executable, "-m", "pipeline", "import_corpus", *options]
    for sign in (".corpus.lock", ".corpus.*.unfinished/train/*/*.txt"):
        stage = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        while not list(tmp_path.glob(sign)):
            assert stage.poll() is None
            time.sleep(0.002)
        os.killpg(stage.pid, signal.SIGINT)  # as a terminal does
        _, said = stage.communicate(timeout=60)
        assert said == "mmnmt import_corpus: stopped by Ctrl-C.\n"
        assert stage.returncode == 130
        assert names_in(tmp_path) == ["raw", "recipe.toml"]


# ---------------------------------------------------------------- checkpoints


def test_an_artifact_is_inspected_and_verified(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.read()
    artifact = bench.at("corpus")
    assert cli.main(["checkpoint", "inspect", artifact]) == 0
    assert capsys.readouterr().out.startswith(f"{artifact}: corpus made by read, ")
    assert cli.main(["checkpoint", "inspect", artifact, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {"text.json": len('"read"\n')}
    assert cli.main(["checkpoint", "verify", artifact]) == 0
    assert capsys.readouterr().out.startswith(f"{artifact}: this corpus artifact with 1 file (")
    (bench.folder / "corpus" / "text.json").write_text('"Read"\n')
    assert cli.main(["checkpoint", "verify", artifact]) == EXIT_USER_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"mmnmt checkpoint verify: {artifact}/text.json is damaged")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "--last", "2"],
        ["a", "--run", "b.run", "--last", "2"],
        ["--run", "b.run"],
        ["--last", "2"],
    ],
)
def test_an_average_is_of_checkpoints_or_of_a_runs_last_states(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "mean")]
    assert cli.main(["checkpoint", "average", *arguments, *out]) == EXIT_USER_ERROR
    assert "Name either the checkpoints to average, or --run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_pruning_takes_either_a_number_of_experts_or_a_share(tmp_path: Path) -> None:
    given = ["checkpoint", "prune", "a", "--languages", "de", "--out", str(tmp_path / "b")]
    assert cli.main([*given, "--experts", "2", "--keep-mass", "0.5"]) == EXIT_USER_ERROR


# ---------------------------------------------------------------- ds_configs


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        ("checkpoint prune x", "--keep-mass", "nan"),
        ("checkpoint prune x", "--keep-mass", "-0.1"),
        ("checkpoint prune x", "--keep-mass", "1.5"),
        ("checkpoint prune x", "--keep-mass", "half"),
        ("checkpoint prune x", "--experts", "0"),
        ("checkpoint prune x", "--experts", "99999"),
        ("checkpoint average --run x", "--last", "0"),
        ("checkpoint average --run x", "--last", "1e3"),
        ("describe --recipe smoke", "--vocabulary", "-5"),
        ("estimate demo_moe", "--processes", "two"),
        ("describe --recipe smoke", "--groups", "²"),
        ("run demo", "--processes", "9" * 5000),
        ("pretrain", "--processes", "2000"),
    ],
)
def test_numbers_of_options_have_ranges(
    arguments: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments.split(), option, value])
    assert caught.value.code == EXIT_USER_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    shown = value if len(value) < 40 else value[:39] + "…"
    assert f"argument {option}: {shown!r} is not a " in said
    assert " to 1" in said or "at most 1" in said


@pytest.mark.parametrize("verb", [["describe", "--recipe"], ["estimate"]])
def test_a_vocabulary_that_one_hot_embeddings_have_no_room_for_is_one_sentence(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "one_hot.toml"
    recipe.write_text('[model]\nwidth = 256\n[model.embedding]\ninput = "one_hot"\n')
    arguments = [*verb, str(recipe), "--vocabulary", "300"]
    assert cli.main(arguments) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "the vocabulary of 300 does not fit a width of 256" in line
