"""Resuming without training: what a state restores, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from support.stage_runs import make_call
from support.tiny_training import make_recipe
from torch import nn

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.run_folders import PROGRESS_FILE, LossScale, Position
from pipeline.checkpoints.resharding import SHAPES_FILE, Fills, Piece, Target, write_pieces
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import LOOPBACK, World
from pipeline.errors import CheckpointError
from pipeline.training.engine import Engine
from pipeline.training.run_directory import RunDirectory
from pipeline.training.saving import Resuming

ALONE = World(0, 1, 0, 1, LOOPBACK, 0)
SCALE = LossScale(scale=512.0, steps=4, last_overflow=1, hysteresis=1)
SAVED = Position(update=4, cursor=(1, 2), validated=4, seconds=9.0, loss_scale=SCALE)


class NotedState:
    """An engine that notes what it is given to load."""

    def __init__(self) -> None:
        self.loaded: list[object] = []
        self.model = nn.Linear(3, 1, bias=False)
        self.model.expert_parallel_size = 1  # type: ignore[assignment]

    def load_optimizer_pieces(self, state: Fills, *, update: int) -> None:
        """Note the update and the values of the one tensor."""
        values = torch.zeros(3)
        state.fill([Target("master", "weight", 0, values)])
        self.loaded += [update, values.tolist()]

    def restore_loss_scale(self, saved: LossScale | None) -> None:
        """Note the loss scale."""
        self.loaded.append(saved)


def directory_of(recipe: Recipe, tmp_path: Path) -> RunDirectory:
    call = make_call("pretrain", recipe, {}, tmp_path / "model")
    return RunDirectory(call.out_dir, stage="pretrain", config=call.config, inputs={}, world=ALONE)


def save(
    recipe: Recipe,
    tmp_path: Path,
    position: Position = SAVED,
    *,
    weight: str = "weight 3",
    shape: tuple[int, ...] = (1, 3),
) -> RunDirectory:
    """Leave a state of the recipe's run, and return its directory."""
    directory = directory_of(recipe, tmp_path)

    def write(writer: ArtifactWriter) -> None:
        pieces = [Piece("master", "weight", 0, torch.arange(3.0))]
        name, size = weight.split()
        pieces += [Piece("master", name, 3, torch.zeros(int(size) - 3))]
        writer.settled |= write_pieces(writer.directory / "optimizer", iter(pieces), part=0)
        writer.write_json(PROGRESS_FILE, position.to_json())
        writer.write_json(SHAPES_FILE, {"weight": shape})

    directory.write(directory.state_dir(position.update), kind="training_state", write=write)
    return directory


def resuming_of(recipe: Recipe, tmp_path: Path, engine: NotedState) -> Resuming:
    directory = directory_of(recipe, tmp_path)
    engine_, call = cast(Engine, engine), make_call("pretrain", recipe, {}, tmp_path / "model")
    return Resuming(call, engine_, directory)


@pytest.mark.parametrize(
    ("weight", "shape", "told"),
    [
        ("weight 5", (1, 3), "5 values of master of weight, and the model 3"),
        ("bias 4", (1, 3), "4 values of master of bias, and the model 0"),
        ("weight 3", (3, 1), r"weight in the shape \(3, 1\), and the model \(1, 3\)"),
        ("weight 3", (3,), r"weight in the shape \(3,\), and the model \(1, 3\)"),
    ],
)
def test_a_state_of_another_model_is_refused(
    weight: str, shape: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    save(make_recipe(), tmp_path, weight=weight, shape=shape)
    engine = NotedState()
    with pytest.raises(CheckpointError, match=rf"update-\d+ has {told}\. If the code"):
        resuming_of(make_recipe(), tmp_path, engine).resume()
    assert not engine.loaded


def test_a_run_without_states_begins_and_loads_nothing(tmp_path: Path) -> None:
    engine = NotedState()
    resumed = resuming_of(make_recipe(), tmp_path, engine).resume()
    assert (resumed.position, resumed.replanned) == (Position(), [])
    assert not engine.loaded


def test_the_newest_state_restores_tensors_loss_scale_and_position(tmp_path: Path) -> None:
    engine = NotedState()
    save(make_recipe(), tmp_path, replace(SAVED, update=2))
    save(make_recipe(), tmp_path)
    resumed = resuming_of(make_recipe(), tmp_path, engine).resume()
    assert (resumed.position, resumed.replanned) == (SAVED, [])
    assert engine.loaded == [4, [0.0, 1.0, 2.0], SCALE]


@pytest.mark.parametrize("update", [2, 4])
def test_a_run_with_a_perplexity_that_is_no_number_can_be_resumed(
    update: int, tmp_path: Path
) -> None:
    """JSON has no NaN, and the state could not be read any more."""
    saved = replace(SAVED, best_update=update, best_perplexity=math.nan)
    save(make_recipe(), tmp_path, saved)
    position = resuming_of(make_recipe(), tmp_path, NotedState()).resume().position
    assert str(position) == str(saved)


def test_best_weights_that_were_kept_after_the_state_stay_the_best(tmp_path: Path) -> None:
    directory = save(make_recipe(), tmp_path)

    def write(writer: ArtifactWriter) -> None:
        writer.statistics.update(update=5, perplexity=2.5)

    directory.write(directory.best_dir, kind="checkpoint", write=write)
    position = resuming_of(make_recipe(), tmp_path, NotedState()).resume().position
    assert position == replace(SAVED, best_update=5, best_perplexity=2.5)


def test_a_changed_number_of_updates_is_noted(tmp_path: Path) -> None:
    save(make_recipe(updates=6), tmp_path)
    resumed = resuming_of(make_recipe(updates=8), tmp_path, NotedState()).resume()
    assert resumed.replanned == [{"after": 4, "from": 6, "to": 8}]


def test_a_run_that_lacks_a_state_of_its_mean_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(updates=6, checkpoint_every=2, average_last=3)
    save(recipe, tmp_path)
    with pytest.raises(CheckpointError, match=r"not there any more: 2; lower it to 2, "):
        resuming_of(recipe, tmp_path, NotedState()).resume()
