"""Weights and training states survive every change of topology, and damage is named."""

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from support.corpora import writing
from support.passes import passes_of
from support.process_pool import ProcessPool
from support.stored_checkpoints import Weights, flip, make_checkpoint
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.artifacts import artifact as artifacts
from pipeline.artifacts import manifest as manifests
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.manifest import FileRecord
from pipeline.artifacts.run_folders import Position
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints import weights
from pipeline.checkpoints.checkpoint import load_model, load_weights, read_spec, read_tokenizer
from pipeline.checkpoints.inspection import inspect
from pipeline.checkpoints.resharding import CheckedState, Piece, PieceReader, Target, write_pieces
from pipeline.checkpoints.weights import TensorFiles, read_tensor, write_weights
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.model import building
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.parameters import initialize_weights, named_slices
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.engine import Engine, connect, expert_parallel_group
from pipeline.training.optim import make_optimizer
from pipeline.training.run_directory import RunDirectory
from pipeline.training.settings import OptimizerConfig

MICRO_BATCHES = 4
SPEC = tiny_spec(moe=MoEConfig(num_experts=4, every=2), groups=2)
OPTIMIZER = OptimizerConfig(clip_norm=0.5)

State = dict[str, dict[str, Tensor]]
"""What (master weight or moment) → tensor → flattened values."""


# ---------------------------------------------------------------- training states


def train_steps(engine: Engine, world: World, updates: range) -> None:
    for update in updates:
        batches = [
            random_batch(SPEC, sentences=1 + index, seed=10 * update + index)
            for index in range(MICRO_BATCHES)
        ]
        mine = range(world.rank, MICRO_BATCHES, world.size)
        engine.train_step(
            passes_of([batches[index] for index in mine], seeds=list(mine)),
            total_labels=sum(batch.num_labels for batch in batches),
            learning_rate=1e-3 * (1 + update),
        )


def train_and_save(
    world: World,
    directory: Path,
    *,
    parallel_size: int = 1,
    zero_stage: int = 1,
    resume: str = "",
    updates: range = range(0),
    save_as: str = "",
) -> dict[str, Tensor]:
    """Resume from a state or begin, train, save a state; returns this rank's weights."""
    connect(world)
    parallel = expert_parallel_group(parallel_size, world=world)
    model = build_model(SPEC, expert_parallel=parallel)
    initialize_weights(model, seed=3 if resume else 1)
    batches = BatchesConfig(micro_batches=MICRO_BATCHES)
    recipe = Recipe(name="test", model=SPEC.model, optimizer=OPTIMIZER, batches=batches)
    engine = Engine(
        model,
        recipe,
        world=world,
        ds_config={"zero_optimization": {"stage": zero_stage, "overlap_comm": False}},
        make_optimizer=lambda groups: make_optimizer(groups, OPTIMIZER),
    )
    run_directory = RunDirectory(
        directory / "model", stage="pretrain", config={}, inputs={}, world=world
    )
    if resume:
        state = open_artifact(run_directory.states_dir / resume, kind="training_state")
        engine.load_optimizer_pieces(CheckedState(state), update=updates.start)
    train_steps(engine, world, updates)
    if save_as:
        run_directory.write(
            run_directory.states_dir / save_as,
            kind="training_state",
            write=lambda writer: _write(writer.directory / "optimizer", engine, world),
        )
    return {entry.name: entry.value.clone() for entry in named_slices(model)}


def _write(directory: Path, engine: Engine, world: World) -> None:
    write_pieces(directory, engine.optimizer_pieces(), part=world.rank)


def state_path(directory: Path, name: str) -> Path:
    return directory / "model.run" / "states" / name


def assembled(directory: Path, name: str) -> State:
    """A state put together from its files by hand; every value must be there exactly once."""
    pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    for path in sorted(state_path(directory, name).glob("optimizer/*")):
        for key, values in load_file(path).items():
            what, tensor, start = key.rsplit(":", 2)
            pieces.setdefault((what, tensor), []).append((int(start), values))
    state: State = {}
    for (what, tensor), found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        ordered = [values for _, values in found]
        lengths = accumulate((len(values) for values in ordered[:-1]), initial=0)
        assert [start for start, _ in found] == list(lengths), (what, tensor)
        state.setdefault(what, {})[tensor] = torch.cat(ordered)
    return state


def assert_same_state(found: State, expected: State) -> None:
    assert set(found) == set(expected) == {"master", "exp_avg", "exp_avg_sq"}
    for what, tensors in expected.items():
        assert set(found[what]) == set(tensors)
        for name, values in tensors.items():
            assert torch.equal(found[what][name], values), (what, name)


