"""Learning rates, Adam by hand, and the update from flat gradients, which is DeepSpeed's own."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import deepspeed
import pytest
import torch
from support.parity_engine import CLIP_NORM, SPEC, Precision, make_engine, try_update
from support.passes import passes_of
from support.plain_training import MICRO_BATCHES, micro_batches
from support.process_pool import ProcessPool
from support.tiny_models import tiny_spec
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.ds_config import ds_config_names, load_ds_config
from pipeline.distributed.world import World
from pipeline.kernels.gradient_sums import FlatSums, squared_norm
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.spec import ModelSpec
from pipeline.training import engine as engine_module
from pipeline.training import optim
from pipeline.training.engine import Engine, trainable
from pipeline.training.losses import training_loss
from pipeline.training.optim import (
    ZERO_ATTRIBUTES,
    has_flat_gradients,
    learning_rate,
    make_optimizer,
)
from pipeline.training.settings import OptimizerConfig

POLYNOMIAL = OptimizerConfig(learning_rate=2e-4, final_learning_rate=1e-5, warmup_updates=4000)
INVERSE = OptimizerConfig(learning_rate=5e-4, warmup_updates=100, schedule="inverse_sqrt")
WITHOUT_WARM_UP = POLYNOMIAL.model_copy(update={"warmup_updates": 0})


@pytest.mark.parametrize(
    ("config", "total", "rates"),
    [
        (
            POLYNOMIAL,
            100_000,
            {
                **{1: 2e-4 / 4000, 1000: 5e-5, 3999: 2e-4 * 3999 / 4000, 4000: 2e-4},
                **{52_000: (2e-4 + 1e-5) / 2, 76_000: 1e-5 + (2e-4 - 1e-5) / 4},
                **{100_000: 1e-5, 150_000: 1e-5},
            },
        ),
        (POLYNOMIAL, 10, {update: 2e-4 * update / 4000 for update in range(1, 11)}),
        (WITHOUT_WARM_UP, 100, {1: 1e-5 + (2e-4 - 1e-5) * 0.99}),
        (INVERSE, 1000, {1: 5e-6, 50: 2.5e-4, 100: 5e-4, 400: 2.5e-4, 10_000: 5e-5}),
        (INVERSE.model_copy(update={"warmup_updates": 0}), 100, {1: 5e-4}),
    ],
    ids=["polynomial", "within its warm-up", "no warm-up", "inverse", "inverse, no warm-up"],
)
def test_the_rate_warms_up_and_falls_in_a_line_or_halves_at_four_times_the_updates(
    config: OptimizerConfig, total: int, rates: dict[int, float]
) -> None:
    found = {update: learning_rate(config, update, total_updates=total) for update in rates}
    assert found == pytest.approx(rates, rel=1e-12)


def test_the_optimizer_is_adam_with_decoupled_weight_decay() -> None:
    config = OptimizerConfig(learning_rate=0.1, betas=(0.8, 0.95), epsilon=1e-3, weight_decay=0.2)
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = make_optimizer([parameter], config)
    value, first, second = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate([[0.5, -1.0], [0.1, 3.0], [0.0, -0.2]], start=1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(gradient):
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.95 * second[i] + 0.05 * g * g
            slope = first[i] / (1 - 0.8**step)
            scale = math.sqrt(second[i] / (1 - 0.95**step)) + 1e-3
            value[i] = value[i] - 0.1 * 0.2 * value[i] - 0.1 * slope / scale
        assert parameter.tolist() == pytest.approx(value, rel=1e-9)


DENSE = tiny_spec()
UPDATES = 4
FLOAT32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
"""DeepSpeed sums in the model's precision by default; flat gradients are always in float32."""
Path = Literal["flat", "DeepSpeed"]
PATHS: tuple[Path, Path] = ("flat", "DeepSpeed")


