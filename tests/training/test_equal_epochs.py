"""Updates counted in bytes: every vocabulary passes over the text equally often."""

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from support.corpora import make_corpus
from support.process_pool import ProcessPool, RankFailed
from support.stage_runs import make_call, run_stage
from support.tiny_training import Inputs, changed, make_recipe, pretrain

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.shards import Mixture
from pipeline.artifacts.tokenizer import load_tokenizer, tokenizer_folder
from pipeline.batching.equal_epochs import byte_offsets, with_resolved_updates
from pipeline.batching.feed import TrainingData
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import LOOPBACK, World
from pipeline.errors import ConfigError
from pipeline.model.transformer import Transformer
from pipeline.stages.pretrain import check_phases, model_spec, train, training_data
from pipeline.training.settings import OptimizerConfig

LINES = {"en-ru": 300, "de-en": 200}
UPDATES = 40
VOCABULARIES = {
    "bytes": {"kind": "bytes"},
    "characters": {"kind": "characters"},
    "byte pairs": {"kind": "byte_bpe", "vocabulary_size": 300},
    "pieces": {"kind": "sentencepiece", "vocabulary_size": 80, "model_type": "bpe"},
}


def recipe_of(vocabulary: str, **changes: object) -> Recipe:
    plain = make_recipe(updates=UPDATES, updates_of="bytes").model_dump()
    plain["model"] |= {"moe": None, "max_positions": 512}  # no line is too long for any
    plain["batches"] |= {"tokens": 6000, "window_steps": 8}
    plain["tokenizer"] |= VOCABULARIES[vocabulary]
    return Recipe.model_validate(plain | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Artifact]]:
    """Vocabulary → shards and mixture of one corpus of words of Cyrillic, Latin and umlauts."""
    folder = tmp_path_factory.mktemp("equal")
    generator = random.Random(1)
    words = {"ru": ["домик", "книга", "и"], "de": ["größer", "Haus", "und"], "en": ["a", "house"]}
    texts: dict[Split, dict[str, dict[str, list[str]]]] = {"train": {}, "valid": {}}
    for pair, count in LINES.items():
        for split, by_pair in texts.items():
            lengths = [generator.randint(1, 12) for _ in range(count if split == "train" else 2)]
            by_pair[pair] = {
                code: [" ".join(generator.choices(words[code], k=k)) for k in lengths]
                for code in pair.split("-")
            }
    corpus = make_corpus(folder / "corpus", texts)
    found = {}
    for name in VOCABULARIES:
        recipe, place = recipe_of(name), folder / name
        given = {"corpus": corpus}
        given["tokenizer"] = run_stage("train_tokenizer", place / "tokenizer", given, recipe)
        shards = run_stage("make_shards", place / "shards", given, recipe)
        mixture = run_stage("mix", place / "mixture", {"shards": shards}, recipe)
        found[name] = {"shards": shards, "mixture": mixture}
    return found


def data_of(vocabulary: str, artifacts: dict[str, Artifact], folder: Path) -> TrainingData:
    recipe = recipe_of(vocabulary)
    return training_data(make_call("pretrain", recipe, artifacts, folder / "unused"))


def sentences_drawn(vocabulary: str, data: TrainingData) -> int:
    """Sentence pairs of all the updates that training makes, counted one by one."""
    resolved = with_resolved_updates(recipe_of(vocabulary), data)
    steps = islice(data.planner.steps((0, 0)), resolved.training.updates)
    return sum(len(one.pair_B) for step in steps for one in step.micro_batches)


def test_every_vocabulary_draws_as_many_sentence_pairs_as_bytes_do(
    made: dict[str, dict[str, Artifact]], tmp_path: Path
) -> None:
    drawn = {
        name: sentences_drawn(name, data_of(name, artifacts, tmp_path))
        for name, artifacts in made.items()
    }
    assert drawn["bytes"] > 4 * sum(LINES.values())
    assert all(one == pytest.approx(drawn["bytes"], rel=0.03) for one in drawn.values()), drawn


def test_the_bytes_of_every_line_are_known_whatever_its_pieces(
    made: dict[str, dict[str, Artifact]], tmp_path: Path
) -> None:
    expected = data_of("bytes", made["bytes"], tmp_path).train.offsets
    for name, artifacts in made.items():
        found = byte_offsets(data_of(name, artifacts, tmp_path))
        for pair, offsets in expected.items():
            assert np.array_equal(found[pair].first, offsets.first), name
            assert np.array_equal(found[pair].second, offsets.second), name


def test_a_model_of_bytes_makes_the_updates_of_the_recipe_and_others_make_fewer(
    made: dict[str, dict[str, Artifact]],
) -> None:
    planned = {name: one["mixture"].statistics["updates"] for name, one in made.items()}
    assert planned["bytes"] == UPDATES
    assert UPDATES > planned["characters"] > planned["pieces"] > UPDATES / 16


