"""Run the commands of docs/tutorials/from_bytes.md in order, for a few updates."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from support.forked import run_line
from support.page_commands import ROOT, blocks, named_blocks

from data_prep.settings import SEGMENTERS, TokenizerConfig
from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config.recipe import load_recipe, recipe_names
from pipeline.jobs.plan import plan_names

pytestmark = pytest.mark.slow

PAGE_PATH = ROOT / "docs" / "tutorials" / "from_bytes.md"
PAGE = PAGE_PATH.read_text(encoding="utf-8")
SETTINGS = [block.text for block in blocks([PAGE_PATH]) if block.info == "toml"]
FEW = """
corpus = { max_train_lines = 20, max_valid_lines = 2, max_test_lines = 2 }
model = { encoder_layers = 1, decoder_layers = 1, width = 16, feed_forward_width = 16 }
batches = { tokens = 300, micro_batches = 1, window_steps = 2 }
optimizer = { warmup_updates = 1 }
training = { updates = 5, validate_every = 5, checkpoint_every = 1 }
decoding = { max_length_ratio = 0.1 }
evaluation = { language_accuracy = false }
logging = { every = 1 }
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command of the page has succeeded."""
    folder = tmp_path_factory.mktemp("bytes")
    words = {"de": "Haus", "en": "house"}
    for side, word in words.items():
        text = "".join(f"{word} {number}\n" for number in range(1020))
        (folder / f"my.{side}").write_text(text, encoding="utf-8")
    (folder / "mine.toml").write_text(SETTINGS[0], encoding="utf-8")
    (folder / "few.toml").write_text(FEW, encoding="utf-8")
    for line in named_blocks(PAGE_PATH, "bash")["bytes"].splitlines():
        if "mmnmt" in line:
            run_line(line.replace("mine.toml", "mine.toml+few.toml"), folder)
        else:
            subprocess.run(["bash", "-c", line], cwd=folder, timeout=60, check=True)
    return folder


def test_two_text_files_end_as_translations_both_ways(done: Path) -> None:
    runs = done / "runs" / "mine"
    translations = open_artifact(runs / "translations", kind="translations")
    assert translations.statistics["directions"] == {"de-en": 2, "en-de": 2}
    spec = read_spec(open_artifact(runs / "model", kind="checkpoint"))
    assert spec.model.front == load_recipe("bytes+ada_msha").model.front
    report = (runs / "evaluation" / "report.md").read_text(encoding="utf-8")
    assert "Ada-MSHA" in report


def test_the_model_is_the_mean_of_the_last_five_states(done: Path) -> None:
    made = open_artifact(done / "runs" / "mine" / "model", kind="checkpoint")
    assert made.statistics["averaged_updates"] == [1, 2, 3, 4, 5]
    assert not (done / "runs" / "mine" / "model.run").exists()


def test_the_segmenters_that_the_page_names_are_settings() -> None:
    table = tomllib.loads(SETTINGS[1])["tokenizer"]
    config = TokenizerConfig.model_validate({"kind": "bytes", **table})
    assert set(config.segmenters.values()) > set(SEGMENTERS)


def test_every_overlay_and_plan_that_the_page_names_ships() -> None:
    named = set(re.findall(r"`((?:msc|ada_msha|ncf|wsf|subwords|byte_bpe)_?\w*)`", PAGE))
    named |= {"one_hot", "lobef_code", "characters"}
    assert named - {"wsf"} <= set(recipe_names())
    plans = re.findall(r"^\| `(\w+)` \| (?:MoCE|LOBEF|\|)", PAGE, re.MULTILINE)
    plans += re.findall(r"mmnmt run (\w+)", PAGE)
    assert set(plans) <= set(plan_names())
    assert len(set(plans)) == 7
