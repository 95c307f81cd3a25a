"""Language modules make the same updates on any topology.

Low-rank modules, fuse distillation, gated projections and language experts × worlds of 1, 2 and 4;
language experts × expert-parallel sizes of 1, 2 and 4, too. There are five languages, so that ranks
have unequal shares of them, and one of four has nothing but padding; a micro-batch is of one target
language, so that most modules see no row on most ranks. The reference is plain PyTorch in one
process.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from support.parity_engine import CLIP_NORM, make_engine
from support.passes import passes_of
from support.plain_training import LEARNING_RATE, MICRO_BATCHES, micro_batches, set_weights
from support.process_pool import ProcessPool
from support.tiny_models import EVERYWHERE, perturb_vectors, tiny_model, tiny_spec
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.extensions.language_modules.language_experts import FeedForwardStack
from pipeline.model.parameters import initialize_weights, named_slices, tensor_shapes
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

pytestmark = pytest.mark.slow

UPDATES = 2
PROGRESS = 0.5
"""So that gates have noise."""
DISTILLED = {"objective": "fuse_distillation"}
TO_SHARED = {**DISTILLED, "distillation": "to_shared"}
EXPERTS = {"kind": "language_experts"}
KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "low rank": ({"kind": "low_rank", "rank": 2, "within": EVERYWHERE}, {}),
    "low rank, distilled": ({"kind": "low_rank", "rank": 2, "shared": True}, DISTILLED),
    "clsr": ({"kind": "clsr", "gate_width": 4}, {}),
    "experts, distilled": ({**EXPERTS, "shared": True}, TO_SHARED),
    "low rank, MoE": ({"kind": "low_rank", "rank": 2, "within": EVERYWHERE}, {}),
    "experts, MoE": (EXPERTS, {}),
    "distilled, MoE by groups": ({"kind": "low_rank", "rank": 2, "shared": True}, DISTILLED),
    "low rank, Ada-MSHA": ({"kind": "low_rank", "rank": 2, "within": EVERYWHERE}, {}),
}
CASES = [
    *((kind, world, 1) for kind in list(KINDS)[:4] for world in (1, 2, 4)),
    ("low rank, Ada-MSHA", 2, 1),
    *(("experts, distilled", *topology) for topology in ((2, 2), (4, 2), (4, 4))),
    *((kind, *topology) for kind in KINDS if "MoE" in kind for topology in ((2, 2), (4, 4))),
]
"""Kind, world, expert-parallel size."""


def setting(kind: str) -> tuple[ModelSpec, LossConfig]:
    """One layer a side; with MoE, two, of which the second has routed experts."""
    modules, loss = KINDS[kind]
    has_moe = "MoE" in kind
    front = {"front": {"kind": "ada_msha"}} if kind.endswith("Ada-MSHA") else {}
    spec = tiny_spec(
        layers=2 if has_moe else 1,
        languages=5,
        moe=MoEConfig(num_experts=8, every=2) if has_moe else None,
        groups=2 if kind.endswith("group") else 0,
        model={"language_modules": modules, **front},
    )
    return spec, LossConfig(balance_weight=0.1, label_smoothing=0.1, **loss)


def start(model: Transformer) -> None:
    """Weights under which low-rank modules do something."""
    if model.spec.model.moe is not None:
        set_weights(model)
    else:
        initialize_weights(model, seed=1)
        perturb_vectors(model, seed=1)
    for entry in named_slices(model):
        if entry.name.endswith(".flat"):
            generator = torch.Generator().manual_seed(len(entry.name))
            entry.value.normal_(0, 0.3, generator=generator)


def train(world: World, kind: str, *, parallel_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms, and what this rank holds of every tensor after the updates."""
    spec, loss = setting(kind)
    engine = make_engine(
        world,
        parallel_size=parallel_size,
        zero="ZeRO 2",
        precision="fp32",
        method="sgd",
        spec=spec,
        loss=loss,
        prepare=start,
    )
    norms = []
    for update in range(UPDATES):
        mine = range(world.rank, MICRO_BATCHES, world.size)
        batches = micro_batches(spec, update)
        result = engine.train_step(
            passes_of([batches[index] for index in mine], seeds=list(mine)),
            total_labels=sum(batch.num_labels for batch in batches),
            learning_rate=LEARNING_RATE,
            progress=PROGRESS,
        )
        norms.append(result.gradient_norm)
    padding = [
        parameter[len(module.held_slots) :]
        for module in engine.model.modules()
        if isinstance(module, FeedForwardStack)
        for parameter in module.parameters()
    ]
    assert not any(bool(one.any()) for one in padding)
    return norms, {entry.name: entry.value.clone() for entry in named_slices(engine.model)}


@cache
def plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    spec, loss = setting(kind)
    model = tiny_model(spec)
    start(model)
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    norms = []
    for update in range(UPDATES):
        optimizer.zero_grad()
        batches = micro_batches(spec, update)
        total = sum(batch.num_labels for batch in batches)
        for index, batch in enumerate(batches):
            keyed = batch.keyed(index)
            objective = training_loss(model, keyed, loss, progress=PROGRESS).objective
            (objective / total).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)))
        optimizer.step()
    return norms, {entry.name: entry.value.clone() for entry in named_slices(model)}


@pytest.mark.parametrize(("kind", "world_size", "parallel_size"), CASES)
def test_updates_are_those_of_one_plain_process(
    request: pytest.FixtureRequest, kind: str, world_size: int, parallel_size: int
) -> None:
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    ranks = pool.run(train, kind, parallel_size=parallel_size)
    norms, weights = plain(kind)
    assert set().union(*(held for _, held in ranks)) == set(tensor_shapes(setting(kind)[0]))
    for found_norms, held in ranks:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, value in held.items():
            expected = weights[name]
            bound = 1e-5 * max(float(expected.abs().max()), 1e-2)
            torch.testing.assert_close(value, expected, rtol=0, atol=bound, msg=name)


def of_languages(name: str) -> set[str]:
    return {"de", "en", "fr", "ru", "ja"} & set(name.split("."))


def test_a_rank_holds_its_share_of_the_languages_alone(pool4: ProcessPool) -> None:
    ranks = pool4.run(train, "experts, distilled", parallel_size=4)
    shares = [set().union(*map(of_languages, held)) for _, held in ranks]
    assert shares == [{"de", "en"}, {"fr", "ru"}, {"ja"}, set()]
