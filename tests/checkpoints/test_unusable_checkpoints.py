"""Checkpoints from elsewhere: weights that are no numbers, shapes that are not the files'."""

import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.corpora import bytes_of
from support.exported_models import own_checkpoint, tokenizer_of_two
from support.readable_artifacts import Shelf, build_shelf, stage_call
from support.readers_sweep import reseal
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline import cli
from pipeline.artifacts.tokenizer import TokenizerFiles, load_tokenizer
from pipeline.checkpoints.checkpoint import (
    load_model,
    open_checkpoint,
    read_spec,
    read_tokenizer,
    refuse_other_tokenizer,
)
from pipeline.config.recipe import load_recipe
from pipeline.errors import CheckpointError, ConfigError
from pipeline.stages.finetune import refuse_other_model


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return build_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def broken(shelf: Shelf, tmp_path: Path) -> Path:
    copied = shutil.copytree(
        shelf.path("experts"), tmp_path / "broken", copy_function=shutil.copyfile
    )
    return Path(copied)


def spoil(checkpoint: Path, value: float) -> str:
    path = checkpoint / "weights" / "part-00000-000.safetensors"
    tensors = load_file(path)
    name = "encoder.layers.0.feed_forward.experts.0.up.weight"
    assert name in tensors
    tensors[name].view(-1)[7] = value
    save_file(tensors, path)
    reseal(checkpoint)
    return name


def change_model(checkpoint: Path, **settings: int) -> None:
    path = checkpoint / "model.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["model"] |= settings
    path.write_text(json.dumps(spec), encoding="utf-8")
    reseal(checkpoint)


RECIPE = """
[model]
encoder_layers = 1
decoder_layers = 1
width = 16
feed_forward_width = 32
num_heads = 2
max_positions = 64
[model.moe]
num_experts = 4
every = 1
decoder_router = "language_group"
"""


def commands(shelf: Shelf, broken: Path, tmp_path: Path) -> dict[str, list[str]]:
    recipe, out = tmp_path / "recipe.toml", f"--out={tmp_path / 'out'}"
    recipe.write_text(RECIPE, encoding="utf-8")
    settings, weights = f"--recipe={recipe}", f"--checkpoint={broken}"
    data = [f"--shards={shelf.path('shards')}", f"--mixture={shelf.path('mixture')}"]
    parts = [f"--{part}={broken}" for part in ("embeddings", "encoder", "decoder")]
    return {
        "upcycle": ["upcycle", settings, *parts, out],
        "finetune": ["finetune", settings, *data, weights, out],
        "translate": ["translate", settings, f"--corpus={shelf.path('corpus')}", weights, out],
        "average": ["checkpoint", "average", str(broken), out],
        "prune": ["checkpoint", "prune", str(broken), "--languages=de", "--experts=4", out],
    }


@pytest.mark.parametrize(
    "verb", ["upcycle", "finetune", "translate", "average", "prune", "average inf"]
)
def test_weights_that_are_no_numbers_are_named_on_one_line(
    shelf: Shelf, broken: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    verb, _, value = verb.partition(" ")
    name = spoil(broken, float(value or "nan"))
    assert cli.main(commands(shelf, broken, tmp_path)[verb]) == 2
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert printed.count("mmnmt ") == 1
    said = printed.splitlines()[-1]  # before it DeepSpeed may say what it cannot compile
    assert said.startswith("mmnmt ")
    assert f"Tensor {name} has values that are not finite numbers" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("verb", "cut"),
    [*(("inspect", cut) for cut in (0, 4, 100, -1)), ("translate", 100), ("average", -1)],
)
def test_truncated_weights_are_one_line(
    shelf: Shelf,
    broken: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    verb: str,
    cut: int,
) -> None:
    path = broken / "weights" / "part-00000-000.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    reseal(broken)
    inspect = ["checkpoint", "inspect", str(broken)]
    command = inspect if verb == "inspect" else commands(shelf, broken, tmp_path)[verb]
    assert cli.main(command) == 2
    said = capfd.readouterr().err.strip()
    assert "\n" not in said
    assert "part-00000-000.safetensors cannot be read" in said