def engine_of(
    world: World,
    *,
    path: Path = "flat",
    spec: ModelSpec = SPEC,
    parallel_size: int = 1,
    precision: Precision = "fp32",
    **options: Any,
) -> Engine:
    """An engine that sums gradients by the path, in float32 in both."""

    def is_flat(config: Any) -> bool:
        return path == "flat" and has_flat_gradients(config)

    with mock.patch.object(engine_module, "has_flat_gradients", is_flat):
        engine = make_engine(
            world,
            parallel_size=parallel_size,
            zero="ZeRO 1",
            precision=precision,
            method="adam",
            spec=spec,
            **options,
            keys=FLOAT32_SUMS,
        )
    assert (engine._flat is not None) == (path == "flat")
    return engine


def pieces(engine: Engine) -> dict[str, Tensor]:
    """This rank's share of master weights and moments."""
    return {f"{p.what} {p.tensor} {p.start}": p.values.clone() for p in engine.optimizer_pieces()}


def steps(engine: Engine) -> set[float]:
    return {float(state["step"]) for state in engine._zero.optimizer.state.values()}


@dataclass
class Updates:
    """Figures of one rank's updates, and its optimizer state after them."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    state: dict[str, Tensor]


def make_updates(world: World, /, *, number: int, **options: Any) -> Updates:
    engine = engine_of(world, **options)
    found = Updates([], [], [], {})
    for update in range(number):
        # DeepSpeed scales losses, and we scale sums: a power of two rounds neither
        result = try_update(
            engine, world, update, rate=1e-3, spec=options["spec"], total_labels=128
        )
        assert result.was_made
        found.losses.append(float(result.cross_entropy))
        found.norms.append(result.gradient_norm)
        found.scales.append(engine._zero.loss_scale)
    found.state = pieces(engine)
    return found


TOPOLOGIES = [(DENSE, 2, 1), (SPEC, 1, 1), (SPEC, 4, 2)]
"""Model, ranks and ranks that share experts; the last has copies of each share."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("spec", "size", "parallel_size"),
    TOPOLOGIES,
    ids=[f"{'dense' if spec is DENSE else 'moe'}-{w}-{ep}" for spec, w, ep in TOPOLOGIES],
)
def test_updates_are_those_of_deepspeeds_own_step(
    request: pytest.FixtureRequest,
    spec: ModelSpec,
    size: int,
    parallel_size: int,
    precision: Precision,
) -> None:
    """Clipped gradients are rounded otherwise, which a second update would magnify."""
    pool: ProcessPool = request.getfixturevalue(f"pool{size}")
    # DeepSpeed divides by a loss scale that it has just raised: end before the first raise
    number = 2 if precision == "fp16" else UPDATES
    # in fp16, DeepSpeed computes with the loss times the ranks, and averages afterwards
    ranks = size if precision == "fp16" else 1
    options: dict[str, Any] = {"spec": spec, "parallel_size": parallel_size}
    for updates, clip_norm in ((number, 1e6), (1, CLIP_NORM)):
        options |= {"precision": precision, "number": updates, "clip_norm": clip_norm}
        power = 10 + ranks.bit_length() - 1
        ours = pool.run(make_updates, path="flat", scale_power=power, **options)
        theirs = pool.run(make_updates, path="DeepSpeed", **options)
        assert min(theirs[0].norms) > CLIP_NORM
        for found, expected in zip(ours, theirs, strict=True):
            assert found.losses == pytest.approx(expected.losses, rel=1e-6)
            assert found.norms == pytest.approx(expected.norms, rel=1e-6)
            assert expected.scales == [scale / ranks for scale in found.scales]
            for what in ("master", "exp_avg", "exp_avg_sq"):
                assert distance(found.state, expected.state, what) <= 1e-6


def distance(state: dict[str, Tensor], other: dict[str, Tensor], what: str) -> float:
    """Return the norm of the difference of all values of a kind, divided by their norm.

    The gradients of key biases are pure rounding, which Adam divides by.
    """
    assert state.keys() == other.keys()
    names = [n for n in state if n.startswith(f"{what} ") and ".key.bias" not in n]
    values = torch.cat([other[name].flatten() for name in names])
    return float(
        (torch.cat([state[name].flatten() for name in names]) - values).norm() / values.norm()
    )


