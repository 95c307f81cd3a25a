"""Micro-batches whose gradients are not finite: found, recorded, and left out for good."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.fp16_on_cpu import fp16_on_cpu
from support.process_pool import ProcessPool, RankFailed
from support.stage_runs import make_call
from support.tiny_training import (
    UPDATES,
    Inputs,
    Train,
    assert_same_runs,
    assert_same_tensors,
    changed,
    make_recipe,
    pretrain,
    read_metrics,
    read_weights,
    sharing_passes,
    trainer,
)
from torch import Tensor, nn

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.manifest import run_dir
from pipeline.batching.batch import Batch
from pipeline.batching.feed import TrainingData
from pipeline.batching.global_step import GlobalStep, MicroBatch
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World
from pipeline.errors import CheckpointError
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, named_slices
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.seeds import derive_seed
from pipeline.stages.pretrain import model_spec, training_data
from pipeline.terminal import counted
from pipeline.training import engine as engine_module
from pipeline.training import loop, run_directory
from pipeline.training.engine import Engine, Verdict
from pipeline.training.loop import Updater, culprits
from pipeline.training.losses import LossTerms, training_loss
from pipeline.training.optim import learning_rate, make_optimizer
from pipeline.training.run_directory import LeftOut, Quarantine, left_out
from pipeline.training.settings import LossConfig

pytestmark = pytest.mark.slow

Sentence = tuple[int, int]
"""Numbers of a pair and of a line."""
ALONE = World(0, 1, 0, 1, "127.0.0.1", 1)


# ---------------------------------------------------------------- who did it


KINDS = {"fine": (True, True), "bad": (False, False), "experts": (True, False)}
"""Whether the own gradient and the experts' are finite."""


def verdicts_of(rank: str) -> list[Verdict]:
    """Return the verdicts of a rank's turns, such as "3 fine, none bad"."""
    turns = [turn.split() for turn in rank.split(", ")]
    return [Verdict(None if n == "none" else int(n), *KINDS[kind]) for n, kind in turns]


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ("3 fine, 0 bad | 2 fine, 1 experts", {0}),
        ("0 experts | 1 experts | 2 fine | 3 fine", {0, 1}),  # the ranks that share experts
        ("0 bad, 2 experts | 1 experts, none bad", {0}),  # a stand-in clears its turn
    ],
)
def test_the_micro_batch_is_named_whose_gradient_is_not_finite(ranks: str, named: set[int]) -> None:
    assert culprits([*map(verdicts_of, ranks.split(" | "))], sharing=2) == named


def test_lines_are_told_by_direction_and_counted_from_one() -> None:
    plan = MicroBatch(
        pair_B=np.array([0, 1, 0, 0]),
        reverse_B=np.array([0, 1, 0, 1]),
        line_B=np.array([8, 0, 2, 4]),
        num_labels=30,
        num_tokens=60,
    )
    entry = left_out(plan, update=7, micro_batch=3, pairs=["de-en", "en-ru"])
    assert entry.lines == {"de-en": [3, 9], "en-de": [5], "ru-en": [1]}
    assert entry.described == "micro-batch 3 (de-en lines 3, 9; en-de line 5; ru-en line 1)"


# ---------------------------------------------------------------- the record


def entry(update: int, micro_batch: int = 0) -> LeftOut:
    return LeftOut(update=update, micro_batch=micro_batch, labels=5, lines={"de-en": [1, 2]})


def test_what_was_recorded_is_read_again_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    Quarantine(path, world=ALONE).add([entry(4), entry(4, 2)])
    with path.open("a") as stream:
        stream.write('{"update": 5, "micro')
    again = Quarantine(path, world=ALONE)
    again.read()
    again.add([entry(6, 1)])
    last = Quarantine(path, world=ALONE)
    last.read()
    assert last.entries == [entry(4), entry(4, 2), entry(6, 1)]
    assert last.of_update(4) == {0, 2}
    assert last.of_update(5) == frozenset()


@pytest.mark.parametrize(
    ("numbers", "ends"), [(range(3, 12), True), (range(4, 12), False), ([*range(2, 11)], False)]
)
def test_the_tenth_update_in_a_row_with_something_left_out_would_end_training(
    tmp_path: Path, numbers: Sequence[int], ends: bool
) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.jsonl", world=ALONE)
    quarantine.add([*map(entry, numbers)])
    assert quarantine.would_end_training(12) == ends


