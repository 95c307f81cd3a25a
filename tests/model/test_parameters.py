"""Weights by name: views into memory, and initial values that depend only on name and seed."""

import math
from typing import cast

import numpy as np
import pytest
import torch
from support.stored_checkpoints import weights_of as values
from support.tiny_models import PAD_ID, tiny_spec
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.errors import ConfigError
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.parameters import (
    initialize,
    initialize_weights,
    named_slices,
    select_experts,
    tensor_shapes,
)
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer

MOE = MoEConfig(num_experts=4, top_k=2, every=2)


def moe_spec(**changes: int) -> ModelSpec:
    return tiny_spec(moe=MOE, groups=3, **changes)  # type: ignore[arg-type]


def initialized(spec: ModelSpec, *, seed: int = 1) -> Transformer:
    model = build_model(spec)
    initialize_weights(model, seed=seed)
    return model


def rank_of_two(spec: ModelSpec, rank: int) -> Transformer:
    """What one of two expert-parallel ranks holds; the group is not used to build it."""
    parallel = ExpertParallel(group=cast(ProcessGroup, None), rank=rank, size=2)
    model = build_model(spec, expert_parallel=parallel)
    initialize_weights(model, seed=1)
    return model


def test_an_artifact_has_a_tensor_per_expert_and_one_name_per_dense_tensor() -> None:
    spec = moe_spec()
    shapes = tensor_shapes(spec)
    width, hidden = spec.model.width, spec.model.feed_forward_width
    layer = "encoder.layers.1.feed_forward"
    experts = {name for name in shapes if name.startswith(f"{layer}.")}
    assert experts == {f"{layer}.router.weight"} | {
        f"{layer}.experts.{expert}.{linear}.{part}"
        for expert in range(4)
        for linear in ("up", "down")
        for part in ("weight", "bias")
    }
    assert shapes[f"{layer}.experts.3.up.weight"] == (hidden, width)
    assert shapes[f"{layer}.experts.3.down.bias"] == (width,)
    assert shapes["encoder.layers.0.feed_forward.up.weight"] == (hidden, width)
    assert shapes["decoder.layers.1.feed_forward.router.group_weight"] == (3, 4, width)
    assert shapes["embedding.weight"] == (spec.vocabulary_size, width)
    model = initialized(spec)
    assert {name: value.shape for name, value in values(model).items()} == shapes
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(map(torch.Size.numel, shapes.values())) == count


def test_slices_are_views_that_begin_at_their_offset() -> None:
    model = initialized(moe_spec())
    for entry in named_slices(model):
        entry.value.fill_(7.0)
        flat = entry.parameter.detach().flatten()
        stop = entry.offset + entry.value.numel()
        assert torch.equal(flat[entry.offset : stop], torch.full_like(flat[entry.offset : stop], 7))
        entry.value.fill_(0.0)
        assert entry.parameter.detach()[...].flatten()[entry.offset : stop].count_nonzero() == 0
    assert all(parameter.count_nonzero() == 0 for parameter in model.parameters())


def test_two_expert_parallel_ranks_hold_together_what_one_process_holds() -> None:
    spec = moe_spec()
    whole, ranks = values(initialized(spec)), [values(rank_of_two(spec, rank)) for rank in (0, 1)]
    owned = [{name for name in held if ".experts." in name} for held in ranks]
    assert not owned[0] & owned[1]
    assert set(ranks[0]) | set(ranks[1]) == set(whole)
    assert {name.split(".experts.")[1].split(".")[0] for name in owned[1]} == {"2", "3"}
    for held in ranks:
        for name, value in held.items():
            assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("inner", ["weight", "positions.weight", "network.positions"])
def test_all_tensors_of_a_router_begin_uniformly(inner: str) -> None:
    name = f"decoder.layers.1.feed_forward.router.{inner}"
    value = initialize(name, torch.Size([400, 30]), spec=tiny_spec(), seed=1)
    assert 0.24 < value.abs().max() < 0.25 == tiny_spec().model.width ** -0.5
    assert value.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.02)


def test_initial_values_depend_on_name_and_seed_only() -> None:
    small, large = values(initialized(tiny_spec())), values(initialized(moe_spec(layers=4)))
    shared = set(small) & set(large)
    assert "encoder.layers.0.self_attention.query.weight" in shared
    assert "decoder.layers.0.feed_forward.down.weight" in shared
    for name in shared:
        assert torch.equal(small[name], large[name]), name
    torch.manual_seed(5)
    again = values(initialized(moe_spec(layers=4)))
    assert all(torch.equal(value, large[name]) for name, value in again.items())
    other = values(initialized(tiny_spec(), seed=2))
    random = [name for name, value in small.items() if value.dim() > 1]
    assert all(not torch.equal(small[name], other[name]) for name in random)
    experts = [v for name, v in large.items() if ".experts." in name and v.dim() == 2]
    distinct = {value.flatten().numpy().tobytes() for value in experts}
    assert len(distinct) == len(experts) == 4 * 2 * 4


