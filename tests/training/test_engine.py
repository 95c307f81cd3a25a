"""Updates under DeepSpeed are those of a plain PyTorch loop in one process, on any topology."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from support.fp16_on_cpu import fp16_on_cpu
from support.parity_engine import Precision, make_engine, one_update
from support.passes import passes_of
from support.plain_training import (
    IDLE_EXPERT,
    LEARNING_RATE,
    MICRO_BATCHES,
    MOE,
    UPDATES,
    Trained,
    dropout_seeds,
    make_recipe,
    micro_batches,
    plain_training,
    set_weights,
)
from support.process_pool import ProcessPool
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.batching.batch import Batch
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.resharding import PieceReader
from pipeline.config.ds_config import OWN_KEYS, ds_config_names, load_ds_config
from pipeline.distributed import process
from pipeline.distributed.world import World
from pipeline.errors import ConfigError
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, named_slices
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.training import engine as engine_module
from pipeline.training.engine import (
    Engine,
    _check_monitors,
    connect,
    expert_parallel_group,
    merge_ds_config,
)
from pipeline.training.losses import LossTerms, training_loss
from pipeline.training.optim import make_optimizer
from pipeline.training.settings import OptimizerConfig

SPECS = {
    "dense": tiny_spec(),
    "moe": tiny_spec(moe=MOE),
    "moe_lgr": tiny_spec(moe=MOE, groups=2),
    "capacity": tiny_spec(moe=MOE.model_copy(update={"dispatch": "capacity"})),
    "moe_lgr of nine": tiny_spec(moe=MOE.model_copy(update={"num_experts": 9}), groups=2),
}


def zero_config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "overlap_comm": False}}


def stand_in(spec: ModelSpec) -> Batch:
    """One sentence, which is in no micro-batch, of a rank that has no micro-batch left."""
    return random_batch(spec, sentences=1, seed=99)


def engine_training(
    world: World,
    spec: ModelSpec,
    *,
    parallel_size: int,
    zero_stage: int,
    clip_norm: float = 0.5,
    dropout: float = 0.0,
    rehearses: bool = False,
    recomputes: bool = False,
    own_keys: Mapping[str, Any] | None = None,
) -> Trained:
    """The same training by the engine on this rank's share of the micro-batches."""
    connect(world)
    model = build_model(
        spec,
        regularization=Regularization(dropout, dropout),
        expert_parallel=expert_parallel_group(parallel_size, world=world),
    )
    set_weights(model)
    engine = Engine(
        model,
        make_recipe(spec.model, clip_norm=clip_norm),
        world=world,
        ds_config={**zero_config(zero_stage), **(own_keys or {})},
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE, fused=True),
    )
    model.recomputes = recomputes
    trained = Trained({}, [], [], [])
    mine = list(range(world.rank, MICRO_BATCHES, world.size))
    lacking = -(-MICRO_BATCHES // world.size) - len(mine)
    for update in range(UPDATES):
        batches = micro_batches(spec, update)
        if rehearses:
            engine.rehearse(batches[-1])
        result = engine.train_step(
            passes_of(
                [*(batches[index] for index in mine), *[stand_in(spec)] * lacking],
                seeds=[*dropout_seeds(update, mine), *[0] * lacking],
                stand_ins=range(len(mine), len(mine) + lacking),
                per_pass=engine.per_pass,
            ),
            total_labels=sum(batch.num_labels for batch in batches),
            learning_rate=LEARNING_RATE,
        )
        assert result.labels == sum(batches[index].num_labels for index in mine)
        trained.norms.append(result.gradient_norm)
        trained.cross_entropies.append(result.cross_entropy.item())
        trained.balances.append(result.balance.item())
    trained.weights = {entry.name: entry.value.clone() for entry in named_slices(model)}
    return trained


def merged(results: Sequence[Trained]) -> Trained:
    """One result of all ranks; what several of them hold must be the same bits."""
    weights: dict[str, Tensor] = {}
    for result in results:
        assert result.norms == results[0].norms
        for name, value in result.weights.items():
            assert torch.equal(weights.setdefault(name, value), value), name
    return Trained(
        weights=weights,
        norms=results[0].norms,
        cross_entropies=[
            sum(each) for each in zip(*(r.cross_entropies for r in results), strict=True)
        ],
        balances=[sum(each) for each in zip(*(r.balances for r in results), strict=True)],
    )


def assert_equal_training(found: Trained, expected: Trained) -> None:
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.cross_entropies == pytest.approx(expected.cross_entropies, rel=1e-5)
    assert found.balances == pytest.approx(expected.balances, rel=1e-5)
    assert set(found.weights) == set(expected.weights)
    for name, value in expected.weights.items():
        difference = (found.weights[name] - value).abs().max() / value.abs().max()
        assert difference <= 1e-5, (name, difference)


CASES = [
    *[("dense", size, 1, stage) for size in (1, 2) for stage in (1, 2)],
    *[(name, 1, 1, 1) for name in ("moe", "moe_lgr")],
    *[("moe", 2, parallel, stage) for parallel in (1, 2) for stage in (1, 2)],
    *[("moe_lgr", 2, parallel, 1) for parallel in (1, 2)],
    ("capacity", 2, 2, 1),
    *[("moe_lgr", 4, parallel, 2) for parallel in (2, 4)],
    ("moe", 4, 2, 1),
    # two ranks of three have one micro-batch less
    *[("dense", 3, 1, stage) for stage in (1, 2)],
    *[("moe_lgr of nine", 3, parallel, stage) for parallel in (1, 3) for stage in (1, 2)],
    ("capacity", 3, 1, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size", "parallel_size", "zero_stage"), CASES)
def test_three_updates_equal_those_of_a_plain_loop_over_the_same_micro_batches(
    request: pytest.FixtureRequest,
    name: str,
    world_size: int,
    parallel_size: int,
    zero_stage: int,
) -> None:
    spec = SPECS[name]
    expected, routed_E = plain_training(spec)
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    results = pool.run(engine_training, spec, parallel_size=parallel_size, zero_stage=zero_stage)
    assert_equal_training(merged(results), expected)
    assert min(expected.norms) > 0.5, "the gradient must be clipped in every update"
    if spec.model.moe is not None:
        assert routed_E[IDLE_EXPERT] == 0
        assert routed_E.count_nonzero() == spec.model.moe.num_experts - 1


@pytest.mark.slow
def test_a_gradient_within_the_norm_is_not_clipped(pool2: ProcessPool) -> None:
    spec = SPECS["moe"]
    expected, _ = plain_training(spec, clip_norm=1000.0)
    results = pool2.run(engine_training, spec, parallel_size=2, zero_stage=1, clip_norm=1000.0)
    assert_equal_training(merged(results), expected)


@pytest.mark.slow
def test_a_rehearsed_batch_leaves_no_trace(pool2: ProcessPool) -> None:
    spec = SPECS["moe_lgr"]
    results = pool2.run(engine_training, spec, parallel_size=2, zero_stage=2, rehearses=True)
    assert_equal_training(merged(results), plain_training(spec)[0])


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_layers_that_are_computed_again_make_the_same_updates_over_expert_parallel_ranks(
    pool2: ProcessPool, zero_stage: int
) -> None:
    spec = SPECS["moe_lgr"]
    expected, _ = plain_training(spec, dropout=0.3)
    results = pool2.run(
        engine_training,
        spec,
        parallel_size=2,
        zero_stage=zero_stage,
        dropout=0.3,
        recomputes=True,
    )
    assert_equal_training(merged(results), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "parallel_size"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_dropout_does_not_depend_on_the_world(
    request: pytest.FixtureRequest, world_size: int, parallel_size: int
) -> None:
    spec = SPECS["moe"]
    expected, _ = plain_training(spec, dropout=0.3)
    without, _ = plain_training(spec)
    assert expected.norms != pytest.approx(without.norms, rel=1e-3)
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    results = pool.run(
        engine_training, spec, parallel_size=parallel_size, zero_stage=1, dropout=0.3
    )
    assert_equal_training(merged(results), expected)


PER_PASS = [
    ("moe_lgr", 1, 1, 2, 2),
    ("moe_lgr", 1, 1, 1, 3),  # the last pass has one micro-batch
    ("capacity", 1, 1, 2, 4),
    ("dense", 2, 1, 2, 2),
    ("capacity", 2, 2, 1, 2),
    ("moe_lgr of nine", 3, 3, 2, 2),  # two ranks have one micro-batch in their pass
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size", "parallel_size", "zero_stage", "per_pass"), PER_PASS
)
def test_micro_batches_that_share_a_pass_make_the_same_updates(
    request: pytest.FixtureRequest,
    name: str,
    world_size: int,
    parallel_size: int,
    zero_stage: int,
    per_pass: int,
) -> None:
    spec = SPECS[name]
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    results = pool.run(
        engine_training,
        spec,
        parallel_size=parallel_size,
        zero_stage=zero_stage,
        dropout=0.3,
        rehearses=True,
        own_keys={"micro_batches_per_pass": per_pass},
    )
    assert_equal_training(merged(results), plain_training(spec, dropout=0.3)[0])


def test_the_number_of_micro_batches_per_pass_sets_the_number_of_passes() -> None:
    for per_pass, passes in ((1, 4), (2, 2), (3, 2), (4, 1), (9, 1)):
        merged_config = merge({**zero_config(2), "micro_batches_per_pass": per_pass}, world_size=1)
        assert merged_config["gradient_accumulation_steps"] == passes
        assert "micro_batches_per_pass" not in merged_config


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", 1025])
def test_a_number_of_micro_batches_per_pass_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"micro_batches_per_pass is .* from 1 to 1,024"):
        merge({**zero_config(2), "micro_batches_per_pass": wrong})


def engine_of(
    world: World,
    spec: ModelSpec,
    rates: Regularization | None = None,
    *,
    change: Callable[[Transformer], object] = lambda _: None,
) -> Engine:
    connect(world)
    model = build_model(spec, regularization=rates)
    set_weights(model)
    change(model)
    return Engine(
        model,
        make_recipe(spec.model),
        world=world,
        ds_config=zero_config(1),
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE, fused=True),
    )


def steps_of_calls(world: World) -> list[int]:
    """Steps that the watchdog sees in a rehearsal, a verdict, an evaluation and an update."""
    spec = SPECS["dense"]
    engine = engine_of(world, spec)
    batches = micro_batches(spec, 1)
    calls: list[Callable[[], object]] = [
        lambda: engine.rehearse(batches[0]),
        lambda: engine.verdict(batches[0], micro_batch=0, seed=1, total_labels=9),
        lambda: engine.evaluate(batches[0]),
        lambda: engine.train_step(passes_of(batches), total_labels=9, learning_rate=0.1),
    ]
    counts = [process.steps()]
    for call in calls:
        call()
        counts.append(process.steps())
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.slow
def test_every_batch_that_the_model_computes_is_a_step_for_the_watchdog(pool1: ProcessPool) -> None:
    assert pool1.run(steps_of_calls) == [[1, 1, 1, MICRO_BATCHES]]


def rehearsal_of(world: World, objective: Callable[[LossTerms], Tensor]) -> str:
    """What a rehearsal says of a loss with this objective."""
    spec = SPECS["dense"]
    engine = engine_of(world, spec)

    def loss(*given: Any, **options: Any) -> LossTerms:
        terms = training_loss(*given, **options)
        return replace(terms, objective=objective(terms))

    with mock.patch.object(engine_module, "training_loss", loss):
        try:
            engine.rehearse(micro_batches(spec, 1)[0])
        except ConfigError as error:
            return str(error)
    return ""


def of_no_parameter(terms: LossTerms) -> Tensor:
    return terms.cross_entropy.clone().requires_grad_()


def of_nothing(terms: LossTerms) -> Tensor:
    return terms.objective * 0 + terms.cross_entropy


def of_the_model(terms: LossTerms) -> Tensor:
    return terms.objective * 1e-3


@pytest.mark.slow
def test_a_constant_loss_is_named_before_the_first_update(pool1: ProcessPool) -> None:
    for objective in (of_no_parameter, of_nothing):
        assert pool1.run(rehearsal_of, objective) == [
            "The loss 'cross_entropy' is constant: no parameter has a gradient. Compute its "
            "objective from the output of the model."
        ]
    assert pool1.run(rehearsal_of, of_the_model) == [""]


def losses_of_evaluation(world: World, spec: ModelSpec) -> tuple[float, float, bool]:
    engine = engine_of(world, spec, Regularization(0.5, 0.5))
    terms = engine.evaluate(micro_batches(spec, 0)[-1])
    return terms.cross_entropy.item(), terms.balance.item(), terms.objective.requires_grad


@pytest.mark.slow
def test_evaluation_has_no_dropout_and_no_gradient(pool1: ProcessPool) -> None:
    spec = SPECS["moe"]
    model = tiny_model(spec)
    set_weights(model)
    batch = micro_batches(spec, 0)[-1]
    output = model.eval()(batch)
    loss = F.cross_entropy(output.logits_LV, batch.labels_L, reduction="sum")
    balance = sum(record.balance_loss.item() for record in output.routing)
    [(found_loss, found_balance, has_gradient)] = pool1.run(losses_of_evaluation, spec)
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    assert found_balance == pytest.approx(balance, rel=1e-6)
    assert not has_gradient


def merge(ds_config: Mapping[str, Any], *, world_size: int = 2) -> dict[str, Any]:
    return merge_ds_config(ds_config, make_recipe(ModelConfig()), world_size=world_size)


def test_the_recipe_decides_clipping_and_accumulation() -> None:
    merged_config = merge(zero_config(2), world_size=2)
    assert merged_config["gradient_accumulation_steps"] == 2
    assert merged_config["gradient_clipping"] == 0.5
    assert merged_config["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        ({"gradient_clipping": 1.0}, ["'gradient_clipping'", "optimizer.clip_norm"]),
        ({"train_batch_size": 8}, ["'train_batch_size'", "batches.micro_batches"]),
        ({"optimizer": {}}, ["'optimizer'", "[optimizer]"]),
        ({"gradient_acumulation": 1}, ["unknown key 'gradient_acumulation'"]),
        ({"bf17": {}}, ["unknown key 'bf17'", "Did you mean 'bf16'"]),
        (
            {"zero_optimization": {"stage": 1, "reduce_scater": True}},
            ["'reduce_scater'", "Did you mean 'reduce_scatter'"],
        ),
        ({"zero_optimization": {"stage": 0}}, ["ZeRO stage 0", "Use 1 or 2"]),
        ({"zero_optimization": {}}, ["ZeRO stage 0", "Use 1 or 2"]),
        ({"zero_optimization": {"stage": 3}}, ["ZeRO stage 3", "Use 1 or 2"]),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            ["enables both fp16 and bf16"],
        ),
        (
            {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            ["accumulates the gradients of fp16 in bf16", "to fp32"],
        ),
        ({"fp16": {"hysteresis": 0}}, ["fp16.hysteresis is 0", "from 1 to"]),
        ({"fp16": {"loss_scale_window": True}}, ["fp16.loss_scale_window is true"]),
        ({"fp16": {"initial_scale_power": 1.5}}, ["initial_scale_power is 1.5", "from 0 to 32"]),
        ({"fp16": {"loss_scale": float("nan")}}, ["fp16.loss_scale is NaN"]),
        ({"fp16": {"min_loss_scale": "1"}}, ['min_loss_scale is "1"']),
        ({"fp16": {"auto_cast": True}}, ["unknown key 'auto_cast'"]),
        ({"bf16": True}, ["bf16 is true", '"bf16": {...}']),
        ({"tensorboard": True}, ["tensorboard is true", '"tensorboard": {...}']),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, ['is "fp8"', "Use fp32 or bf16"]),
        ({"zero_optimization": None}, ["zero_optimization is null"]),
        ({"zero_optimization": {"stage": "1"}}, ['ZeRO stage "1"', "Use 1 or 2"]),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}},
            ["zero_optimization.offload_optimizer is wrong"],
        ),
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": True}},
            ["'cpu_offload'", "Set offload_optimizer instead"],
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_key_that_the_recipe_owns_or_that_would_be_ignored_is_refused(
    addition: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        merge({**zero_config(1), **addition})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fix"), [("tensorboard", "'mmnmt[monitors]'"), ("wandb", "wandb")]
)
def test_a_monitor_that_is_not_installed_is_refused_before_deepspeed_imports_it(
    monkeypatch: pytest.MonkeyPatch, name: str, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    off: dict[str, Any] = {**zero_config(1), name: {"enabled": False}}
    assert merge(off)[name] == {"enabled": False}
    with pytest.raises(ConfigError, match=rf"enables {name}, .* Run pip install {re.escape(fix)},"):
        merge({**off, name: {"enabled": True}})


@pytest.mark.parametrize("name", ["csv_monitor", "tensorboard"])
@pytest.mark.parametrize("below", ["file/logs", "file"])
def test_a_monitor_whose_files_cannot_be_written_is_refused_by_the_engine(
    tmp_path: Path, name: str, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda _: True)  # as if it were installed
    (tmp_path / "file").write_text("")
    section: dict[str, Any] = {"enabled": True, "output_path": str(tmp_path / "logs")}
    _check_monitors({name: section})
    _check_monitors({name: {"enabled": False, "output_path": str(tmp_path / below)}})
    what = (
        rf"The ds_config's {name} in {tmp_path / below} cannot be written \(.*another output_path"
    )
    unwritable = section | {"output_path": str(tmp_path / below)}
    with pytest.raises(ConfigError, match=what):
        Engine(
            build_model(SPECS["dense"]),
            make_recipe(SPECS["dense"].model),
            world=World(0, 1, 0, 1, "127.0.0.1", 1),
            ds_config={**zero_config(1), name: unwritable},
            make_optimizer=lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE),
        )
    assert [*(tmp_path / "logs").iterdir()] == []


