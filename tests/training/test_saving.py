"""Saving and publishing without training: what is due, who writes what, and what stays."""

import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.folder_listing import names_in
from support.stage_runs import make_call
from support.tiny_training import changed, make_recipe
from torch import Tensor, nn

from pipeline.artifacts.artifact import ArtifactWriter, open_artifact
from pipeline.artifacts.run_folders import Position, read_position
from pipeline.checkpoints.resharding import SHAPES_FILE, Piece
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import LOOPBACK, World
from pipeline.errors import ArtifactError
from pipeline.estimates.launches import LaunchCounter
from pipeline.model.moe.routing_statistics import RoutingCounter
from pipeline.model.parameters import NamedSlice
from pipeline.model.spec import make_spec
from pipeline.training.engine import Engine
from pipeline.training.run_directory import Quarantine, RunDirectory
from pipeline.training.saving import Publishing, Resumed, Saving, ValidationResult, judge
from pipeline.training.task import Task

SPEC = make_spec(
    model=make_recipe().model.model_copy(update={"moe": None}),
    vocabulary_size=100,
    pad_id=0,
    languages=("de", "en"),
)
ROUTING = RoutingCounter(SPEC).result()
EXPERTS = 4


@pytest.mark.parametrize("layers", [2, 6])
def test_the_host_waits_once_for_the_routes_of_a_validated_batch(layers: int) -> None:
    model = make_recipe().model
    sizes = {"encoder_layers": layers, "decoder_layers": layers}
    counter = RoutingCounter(SPEC.model_copy(update={"model": model.model_copy(update=sizes)}))
    shapes = {
        "probability_NE": (5, counter.num_experts),
        **dict.fromkeys(("routed_E", "kept_E"), (counter.num_experts,)),
    }
    record: Any = SimpleNamespace(
        **{name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    )
    with LaunchCounter() as mode:
        counter.add([record] * len(counter.sums), language=1)
    assert len(counter.sums) >= layers
    assert len(mode.counted.host_waits) == 1


def world_of(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, size, LOOPBACK, 0)


def describe(writer: ArtifactWriter, spec: object) -> None:
    """Write what a checkpoint has beside its weights: here, its languages."""
    assert spec is SPEC
    writer.write_json("model.json", {"languages": list(SPEC.languages)})


TASK = cast(
    Task,
    SimpleNamespace(
        makes="checkpoint", describe=describe, notes=("A note.",), trained_on=lambda: "two pairs"
    ),
)


class HeldTensors:
    """An engine that holds seven shared tensors and one rank's share of four experts."""

    def __init__(self, *, rank: int = 0, parallel_size: int = 1) -> None:
        self.model = cast(Any, nn.Linear(2, 3, bias=False))
        self.model.spec, self.model.expert_parallel_size = SPEC, parallel_size
        self.value = torch.arange(3.0)
        own = EXPERTS // parallel_size
        first = (rank % parallel_size) * own
        names: list[tuple[str, int | None]] = [(f"shared.{one}", None) for one in range(7)]
        names += [(f"experts.{one}", one) for one in range(first, first + own)]
        self._entries = [
            NamedSlice(name, cast(Any, None), cast(Any, None), self.value, 0, expert)
            for name, expert in names
        ]

    def published_weights(self) -> Iterator[tuple[NamedSlice, Tensor]]:
        """Yield all of them."""
        return ((entry, self.value) for entry in self._entries)

    def optimizer_pieces(self, *, copied: bool) -> Iterator[Piece]:
        """Yield one piece, as a copy or as it is."""
        yield Piece("master", "shared.0", 0, self.value.clone() if copied else self.value)


class NotedWrites:
    """A run directory that notes what it is given to write, and writes nothing."""

    def __init__(self, directory: Path) -> None:
        self.best_dir, self.mean_dir = directory / "best", directory / "mean"
        self.writes: list[Callable[[ArtifactWriter], None]] = []
        self.in_background: list[bool] = []

    def write(self, out_dir: Path, *, kind: str, write: Any, in_background: bool) -> None:
        """Note the function that writes."""
        assert (out_dir, kind) == (self.best_dir, "checkpoint")
        self.writes.append(write)
        self.in_background.append(in_background)


def saving(
    engine: HeldTensors, directory: object, recipe: Recipe | None = None, *, world: World
) -> Saving:
    return Saving(
        cast(Engine, engine),
        TASK,
        recipe or make_recipe(),
        cast(RunDirectory, directory),
        world=world,
    )


def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        tmp_path / "model", stage="pretrain", config={}, inputs={}, world=world_of()
    )


def validated(perplexity: float = 3.0) -> ValidationResult:
    return ValidationResult({}, "specific", perplexity, ROUTING)


