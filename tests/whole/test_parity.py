"""The parity matrix: every topology, ZeRO stage and precision makes the same updates.

ZeRO 1, 1 with overlap and 2 × fp32 and bf16 × worlds of 1, 2 and 4 × expert-parallel sizes of 1, 2
and 4, with accumulation that keeps the micro-batches. What depends on the topology or on ZeRO, but
not on both, runs once per topology, with each way of ZeRO in turn. In fp32 the reference is plain
PyTorch in one process (see ``test_engine.py``); in bf16, whose rounding depends on how a master
weight is kept, it is the same engine in one process. Kernels are chosen by size: in fp32 all
choices are made once far from, and once between, the sizes of the ranks' micro-batches; buckets are
small enough to be sent several times per backward pass. Every front of the encoder makes the
updates of plain PyTorch, too, in worlds of 1, 2 and 4. Then training states that move between
worlds of 2, 1, 4 and 2 ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from support.fronted_models import FRONTS, fronted_spec
from support.parity_engine import (
    ADAM,
    CLIP_NORM,
    SPEC,
    ZEROS,
    Method,
    Precision,
    make_engine,
    one_update,
)
from support.plain_training import LEARNING_RATE, MOE, plain_training
from support.process_pool import ProcessPool
from support.tiny_models import tiny_spec
from torch import Tensor

from pipeline.artifacts.artifact import ArtifactWriter, open_artifact
from pipeline.checkpoints.resharding import CheckedState, write_pieces
from pipeline.distributed.world import World
from pipeline.kernels import cpu
from pipeline.model.spec import ModelSpec
from pipeline.training.engine import Engine
from pipeline.training.optim import make_optimizer
from pipeline.training.run_directory import RunDirectory

pytestmark = pytest.mark.slow

UPDATES = 3
RATES = {"fp32": LEARNING_RATE, "bf16": LEARNING_RATE / 10}
"""In bf16 a rate at which the loss does not rise, so that rounding is not blown up."""
TOPOLOGIES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
MATRIX = [(*topology, zero) for topology in TOPOLOGIES for zero in ZEROS]
EACH_ONCE = [(*topology, zero) for topology, zero in zip(TOPOLOGIES, cycle(ZEROS), strict=False)]


@dataclass
class Run:
    """What one rank saw: losses summed over its micro-batches, norms, and its master weights."""

    losses: list[float]
    norms: list[float]
    first: dict[tuple[str, int], Tensor]
    """Master weights before the first update, by tensor and start."""
    second: dict[tuple[str, int], Tensor]
    """… after the first update."""
    last: dict[tuple[str, int], Tensor]


@dataclass
class Joined:
    """All ranks' figures; master weights as one vector in a fixed order."""

    losses: list[float]
    norms: list[float]
    first: Tensor
    second: Tensor
    last: Tensor
    names: list[str]
    parts: dict[str, Tensor]


@contextmanager
def thresholds_among_the_sizes(wanted: bool) -> Iterator[None]:
    """Choose kernels as if the sizes of these micro-batches were the ones that matter."""
    before = cpu.WORTH_OTHER_THREADS
    if wanted:
        cpu.WORTH_OTHER_THREADS = 16 * 32 * 16
        torch.set_num_threads(2)
    try:
        yield
    finally:
        cpu.WORTH_OTHER_THREADS = before
        torch.set_num_threads(1)


def masters(engine: Engine) -> dict[tuple[str, int], Tensor]:
    pieces = engine.optimizer_pieces()
    return {(p.tensor, p.start): p.values for p in pieces if p.what == "master"}


def train(
    world: World,
    *,
    parallel_size: int,
    zero: str,
    precision: Precision,
    method: Method,
    at_thresholds: bool = False,
    updates: int = UPDATES,
    spec: ModelSpec = SPEC,
) -> Run:
    engine = make_engine(
        world, parallel_size=parallel_size, zero=zero, precision=precision, method=method, spec=spec
    )
    rate = RATES[precision] if method == "sgd" else ADAM.learning_rate
    run = Run([], [], first=masters(engine), second={}, last={})
    with thresholds_among_the_sizes(at_thresholds):
        for update in range(updates):
            loss, norm = one_update(engine, world, update, rate=rate, spec=spec)
            run.losses.append(loss)
            run.norms.append(norm)
            if update == 0:
                run.second = masters(engine)
    run.last = masters(engine)
    return run