def drawn(name: str, *shape: int, width: int = 64) -> Tensor:
    spec = tiny_spec(width=width)
    return initialize(name, torch.Size(shape), spec=spec, seed=1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.layers.0.feed_forward.up.weight", (96, 64)),
        ("encoder.layers.1.feed_forward.experts.3.down.weight", (64, 96)),
        ("decoder.layers.0.cross_attention.key.weight", (64, 96)),
    ],
)
def test_linear_weights_are_xavier_uniform(name: str, shape: tuple[int, int]) -> None:
    value, reference = drawn(name, *shape), torch.empty(shape)
    torch.nn.init.xavier_uniform_(reference)
    assert float(value.abs().max()) == pytest.approx(float(reference.abs().max()), rel=0.01)
    assert float(value.std()) == pytest.approx(float(reference.std()), rel=0.05)


@pytest.mark.parametrize(
    ("name", "shape", "reference"),
    [
        ("self_attention.query.weight", (64, 64), math.sqrt(6 / 128) / math.sqrt(2)),
        ("cross_attention.value.weight", (64, 64), math.sqrt(6 / 128) / math.sqrt(2)),
        ("self_attention.key.bias", (64,), 1 / 8),
        ("self_attention.output.weight", (64, 64), math.sqrt(6 / 128)),
        ("self_attention.output.bias", (64,), 0),
        ("feed_forward.up.weight", (100, 64), 1 / 8),
        ("feed_forward.experts.3.up.bias", (100,), 1 / 8),
        ("feed_forward.experts.3.down.weight", (64, 100), 1 / 10),
        ("feed_forward.down.bias", (64,), 1 / 10),
        ("feed_forward_norm.bias", (64,), 0),
    ],
)
def test_fairseqs_linear_layers_are_uniform_within_its_bounds(
    name: str, shape: tuple[int, ...], reference: float
) -> None:
    spec = tiny_spec(width=64, feed_forward_width=100, model={"initialization": "fairseq"})
    value = initialize(f"decoder.layers.0.{name}", torch.Size(shape), spec=spec, seed=1)
    assert float(value.abs().max()) <= reference
    assert float(value.abs().max()) == pytest.approx(reference, rel=0.05)
    assert float(value.std()) == pytest.approx(reference / math.sqrt(3), rel=0.2)


def test_a_fairseq_model_has_zero_biases_only_where_fairseq_has() -> None:
    spec = moe_spec()
    model = spec.model.model_copy(update={"initialization": "fairseq"})
    found = values(initialized(spec.model_copy(update={"model": model})))
    zero = {name.split(".")[-2] for name, value in found.items() if not value.any()}
    assert zero == {"output", *(name for name in zero if name.endswith("norm"))}
    plain = values(initialized(spec))
    same = {name for name in found if torch.equal(found[name], plain[name])}
    assert {"embedding.weight"} | {name for name in found if ".router." in name} <= same
    assert not any(".query." in name or ".up." in name for name in same)


@pytest.mark.parametrize("name", ["weight", "group_weight"])
def test_routers_are_uniform_within_the_root_of_the_width(name: str) -> None:
    value = drawn(f"decoder.layers.1.feed_forward.router.{name}", 5, 32, 64)
    assert 0.99 / 8 < float(value.abs().max()) <= 1 / 8
    assert float(value.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert not torch.equal(value[0], value[1])


@pytest.mark.parametrize("name", ["embedding.weight", "encoder.positions.weight"])
def test_embeddings_and_positions_have_unit_expected_norm(name: str) -> None:
    value = drawn(name, 500, 64)
    assert float(value[2:].std()) == pytest.approx(1 / 8, rel=0.02)
    assert float(value.square().sum(-1)[2:].mean()) == pytest.approx(1, rel=0.05)
    assert (value[PAD_ID].count_nonzero() == 0) == (name == "embedding.weight")


def test_biases_start_at_zero_and_norms_as_the_identity() -> None:
    for name, value in values(initialized(moe_spec())).items():
        if value.dim() > 1:
            assert value.count_nonzero() > 0, name
        else:
            expected = 1.0 if name.endswith("norm.weight") else 0.0
            assert torch.equal(value, torch.full_like(value, expected)), name


def test_a_parameter_that_no_rule_covers_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"front\.factor \(16,\) .* method initial_value"):
        initialize("front.factor", torch.Size([16]), spec=tiny_spec(), seed=1)


@pytest.mark.parametrize(
    "made", [None, torch.zeros(3), np.zeros(16), torch.full((16,), torch.nan)], ids=type
)
def test_an_initial_value_that_is_none_is_named(made: object) -> None:
    owner = nn.Module()
    owner.initial_value = lambda *_, **__: made  # type: ignore[assignment]
    told = r"of Module returned no tensor of finite numbers .* \(16,\) for front\.factor"
    with pytest.raises(ConfigError, match=told):
        initialize("front.factor", torch.Size([16]), spec=tiny_spec(), seed=1, owner=owner)


@pytest.mark.parametrize("shape", [(8, 3), (5, 2)])
def test_a_routers_tensor_of_another_number_than_its_experts_is_refused(
    shape: tuple[int, int],
) -> None:
    """Of two rows for each of four experts, or one more than these, three of them keep some."""
    kept, wanted = (0, 2, 3), (6, 3) if shape == (8, 3) else (4, 2)
    with pytest.raises(ConfigError, match=r"a tensor .* not known what 3 experts keep"):
        select_experts(torch.ones(shape), kept, wanted)
    square = torch.arange(16).view(4, 4)
    assert select_experts(square, kept, (3, 3)).tolist() == [[0, 2, 3], [8, 10, 11], [12, 14, 15]]