def test_what_is_left_to_deepspeed_is_not_passed_on() -> None:
    left = {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    assert "reduce_bucket_size" not in merge(left)["zero_optimization"]


def test_what_this_project_does_by_the_machine_is_not_passed_on() -> None:
    own = {"micro_batches_per_pass": 1}
    assert set(own) == set(OWN_KEYS)
    assert merge({**zero_config(1), **own}) == merge(zero_config(1))


def test_gradients_are_gathered_in_buffers_only_where_ranks_share_them() -> None:
    for size, gathers in ((1, False), (2, True)):
        for name in ds_config_names():
            merged = merge(load_ds_config(name), world_size=size)["zero_optimization"]
            assert merged["contiguous_gradients"] == gathers


def test_gradients_of_experts_are_not_reduced_over_the_wrong_ranks() -> None:
    ds_config = {"zero_optimization": {"stage": 1, "contiguous_gradients": False}}
    assert merge(ds_config, world_size=1)
    assert merge(ds_config, world_size=2)
    recipe = make_recipe(ModelConfig(moe=MoEConfig(num_experts=4)))
    assert merge_ds_config(ds_config, recipe, world_size=1)
    with pytest.raises(ConfigError, match=r"over the wrong ranks\. Set it to true"):
        merge_ds_config(ds_config, recipe, world_size=2)


@pytest.mark.parametrize("zero", [{"stage": 1, "overlap_comm": True}, {"stage": 2}])
def test_gradients_of_language_experts_are_not_either(zero: dict[str, Any]) -> None:
    model = ModelConfig.model_validate({"language_modules": {"kind": "language_experts"}})
    ds_config = {"zero_optimization": {**zero, "contiguous_gradients": False}}
    assert merge_ds_config(ds_config, make_recipe(model), world_size=1)
    with pytest.raises(ConfigError, match=r"over the wrong ranks\. Set it to true"):
        merge_ds_config(ds_config, make_recipe(model), world_size=2)


def refusal_of(world: World, zero: dict[str, Any]) -> str:
    with mock.patch.object(sys.modules[__name__], "zero_config", return_value=zero):
        try:
            engine_of(world, SPECS["dense"])
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("allgather_bucket_size", 5001, "must be a multiple"),
        ("compute_grad_norm", False, "requires gradient_clipping=0"),
    ],
)
def test_what_deepspeed_does_not_take_is_refused_in_one_sentence(
    pool1: ProcessPool, key: str, value: object, reason: str
) -> None:
    [said] = pool1.run(refusal_of, {"zero_optimization": {"stage": 1, key: value}})
    assert re.fullmatch(rf"DeepSpeed refuses the ds_config \(.*{key}.* {reason}.*\)\. .*", said)