@pytest.mark.slow
def test_an_interrupted_run_ends_after_the_same_updates(
    made: dict[str, dict[str, Artifact]], inputs: Inputs, pool1: ProcessPool, tmp_path: Path
) -> None:
    expected = made["pieces"]["mixture"].statistics["updates"]
    inputs, recipe = Inputs(**made["pieces"], groups=inputs.groups), recipe_of("pieces")
    pool1.run(pretrain, inputs, tmp_path / "model", recipe, terminate_at=(0, 3))
    assert pool1.run(pretrain, inputs, tmp_path / "model", recipe) == ["done"]
    model = open_artifact(tmp_path / "model", kind="checkpoint")
    assert model.statistics["updates"] == expected
    assert model.manifest.config["training"]["updates"] == UPDATES, "the recipe as it was given"


@pytest.mark.slow
def test_a_run_that_is_beyond_its_updates_in_bytes_is_refused(
    made: dict[str, dict[str, Artifact]], inputs: Inputs, pool1: ProcessPool, tmp_path: Path
) -> None:
    """32 updates of bytes are 4 of pieces, fewer than are done, though the number is larger."""

    def recipe(updates: int) -> Recipe:
        training = recipe_of("pieces").training.model_copy(update={"updates": updates})
        return recipe_of("pieces", training=training.model_dump())

    inputs = Inputs(**made["pieces"], groups=inputs.groups)
    [stopped] = pool1.run(pretrain, inputs, tmp_path / "model", recipe(64), terminate_at=(0, 17))
    assert int(stopped.split()[3]) > 4
    with pytest.raises(RankFailed, match="updates are done, and the recipe makes 4"):
        pool1.run(pretrain, inputs, tmp_path / "model", recipe(32))
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_model_with_experts_makes_the_updates_that_have_the_flop_of_a_dense_model(
    inputs: Inputs, pool1: ProcessPool, tmp_path: Path
) -> None:
    recipe = make_recipe(updates=30, updates_of="dense", validate_every=30, checkpoint_every=30)
    moe, updates = recipe.model.moe, {}
    assert moe is not None
    for top_k in (0, 1, 3):
        experts = moe.model_copy(update={"top_k": top_k}) if top_k else None
        out_dir, changed_recipe = tmp_path / str(top_k), changed(recipe, "model", moe=experts)
        pool1.run(pretrain, inputs, out_dir, changed_recipe)
        checkpoint = open_artifact(out_dir, kind="checkpoint")
        updates[top_k] = checkpoint.statistics["updates"]
        assert checkpoint.manifest.config["training"]["updates"] == 30, "the recipe as it was given"
    assert updates[0] == 30
    pieces = load_tokenizer(tokenizer_folder(inputs.shards)).size
    attention, feed_forward, output = 16 * 16 * 4, 2 * 16 * 32, 16 * pieces
    dense = 3 * attention + 2 * feed_forward + output
    for top_k in (1, 3):
        further = 2 * (top_k - 1) * feed_forward + 2 * 16 * moe.num_experts  # experts and routers
        assert updates[top_k] == pytest.approx(30 * dense / (dense + further), abs=1)


@pytest.mark.parametrize("updates", [19, 20])
def test_a_phase_that_a_model_of_fewer_updates_never_reaches_is_refused(
    made: dict[str, dict[str, Artifact]], tmp_path: Path, updates: int
) -> None:
    data = data_of("pieces", made["pieces"], tmp_path)
    (phase,) = data.mixture.phases
    data.mixture = Mixture((phase, replace(phase, from_update=20)))
    recipe = recipe_of("pieces")
    training = recipe.training.model_copy(update={"updates": updates, "updates_of": "dense"})
    if updates == 20:
        check_phases(data, training)
        return
    recipe = recipe.model_copy(update={"training": training})
    call = make_call("pretrain", recipe, made["pieces"], tmp_path / "model")
    model = cast(Transformer, SimpleNamespace(spec=model_spec(call, data.tokenizer)))
    with pytest.raises(ConfigError, match="begins at update 20, and this model makes 19 updates"):
        train(call, model, data, world=World(0, 1, 0, 1, LOOPBACK, 0))


def test_updates_that_cannot_be_counted_in_bytes_are_refused(
    made: dict[str, dict[str, Artifact]], tmp_path: Path
) -> None:
    data = data_of("pieces", made["pieces"], tmp_path)
    recipe = recipe_of("pieces")
    falling = OptimizerConfig(schedule="polynomial", warmup_updates=UPDATES - 1)
    with pytest.raises(ConfigError, match="Lower it, or train longer"):
        with_resolved_updates(recipe.model_copy(update={"optimizer": falling}), data)
    narrow = recipe.batches.model_copy(update={"tokens": 90})
    with pytest.raises(ConfigError, match=r"or lower clean\.max_bytes"):
        with_resolved_updates(recipe.model_copy(update={"batches": narrow}), data)
    with pytest.raises(ValueError, match="Leave one of them out"):
        recipe_of("pieces", mixture={"phases": [{"from_update": 1}]})