# ---------------------------------------------------------------- gradients that are not finite


def poisoned_update(world: World, /, *, poison: float, name: str, **options: Any) -> None:
    """An update whose gradient is not finite changes nothing, and the next one is as without it.

    One value of one gradient on the last rank is ``poison``.
    """
    engine, clean = (engine_of(world, **options) for _ in range(2))
    for each in (engine, clean):
        try_update(each, world, 0, rate=1e-3)

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = poison
        return gradient

    [parameter] = [p for n, p in engine.model.named_parameters() if n == name]
    before = pieces(engine), steps(engine), engine.loss_scale
    hook = parameter.register_hook(spoil) if world.rank == world.size - 1 else None
    result = try_update(engine, world, 1, rate=1e-3)
    if hook is not None:
        hook.remove()
    assert not result.was_made
    assert result.gradient_norm == float("inf")
    after = pieces(engine), steps(engine), engine.loss_scale
    assert before[1] == after[1] == {1.0}
    assert all(torch.equal(value, after[0][key]) for key, value in before[0].items())
    assert all(
        torch.equal(ours, others)
        for ours, others in zip(engine.model.parameters(), clean.model.parameters(), strict=True)
    )
    if engine.loss_scale is not None:
        assert before[2] is not None
        assert after[2] is not None
        assert after[2].hysteresis == before[2].hysteresis - 1
        engine.restore_loss_scale(before[2])
    for each in (engine, clean):
        assert try_update(each, world, 1, rate=1e-3).was_made
    others = pieces(clean)
    assert all(torch.equal(value, others[key]) for key, value in pieces(engine).items())
    assert steps(engine) == {2.0}


NORM, EXPERTS = "decoder.final_norm.weight", "encoder.layers.1.feed_forward.experts.up.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "poison", "name"),
    [
        *(("fp32", float("nan"), EXPERTS), ("fp32", float("inf"), NORM)),
        *(("bf16", float("nan"), NORM), ("bf16", float("inf"), EXPERTS)),
        *(("fp16", float("nan"), NORM), ("fp16", float("inf"), EXPERTS)),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    pool2: ProcessPool, precision: Precision, poison: float, name: str
) -> None:
    pool2.run(poisoned_update, poison=poison, name=name, precision=precision, parallel_size=2)


# ---------------------------------------------------------------- other gradients


def update_with_an_unused_parameter(world: World, path: Path) -> tuple[Tensor, float]:
    """A parameter of threes that no loss depends on, after two updates, and the last norm."""

    def add_unused(model: nn.Module) -> None:
        initialize_weights(model, seed=1)  # type: ignore[arg-type]
        model.encoder.layers[0].unused = nn.Parameter(torch.full((5,), 3.0))  # type: ignore

    engine = engine_of(world, path=path, spec=DENSE, prepare=add_unused)
    norms = [
        try_update(engine, world, update, rate=1e-3, spec=DENSE).gradient_norm
        for update in range(2)
    ]
    [unused] = [p for n, p in engine.model.named_parameters() if n.endswith("unused")]
    return unused.detach().clone(), norms[-1]