@pytest.mark.parametrize("name", ds_config_names())
def test_every_ds_config_that_ships_is_accepted(name: str) -> None:
    assert merge(load_ds_config(name))["gradient_clipping"] == 0.5


def test_more_ranks_than_micro_batches_are_refused() -> None:
    assert merge(zero_config(2), world_size=3)["gradient_accumulation_steps"] == 2
    assert merge(zero_config(2), world_size=4)["gradient_accumulation_steps"] == 1
    with pytest.raises(ConfigError, match="5 ranks are more than the 4 micro-batches"):
        merge(zero_config(2), world_size=5)


def one_update_and_state(world: World, name: str) -> dict[str, set[str]]:
    """One update by Adam under a ds_config that ships; the tensors its state covers, by kind."""
    connect(world)
    spec = SPECS["moe"]
    model = build_model(spec)
    set_weights(model)
    recipe = make_recipe(spec.model)
    with fp16_on_cpu():
        engine = Engine(
            model,
            recipe,
            world=world,
            ds_config=load_ds_config(name),
            make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
        )
    batches = micro_batches(spec, 0)
    result = engine.train_step(
        passes_of(batches),
        total_labels=sum(batch.num_labels for batch in batches),
        learning_rate=1e-3,
    )
    assert result.was_made
    covered: dict[str, set[str]] = {}
    for piece in engine.optimizer_pieces():
        covered.setdefault(piece.what, set()).add(piece.tensor)
        assert piece.values.isfinite().all()
    return covered


