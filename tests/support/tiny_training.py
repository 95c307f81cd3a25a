"""A whole training in a few seconds: shards of three pairs, a recipe, and what a run leaves."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, Kind, open_artifact
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World
from pipeline.errors import Interrupted
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, tensor_shapes
from pipeline.model.sublayer import Regularization
from pipeline.stages.pretrain import model_spec, train, training_data
from pipeline.training import loop
from pipeline.training.engine import Engine, connect, expert_parallel_group
from pipeline.training.saving import ValidationResult
from support.corpora import bytes_of, make_corpus, writing
from support.process_pool import ProcessPool
from support.stage_runs import make_call, run_stage

if TYPE_CHECKING:  # a benchmark trains without pytest
    import pytest

PAIRS = {"de-en": 40, "en-ru": 16, "en-fr": 9}
VALID_LINES = {"de-en": 7, "en-ru": 7, "en-fr": 3}
UPDATES = 6
Train = Callable[..., list[Any]]


@dataclass(frozen=True)
class Inputs:
    """What training reads."""

    shards: Artifact
    mixture: Artifact
    groups: Artifact

    def artifacts(self) -> dict[str, Artifact]:
        return {"shards": self.shards, "mixture": self.mixture, "groups": self.groups}


def make_recipe(**training: Any) -> Recipe:
    settings: dict[str, Any] = {
        "name": "tiny",
        "model": {
            **{"encoder_layers": 1, "decoder_layers": 1, "width": 16, "feed_forward_width": 32},
            **{"num_heads": 2, "max_positions": 64},
            "moe": {"num_experts": 4, "every": 1, "decoder_router": "language_group"},
        },
        "batches": {"tokens": 60, "micro_batches": 4, "window_steps": 2, "evaluation_tokens": 60},
        "optimizer": {
            **{"learning_rate": 0.01, "clip_norm": 1.0},
            "warmup_updates": min(2, training.get("updates", UPDATES) - 1),
        },
        "training": {
            **{"updates": UPDATES, "dropout": 0.1, "attention_dropout": 0.1},
            **{"expert_parallel_size": 2, "validate_every": 2, "checkpoint_every": 2},
            "resource_thresholds": [10, 30],
            **training,
        },
        "logging": {"every": 1},
        "saving": {"keep_states": "last"},
    }
    return Recipe.model_validate(settings)


def changed(recipe: Recipe, section: str, **values: object) -> Recipe:
    part = getattr(recipe, section).model_copy(update=values)
    return recipe.model_copy(update={section: part})


def make_inputs(
    directory: Path,
    *,
    lengths: tuple[int, int] = (1, 14),
    recipe: Recipe | None = None,
    times: int = 1,
) -> Inputs:
    """Sentences whose target repeats the source, through the stages that prepare data.

    Training has ``times`` as many of them as ``PAIRS`` says.
    """
    recipe = recipe or make_recipe()
    generator = random.Random(1)
    codes = sorted({code for pair in PAIRS for code in pair.split("-")})
    texts: dict[Split, dict[str, dict[str, list[str]]]] = {"train": {}, "valid": {}}
    for pair, train_lines in PAIRS.items():
        counts: dict[Split, int] = {"train": times * train_lines, "valid": VALID_LINES[pair]}
        for split, count in counts.items():
            lines = [
                "".join(generator.choices("abcd", k=generator.randint(*lengths)))
                for _ in range(count)
            ]
            texts[split][pair] = dict.fromkeys(pair.split("-"), lines)
    corpus = make_corpus(directory / "corpus", texts)
    with writing(directory / "tokenizer", "tokenizer") as writer:
        description = bytes_of(codes)
        TokenizerFiles(description).write(writer.directory)
    with writing(directory / "groups", "groups") as writer:
        writer.write_json("groups.json", {"groups": {c: int(c == "ru") for c in codes}})
    kinds: tuple[Kind, ...] = ("tokenizer", "groups")
    tokenizer, groups = (open_artifact(directory / kind, kind=kind) for kind in kinds)
    given = {"corpus": corpus, "tokenizer": tokenizer}
    shards = run_stage("make_shards", directory / "shards", given, recipe)
    return Inputs(
        shards, run_stage("mix", directory / "mixture", {"shards": shards}, recipe), groups
    )


def pretrain(
    world: World,
    inputs: Inputs,
    out_dir: Path,
    recipe: Recipe,
    *,
    terminate_at: tuple[int, int] | None = None,
    overwrite: bool = False,
    ds_config: str = "cpu_fp32",
    profile: tuple[int, int] | None = None,
) -> str:
    """What ``pretrain`` does within a world that is open already; says how it ended.

    With ``terminate_at`` = (rank, n) that rank sends itself SIGTERM during its n-th call of the
    engine, updates and validation batches counted together.
    """
    connect(world)
    call = make_call(
        "pretrain", recipe, inputs.artifacts(), out_dir, overwrite=overwrite, ds_config=ds_config
    )
    call = replace(call, profile=profile)
    data = training_data(call)
    training = recipe.training
    parallel = expert_parallel_group(training.expert_parallel_size, world=world)
    model = build_model(
        model_spec(call, data.tokenizer),
        regularization=Regularization.of(training),
        expert_parallel=parallel,
    )
    initialize_weights(model, seed=training.seed)
    with ExitStack() as stack:
        if terminate_at is not None and terminate_at[0] == world.rank:
            terminate_at_call(stack, terminate_at[1])
        try:
            train(call, model, data, world=world)
        except Interrupted as stopped:
            return str(stopped)
    return "done"


def trainer(request: "pytest.FixtureRequest", inputs: Inputs) -> Train:
    """Return a function that trains at two ``ranks`` ``by`` pretrain, unless told otherwise."""

    def train(out_dir: Path, recipe: Recipe | None = None, *more: Any, **options: Any) -> list[Any]:
        pool: ProcessPool = request.getfixturevalue(f"pool{options.pop('ranks', 2)}")
        by = options.pop("by", pretrain)
        return pool.run(by, inputs, out_dir, recipe or make_recipe(), *more, **options)

    return train


@contextmanager
def scripted_validations(perplexities: Mapping[int, float]) -> Iterator[None]:
    """Let the validation after an update find what stands there for it."""
    keep = loop.TrainingRun._keep_if_best

    def keep_scripted(run: loop.TrainingRun, found: ValidationResult) -> None:
        keep(run, replace(found, perplexity=perplexities[run.position.update]))

    with mock.patch.object(loop.TrainingRun, "_keep_if_best", keep_scripted):
        yield


def sharing_passes(tmp_path: Path, per_pass: int) -> str:
    """A ds_config for CPUs whose passes have several micro-batches."""
    path = tmp_path / f"{per_pass}_per_pass.json"
    path.write_text(json.dumps({**load_ds_config("cpu_fp32"), "micro_batches_per_pass": per_pass}))
    return str(path)


def terminate_at_call(
    stack: ExitStack, number: int, *, names: tuple[str, ...] = ("train_step", "evaluate")
) -> None:
    """Within the stack, SIGTERM to this process during the n-th call of the engine's methods."""
    calls = 0

    def counting(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)

        return call

    for name in names:
        stack.enter_context(mock.patch.object(Engine, name, counting(getattr(Engine, name))))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records without what depends on the clock and on memory."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    timed = {
        *("seconds", "tokens_per_second", "source_tokens_per_second", "peak_memory_gib"),
        *("slowest_to_median", "slowest_rank", "slowest_node"),
    }
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint; every tensor of the model must be there exactly once."""
    saved = open_artifact(directory, kind="checkpoint")
    saved.check()
    tensors = [
        entry
        for file_name in saved.names("weights/")
        for entry in load_file(saved.file(file_name)).items()
    ]
    assert sorted(name for name, _ in tensors) == sorted(tensor_shapes(read_spec(saved)))
    return dict(tensors)


def read_state(out_dir: Path, update: int) -> dict[str, Tensor]:
    """All pieces of a training state, by key."""
    state = out_dir.parent / f"{out_dir.name}.run" / "states" / f"update-{update:07d}"
    return {
        key: value
        for path in sorted((state / "optimizer").iterdir())
        for key, value in load_file(path).items()
    }


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert expected
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_same_runs(found: Path, expected: Path, *, state: int = 0) -> None:
    """Compare weights and curves, and the training state after an update if one is named."""
    assert_same_tensors(read_weights(found), read_weights(expected))
    assert read_metrics(found / "metrics.jsonl") == read_metrics(expected / "metrics.jsonl")
    if state:
        assert_same_tensors(read_state(found, state), read_state(expected, state))