def test_a_line_that_names_no_micro_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"update": 5, "micro_batch": -1, "labels": 3, "lines": {}}\n')
    with pytest.raises(CheckpointError, match=rf"{path} has a line that names no micro-batch"):
        Quarantine(path, world=ALONE).read()


# ---------------------------------------------------------------- poison


def has_sentence(batch: Batch, sentence: Sentence) -> Tensor:
    """Which rows of a batch are the sentence, in either direction."""
    pair, line = sentence
    return (batch.pair_B == pair) & (batch.line_B == line)


@contextmanager
def poisoned(sentence: Sentence, *, times: int = 10**9) -> Iterator[None]:
    """Source states of a sentence are no numbers whenever it is trained on, ``times`` at most.

    They go through attention, routers and experts, also those of other ranks.
    """
    left = times

    def loss(model: Transformer, batch: Batch, config: LossConfig, *, progress: float) -> LossTerms:
        nonlocal left
        bad_B = has_sentence(batch, sentence)
        if not (model.training and torch.is_grad_enabled() and bool(bad_B.any()) and left):
            return training_loss(model, batch, config, progress=progress)
        left -= 1
        bad_N = bad_B[batch.source.sentence_N]

        def spoil(_module: nn.Module, _args: Any, embedded_ND: Tensor) -> Tensor:
            good_ND = embedded_ND.clone()
            good_ND[: len(bad_N)][bad_N] = torch.nan
            return good_ND

        with model.embedding.register_forward_hook(spoil):
            return training_loss(model, batch, config, progress=progress)

    with mock.patch.object(engine_module, "training_loss", loss):
        yield


def pretrain_poisoned(
    world: World,
    /,
    inputs: Inputs,
    out_dir: Path,
    recipe: Recipe,
    sentence: Sentence,
    *,
    times: int = 10**9,
    in_fp16: bool = False,
    dies_on_record: bool = False,
    most_in_a_row: int = 10,
    **options: Any,
) -> str:
    with ExitStack() as stack:
        for module in (loop, run_directory):
            stack.enter_context(mock.patch.object(module, "MOST_IN_A_ROW", most_in_a_row))
        # the rehearsal of the largest batch, at the start, takes none of the ``times``
        stack.enter_context(mock.patch.object(Engine, "rehearse"))
        stack.enter_context(poisoned(sentence, times=times))
        if in_fp16:
            stack.enter_context(fp16_on_cpu())
        if dies_on_record:
            stack.enter_context(mock.patch.object(Quarantine, "add", _add_and_die))
        return pretrain(world, inputs, out_dir, recipe, **options)


_ADD = Quarantine.add


def _add_and_die(self: Quarantine, entries: list[LeftOut]) -> None:
    _ADD(self, entries)
    raise MemoryError("killed between record and update")


# ---------------------------------------------------------------- runs


def skipping_recipe(**training: Any) -> Recipe:
    settings = {"skip_nonfinite_after": 2, "checkpoint_every": 1, "validate_every": UPDATES}
    return make_recipe(**{**settings, **training})


def data_of(inputs: Inputs, recipe: Recipe, tmp_path: Path) -> TrainingData:
    return training_data(make_call("pretrain", recipe, inputs.artifacts(), tmp_path / "unused"))


def planned(data: TrainingData) -> list[GlobalStep]:
    return list(islice(data.planner.steps((0, 0)), UPDATES))


def where(steps: list[GlobalStep], sentence: Sentence) -> list[tuple[int, int]]:
    """(update, micro-batch) of every time a sentence is trained on."""
    pair, line = sentence
    return [
        (update, index)
        for update, step in enumerate(steps, start=1)
        for index, plan in enumerate(step.micro_batches)
        if bool(((plan.pair_B == pair) & (plan.line_B == line)).any())
    ]


@pytest.fixture(scope="module")
def sentence(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Sentence:
    """One that is trained on in the third update, and in no earlier one."""
    steps = planned(data_of(inputs, skipping_recipe(), tmp_path_factory.mktemp("plan")))
    for plan in steps[2].micro_batches:
        for pair, line in zip(plan.pair_B.tolist(), plan.line_B.tolist(), strict=True):
            if where(steps, (pair, line))[0][0] == 3:
                return pair, line
    raise AssertionError("no sentence comes first in the third update")


def recorded(directory: Path) -> list[tuple[int, int]]:
    lines = (directory / "quarantine.jsonl").read_text().splitlines()
    return [(record["update"], record["micro_batch"]) for record in map(json.loads, lines)]


def large_epsilon(recipe: Recipe) -> Recipe:
    """Return a recipe with which signs of noise are not learnt."""
    return changed(recipe, "optimizer", epsilon=1e-3)


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest, inputs: Inputs, sentence: Sentence) -> Train:
    """Train with the poison."""

    def run(out_dir: Path, recipe: Recipe | None = None, **options: Any) -> list[str]:
        options = {"by": pretrain_poisoned, **options}
        return trainer(request, inputs)(out_dir, recipe or skipping_recipe(), sentence, **options)

    return run