def weights_of_all(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for result in results for name, value in result.items()}


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_state_goes_from_two_ranks_to_one_and_back_without_a_changed_bit(
    pool1: ProcessPool, pool2: ProcessPool, tmp_path: Path, zero_stage: int
) -> None:
    on_two: Any = partial(pool2.run, train_and_save, tmp_path, parallel_size=2)
    on_two(zero_stage=zero_stage, updates=range(2), save_as="two")
    [alone] = pool1.run(train_and_save, tmp_path, resume="two", updates=range(2, 2), save_as="one")
    again = on_two(resume="one", updates=range(2, 2), save_as="two-again")
    paths = [path for path in state_path(tmp_path, "two").rglob("*") if path.is_file()]
    assert [path.suffix for path in sorted(paths)] == [".json", ".safetensors", ".safetensors"]
    state = assembled(tmp_path, "two")
    assert {values.dtype for what in state.values() for values in what.values()} == {torch.float32}
    assert set(state["master"]) == {entry.name for entry in named_slices(tiny_model(SPEC))}
    assert all(values.count_nonzero() > 0 for values in state["exp_avg_sq"].values())
    assert_same_state(assembled(tmp_path, "one"), state)
    assert_same_state(assembled(tmp_path, "two-again"), state)
    masters = {name: values.view_as(alone[name]) for name, values in state["master"].items()}
    assert_same_weights(alone, masters)
    assert_same_weights(weights_of_all(again), masters)


@pytest.mark.slow
def test_a_state_goes_on_bit_for_bit_on_the_same_ranks_and_to_the_same_weights_on_others(
    request: pytest.FixtureRequest, pool2: ProcessPool, tmp_path: Path
) -> None:
    on_two: Any = partial(pool2.run, train_and_save, tmp_path, parallel_size=2)
    straight = on_two(updates=range(4), save_as="straight")
    on_two(updates=range(2), save_as="half")
    on: dict[str, Any] = {"resume": "half", "updates": range(2, 4)}
    resumed = on_two(save_as="resumed", **on)
    assert_same_weights(weights_of_all(resumed), weights_of_all(straight))
    assert_same_state(assembled(tmp_path, "resumed"), assembled(tmp_path, "straight"))
    for size, parallel_size in ((1, 1), (2, 1), (4, 2), (4, 4)):
        pool: ProcessPool = request.getfixturevalue(f"pool{size}")
        resumed = pool.run(
            train_and_save, tmp_path, parallel_size=parallel_size, zero_stage=2, **on
        )
        for name, value in weights_of_all(resumed).items():
            if name.endswith("attention.key.bias"):
                continue  # its gradient is zero but for rounding, which Adam makes updates of
            expected = weights_of_all(straight)[name]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def make_state(directory: Path, pieces: list[Piece], *, parts: int = 1) -> Artifact:
    with writing(directory, "training_state", "pretrain") as writer:
        for part in range(parts):
            write_pieces(writer.directory / "optimizer", iter(pieces[part::parts]), part=part)
    return open_artifact(directory, kind="training_state")