@pytest.mark.slow
@pytest.mark.parametrize("name", ds_config_names())
def test_every_ds_config_that_ships_trains_and_gives_its_state(
    pool1: ProcessPool, name: str
) -> None:
    [covered] = pool1.run(one_update_and_state, name)
    names = {entry.name for entry in named_slices(tiny_model(SPECS["moe"]))}
    assert covered == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), names)


class Recorder(torch.optim.SGD):
    """Keeps the gradients that it is given, and changes nothing."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, lr=0)
        self.gradients: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        del closure
        divisor = getattr(self, "grad_scale", 1)
        self.gradients += [p.grad / divisor for group in self.param_groups for p in group["params"]]


def summed_gradients(
    world: World,
    spec: ModelSpec,
    name: str,
    *,
    passes: int = 1,
    parallel_size: int = 1,
    only: int | None = None,
) -> Tensor:
    """This rank's share of the gradients, in as many passes of the same micro-batch on each rank.

    ``only`` is the rank whose micro-batches count; None: those of all ranks do.
    """
    connect(world)
    model = build_model(spec, expert_parallel=expert_parallel_group(parallel_size, world=world))
    set_weights(model)
    batches = micro_batches(spec, 0)[: world.size]
    settings = BatchesConfig(micro_batches=passes * world.size)
    engine = Engine(
        model,
        make_recipe(spec.model, clip_norm=1e6).model_copy(update={"batches": settings}),
        world=world,
        ds_config=load_ds_config(name),
        make_optimizer=Recorder,
    )
    engine.train_step(
        passes_of(
            [batches[world.rank]] * passes,
            stand_ins=range(passes) if only not in (None, world.rank) else (),
        ),
        total_labels=passes * 256,  # a power of two, so that no division rounds
        learning_rate=0,
    )
    assert isinstance(engine._zero, DeepSpeedZeroOptimizer)
    recorder = engine._zero.optimizer
    assert isinstance(recorder, Recorder)
    return torch.cat(recorder.gradients)


@pytest.mark.parametrize("name", ["zero1_bf16", "zero2_bf16"])
def test_gradients_in_bf16_of_ranks_and_micro_batches_are_summed_in_float32(
    pool2: ProcessPool, name: str
) -> None:
    """In bf16, such sums would be off by up to one part in 256."""

    def run(**options: Any) -> list[Tensor]:
        return pool2.run(summed_gradients, SPECS["dense"], name, **options)

    for both, first, second, repeated in zip(
        run(), run(only=0), run(only=1), run(passes=4), strict=True
    ):
        assert both.dtype == torch.float32
        assert both.count_nonzero() > 1000
        assert torch.equal(both, first + second)
        torch.testing.assert_close(repeated, both, rtol=1e-6, atol=1e-30)


def bytes_reduced(world: World, name: str, *, passes: int) -> list[int]:
    """Return the bytes of each sum of gradients over ranks, in the order of an update's sums."""
    sizes, all_reduce = [], torch.distributed.all_reduce

    def recorded(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.is_floating_point() and tensor.numel() > 1:  # not norms
            sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    with mock.patch.object(torch.distributed, "all_reduce", recorded):
        summed_gradients(world, SPECS["dense"], name, passes=passes)
    return sizes


@pytest.mark.parametrize(
    ("name", "of_each_pass"), [("zero1_bf16", False), ("zero2_bf16", True), ("zero2_fp32", True)]
)
def test_zero_1_reduces_gradients_once_per_update_and_zero_2_each_pass_in_float32(
    pool2: ProcessPool, name: str, of_each_pass: bool
) -> None:
    passes, float32 = 3, 4
    values = sum(parameter.numel() for parameter in build_model(SPECS["dense"]).parameters())
    for sizes in pool2.run(bytes_reduced, name, passes=passes):
        assert len(sizes) == (passes if of_each_pass else 1)
        assert sizes == pytest.approx([float32 * values] * len(sizes), rel=0.01)


def test_both_stages_of_zero_sum_the_gradients_of_spread_experts(pool2: ProcessPool) -> None:
    first, second = (
        pool2.run(summed_gradients, SPECS["moe"], name, passes=2, parallel_size=2)
        for name in ("zero1_bf16", "zero2_bf16")
    )
    for ours, others in zip(first, second, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-6, atol=1e-30)


def blocks_kept(world: World) -> tuple[list[int], int]:
    """What an engine asks to be kept of freed memory, and the size of all gradients; bytes."""
    connect(world)
    model, kept = build_model(SPECS["moe"]), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "keep_freed_memory", lambda *, block: kept.append(block))
        Engine(
            model,
            make_recipe(SPECS["moe"].model),
            world=world,
            ds_config=zero_config(2),
            make_optimizer=lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE, fused=True),
        )
    return kept, sum(parameter.nbytes for parameter in model.parameters())