def join(runs: list[Run]) -> Joined:
    def vector(which: str) -> tuple[list[str], Tensor, dict[str, Tensor]]:
        pieces: dict[tuple[str, int], Tensor] = {}
        for run in runs:
            pieces |= getattr(run, which)
        parts: dict[str, list[Tensor]] = {}
        for (name, _), values in sorted(pieces.items()):
            parts.setdefault(name, []).append(values)
        whole = {name: torch.cat(values) for name, values in parts.items()}
        return list(whole), torch.cat([torch.empty(0), *whole.values()]), whole

    names, last, parts = vector("last")
    return Joined(
        losses=[sum(losses) for losses in zip(*(run.losses for run in runs), strict=True)],
        norms=runs[0].norms,
        first=vector("first")[1],
        second=vector("second")[1],
        last=last,
        names=names,
        parts=parts,
    )


@cache
def plain_sgd() -> tuple[list[float], list[float], dict[str, Tensor]]:
    trained, _ = plain_training(SPEC, clip_norm=CLIP_NORM, updates=UPDATES)
    return trained.cross_entropies, trained.norms, trained.weights


@cache
def plain_adam() -> Tensor:
    """All weights after the updates of plain PyTorch with the same optimizer."""
    trained, _ = plain_training(
        SPEC,
        clip_norm=CLIP_NORM,
        updates=UPDATES,
        make_optimizer=lambda parameters: make_optimizer(parameters, ADAM),
    )
    return torch.cat([trained.weights[name].flatten() for name in sorted(trained.weights)])


@pytest.mark.parametrize(
    ("world_size", "parallel_size", "zero", "at_thresholds"),
    [*((*case, False) for case in MATRIX), *((*case, True) for case in EACH_ONCE)],
)
def test_fp32_updates_by_sgd_are_those_of_one_plain_process(
    request: pytest.FixtureRequest,
    world_size: int,
    parallel_size: int,
    zero: str,
    at_thresholds: bool,
) -> None:
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    found = join(
        pool.run(
            train,
            parallel_size=parallel_size,
            zero=zero,
            precision="fp32",
            method="sgd",
            at_thresholds=at_thresholds,
        )
    )
    losses, norms, weights = plain_sgd()
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.norms == pytest.approx(norms, rel=1e-5)
    assert sorted(weights) == found.names
    for name, values in found.parts.items():
        expected = weights[name].flatten()
        assert (values - expected).abs().max() <= 1e-5 * expected.abs().max(), name
    clipped = (found.second - found.first).norm() / LEARNING_RATE
    assert norms[0] > CLIP_NORM
    assert float(clipped) == pytest.approx(CLIP_NORM, rel=1e-4)


FRONT_UPDATES = 2
FRONT_SPECS = {
    **{name: fronted_spec(front, moe=MOE, groups=2) for name, front in FRONTS.items()},
    "converter layers": tiny_spec(moe=MOE, groups=2, model={"converter_layers": 1}),
}


