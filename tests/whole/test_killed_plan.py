"""A plan that is killed at every stage completes, with the result of one that was not."""

import time
from pathlib import Path

import pytest
from support.forked import run_command, start_command

from pipeline.artifacts.artifact import MANIFEST_NAME, read_manifest

pytestmark = pytest.mark.slow

RECIPE = """
[corpus]
source = "cldr"
[corpus.cldr]
train_pairs = { de = 60, fr = 40 }
valid_phrases = 4
test_phrases = 3
[tokenizer]
kind = "bytes"
[model]
encoder_layers = 2
decoder_layers = 2
width = 16
feed_forward_width = 32
num_heads = 2
max_positions = 256
[batches]
tokens = 600
micro_batches = 2
window_steps = 4
[optimizer]
warmup_updates = 2
[training]
updates = 6
validate_every = 3
checkpoint_every = 2
[decoding]
beam_size = 2
max_length_ratio = 0.2
[evaluation]
language_accuracy = false
"""
MOE_RECIPE = """
parent = "{parent}"
[model.moe]
num_experts = 4
[training]
expert_parallel_size = 2
"""
PLAN = """
[stages.corpus]
run = "import_corpus"
recipe = "{dense}"
[stages.clean]
run = "clean"
recipe = "{dense}"
inputs = {{ corpus = "corpus" }}
[stages.tokenizer]
run = "train_tokenizer"
recipe = "{dense}"
inputs = {{ corpus = "clean" }}
[stages.shards]
run = "make_shards"
recipe = "{dense}"
inputs = {{ corpus = "clean", tokenizer = "tokenizer" }}
[stages.mixture]
run = "mix"
recipe = "{dense}"
inputs = {{ shards = "shards" }}
[stages.dense]
run = "pretrain"
recipe = "{dense}"
inputs = {{ shards = "shards", mixture = "mixture" }}
[stages.assembled]
run = "upcycle"
recipe = "{moe}"
inputs = {{ embeddings = "dense", encoder = "dense", decoder = "dense" }}
[stages.tuned]
run = "finetune"
recipe = "{moe}"
inputs = {{ shards = "shards", mixture = "mixture", checkpoint = "assembled" }}
processes = 2
[stages.translated]
run = "translate"
recipe = "{dense}"
inputs = {{ checkpoint = "tuned", corpus = "clean" }}
[stages.evaluation]
run = "evaluate"
recipe = "{dense}"
[stages.evaluation.inputs]
corpus = "clean"
systems = {{ tuned = "translated" }}
"""
STAGES = [
    line[8:-1] for line in PLAN.split("\n") if line.startswith("[stages.") and "inputs" not in line
]


ODD_NAME = 'it\'s a "plan"; $(touch made) `touch made` & more ü'
"""Of the folder of everything: a shell would run parts of it."""


def write_plan(folder: Path) -> Path:
    folder.mkdir()
    dense, moe, plan = folder / "dense.toml", folder / "moe.toml", folder / "plan.toml"
    dense.write_text(RECIPE, encoding="utf-8")
    names = {name: str(path).replace('"', '\\"') for name, path in (("dense", dense), ("moe", moe))}
    moe.write_text(MOE_RECIPE.format(parent=names["dense"]), encoding="utf-8")
    plan.write_text(PLAN.format(**names), encoding="utf-8")
    return plan


def begun(out_dir: Path, stage: str) -> bool:
    """Whether a stage has written anything yet."""
    traces = (f".{stage}.*unfinished", f"{stage}.run", stage)
    return any(path for trace in traces for path in out_dir.glob(trace))


def kill_at(plan: Path, out_dir: Path, stage: str) -> bool:
    """Run until the stage shows a first sign, then kill -9; False if the plan ended before."""
    process = start_command(["run", str(plan), "--out", str(out_dir)])
    deadline = time.monotonic() + 90
    while process.is_alive() and not begun(out_dir, stage):
        assert time.monotonic() < deadline, f"{stage} never began"
        time.sleep(0.005)
    killed = process.is_alive()
    process.kill()
    process.join(timeout=30)
    return killed


@pytest.mark.timeout(600)
def test_a_plan_killed_at_every_stage_completes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ODD_NAME
    plan = write_plan(folder)
    interrupted, straight = folder / "interrupted", folder / "straight"
    killed = [stage for stage in STAGES if kill_at(plan, interrupted, stage)]
    assert {"dense", "tuned"} <= set(killed)
    for out_dir in (interrupted, straight):
        done = run_command(["run", str(plan), "--out", str(out_dir)])
        assert done.returncode == 0, done.stderr
    for stage in STAGES:
        ours, reference = read_manifest(interrupted / stage), read_manifest(straight / stage)
        assert ours is not None
        assert reference is not None
        weights = {name: r for name, r in ours.files.items() if name.startswith("weights/")}
        expected = {name: r for name, r in reference.files.items() if name.startswith("weights/")}
        assert weights == expected, f"{stage} differs"
    leftovers = (".unfinished", ".run")
    assert not [path for path in interrupted.iterdir() if path.name.endswith(leftovers)]
    assert (interrupted / "evaluation" / MANIFEST_NAME).is_file()
    assert [path.name for path in tmp_path.iterdir()] == [ODD_NAME], "no shell has read the name"