def test_a_range_is_read_from_whatever_pieces_cover_it(tmp_path: Path) -> None:
    values = torch.arange(20.0)
    cuts = [0, 3, 4, 11, 20]
    pieces = [Piece("master", "a.b", start, values[start:stop]) for start, stop in pairwise(cuts)]
    reader = PieceReader(make_state(tmp_path / "state", pieces[::-1], parts=3))
    for start in range(20):
        for stop in range(start + 1, 21):
            found = reader.read(what="master", tensor="a.b", start=start, length=stop - start)
            assert torch.equal(found, values[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_are_filled(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {what: torch.randn(500) for what in ("master", "exp_avg")}
    cuts = [0, 3, 4, 311, 500]
    pieces = [
        Piece(what, "a.b", start, value[start:stop])
        for what, value in values.items()
        for start, stop in pairwise(cuts)
    ]
    state = make_state(tmp_path / "state", pieces[::-1], parts=3)
    targets = [
        Target(what, "a.b", start, torch.zeros(stop - start, dtype=dtype))
        for what in values
        for start, stop in [(0, 500), (0, 1), (2, 5), (40, 350), (499, 500), (7, 7)]
    ]
    CheckedState(state).fill(targets)
    for target in targets:
        expected = values[target.what][target.start : target.start + len(target.values)]
        assert torch.equal(target.values, expected.to(dtype))


def test_a_damaged_value_is_named_by_file_when_targets_are_filled(tmp_path: Path) -> None:
    pieces = [Piece("master", name, 0, torch.ones(100)) for name in ("a", "b")]
    state = make_state(tmp_path / "state", pieces, parts=2)
    path = state.directory / "optimizer/part-00001-000.safetensors"
    for position in (5, path.stat().st_size - 1):
        flip(path, position)
        # also if nobody wants a value of that file
        for name in ("a", "b"):
            with pytest.raises(ArtifactError, match=rf"{path} is damaged"):
                CheckedState(state).fill([Target("master", name, 0, torch.zeros(100))])
        flip(path, position)
    CheckedState(state).fill([Target("master", "b", 0, torch.zeros(100))])


def test_targets_that_a_state_cannot_fill_are_refused(tmp_path: Path) -> None:
    pieces = [
        Piece("exp_avg", "a", 0, torch.ones(3)),
        Piece("exp_avg", "a", 5, torch.ones(2)),
        Piece("master", "a", 0, torch.tensor([1.0, math.inf])),
    ]
    state = make_state(tmp_path / "state", pieces)
    for target, words in (
        (
            Target("exp_avg", "a", 0, torch.zeros(7)),
            r"has 5 of 7 values .* a\. If the code of the model has changed, .* Restore it",
        ),
        (
            Target("exp_avg", "b", 0, torch.zeros(1)),
            r"has 0 of 1 values .* code of the model",
        ),
        (Target("master", "a", 0, torch.zeros(2)), "master:a:0 has values that are not finite"),
    ):
        with pytest.raises(CheckpointError, match=words):
            CheckedState(state).fill([target])


def test_progress_survives_json() -> None:
    later = Position(update=7, cursor=(2, 3), validated=6, best_perplexity=12.25, best_update=6)
    for progress in (Position(), later):
        document = json.loads(json.dumps(progress.to_json()))
        assert TypeAdapter(Position).validate_python(document) == progress


# ---------------------------------------------------------------- weights


def saved_checkpoint(
    directory: Path, model: Transformer, *, leave_out: str = "", add: str = ""
) -> Artifact:

    def change(weights: Weights) -> Weights:
        added = {add: torch.ones(2)} if add else {}
        return {name: value for name, value in weights.items() if name != leave_out} | added

    return open_artifact(make_checkpoint(directory, model, change=change), kind="checkpoint")


def test_a_checkpoint_alone_gives_back_model_shape_and_tokenizer(tmp_path: Path) -> None:
    model = tiny_model(SPEC)
    saved = saved_checkpoint(tmp_path / "checkpoint", model)
    assert read_spec(saved) == SPEC
    tokenizer = load_tokenizer(tmp_path / "tokenizer of checkpoint")
    assert read_tokenizer(saved).fingerprint == tokenizer.fingerprint
    loaded = load_model(saved)
    batch = random_batch(SPEC, sentences=3, seed=1)
    assert torch.equal(loaded.eval()(batch).logits_LV, model.eval()(batch).logits_LV)
    for entry in named_slices(model):
        assert torch.equal(read_tensor(saved, entry.name), entry.value)


def sums_and_reads(world: World, directory: Path) -> tuple[dict[str, float], list[str]]:
    connect(world)
    saved = open_artifact(directory, kind="checkpoint")
    parallel = expert_parallel_group(world.size, world=world)
    original = TensorFiles.read_as_stored
    with mock.patch.object(
        TensorFiles, "read_as_stored", autospec=True, side_effect=original
    ) as reading:
        model = load_model(saved, expert_parallel=parallel)
    sums = {entry.name: entry.value.sum().item() for entry in named_slices(model)}
    return sums, [call.args[1] for call in reading.call_args_list]


def test_every_rank_reads_only_its_own_experts(pool2: ProcessPool, tmp_path: Path) -> None:
    model = tiny_model(SPEC)
    saved_checkpoint(tmp_path / "checkpoint", model)
    expected = {entry.name: entry.value.sum().item() for entry in named_slices(model)}
    (first, reads), (second, other_reads) = pool2.run(sums_and_reads, tmp_path / "checkpoint")
    assert first | second == expected
    shared = {name for name in expected if ".experts." not in name}
    assert set(first) & set(second) == shared
    assert (sorted(reads), sorted(other_reads)) == (sorted(first), sorted(second))


def test_a_model_loaded_in_bfloat16_is_rounded_and_allocated_once(tmp_path: Path) -> None:
    saved = saved_checkpoint(tmp_path / "checkpoint", tiny_model(SPEC))
    original, allocated = building.allocate, list[torch.dtype]()

    def allocate(model: nn.Module, device: torch.device) -> None:
        allocated.extend(parameter.dtype for parameter in model.parameters())
        original(model, device)

    with mock.patch.object(building, "allocate", allocate):
        loaded = load_model(saved, dtype=torch.bfloat16)
    assert set(allocated) == {torch.bfloat16}
    expected = load_model(saved).to(torch.bfloat16)
    for found, wanted in (
        (loaded.parameters(), expected.parameters()),
        (loaded.buffers(), expected.buffers()),
    ):
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_files_keep_size_and_order_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 4 * 100)
    sizes = [60, 40, 1, 99, 250, 50, 50]
    tensors = [(f"t{index}", torch.full((size,), 1.0)) for index, size in enumerate(sizes)]
    names = [path.name for path in write_weights(tmp_path / "weights", tensors, part=3)]
    assert names == [f"part-00003-{index:03d}.safetensors" for index in range(4)]
    found = [sorted(load_file(tmp_path / "weights" / name)) for name in names]
    assert found == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t5", "t6"]]


def test_a_missing_tensor_and_one_of_another_shape_are_errors_that_name_it(tmp_path: Path) -> None:
    lost = "decoder.layers.1.feed_forward.experts.2.down.weight"
    saved = saved_checkpoint(tmp_path / "lost", tiny_model(SPEC), leave_out=lost)
    with pytest.raises(CheckpointError, match=r"has no tensor 'decoder.layers.1.*experts.2.down"):
        load_model(saved)
    whole = saved_checkpoint(tmp_path / "whole", tiny_model(SPEC))
    wider = build_model(SPEC.model_copy(update={"vocabulary_size": 41}))
    words = r"embedding.weight has shape \(40, 16\), but the model needs \(41, 16\)"
    with pytest.raises(CheckpointError, match=words):
        load_weights(wider, whole)


@pytest.mark.parametrize("name", ["front.scale", "decoder.layers.1.feed_forward.experts.4.up.bias"])
def test_a_tensor_beyond_the_model_is_refused_before_the_model_is_built(
    name: str, tmp_path: Path
) -> None:
    saved = saved_checkpoint(tmp_path / "saved", tiny_model(SPEC), add=name)
    told = rf"saved holds tensors beyond the model \(1\): {name}\. Name"
    with (
        mock.patch("pipeline.checkpoints.checkpoint.build_model", side_effect=AssertionError),
        pytest.raises(CheckpointError, match=told),
    ):
        load_model(saved)
    assert any(one["name"] == name for one in inspect(saved.directory, tensors=True)["tensors"])
    parallel = ExpertParallel(group=mock.Mock(), rank=1, size=2)  # with half of the experts
    load_model(saved_checkpoint(tmp_path / "whole", tiny_model(SPEC)), expert_parallel=parallel)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "length of the header": lambda path: flip(path, 0),
    "header": lambda path: flip(path, 20),
    "name in the header": lambda path: flip(path, path.read_bytes().index(b"a:0")),
    "value": lambda path: flip(path, path.stat().st_size - 1),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_whatever_part_is_damaged(tmp_path: Path, kind: str) -> None:
    pieces = [Piece("master", "a", 0, torch.ones(100))]
    state = make_state(tmp_path / "state", pieces)
    DAMAGE[kind](state.file("optimizer/part-00000-000.safetensors"))
    with pytest.raises(ArtifactError, match=r"optimizer/part-00000-000.safetensors"):
        PieceReader(state).read(what="master", tensor="a", start=0, length=100)
    with pytest.raises(ArtifactError, match=r"optimizer/part-00000-000.safetensors"):
        CheckedState(state).fill([Target("master", "a", 0, torch.zeros(100))])


@pytest.mark.parametrize("damaged", [b"decoder.final_norm.bias", b"embedding.weight"])
def test_a_damaged_name_of_a_tensor_is_not_taken_for_a_tensor_of_another_model(
    damaged: bytes, tmp_path: Path
) -> None:
    saved = saved_checkpoint(tmp_path / "saved", tiny_model(SPEC))
    paths = [saved.directory / name for name in saved.names("weights/")]
    path = next(path for path in paths if damaged in path.read_bytes())
    flip(path, path.read_bytes().index(damaged))
    with pytest.raises(ArtifactError, match=rf"{path.name} is damaged: its digest differs"):
        load_model(saved)


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = saved_checkpoint(tmp_path / "checkpoint", tiny_model(SPEC))
    for name in saved.names("weights/"):
        os.utime(saved.directory / name, (0, 0))
    hashed: list[str] = []

    def hash_files(files: Sequence[tuple[Path, FileRecord]]) -> list[bool]:
        hashed.extend(path.name for path, _ in files)
        return manifests.are_intact(files)

    monkeypatch.setattr(artifacts, "are_intact", hash_files)
    for _ in range(2):
        files = TensorFiles(saved, "weights/")
        for name in files.names():
            files.read(name)
    assert hashed == ["part-00000-000.safetensors", "part-00001-000.safetensors"]


def test_names_of_experts_are_global_whatever_rank_holds_them() -> None:
    spec: ModelSpec = tiny_spec(moe=MoEConfig(num_experts=3, every=2))
    names = [entry.name for entry in named_slices(tiny_model(spec))]
    assert len(names) == len(set(names))
    experts = [name for name in names if ".experts." in name and name.endswith("up.bias")]
    assert experts == [
        f"{side}.layers.1.feed_forward.experts.{index}.up.bias"
        for side in ("encoder", "decoder")
        for index in range(3)
    ]