def test_zero_2_on_cpu_has_the_memory_of_flattened_gradients_kept(pool1: ProcessPool) -> None:
    [(kept, gradients)] = pool1.run(blocks_kept)
    assert len(kept) == 1
    assert gradients <= kept[0] < gradients + 64  # ZeRO pads to whole units of alignment


def moments_made(world: World) -> tuple[int, int]:
    """Tensors of the whole partition that resuming makes, and optimizer groups."""
    connect(world)
    engine = Engine(
        build_model(SPECS["moe"]),
        make_recipe(SPECS["moe"].model),
        world=world,
        ds_config=zero_config(1),
        make_optimizer=lambda groups: make_optimizer(groups, OptimizerConfig()),
    )
    made = []

    class Zeros(PieceReader):
        def __init__(self) -> None:
            """No files."""

        def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:  # noqa: ARG002
            return torch.zeros(length)

    def zeros(flat: Tensor) -> Tensor:
        made.append(flat)
        return torch.zeros_like(flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_zeros", zeros)
        engine.load_optimizer_pieces(Zeros(), update=1)
    return len(made), len({id(flat) for flat in made})


def test_resuming_makes_every_moment_once_and_not_for_every_tensor(pool1: ProcessPool) -> None:
    [(made, groups)] = pool1.run(moments_made)
    assert groups > 0
    assert made == 2 * groups


def published_and_pieces(
    world: World, *, parallel_size: int, zero: str, precision: Precision
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[str, int, Tensor]]]:
    """After two updates: what is published, the parameters, and this rank's master weights."""
    engine = make_engine(
        world, parallel_size=parallel_size, zero=zero, precision=precision, method="adam"
    )
    for update in range(2):
        one_update(engine, world, update, rate=1e-3)
    published = {entry.name: value.clone() for entry, value in engine.published_weights()}
    parameters = {entry.name: entry.value.clone() for entry in named_slices(engine.model)}
    pieces = engine.optimizer_pieces()
    masters = [(p.tensor, p.start, p.values) for p in pieces if p.what == "master"]
    return published, parameters, masters


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["ZeRO 1", "ZeRO 2"])
@pytest.mark.parametrize("parallel_size", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_published_weights_are_the_masters_not_what_they_were_rounded_to(
    pool2: ProcessPool, zero: str, parallel_size: int, precision: Precision
) -> None:
    results = pool2.run(
        published_and_pieces, parallel_size=parallel_size, zero=zero, precision=precision
    )
    masters: dict[str, dict[int, Tensor]] = {}
    for _, _, pieces in results:
        for name, start, values in pieces:
            masters.setdefault(name, {})[start] = values
    rounded = 0
    for published, parameters, _ in results:
        for name, value in published.items():
            expected = torch.cat([values for _, values in sorted(masters[name].items())])
            assert value.dtype == torch.float32
            assert torch.equal(value.flatten(), expected)
            rounded += int((value != parameters[name].float()).sum())
    assert (rounded > 1000) == (precision != "fp32")


def not_of_the_parameters(
    world: World, *, parallel_size: int, stage: int, precision: Precision
) -> list[str]:
    """Tensors that are published, or in pieces, with other values than training computes with."""
    engine = make_engine(
        world,
        parallel_size=parallel_size,
        zero="ZeRO 1",
        precision=precision,
        method="adam",
        keys={"zero_optimization": {"stage": stage, "round_robin_gradients": True}},
    )
    one_update(engine, world, 0, rate=1e-2)
    held = {entry.name: entry.value for entry in named_slices(engine.model)}
    published = {entry.name: value for entry, value in engine.published_weights()}
    wrong = [name for name, value in held.items() if not published[name].to(value).equal(value)]
    for piece in engine.optimizer_pieces():
        value = held[piece.tensor].flatten()[piece.start : piece.start + len(piece.values)]
        if piece.what == "master" and not piece.values.to(value).equal(value):
            wrong.append(piece.key)
    return wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "parallel_size"), [(1, 1), (2, 2)])