@cache
def plain_sgd_with(front: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    trained, _ = plain_training(FRONT_SPECS[front], clip_norm=CLIP_NORM, updates=FRONT_UPDATES)
    return trained.cross_entropies, trained.norms, trained.weights


@pytest.mark.parametrize(("world_size", "parallel_size"), [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("front", FRONT_SPECS)
def test_fp32_updates_with_every_front_are_those_of_one_plain_process(
    request: pytest.FixtureRequest, world_size: int, parallel_size: int, front: str
) -> None:
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    found = join(
        pool.run(
            train,
            parallel_size=parallel_size,
            zero="ZeRO 1 + overlap",
            precision="fp32",
            method="sgd",
            updates=FRONT_UPDATES,
            spec=FRONT_SPECS[front],
        )
    )
    losses, norms, weights = plain_sgd_with(front)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.norms == pytest.approx(norms, rel=1e-5)
    assert sorted(weights) == found.names
    for name, values in found.parts.items():
        expected = weights[name].flatten()
        assert (values - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize(("world_size", "parallel_size", "zero"), EACH_ONCE)
def test_fp32_updates_by_adam_reach_the_same_whole_model_norm(
    request: pytest.FixtureRequest, world_size: int, parallel_size: int, zero: str
) -> None:
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    found = join(
        pool.run(train, parallel_size=parallel_size, zero=zero, precision="fp32", method="adam")
    )
    assert float(found.last.norm()) == pytest.approx(float(plain_adam().norm()), rel=1e-5)


@pytest.fixture(scope="module")
def of_one_process(pool1: ProcessPool) -> Joined:
    """Updates in bf16."""
    return join(pool1.run(train, parallel_size=1, zero="ZeRO 1", precision="bf16", method="sgd"))


@pytest.mark.parametrize(("world_size", "parallel_size", "zero"), MATRIX)
def test_bf16_updates_follow_those_of_one_process(
    request: pytest.FixtureRequest,
    of_one_process: Joined,
    world_size: int,
    parallel_size: int,
    zero: str,
) -> None:
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    found = join(
        pool.run(train, parallel_size=parallel_size, zero=zero, precision="bf16", method="sgd")
    )
    plain_losses, _, _ = plain_sgd()
    assert found.losses == pytest.approx(of_one_process.losses, rel=2e-3)
    assert found.losses[0] == pytest.approx(plain_losses[0], rel=2e-3)
    ours = found.second - found.first
    theirs = of_one_process.second - of_one_process.first
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
    assert float(cosine) >= 0.999
    clipped = ours.norm() / RATES["bf16"]
    assert float(clipped) == pytest.approx(CLIP_NORM, rel=1e-3)


def continue_training(
    world: World,
    directory: Path,
    *,
    parallel_size: int,
    zero: str,
    updates: range,
    resume: str | None,
    save_as: str,
) -> Run:
    """Some updates by Adam, from a saved state to a saved state."""
    engine = make_engine(
        world, parallel_size=parallel_size, zero=zero, precision="fp32", method="adam"
    )
    runs = RunDirectory(directory / "model", stage="pretrain", config={}, inputs={}, world=world)
    if resume is not None:
        state = open_artifact(runs.states_dir / resume, kind="training_state")
        engine.load_optimizer_pieces(CheckedState(state), update=updates.start)
    run = Run([], [], first=masters(engine), second={}, last={})
    for update in updates:
        loss, norm = one_update(engine, world, update, rate=ADAM.learning_rate)
        run.losses.append(loss)
        run.norms.append(norm)
    pieces = list(engine.optimizer_pieces())

    def write(writer: ArtifactWriter) -> None:
        write_pieces(writer.directory / "optimizer", iter(pieces), part=world.rank)

    runs.write(runs.states_dir / save_as, kind="training_state", write=write)
    run.last = {(f"{p.what} {p.tensor}", p.start): p.values for p in pieces}
    return run


def test_a_state_that_moves_from_two_ranks_to_one_to_four_to_two_trains_as_if_it_had_stayed(
    pool1: ProcessPool, pool2: ProcessPool, pool4: ProcessPool, tmp_path: Path
) -> None:
    moves = [
        (pool2, 2, "ZeRO 1"),
        (pool1, 1, "ZeRO 2"),
        (pool4, 4, "ZeRO 1 + overlap"),
        (pool2, 1, "ZeRO 2"),
    ]
    losses: list[float] = []
    resume = None
    for turn, (pool, parallel_size, zero) in enumerate(moves):
        moved = join(
            pool.run(
                continue_training,
                tmp_path / "moved",
                parallel_size=parallel_size,
                zero=zero,
                updates=range(2 * turn, 2 * turn + 2),
                resume=resume,
                save_as=f"state-{turn}",
            )
        )
        losses += moved.losses
        resume = f"state-{turn}"
    stayed = join(
        pool2.run(
            continue_training,
            tmp_path / "stayed",
            parallel_size=2,
            zero="ZeRO 1",
            updates=range(2 * len(moves)),
            resume=None,
            save_as="state",
        )
    )
    assert losses == pytest.approx(stayed.losses, rel=1e-5)
    assert moved.names == stayed.names
    for what in ("master", "exp_avg", "exp_avg_sq"):
        names = [name for name in moved.parts if name.startswith(f"{what} ")]
        # gradients of key biases are pure rounding, which Adam divides by
        names = [name for name in names if not name.endswith(".key.bias")]
        ours = torch.cat([moved.parts[name] for name in names])
        theirs = torch.cat([stayed.parts[name] for name in names])
        assert len(ours) > 1000
        assert float((ours - theirs).norm() / theirs.norm()) <= 1e-6, what
