"""Text that nobody would train bytes on: no UTF-8, a line of 100,000 bytes, words without spaces.

They go from raw files to translations and scores; each stage says in its summary what became of
them.
"""

from pathlib import Path

import pytest
from support.forked import run_command
from support.raw_trees import write

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction, read_hypotheses
from pipeline.registry import STAGES

pytestmark = pytest.mark.slow

LONG = "好" * 33_333 + "!"
"""100,000 bytes without a space."""
RECIPE = """
tokenizer = { kind = "bytes" }
clean = { max_characters = 1000000, max_length_ratio = 1000000.0 }
shards = { max_tokens = 200 }
batches = { tokens = 400, micro_batches = 1, window_steps = 2, evaluation_tokens = 400 }
optimizer = { warmup_updates = 1 }
training = { updates = 2, validate_every = 2, checkpoint_every = 2, resource_thresholds = [10, 30] }
decoding = { beam_size = 1, max_length_ratio = 0.0, max_extra_length = 3, tokens = 20000 }
evaluation = { scores = ["chrf"] }
[model]
encoder_layers = 1
decoder_layers = 1
width = 16
feed_forward_width = 16
num_heads = 2
max_positions = 512
front = { kind = "wsf", layers = 1 }
"""


def sides(begin: int, count: int) -> dict[str, list[bytes]]:
    numbers = range(begin, begin + count)
    return {
        "en": [f"sentence number {number}".encode() for number in numbers],
        "zh": [f"第{number}句话".encode() for number in numbers],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every stage's output; import and clean see all of the bad lines."""
    root = tmp_path_factory.mktemp("bytes")
    texts = {"train": sides(0, 20), "valid": sides(50, 3), "test": sides(60, 2)}
    texts["train"]["en"][3] = b"not \xff\xfe UTF-8"
    texts["train"]["zh"][4] = LONG.replace("好", "坏").encode()
    texts["train"]["en"][5] = b"cut off \xe5\xa5"
    texts["test"]["zh"][1] = LONG.encode()
    for split, of_split in texts.items():
        for code, lines in of_split.items():
            write(root / "raw" / "en-zh", {f"{split}.{code}": b"\n".join([*lines, b""])})
    (root / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return root


def stage(folder: Path, name: str, **inputs: str) -> list[str]:
    """Arguments of a stage that writes into the folder of its name."""
    named = [part for key, value in inputs.items() for part in (f"--{key}", f"{folder}/{value}")]
    recipe = ["--recipe", str(folder / "recipe.toml")]
    return [name, *recipe, *named, "--out", str(folder / name)]


def said(folder: Path, name: str) -> str:
    manifest = open_artifact(folder / name, kind=STAGES[name].makes).manifest
    return "\n".join(manifest.summary)


def test_every_stage_goes_on_and_says_what_became_of_bad_lines(folder: Path) -> None:
    for arguments in (
        stage(folder, "import_corpus", raw="raw"),
        stage(folder, "clean", corpus="import_corpus"),
        stage(folder, "train_tokenizer", corpus="clean"),
        stage(folder, "make_shards", corpus="clean", tokenizer="train_tokenizer"),
        stage(folder, "mix", shards="make_shards"),
    ):
        assert cli.main(arguments) == 0
    imported = open_artifact(folder / "import_corpus", kind="corpus")
    assert imported.statistics["pairs"]["en-zh"] == {"train": 18, "valid": 3, "test": 2}
    assert (
        "left out: 2 lines and their counterparts into quarantine.jsonl (invalid_utf8 in en 2)"
        in (said(folder, "import_corpus"))
    )
    shards = open_artifact(folder / "make_shards", kind="shards")
    assert shards.statistics["too_long"] == {"en-zh": 1}
    assert "left out 1 of more than 200 tokens" in said(folder, "make_shards")

    train = stage(folder, "pretrain", shards="make_shards", mixture="mix")
    done = run_command(train)
    assert done.returncode == 0, done.stderr
    note = "which is not written between words of zh (17 lines)"
    assert done.stderr.count(note) == 1
    assert note in said(folder, "pretrain")

    assert cli.main(stage(folder, "translate", checkpoint="pretrain", corpus="clean")) == 0
    made = open_artifact(folder / "translate", kind="translations")
    found = read_hypotheses(made, Direction("zh", "en"))
    assert found[0].split == 0
    assert found[1].split >= 100_000 // 512
    assert not any(one.truncated for one in found)
    every = [*found, *read_hypotheses(made, Direction("en", "zh"))]
    assert made.statistics["invalid"] == sum(one.invalid > 0 for one in every)
    assert all(one.text.encode().decode() == one.text for one in every)
    arguments = stage(folder, "evaluate", corpus="clean")
    assert cli.main([*arguments, "--systems", f"bytes={folder / 'translate'}"]) == 0
