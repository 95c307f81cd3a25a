"""Gated projections: their two ends, their noise, their budget, their tables."""

import copy

import pytest
import torch
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.extensions.language_modules import ClsrConfig
from pipeline.extensions.language_modules.clsr import ConditionalRouting, Gate, Projections
from pipeline.kernels.noise import Noise
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, tensor_shapes
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

SUBLAYERS = 2 * 2 + 2 * 3
"""Of two encoder and two decoder layers."""


def spec_of(**modules: object) -> ModelSpec:
    config = ClsrConfig.model_validate({"gate_width": 4, **modules})
    return tiny_spec(model={"language_modules": config.model_dump()})


def routing_of(*, bias: float, has_shared: bool = True) -> tuple[ConditionalRouting, Projections]:
    """One whose gate is decided by its bias alone."""
    torch.manual_seed(1)
    table = Projections(("de", "en", "fr"), width=6, kept=None, starts_as_identity=False)
    gate = Gate(width=6, gate_width=4)
    shared = nn.Linear(6, 6) if has_shared else None
    with torch.no_grad():
        table.weight.normal_()
        gate.down.weight.zero_()
        gate.down.bias.fill_(bias)
    return ConditionalRouting(gate, table, owns_projections=False, shared=shared), table


def by_equation(
    routing: ConditionalRouting, table: Projections, y_ND: Tensor, *, gate: float
) -> Tensor:
    """g · y W_lang + (1 - g) · y W_shared, token by token; y itself where W_shared is none."""
    languages = tokens_of().target_language_N.tolist()
    specific = torch.stack([table.weight[s] @ y for s, y in zip(languages, y_ND, strict=True)])
    shared = y_ND
    if isinstance(routing.shared, nn.Linear):
        shared = y_ND @ routing.shared.weight.T + routing.shared.bias
    return gate * specific + (1 - gate) * shared


def tokens_of(*, progress: float = 0.0, noise: Noise | None = None) -> Tokens:
    packing = Packing.from_lengths([2, 1, 3])
    language_B = torch.tensor([2, 0, 2])
    return Tokens(
        packing.sentence_N,
        packing.position_N,
        torch.ones_like(language_B),
        language_B,
        torch.zeros_like(language_B),
        progress=progress,
        noise=noise,
    )


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("bias", "gate"), [(3.0, 1.0), (0.0, 1.0), (-3.0, 0.0)])
def test_without_training_a_gate_is_one_of_the_two_linear_maps(
    bias: float, gate: float, has_shared: bool
) -> None:
    """A logit of 0 opens the gate, as in the authors' code."""
    routing, table = routing_of(bias=bias, has_shared=has_shared)
    x_ND, y_ND = torch.randn(6, 6), torch.randn(6, 6)
    found, gate_N = routing.eval()(x_ND, y_ND, tokens_of())
    assert gate_N.tolist() == [gate] * 6
    expected = by_equation(routing, table, y_ND, gate=gate)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_shared", [True, False])
def test_in_training_both_maps_are_mixed_by_the_gate(has_shared: bool) -> None:
    routing, table = routing_of(bias=0.4, has_shared=has_shared)
    x_ND, y_ND = torch.randn(6, 6), torch.randn(6, 6)
    found, gate_N = routing.train()(x_ND, y_ND, tokens_of())
    gate = torch.sigmoid(torch.tensor(0.4))
    torch.testing.assert_close(gate_N, gate.expand(6))
    expected = by_equation(routing, table, y_ND, gate=float(gate))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_noise_grows_with_the_share_of_training_that_is_done() -> None:
    routing, _ = routing_of(bias=0.0)
    tokens, x_ND = tokens_of(progress=0.0), torch.zeros(6, 6)
    assert routing.gate(x_ND, tokens).tolist() == [0.5] * 6
    logits = {}
    for progress in (0.25, 1.0):
        keys = Noise(torch.zeros(4000).int(), torch.arange(4000).int())
        gate_N = routing.gate(torch.zeros(4000, 6), tokens_of(progress=progress, noise=keys))
        logits[progress] = torch.logit(gate_N.double(), eps=1e-12)
    assert float(logits[0.25].detach().std()) == pytest.approx(1.25, rel=0.05)
    torch.testing.assert_close(logits[1.0][:50], 4 * logits[0.25][:50], rtol=1e-2, atol=1e-2)


