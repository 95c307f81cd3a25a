"""Run the commands of docs/tutorials/experts_in_your_checkpoint.md in order.

They run on the stored run instead of the demo's, and train for a few updates.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.forked import run_line
from support.page_commands import ROOT, blocks
from support.raw_trees import unpack_stored_run

from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.importing import open_model

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "tutorials" / "experts_in_your_checkpoint.md"
RECIPE = """
[shards]
max_tokens = 40
[batches]
tokens = 200
micro_batches = 2
evaluation_tokens = 200
[optimizer]
warmup_updates = 1
[training]
updates = 4
validate_every = 4
[logging]
every = 1
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command of the example has succeeded."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "runs").mkdir()
    unpack_stored_run(folder).rename(folder / "runs" / "demo")
    texts = {block.info: block.text for block in blocks([PAGE])}
    (folder / "experts.toml").write_text(texts["toml"], encoding="utf-8")
    (folder / "few.toml").write_text(RECIPE, encoding="utf-8")
    for line in texts["bash demo"].splitlines():
        run_line(line.replace("demo_moe", "few.toml"), folder)
    return folder


def test_every_part_comes_from_the_folder_of_other_software(done: Path) -> None:
    experts = open_artifact(done / "runs" / "experts", kind="checkpoint")
    receipt: dict[str, Any] = experts.read_json("receipt.json")
    assert set(receipt["unused"]) == set()
    rules = {entry["rule"] for entry in receipt["tensors"]}
    assert rules == {"copied", "expert of dense", "fresh"}
    assert all(".router." in e["target"] for e in receipt["tensors"] if e["rule"] == "fresh")
    assert receipt["function_check"]["largest"] > 0


def test_it_is_trained_and_translates(done: Path) -> None:
    metrics = (done / "runs" / "experts-tuned" / "metrics.jsonl").read_text(encoding="utf-8")
    assert sum("loss" in json.loads(line) for line in metrics.splitlines()) >= 4
    translations = open_artifact(done / "runs" / "experts-translations", kind="translations")
    assert translations.statistics


def test_what_is_exported_again_is_loaded_by_the_other_software(done: Path) -> None:
    folder = done / "runs" / "hf-experts"
    peer = transformers.NllbMoeForConditionalGeneration.from_pretrained(folder)
    assert peer.config.num_experts == 8
    back = open_model(folder)
    made = open_model(done / "runs" / "experts-tuned")
    assert back.spec.model.moe == made.spec.model.moe