def test_states_and_weights_are_those_of_a_ds_config_with_another_order_of_parameters(
    pool2: ProcessPool, stage: int, parallel_size: int, precision: Precision
) -> None:
    found = pool2.run(
        not_of_the_parameters, parallel_size=parallel_size, stage=stage, precision=precision
    )
    assert found == [[], []]


def addresses_and_masters(
    world: World, *, zero: str, precision: Precision
) -> tuple[set[int], dict[str, Tensor], list[tuple[str, int, Tensor]]]:
    """Where parameters start, beyond a multiple of 16 bytes, and the master weights.

    Each gate of CLSR has a bias of one value.
    """
    modules = {"kind": "clsr", "gate_width": 8}
    spec = tiny_spec(model={"language_modules": modules})
    engine = make_engine(
        world,
        parallel_size=1,
        zero=zero,
        precision=precision,
        method="adam",
        spec=spec,
        prepare=lambda model: initialize_weights(model, seed=1),
    )
    one_update(engine, world, 0, rate=1e-3, spec=spec)
    starts = {parameter.data_ptr() % 16 for parameter in engine.model.parameters()}
    published = {entry.name: value.clone() for entry, value in engine.published_weights()}
    pieces = engine.optimizer_pieces()
    return starts, published, [(p.tensor, p.start, p.values) for p in pieces if p.what == "master"]


