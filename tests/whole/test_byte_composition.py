"""An Ada-MSHA encoder over bytes before an MoE decoder routed by language group, from end to end.

The dense model is trained, given experts, trained on over two ranks that share them, stopped, and
resumed on one; then it is averaged, translates and is scored. Neither paper has such a model.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.corpora import make_corpus
from support.process_pool import ProcessPool
from support.stage_runs import make_call, run_stage
from support.tiny_training import (
    UPDATES,
    Inputs,
    assert_same_runs,
    changed,
    make_recipe,
    pretrain,
    read_metrics,
    read_weights,
    terminate_at_call,
)

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.checkpoints.averaging import average_checkpoints
from pipeline.checkpoints.checkpoint import load_model, read_spec
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World
from pipeline.errors import Interrupted
from pipeline.extensions.byte_front_ends import AdaMshaConfig
from pipeline.extensions.byte_front_ends.ada_msha import AdaMsha
from pipeline.model.sublayer import Regularization
from pipeline.stages.pretrain import train, training_data
from pipeline.training.engine import connect, expert_parallel_group

pytestmark = pytest.mark.slow

FRONT = AdaMshaConfig(language_vector=True, max_scale=3)
TEST_LINES = ["abcd dcba", "b", "äß Ω"]
"""Alike on both sides; some letters have more than a byte."""


def recipe_of(*, experts: bool = True) -> Recipe:
    recipe = make_recipe()
    recipe = changed(recipe, "model", front=FRONT, moe=recipe.model.moe if experts else None)
    recipe = changed(recipe, "decoding", beam_size=2, max_extra_length=3, max_length_ratio=1.0)
    return changed(recipe, "evaluation", language_accuracy=False)


def finetune(
    world: World,
    artifacts: Mapping[str, Artifact],
    out_dir: Path,
    recipe: Recipe,
    *,
    terminate_at: tuple[int, int] | None = None,
) -> str:
    """What ``finetune`` does within a world that is open already; says how it ended."""
    connect(world)
    call = make_call("finetune", recipe, dict(artifacts), out_dir)
    data = training_data(call)
    model = load_model(
        artifacts["checkpoint"],
        regularization=Regularization.of(recipe.training),
        expert_parallel=expert_parallel_group(recipe.training.expert_parallel_size, world=world),
    )
    with ExitStack() as stack:
        if terminate_at is not None and terminate_at[0] == world.rank:
            terminate_at_call(stack, terminate_at[1])
        try:
            train(call, model, data, world=world)
        except Interrupted as stopped:
            return str(stopped)
    return "done"


def test_a_byte_encoder_before_routed_experts_goes_the_whole_way(
    inputs: Inputs, pool1: ProcessPool, pool2: ProcessPool, tmp_path: Path
) -> None:
    dense_recipe, recipe = recipe_of(experts=False), recipe_of()
    assert pool1.run(pretrain, inputs, tmp_path / "dense", dense_recipe) == ["done"]
    dense = open_artifact(tmp_path / "dense", kind="checkpoint")

    parts = dict.fromkeys(("embeddings", "encoder", "decoder"), dense)
    given = {**parts, "groups": inputs.groups}
    assembled = run_stage("upcycle", tmp_path / "assembled", given, recipe)
    spec = read_spec(assembled)
    assert spec.model.front == FRONT
    assert spec.num_groups == 2
    assert len(spec.language_token_ids or ()) == len(spec.languages)

    given = {"shards": inputs.shards, "mixture": inputs.mixture, "checkpoint": assembled}
    tuned = tmp_path / "tuned"
    stopped = pool2.run(finetune, given, tuned, recipe, terminate_at=(1, 4))
    assert stopped[0] == stopped[1]
    assert stopped[0].startswith("stopped after update ")
    assert pool1.run(finetune, given, tuned, recipe) == ["done"]
    records = [one for one in read_metrics(tuned / "metrics.jsonl") if one["kind"] == "train"]
    assert [one["update"] for one in records] == list(range(1, UPDATES + 1))
    for name, value in read_weights(tuned).items():
        is_trained = not torch.equal(value, read_weights(tmp_path / "assembled")[name])
        assert is_trained or not name.startswith("front."), name

    average_checkpoints([tmp_path / "assembled", tuned], out_dir=tmp_path / "mean")
    mean = open_artifact(tmp_path / "mean", kind="checkpoint")
    corpus = make_corpus(
        tmp_path / "tests", {"test": {"de-en": dict.fromkeys(("de", "en"), TEST_LINES)}}
    )
    given = {"checkpoint": mean, "corpus": corpus}
    translations = run_stage("translate", tmp_path / "translated", given, recipe)
    assert translations.statistics["lines"] == 2 * len(TEST_LINES)
    assert translations.statistics["truncated"] == 0

    given = {"corpus": corpus, "systems/mean": translations}
    scores = run_stage("evaluate", tmp_path / "evaluation", given, recipe)
    assert set(scores.statistics["systems"]) == {"mean"}


def test_the_ranks_of_a_world_stopped_and_resumed_make_the_same_ada_msha(
    inputs: Inputs, pool2: ProcessPool, tmp_path: Path
) -> None:
    """Weights, moments and curves to the last bit."""
    recipe, straight, out_dir = recipe_of(), tmp_path / "straight", tmp_path / "stopped"
    assert pool2.run(pretrain, inputs, straight, recipe) == ["done"] * 2
    messages = pool2.run(pretrain, inputs, out_dir, recipe, terminate_at=(1, 3))
    assert all(message.startswith("stopped after update ") for message in messages)
    assert pool2.run(pretrain, inputs, out_dir, recipe) == ["done"] * 2
    assert_same_runs(out_dir, straight, state=UPDATES)
    model = load_model(open_artifact(out_dir, kind="checkpoint"))
    assert isinstance(model.front, AdaMsha)