@pytest.fixture(scope="module")
def expected(
    inputs: Inputs, sentence: Sentence, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    """Weights by plain PyTorch in one process, which passes over what has the sentence."""
    recipe = large_epsilon(skipping_recipe())
    folder = tmp_path_factory.mktemp("plain")
    call = make_call("pretrain", recipe, inputs.artifacts(), folder / "unused")
    data = training_data(call)
    model = build_model(
        model_spec(call, data.tokenizer), regularization=Regularization.of(recipe.training)
    )
    initialize_weights(model, seed=recipe.training.seed)
    model.train()
    optimizer = make_optimizer(model.parameters(), recipe.optimizer)
    for update, step in enumerate(planned(data), start=1):
        batches = [data.train.batch(plan) for plan in step.micro_batches]
        kept = [i for i, batch in enumerate(batches) if not has_sentence(batch, sentence).any()]
        labels = sum(batches[index].num_labels for index in kept)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optimizer, update, total_updates=UPDATES)
        optimizer.zero_grad()
        for index in kept:
            seed = derive_seed("dropout", recipe.training.seed, update, index)
            output = model(batches[index].keyed(seed))
            loss = F.cross_entropy(output.logits_LV, batches[index].labels_L, reduction="sum")
            for record in output.routing:
                balance = recipe.loss.balance_weight * record.balance_loss
                loss = loss + balance * batches[index].num_labels
            (loss / labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_norm)
        optimizer.step()
    return {entry.name: entry.value.detach() for entry in named_slices(model)}


@pytest.mark.parametrize(
    ("ranks", "parallel_size", "per_pass"), [(1, 1, 3), (2, 2, 1), (3, 1, 1), (2, 2, 2)]
)
def test_an_update_is_made_of_the_micro_batches_whose_gradients_are_finite(
    train: Train,
    inputs: Inputs,
    sentence: Sentence,
    expected: dict[str, Tensor],
    tmp_path: Path,
    ranks: int,
    parallel_size: int,
    per_pass: int,
) -> None:
    recipe = large_epsilon(skipping_recipe(expert_parallel_size=parallel_size))
    out_dir, ds_config = tmp_path / "model", sharing_passes(tmp_path, per_pass)
    assert train(out_dir, recipe, ranks=ranks, ds_config=ds_config) == ["done"] * ranks
    steps = planned(data_of(inputs, recipe, tmp_path))
    assert recorded(out_dir) == where(steps, sentence)
    assert 0 < len(where(steps, sentence)) < UPDATES
    found = read_weights(out_dir)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-5, name
    for record, step in zip(train_records(out_dir), steps, strict=True):
        without = {index for number, index in recorded(out_dir) if number == record["update"]}
        labels = sum(b.num_labels for i, b in enumerate(step.micro_batches) if i not in without)
        assert record["target_tokens"] == labels


