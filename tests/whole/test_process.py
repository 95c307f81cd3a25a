"""What is set in a process: by an entry point before torch is loaded, by an import nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.manifest import Kind
from pipeline.decoding.line_filter import FEW_LINES
from pipeline.machine import SPIN_COUNT
from pipeline.model.settings import MoEConfig

pytestmark = pytest.mark.slow

NOTE_WHEN_TORCH_IS_LOADED = """
import os, sys

class Notes:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            loaded = "pipeline.machine" in sys.modules
            with open(os.environ["NOTES"], "w") as stream:
                print(os.environ.get("GOMP_SPINCOUNT"), loaded, file=stream)
            os._exit(0)

sys.meta_path.insert(0, Notes())
"""

IMPORTS = """
import importlib, logging, os, pkgutil, random, signal, sys, warnings
import numpy, torch

def state():
    return {
        "environment": dict(os.environ),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "hooks": (sys.excepthook, sys.displayhook, sys.getrecursionlimit(), list(sys.path)),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "arithmetic": (torch.get_default_dtype(), torch.get_float32_matmul_precision(),
                       torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "random": (random.getstate(), str(numpy.random.get_state()),
                   torch.get_rng_state().tolist()),
    }

before = state()
import pipeline, pipeline.model, data_prep
assert "pipeline.machine" not in sys.modules, "malloc might have been set"
names = [module.name for package in (pipeline, data_prep)
         for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for name in names:
    if name not in sys.argv[1:]:
        importlib.import_module(name)
after = state()
assert len(names) > 60
assert "deepspeed" not in sys.modules
print([name for name in before if before[name] != after[name]])
"""

LOAD_DEEPSPEED = (
    *("pipeline.training.engine", "pipeline.training.loop", "pipeline.estimates.memory"),
    *("pipeline.estimates.step_time", "pipeline.training.metrics", "pipeline.training.saving"),
    *("pipeline.stages.pretrain", "pipeline.stages.finetune"),
    "pipeline.extensions.tasks.finetune_task",
)
"""What loads the engine, which settles DeepSpeed's accelerator and warnings as it is loaded."""


def test_importing_any_of_it_changes_nothing_in_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *LOAD_DEEPSPEED],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a process notes, and ends, at the moment it would load torch."""
    (tmp_path / "sitecustomize.py").write_text(NOTE_WHEN_TORCH_IS_LOADED)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "notes"


def finished(path: Path, kind: Kind) -> str:
    """An artifact that can be opened, which is all that is asked of it before torch is loaded."""
    with new_artifact(path, kind=kind, stage="made", config={}, inputs={}) as writer:
        writer.write_json("made.json", kind)
    return str(path)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A command line of ``pretrain`` that is right as far as it is read before torch is loaded."""
    shards = finished(tmp_path / "shards", "shards")
    mixture = finished(tmp_path / "mixture", "mixture")
    given = ["--recipe", "demo_dense", "--shards", shards, "--mixture", mixture]
    return [*given, "--out", str(tmp_path / "out")]


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "pipeline.stages.pretrain"],
        ["-m", "pipeline", "pretrain"],
        ["-c", "from pipeline.cli import command; command()", "pretrain"],
        ["-m", "pipeline", "pretrain", "--processes", "2"],
    ],
    ids=["module", "package", "mmnmt", "ranks"],
)
def test_an_entry_point_says_how_threads_wait_before_torch_is_loaded(
    notes: Path, arguments: list[str], program: list[str]
) -> None:
    subprocess.run([sys.executable, *program, *arguments], check=False, timeout=60)
    assert notes.read_text() == f"{SPIN_COUNT} True\n"


@pytest.mark.parametrize(
    ("name", "value", "noted"),
    [("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "passive", "None")],
)
def test_what_the_environment_says_of_threads_stays(
    notes: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, noted: str
) -> None:
    monkeypatch.setenv(name, value)
    subprocess.run([sys.executable, "-m", "pipeline.stages.pretrain"], check=False, timeout=60)
    assert notes.read_text() == f"{noted} True\n"


@pytest.mark.parametrize("stage", ["finetune", "translate", "upcycle"])
def test_every_stage_that_loads_torch_is_an_entry_point(notes: Path, stage: str) -> None:
    subprocess.run([sys.executable, "-m", f"pipeline.stages.{stage}"], check=False, timeout=60)
    assert notes.read_text() == f"{SPIN_COUNT} True\n"


LISTED = '["'
"""What a line with names of modules begins with."""
SLOW = {"torch._dynamo", "torch._inductor", "sympy", "transformers", "datasets"}
"""What takes longer to load than torch, and is not needed."""

COMMANDS = """
import json, os, sys, tempfile
from pipeline.cli import main
for arguments, given in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as stream:
        stream.write(given.encode())
        stream.seek(0)
        os.dup2(stream.fileno(), 0)
    assert main(arguments) == 0
    print("\\n" + json.dumps(list(sys.modules)))
"""

IMPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print("\\n" + json.dumps(list(sys.modules)))
"""


def loaded_after(program: str, *arguments: str) -> list[set[str]]:
    """Return the names of all modules that a process has loaded, each time that it prints them."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [set(json.loads(line)) for line in lines if line.startswith(LISTED)]


def loaded_after_commands(*commands: list[str], given: Sequence[str] = ()) -> list[set[str]]:
    """Return the names of all modules that one process has loaded after each of its commands."""
    found = loaded_after(COMMANDS, json.dumps([*zip_longest(commands, given, fillvalue="")]))
    assert len(found) == len(commands)
    return found


def test_commands_that_launch_nothing_load_no_compiler() -> None:
    described, needed = loaded_after_commands(
        ["describe", "--recipe", "mmnmt_opus100+smoke"], ["estimate", "demo_moe", "--device", "cpu"]
    )
    assert "torch" in described
    assert not (SLOW | {"numba", "deepspeed"}) & described
    assert not (SLOW | {"numba"}) & needed


def test_a_few_lines_are_translated_without_compiled_loops(tmp_path: Path) -> None:
    spec = byte_spec(moe=MoEConfig(num_experts=4, every=2), groups=2)
    checkpoint = make_checkpoint(tmp_path / "model", tiny_model(spec))
    command = ["translate", "--checkpoint", str(checkpoint), "--from", "en", "--to", "de"]
    lines = ["a line\n" * number for number in (FEW_LINES, FEW_LINES + 1)]
    few, more = loaded_after_commands(command, command, given=lines)
    assert "pipeline.kernels.expert_products" in few
    assert not (SLOW | {"numba", "deepspeed", "sacrebleu", "pandas", "scipy"}) & few
    assert "numba" in more


def test_compiled_loops_are_loaded_with_what_both_training_stages_import() -> None:
    (loaded,) = loaded_after(IMPORT, "pipeline.training.loop")
    assert "numba" in loaded