@pytest.mark.parametrize(
    ("zero", "precision"), [("ZeRO 1", "bf16"), ("ZeRO 2", "bf16"), ("ZeRO 2", "fp32")]
)
def test_every_parameter_starts_at_a_multiple_of_16_bytes_and_keeps_its_place(
    pool2: ProcessPool, zero: str, precision: Precision
) -> None:
    """Grouped products refuse matrices at other addresses."""
    results = pool2.run(addresses_and_masters, zero=zero, precision=precision)
    masters: dict[str, dict[int, Tensor]] = {}
    for _, _, pieces in results:
        for name, start, values in pieces:
            masters.setdefault(name, {})[start] = values
    for starts, published, _ in results:
        assert starts == {0}
        for name, value in published.items():
            expected = torch.cat([values for _, values in sorted(masters[name].items())])
            assert torch.equal(value.flatten(), expected)


def verdict_of(world: World, bias: float) -> tuple[bool, bool]:
    """The verdict on a micro-batch of a model with a parameter that its loss does not read."""
    spec = SPECS["moe"]
    spare = nn.Parameter(torch.zeros(3))
    engine = engine_of(world, spec, change=lambda model: setattr(model.front, "spare", spare))
    engine.model.get_parameter("decoder.final_norm.bias").data.fill_(bias)
    batch = micro_batches(spec, 1)[1]
    found = engine.verdict(batch, micro_batch=0, seed=1, total_labels=9)
    return found.is_finite, found.of_experts_is_finite


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "is_finite"), [(0.0, True), (torch.nan, False)])
def test_a_parameter_that_the_loss_does_not_read_has_no_verdict(
    pool1: ProcessPool, bias: float, is_finite: bool
) -> None:
    [(found, _)] = pool1.run(verdict_of, bias)
    assert found == is_finite


def frozen_pieces(world: World, parallel_size: int, frozen: str) -> list[str]:
    """Names of frozen master weights, after an update of a model in which experts have such."""

    def freeze(model: Transformer) -> None:
        set_weights(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)

    engine = make_engine(
        world,
        parallel_size=parallel_size,
        zero="ZeRO 1",
        precision="fp32",
        method="adam",
        prepare=freeze,
    )
    one_update(engine, world, 0, rate=1e-3)
    kept = {entry.name for entry in named_slices(engine.model) if entry.parameter.requires_grad}
    pieces = engine.optimizer_pieces()
    return [one.tensor for one in pieces if one.what == "master" and one.tensor not in kept]


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "tensors"), [(".experts.up.", 2), (".experts.", 4)])
@pytest.mark.parametrize("parallel_size", [1, 2])
def test_a_state_has_every_frozen_expert_once_whichever_rank_holds_it(
    pool2: ProcessPool, parallel_size: int, frozen: str, tensors: int
) -> None:
    found = pool2.run(frozen_pieces, parallel_size, frozen)
    experts = [name for names in found for name in names if ".experts." in name]
    assert len(experts) == len(set(experts)) == 2 * tensors * MOE.num_experts