@pytest.mark.parametrize("updates", [5, 9])
@pytest.mark.parametrize(
    ("keep_states", "average_last", "due"),
    [("none", 0, [2, 4]), ("last", 0, [2, 4, 5]), ("all", 0, [2, 4, 5]), ("none", 2, [2, 4, 5])],
)
def test_states_are_due_at_intervals_and_at_the_end_where_one_is_needed(
    tmp_path: Path, keep_states: str, average_last: int, due: list[int], updates: int
) -> None:
    """Also where patience ends a run of nine updates after the fifth."""
    recipe = make_recipe(updates=updates, checkpoint_every=2, average_last=average_last)
    recipe = changed(recipe, "saving", keep_states=keep_states)
    one = saving(HeldTensors(), NotedWrites(tmp_path), recipe, world=world_of())
    positions = map(Position, range(1, 6))
    assert [p.update for p in positions if one.is_state_due(p, is_done=p.update == 5)] == due


@pytest.mark.parametrize(("size", "parallel_size"), [(1, 1), (3, 1), (2, 2), (4, 2), (4, 4)])
def test_ranks_write_every_tensor_once(tmp_path: Path, size: int, parallel_size: int) -> None:
    from safetensors import safe_open

    written: list[str] = []
    for rank in range(size):
        noted = NotedWrites(tmp_path)
        engine = HeldTensors(rank=rank, parallel_size=parallel_size)
        saving(engine, noted, world=world_of(rank, size)).save_best(Position(), validated())
        (tmp_path / str(rank)).mkdir()
        noted.writes[0](ArtifactWriter(tmp_path / str(rank)))
        for path in (tmp_path / str(rank) / "weights").iterdir():
            with safe_open(path, framework="pt") as tensors:
                written += tensors.keys()
    expected = [f"shared.{one}" for one in range(7)] + [f"experts.{one}" for one in range(EXPERTS)]
    assert sorted(written) == sorted(expected)