def test_a_parameter_that_no_loss_depends_on_stays_as_it_is(pool2: ProcessPool) -> None:
    ours, theirs = (pool2.run(update_with_an_unused_parameter, path) for path in PATHS)
    for (unused, norm), (_, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(unused, torch.full((5,), 3.0))
        assert norm == pytest.approx(expected, rel=1e-6)


def norms_without_clipping(world: World, path: Path) -> list[float]:
    engine = engine_of(world, path=path, clip_norm=0.0)
    norms = [
        try_update(engine, world, n, rate=1e-3, total_labels=128).gradient_norm for n in range(2)
    ]
    return [*norms, *(float(value.norm()) for value in pieces(engine).values())]


def test_a_norm_of_zero_clips_nothing(pool1: ProcessPool) -> None:
    ours, theirs = (pool1.run(norms_without_clipping, path) for path in PATHS)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert min(ours[0][:2]) > 0.5


def state_after_scattering(world: World, scatters: bool) -> dict[str, Tensor]:
    engine = engine_of(world, parallel_size=2)
    with mock.patch.object(optim, "_scatters", return_value=scatters):
        for update in range(2):
            try_update(engine, world, update, rate=1e-3)
    return pieces(engine)


@pytest.mark.slow
def test_ranks_get_the_same_sums_in_parts_as_they_do_in_full(pool4: ProcessPool) -> None:
    """GPUs send each rank its part only; here gloo does so, too."""
    in_parts, in_full = (pool4.run(state_after_scattering, way) for way in (True, False))
    for ours, others in zip(in_parts, in_full, strict=True):
        for name, value in others.items():
            if ".key.bias" not in name:
                torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-9)


def state_with_experts_that_add(
    world: World, adds: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], int]:
    """The state after two updates, and the number of gradients that experts added themselves."""
    with mock.patch.object(optim, "_adds_at_once", return_value=adds):
        engine = engine_of(world, **options)
    batch = micro_batches(options["spec"], 0)[0]
    verdict = engine.verdict(batch, micro_batch=0, seed=1, total_labels=batch.num_labels)
    assert verdict.is_finite
    assert verdict.of_experts_is_finite
    for update in range(2):
        engine.rehearse(batch)
        try_update(engine, world, update, rate=1e-3, spec=options["spec"])
    parameters = trainable(engine.model)
    return pieces(engine), sum(hasattr(one, "main_gradient") for one in parameters)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("spec", "parallel_size"), [(DENSE, 1), (SPEC, 1), (SPEC, 2)])
def test_experts_that_add_their_gradients_themselves_get_the_same_updates(
    pool2: ProcessPool, spec: ModelSpec, parallel_size: int, precision: Precision
) -> None:
    """As they do in 16 bits on a GPU."""
    options = {"spec": spec, "parallel_size": parallel_size, "precision": precision}
    added, joined = (
        pool2.run(state_with_experts_that_add, adds, options) for adds in (True, False)
    )
    for (ours, adding), (others, none) in zip(added, joined, strict=True):
        assert none == 0
        assert (adding == 0) == (spec is DENSE)
        for name, value in others.items():
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_joined_for_a_gpu_lie_where_their_sums_do(dtype: torch.dtype) -> None:
    sizes = [torch.Size(size) for size in ((2, 3), (1,), (4,), ())]
    sums = FlatSums(torch.zeros(24), sizes, [0, 8, 9, 16])
    first, *others = (torch.randn(size).to(dtype) for size in sizes)
    tensors = (first.t().contiguous().t(), *others)
    sums.set(tensors)
    assert torch.equal(sums.buffer, sums._joined(tensors).float())
    sums.add(tensors)
    assert torch.equal(sums.buffer, 2 * sums._joined(tensors).float())
    assert sums.buffer.count_nonzero() == 12


def test_the_norm_of_many_values_is_exact_to_seven_digits() -> None:
    values = torch.randn(5_000_000, generator=torch.Generator().manual_seed(1))
    expected = float(values.double().square().sum())
    assert float(squared_norm([values[:3], values[3:]])) == pytest.approx(expected, rel=1e-7)


# ---------------------------------------------------------------- operators and waits

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "alias"}
"""Operators that compute nothing."""