def test_a_width_that_no_model_has_is_refused_with_its_range(broken: Path) -> None:
    change_model(broken, width=10**9)
    with pytest.raises(
        CheckpointError, match=r"model\.width is 1000000000. Choose a whole number from 1 to 65,536"
    ):
        read_spec(open_checkpoint(broken))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"width": 2**15}, {"encoder_layers": 200, "decoder_layers": 200}], ids=str
)
def test_a_model_far_larger_than_its_files_is_refused_before_anything_is_allocated(
    broken: Path, settings: dict[str, int]
) -> None:
    held = sum(
        int(np.prod(tensor.shape))
        for path in broken.glob("weights/*")
        for tensor in load_file(path).values()
    )
    change_model(broken, **settings)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(broken))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"hold {held:,} values" in str(caught.value)
    assert "parameters" in str(caught.value)
    assert peak < 2**26


def test_another_model_s_tokenizer_is_refused(shelf: Shelf, broken: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(broken)
    refuse_other_tokenizer(checkpoint, load_tokenizer(shelf.path("tokenizer")))
    with pytest.raises(CheckpointError, match=r"do not belong together \(ids: 263 and 39\)"):
        refuse_other_tokenizer(checkpoint, load_tokenizer(shelf.path("pieces")))
    own_checkpoint(tmp_path / "two", tokenizer=tokenizer_of_two())
    grown = tokenizer_of_two().build()
    refuse_other_tokenizer(open_checkpoint(tmp_path / "two"), grown)
    assert grown.output_size is not None
    grown.output_size += 1  # as many ids, more of them the target's
    with pytest.raises(CheckpointError, match=r"\(ids of the target: 36 and \d+\)"):
        refuse_other_tokenizer(open_checkpoint(tmp_path / "two"), grown)


@pytest.mark.parametrize("languages", [("de", "en"), ("de", "en", "ru")], ids=len)
def test_shards_of_another_tokenizer_are_refused_with_both_artifacts(
    languages: tuple[str, ...], shelf: Shelf, tmp_path: Path
) -> None:
    given = {"checkpoint": shelf.open("dense"), "shards": shelf.open("shards")}
    call = stage_call("finetune", tmp_path / "out", given)
    other = bytes_of(languages)
    fingerprint = TokenizerFiles(other, None).build().fingerprint
    both = f"The tokenizers of {shelf.path('dense')} and {shelf.path('shards')} differ."
    with pytest.raises(ConfigError, match=re.escape(both)):
        refuse_other_model(call, fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("demo_dense", "inspect {} --recipe > model.toml, then --recipe demo_dense+model.toml."),
        ("demo_moe", "An overlay removes no setting: use a recipe without model.moe."),
    ],
)
def test_a_recipe_of_another_model_is_refused_with_how_to_make_one_that_fits(
    recipe: str, said: str, shelf: Shelf, tmp_path: Path
) -> None:
    given = {"checkpoint": shelf.open("dense"), "shards": shelf.open("shards")}
    call = stage_call("finetune", tmp_path / "out", given, recipe=load_recipe(recipe))
    fingerprint = load_tokenizer(shelf.path("shards") / "tokenizer").fingerprint
    with pytest.raises(ConfigError, match=re.escape(said.format(shelf.path("dense")))):
        refuse_other_model(call, fingerprint=fingerprint)


@pytest.mark.parametrize("spelled", [("deu", "eng"), ("en", "de")])
def test_a_recipe_may_spell_and_order_the_languages_of_modules_otherwise(
    spelled: tuple[str, ...], shelf: Shelf, tmp_path: Path
) -> None:
    modules = {"kind": "low_rank", "rank": 2, "languages": ("de", "en")}
    spec = byte_spec(model={"language_modules": modules})
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "modules", tiny_model(spec)))
    given = {"checkpoint": checkpoint, "shards": shelf.open("shards")}
    asked = {**spec.model.model_dump(), "language_modules": {**modules, "languages": spelled}}
    call = stage_call(
        "finetune", tmp_path / "out", given, recipe=load_recipe(None, {"model": asked})
    )
    fingerprint = read_tokenizer(checkpoint).fingerprint
    refuse_other_model(call, fingerprint=fingerprint)
    others = load_recipe(
        None, {"model": {**asked, "language_modules": {**modules, "languages": ("de", "fr")}}}
    )
    with pytest.raises(ConfigError, match="describes another model"):
        refuse_other_model(replace(call, recipe=others), fingerprint=fingerprint)