def test_the_loss_holds_the_mean_of_all_gates_to_the_budget() -> None:
    spec = spec_of()
    model = tiny_model(spec)
    batch = random_batch(spec, sentences=5, seed=1)
    config = LossConfig()
    gates = model(batch).gates
    assert len(gates) == SUBLAYERS
    mean = torch.cat(gates).mean()
    expected = batch.num_labels * (mean - 0.3).abs()
    terms = training_loss(model, batch, config)
    of_gates = terms.objective - terms.cross_entropy
    torch.testing.assert_close(of_gates, expected, rtol=1e-4, atol=1e-4)


def test_a_side_has_one_table_or_every_sublayer_its_own() -> None:
    def tables(spec: ModelSpec) -> set[str]:
        names = [name for name in tensor_shapes(spec) if "projections" in name]
        return {name.partition(".projections.")[0] for name in names}

    assert tables(spec_of()) == {"encoder", "decoder"}
    assert len(tables(spec_of(tables="per_sublayer"))) == SUBLAYERS
    names = [name for name in tensor_shapes(spec_of()) if name.startswith("encoder.projections")]
    assert names == [f"encoder.projections.{code}.weight" for code in ("de", "en", "fr", "ru")]


@pytest.mark.parametrize("tables", ["per_side", "per_sublayer"])
def test_every_sublayer_has_a_shared_map_in_place_of_attentions_output(tables: str) -> None:
    zhang, sizes = (
        tensor_shapes(spec_of(tables=tables, shared_projection=kind))
        for kind in ("per_sublayer", "none")
    )
    replaced, added = set(sizes) - set(zhang), set(zhang) - set(sizes)
    assert len(replaced) == 2 * (2 + 4)
    assert all(
        name.endswith(("attention.output.weight", "attention.output.bias")) for name in replaced
    )
    assert len(added) == 2 * SUBLAYERS
    assert all("_routing.shared." in name for name in added)


def test_the_decoders_attention_to_the_source_can_stay_as_it_is() -> None:
    names = tensor_shapes(spec_of(cross_attention=False, tables="per_sublayer"))
    assert not [name for name in names if "cross_attention_routing" in name]
    routed = {name.partition("_routing.")[0] for name in names if "_routing." in name}
    assert len(routed) == SUBLAYERS - 2
    assert "decoder.layers.0.cross_attention.output.weight" in names


def test_without_shared_maps_they_start_as_the_plain_model() -> None:
    spec = spec_of(shared_projection="none", tables="per_sublayer")
    batch = random_batch(spec, sentences=5, seed=1)
    found = tiny_model(spec).train()(batch, progress=0.7).logits_LV
    expected = tiny_model(tiny_spec())(batch).logits_LV
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_initial_values_are_those_of_the_authors_code() -> None:
    """One Xavier-uniform matrix of L rows and D² columns; the rest Xavier-uniform, biases 0."""
    model = build_model(spec_of())
    initialize_weights(model, seed=1)
    found = {name: one.detach() for name, one in model.named_parameters()}
    table = nn.init.xavier_uniform_(torch.empty(4, 16 * 16))
    weight = found["encoder.projections.weight"]
    assert float(weight.std()) == pytest.approx(float(table.std()), rel=0.1)
    assert float(weight.abs().max()) == pytest.approx(float(table.abs().max()), rel=0.05)
    for name in ("self_attention_routing.shared", "feed_forward_routing.gate.up"):
        weight = found[f"decoder.layers.0.{name}.weight"]
        linear = nn.init.xavier_uniform_(torch.empty(weight.shape))
        assert float(weight.abs().max()) == pytest.approx(float(linear.abs().max()), rel=0.1)
        assert not found[f"decoder.layers.0.{name}.bias"].any()


def test_the_gradient_of_the_shared_table_is_the_sum_over_its_sublayers() -> None:
    shared, apart = tiny_model(spec_of()), tiny_model(spec_of(tables="per_sublayer"))
    theirs = dict(apart.named_parameters())
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            if name in theirs:
                theirs[name].copy_(parameter)
        for name, parameter in apart.named_parameters():
            if "projections" in name:
                side = name.partition(".")[0]
                parameter.copy_(dict(shared.named_parameters())[f"{side}.projections.weight"])
    batch = random_batch(shared.spec, sentences=5, seed=1)
    sums: list[dict[str, Tensor]] = []
    for model in (shared, apart):
        model = copy.deepcopy(model).train()
        model(batch).logits_LV.square().sum().backward()
        sums.append({"encoder": torch.zeros(()), "decoder": torch.zeros(())})
        for name, parameter in model.named_parameters():
            if "projections" in name:
                assert parameter.grad is not None
                side = name.partition(".")[0]
                sums[-1][side] = sums[-1][side] + parameter.grad
    for side in ("encoder", "decoder"):
        torch.testing.assert_close(sums[0][side], sums[1][side], rtol=1e-4, atol=1e-3)
