"""A model from elsewhere gets experts and is trained on: from its folder to lower losses."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from support.foreign_models import LINES, m2m100_folder
from support.forked import run_command
from support.raw_trees import write

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.tokenizer import load_tokenizer, tokenizer_folder
from pipeline.checkpoints.checkpoint import (
    load_model,
    open_checkpoint,
    read_spec,
    read_tokenizer,
    recipe_text,
)
from pipeline.cli import main
from pipeline.config.recipe import load_recipe
from pipeline.errors import ArtifactError
from pipeline.model.settings import ModelConfig

UPDATES = 20
ASSEMBLY = """
[sources]
m2m = "m2m100"
[parts]
embeddings = "m2m"
encoder = "m2m"
decoder = "m2m"
[experts]
num_experts = 4
"""
TRAINING = f"""
[batches]
tokens = 200
micro_batches = 2
evaluation_tokens = 200
[optimizer]
learning_rate = 0.005
warmup_updates = 2
[training]
updates = {UPDATES}
dropout = 0.0
attention_dropout = 0.0
validate_every = {UPDATES}
[logging]
every = 1
"""
TEXTS = [f"{line} {other}" for line in LINES for other in LINES if len(line + other) < 30]


@pytest.fixture
def upcycled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    m2m100_folder(Path("m2m100"))
    Path("assembly.toml").write_text(ASSEMBLY, encoding="utf-8")
    assert main(["upcycle", "assembly.toml", "--out", "experts"]) == 0
    return Path("experts")


def run(*arguments: str) -> None:
    assert main(list(arguments)) == 0


@pytest.mark.slow
def test_an_upcycled_m2m100_learns_within_20_updates(upcycled: Path) -> None:
    names = [f"de-en/{split}.{code}" for split in ("train", "valid") for code in ("de", "en")]
    write(Path("raw"), dict.fromkeys(names, "".join(f"{line}\n" for line in TEXTS)))
    Path("recipe.toml").write_text(TRAINING, encoding="utf-8")
    run("checkpoint", "import", str(upcycled), "--tokenizer", "--out", "tokenizer")
    Path("model.toml").write_text(recipe_text(upcycled), encoding="utf-8")
    recipe = "recipe.toml+model.toml"
    run("import_corpus", "--recipe", recipe, "--raw", "raw", "--out", "corpus")
    given = ["--corpus", "corpus", "--tokenizer", "tokenizer"]
    run("make_shards", "--recipe", recipe, *given, "--out", "shards")
    run("mix", "--recipe", recipe, "--shards", "shards", "--out", "mixture")
    given = ["--shards", "shards", "--mixture", "mixture", "--checkpoint", str(upcycled)]
    # DeepSpeed keeps the process group of the first training of a process.
    done = run_command(["finetune", "--recipe", recipe, *given, "--out", "tuned"])
    assert done.returncode == 0, done.stderr
    curve = [
        record["loss"]
        for line in Path("tuned/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if "loss" in (record := json.loads(line))
    ]
    assert len(curve) >= UPDATES
    assert sum(curve[-3:]) < 0.8 * sum(curve[:3])
    tuned = open_artifact(Path("tuned"), kind="checkpoint")
    assert read_spec(tuned) == read_spec(open_checkpoint(upcycled))
    load_model(tuned)


def test_the_recipe_is_of_the_model(upcycled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(upcycled), "--recipe"]) == 0
    printed = capsys.readouterr().out
    document = tomllib.loads(printed)
    spec = read_spec(open_checkpoint(upcycled))
    assert ModelConfig.model_validate(document["model"]) == spec.model
    assert document["batches"] == {"tag_scheme": spec.tag_scheme}
    assert set(document) == {"model", "batches"}
    Path("model.toml").write_text(printed, encoding="utf-8")
    laid_over = load_recipe("demo_mmnmt+model.toml")
    assert laid_over.model == spec.model
    assert laid_over.training == load_recipe("demo_mmnmt").training


def test_the_tokenizer_has_the_ids(upcycled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("checkpoint", "import", str(upcycled), "--tokenizer", "--out", "tokenizer")
    made = load_tokenizer(tokenizer_folder(open_artifact(Path("tokenizer"), kind="tokenizer")))
    assert made.fingerprint == read_tokenizer(open_checkpoint(upcycled)).fingerprint
    assert f"{made.size:,} ids" in capsys.readouterr().out
    run("checkpoint", "import", str(upcycled), "--tokenizer", "--out", "tokenizer")
    assert "import: already done, tokenizer is up to date." in capsys.readouterr().err
    run("checkpoint", "average", str(upcycled), "--out", "mean")
    assert main(["checkpoint", "import", "mean", "--tokenizer", "--out", "tokenizer"]) == 2
    assert main(["checkpoint", "import", "m2m100", "--tokenizer", "--out", "other"]) == 2
    error = capsys.readouterr().err
    assert "--overwrite" in error
    assert "`mmnmt checkpoint import m2m100 --out runs/m2m100`" in error


@pytest.mark.parametrize("name", ["m2m100", "a model"])
def test_the_commands_for_the_tokenizer_of_a_model_from_elsewhere_make_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m2m100_folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(Path(name), kind="tokenizer")
    *commands, last = str(caught.value).split("`")
    for command in commands[1::2]:
        assert main(shlex.split(command)[1:]) == 0
    made = open_artifact(Path(last.removeprefix(", and name ").removesuffix(".")), kind="tokenizer")
    assert load_tokenizer(tokenizer_folder(made)).languages


def test_the_commands_for_the_tokenizer_of_a_file_of_fairseq_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.touch()
    with pytest.raises(
        ArtifactError, match=r"--dictionary dict\.txt .* --tokenizer --out runs/m-tok"
    ):
        open_artifact(path, kind="tokenizer")
    with pytest.raises(
        ArtifactError, match=r"--sentencepiece FILE --out runs/m`, and name runs/m\."
    ):
        open_artifact(path, kind="checkpoint")