def test_what_is_written_in_the_background_is_what_the_weights_were(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine, noted = HeldTensors(), NotedWrites(tmp_path)
    recipe = changed(make_recipe(), "saving", in_background=True)
    saving(engine, noted, recipe, world=world_of()).save_best(Position(), validated())
    engine.value += 1.0
    noted.writes[0](ArtifactWriter(tmp_path))
    [path] = (tmp_path / "weights").iterdir()
    assert noted.in_background == [True]
    assert load_file(path)["shared.0"].tolist() == [0.0, 1.0, 2.0]


def test_a_state_holds_the_position_and_older_states_go(tmp_path: Path) -> None:
    directory = run_directory(tmp_path)
    one = saving(HeldTensors(), directory, make_recipe(keep_last=1), world=world_of())
    change = {"after": 2, "from": 6, "to": 8}
    for update in (2, 4):
        one.save_state(Position(update=update, seconds=1.5), replanned=[change], is_done=False)
    assert directory.state_names() == ["update-0000004"]
    state = open_artifact(directory.state_dir(4), kind="training_state")
    assert read_position(state) == Position(update=4, seconds=1.5)
    assert state.statistics == {"update": 4, "replanned": [change]}
    assert state.read_json(SHAPES_FILE) == {"weight": [3, 2]}
    for changes, noted in (([], {}), ([change], {"replanned": [change]})):
        at = Position(best_update=4, best_perplexity=3.0)
        one.save_best(at, validated(), replanned=changes)
        best = open_artifact(directory.best_dir, kind="checkpoint")
        assert best.statistics == {"update": 4, "perplexity": 3.0, **noted}


def publish(
    tmp_path: Path,
    position: Position,
    *,
    recipe: Recipe,
    averaged: list[int] | None = None,
    resumed: Resumed | None = None,
    damage: Callable[[Path], object] = Path.exists,
    saved_after: tuple[int, ...] = (2,),
) -> RunDirectory:
    """Publish a run of one rank that kept the weights of update 2, or took a mean."""
    directory = run_directory(tmp_path)
    one = saving(HeldTensors(), directory, recipe, world=world_of())
    with directory.locked():
        for update in saved_after:
            one.save_state(Position(update=update), replanned=[], is_done=False)
        one.save_best(Position(best_update=2, best_perplexity=3.0), validated())
        if averaged:
            one.save_mean(averaged, validated(2.5))
        directory.metrics_path.write_text('{"update": 2}\n')
        damage(directory.best_dir)
        Publishing(
            make_call("pretrain", recipe, {}, tmp_path / "model"),
            TASK,
            directory,
            Quarantine(directory.quarantine_path, world=world_of()),
            world=world_of(),
            ds_config={"merged": True},
        ).publish(position, resumed or Resumed(Position(), []), averaged=averaged or [])
    return directory


ENDED = Position(update=6, best_update=2, best_perplexity=3.0, validations_since_best=2)


def test_the_artifact_holds_the_best_weights_and_the_metrics_and_says_which(
    tmp_path: Path,
) -> None:
    change = {"after": 2, "from": 4, "to": 8}
    recipe = make_recipe(updates=8, patience=2)
    resumed = Resumed(Position(update=2, seconds=1000.0), [change])
    publish(tmp_path, ENDED, recipe=recipe, resumed=resumed)
    made = open_artifact(tmp_path / "model", kind="checkpoint")
    assert {"metrics.jsonl", "model.json"} <= set(made.names())
    assert made.statistics == {
        "update": 2,
        "perplexity": 3.0,
        "updates": 6,
        "deepspeed": {"merged": True},
        "replanned": [change],
    }
    assert list(made.manifest.summary) == [
        "6 updates on two pairs, 0 s of training",
        "kept the weights of update 2, whose validation perplexity, 3.000, is the lowest",
        "ended 2 updates early: 2 validations in a row found none lower",
        "the number of updates was changed on the way: 4 → 8 after update 2",
        "A note.",
    ]
    assert made.manifest.run.wall_seconds >= 1000.0


@pytest.mark.parametrize("averaged", [[], [4, 6]])
def test_a_run_without_its_metrics_is_published(averaged: list[int], tmp_path: Path) -> None:
    """A refusal of a damaged line says that the file may go, even after the last update."""
    publish(
        tmp_path,
        ENDED,
        recipe=make_recipe(average_last=len(averaged)),
        averaged=averaged,
        damage=lambda best: best.with_name("metrics.jsonl").unlink(),
    )
    made = open_artifact(tmp_path / "model", kind="checkpoint")
    assert made.file("metrics.jsonl").read_bytes() == b""
    assert made.statistics["updates"] == 6


@pytest.mark.parametrize("tier", ["all", "low"])
def test_weights_of_which_no_perplexity_is_a_number_are_not_called_the_best(
    tier: str, tmp_path: Path
) -> None:
    recipe = make_recipe(updates=8, best_by=tier)
    publish(tmp_path, replace(ENDED, best_perplexity=math.nan), recipe=recipe)
    summary = open_artifact(tmp_path / "model", kind="checkpoint").manifest.summary
    of_tier = "" if tier == "all" else " on low-resource pairs"
    assert summary[1] == (
        "kept the weights of update 2, the first validated: no validation perplexity"
        f"{of_tier} is a number. Look at metrics.jsonl"
    )


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda best: (best / "manifest.json").unlink(),
        lambda best: (best / "manifest.json").write_text("{}"),
        lambda best: (best / "model.json").write_text("{}"),
    ],
    ids=["gone", "without manifest", "broken manifest", "damaged"],
)
def test_lost_weights_are_refused_with_the_folder_to_move_for_a_new_run(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    fix = re.escape(f"or move the folder {tmp_path / 'model.run'} away and run its stage again.")
    with pytest.raises(ArtifactError, match=f"/best.*{fix}"):
        publish(tmp_path, ENDED, recipe=make_recipe(), damage=damage)


def test_the_artifact_of_a_mean_names_its_states(tmp_path: Path) -> None:
    recipe = make_recipe(average_last=3)
    publish(tmp_path, ENDED, recipe=recipe, averaged=[4, 6])
    made = open_artifact(tmp_path / "model", kind="checkpoint")
    assert made.statistics["averaged_updates"] == [4, 6]
    assert made.manifest.summary[1] == (
        "took the mean of the weights after updates 4, 6; 3 were asked for: its validation "
        "perplexity is 2.500, the lowest of one update's weights 3.000"
    )


@pytest.mark.parametrize(
    ("keep_states", "averaged", "left"),
    [
        ("none", [], None),
        ("none", [2], None),
        ("last", [], {"best", "states"}),
        ("last", [2], {"best", "states"}),
        ("all", [2], {"best", "states"}),
    ],
)
def test_a_published_run_leaves_what_the_recipe_keeps(
    tmp_path: Path, keep_states: str, averaged: list[int], left: set[str] | None
) -> None:
    recipe = changed(make_recipe(), "saving", keep_states=keep_states)
    directory = publish(tmp_path, ENDED, recipe=recipe, averaged=averaged).directory
    assert directory.exists() == (left is not None)
    if left is not None:
        folders = {name for name in names_in(directory) if (directory / name).is_dir()}
        assert folders == left


@pytest.mark.parametrize(
    ("keep_last", "averaged", "left"), [(1, [], [8]), (2, [], [6, 8]), (1, [4, 8], [4, 8])]
)
@pytest.mark.parametrize("in_background", [False, True])
def test_as_many_states_are_left_however_they_were_written(
    tmp_path: Path, keep_last: int, averaged: list[int], left: list[int], in_background: bool
) -> None:
    recipe = make_recipe(keep_last=keep_last, checkpoint_every=4, average_last=len(averaged))
    recipe = changed(recipe, "saving", keep_states="all", in_background=in_background)
    after = (2, 4, 6, 8)
    directory = publish(tmp_path, ENDED, recipe=recipe, averaged=averaged, saved_after=after)
    assert directory.state_names() == [directory.state_dir(update).name for update in left]


@pytest.mark.parametrize(
    ("found", "best_update"), [((math.nan, 5.0, 6.0), 2), ((math.nan, math.nan), 1), ((5.0,), 1)]
)
def test_a_perplexity_that_is_no_number_is_beaten_by_any_number(
    found: tuple[float, ...], best_update: int
) -> None:
    position = Position()
    for update, perplexity in enumerate(found, start=1):
        position, _ = judge(replace(position, update=update), perplexity)
    assert position.best_update == best_update
    assert position.validations_since_best == len(found) - best_update