class Operators(TorchDispatchMode):
    """Counts operators that compute something, and the host's reads of single values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.reads = 0
        self.on_host: set[int] = set()
        """Addresses of values that were copied to the host at once."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            self.reads += args[0].untyped_storage().data_ptr() not in self.on_host
        elif not function.is_view and name not in FREE:
            self.count += 1
        return function(*args, **(kwargs or {}))

    def copy(self, tensor: Tensor) -> Tensor:
        """Stands for ``Tensor.cpu``, which a tensor on the CPU would return as it is."""
        copied = tensor.clone()
        self.on_host.add(copied.untyped_storage().data_ptr())
        self.reads += 1
        return copied


@contextmanager
def counted() -> Iterator[Operators]:
    operators = Operators()
    with operators, mock.patch.object(Tensor, "cpu", lambda tensor: operators.copy(tensor)):
        yield operators


def operators_added(world: World, options: dict[str, Any]) -> tuple[float, float, int]:
    """Operators per pass and per update beyond forward and backward, and reads per update."""
    engine = engine_of(world, **options)
    batches = micro_batches(options.get("spec", SPEC), 0)[: MICRO_BATCHES // world.size]
    batches = [batches[0]] * len(batches)

    def bare() -> None:
        terms = training_loss(engine.model, batches[0], engine._loss_config)
        torch.autograd.grad(terms.objective, trainable(engine.model))

    def update(passes: int) -> Callable[[], object]:
        return lambda: engine.train_step(
            passes_of(batches[:1] * passes), total_labels=9, learning_rate=0
        )

    found = []
    update(1)()
    for call in (bare, update(1), update(2)):
        engine.model.train()
        with counted() as operators:
            call()
        found.append((operators.count, operators.reads))
    (bare_count, bare_reads), (one, reads), (two, _) = found
    per_pass = two - one - bare_count
    return per_pass, one - bare_count - per_pass, reads - bare_reads


@pytest.mark.parametrize(
    ("size", "precision"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (2, "fp16")]
)
def test_an_update_adds_few_operators_and_one_read_whatever_the_number_of_parameters(
    request: pytest.FixtureRequest, size: int, precision: Precision
) -> None:
    pool: ProcessPool = request.getfixturevalue(f"pool{size}")
    options = {"parallel_size": size, "precision": precision}
    assert len(trainable(build_model(SPEC))) > 50
    for per_pass, per_update, reads in pool.run(operators_added, options):
        assert 0 < per_pass <= 10
        assert 0 < per_update <= 30
        assert reads == 1


# ---------------------------------------------------------------- which ds_configs, which DeepSpeed


def test_zero_1_has_flat_gradients_unless_deepspeeds_own_path_is_asked_for() -> None:
    flat = {name for name in ds_config_names() if has_flat_gradients(load_ds_config(name))}
    assert flat == {"cpu_fp32", "zero1_bf16"}
    for zero in ({"overlap_comm": True}, {"offload_optimizer": {"device": "cpu"}}, {"stage": 2}):
        assert not has_flat_gradients({"zero_optimization": {"stage": 1, **zero}})
    for keys in ({"data_types": {"grad_accum_dtype": "bf16"}}, {"communication_data_type": "fp16"}):
        assert not has_flat_gradients({"zero_optimization": {"stage": 1}, **keys})
    for has_moments in (False, True):
        in_bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": has_moments}
        assert not has_flat_gradients({"zero_optimization": {"stage": 1}, "bf16": in_bf16})
    assert has_flat_gradients({"zero_optimization": {"stage": 1}})


def names_missing(world: World) -> list[str]:
    engine = engine_of(world)
    return [n for n in (*ZERO_ATTRIBUTES, *ENGINES_OWN) if not hasattr(engine._zero, n)]


ENGINES_OWN = ("loss_scale", "loss_scaler", "optimizer", "overflow", "param_groups")


def test_deepspeeds_zero_optimizer_has_the_private_names_that_are_used(pool1: ProcessPool) -> None:
    """Their meaning was read in DeepSpeed 0.19.8, and has to be read again in other releases."""
    assert deepspeed.__version__.startswith("0.19."), "pyproject.toml allows no other"
    assert pool1.run(names_missing) == [[]]