@pytest.fixture(scope="module")
def straight(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("straight") / "model"
    train(out_dir)
    return out_dir


@pytest.fixture(scope="module")
def killed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after the record."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(RankFailed, match="killed between record and update"):
        train(folder / "model", dies_on_record=True)
    return folder


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    return tmp_path / "model"


def train_records(out_dir: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(out_dir / "metrics.jsonl") if r["kind"] == "train"]


def test_the_model_names_what_it_was_not_trained_on(straight: Path, sentence: Sentence) -> None:
    model = open_artifact(straight, kind="checkpoint")
    assert "quarantine.jsonl" in model.names()
    count = len(recorded(straight))
    wanted = f"{counted(count, 'micro-batch', 'micro-batches')} left out, since gradients were not"
    assert [line for line in model.manifest.summary if line.startswith(wanted)]
    first = json.loads((straight / "quarantine.jsonl").read_text().splitlines()[0])
    assert sentence[1] + 1 in [line for lines in first["lines"].values() for line in lines]


def test_a_run_killed_after_the_record_makes_the_same_updates_when_it_is_resumed(
    train: Train, straight: Path, killed: Path, tmp_path: Path
) -> None:
    out_dir = shutil.copytree(killed, tmp_path / "copy") / "model"
    assert recorded(run_dir(out_dir)) == recorded(straight)[:1]
    assert train(out_dir) == ["done"] * 2
    assert_same_tensors(read_weights(out_dir), read_weights(straight))
    assert recorded(out_dir) == recorded(straight)


def test_the_record_decides_on_any_ranks_though_the_cause_is_gone_and_the_setting_off(
    inputs: Inputs, straight: Path, killed: Path, pool1: ProcessPool, tmp_path: Path
) -> None:
    out_dir = shutil.copytree(killed, tmp_path / "copy") / "model"
    update, micro_batch = recorded(straight)[0]
    pool1.run(pretrain, inputs, out_dir, skipping_recipe(skip_nonfinite_after=0))
    assert recorded(out_dir) == [(update, micro_batch)]
    found, expected = (train_records(path)[:update] for path in (out_dir, straight))
    for record, wanted in zip(found, expected, strict=True):
        assert record["target_tokens"] == wanted["target_tokens"]
        for name in ("loss", "gradient_norm"):
            assert record[name] == pytest.approx(wanted[name], rel=1e-4)


@pytest.mark.parametrize("call", [3, 6])
def test_a_run_that_was_stopped_goes_on_bit_for_bit_with_its_quarantine(
    train: Train, straight: Path, out_dir: Path, call: int
) -> None:
    stopped = train(out_dir, terminate_at=(1, call))
    assert all(ending.startswith("stopped after update") for ending in stopped)
    assert train(out_dir) == ["done"] * 2
    assert_same_runs(out_dir, straight)
    assert recorded(out_dir) == recorded(straight)


def test_a_gradient_that_is_finite_at_the_next_try_leaves_nothing_out(
    train: Train, tmp_path: Path
) -> None:
    for name, times in (("sound", 0), ("model", 1)):
        train(tmp_path / name, times=times)
    assert_same_tensors(read_weights(tmp_path / "model"), read_weights(tmp_path / "sound"))
    assert not (tmp_path / "model" / "quarantine.jsonl").exists()


@pytest.mark.parametrize(("update", "fix"), [(1, "Look at"), (2, "Lower optimizer.learning_rate")])
def test_the_learning_rate_is_not_the_cause_before_the_first_update(update: int, fix: str) -> None:
    run = SimpleNamespace(path=Path("model.run/quarantine.jsonl"))
    updater = Updater(Mock(), Mock(), make_recipe(), cast(Quarantine, run))
    assert f"last state. {fix}" in str(updater._not_finite(update))


def test_without_the_setting_training_ends_and_names_it(train: Train, out_dir: Path) -> None:
    with pytest.raises(RankFailed, match=r"update 3 is not a number.*skip_nonfinite_after"):
        train(out_dir, skipping_recipe(skip_nonfinite_after=0))
    assert not (run_dir(out_dir) / "quarantine.jsonl").exists()
    assert not out_dir.exists()


def test_a_model_that_spoils_every_micro_batch_ends_the_run(
    inputs: Inputs, pool2: ProcessPool, out_dir: Path
) -> None:
    recipe = changed(skipping_recipe(), "optimizer", learning_rate=1e38, warmup_updates=1)
    with pytest.raises(RankFailed, match="not some of its micro-batches alone"):
        pool2.run(pretrain, inputs, out_dir, recipe)
    assert not (run_dir(out_dir) / "quarantine.jsonl").exists()


def test_training_ends_before_it_leaves_too_much_out(train: Train, out_dir: Path) -> None:
    with pytest.raises(RankFailed, match=r"update 3 is not a number.*all of the last 1 updates"):
        train(out_dir, most_in_a_row=1)
    assert not (run_dir(out_dir) / "quarantine.jsonl").exists()


def test_in_fp16_what_no_loss_scale_mends_is_left_out_and_the_scale_taken_up_again(
    train: Train, straight: Path, tmp_path: Path
) -> None:
    path, out_dir = tmp_path / "fp16.json", tmp_path / "model"
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": fp16}))
    train(out_dir, in_fp16=True, ds_config=str(path))
    assert recorded(out_dir) == recorded(straight)
    records = train_records(out_dir)
    assert [record["loss_scale"] for record in records] == [2.0**8] * UPDATES
    assert records[-1]["overflows"] == 0
