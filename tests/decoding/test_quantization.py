"""Tests of pipeline/decoding/quantization.py."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.searched_models import Kind, model_of, translate
from support.tiny_models import EOS_ID, random_examples, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.batching.batch import collate
from pipeline.decoding.quantization import QuantizedLinear, QuantizedStack, quantize
from pipeline.errors import ConfigError
from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.products import Linear
from pipeline.model.building import shape_of_model
from pipeline.model.moe.experts import Experts, StackedLinear
from pipeline.model.moe.layer import MixtureOfExperts


def by_integers(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """Compute the product in 64-bit whole numbers, which do not overflow."""
    scale_R1 = x_RI.abs().amax(1, keepdim=True)
    scale_O = weight_OI.abs().amax(1) / 127
    x = torch.round(x_RI / scale_R1 * 63).long()
    weight = torch.round(weight_OI / scale_O[:, None]).long()
    return (x @ weight.t()) * (scale_R1.double() / 63 * scale_O.double()) + bias_O


def assert_mostly_close(found: Tensor, expected: Tensor) -> None:
    close = (found.double() - expected).abs() < 1e-4
    assert close.double().mean() > 0.9  # but where a half was rounded to the other side


@pytest.mark.parametrize("value", ["random", "largest"])
def test_a_product_is_that_of_whole_numbers_and_overflows_nowhere(value: str) -> None:
    torch.manual_seed(1)
    x_RI, weight_OI, bias_O = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48)
    if value == "largest":
        x_RI, weight_OI = torch.ones(5, 64), torch.ones(48, 64)
        weight_OI[::2] = -1
    found = QuantizedLinear(weight_OI, bias_O)(x_RI)
    expected = by_integers(x_RI, weight_OI, bias_O)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-2)
    assert_mostly_close(found, expected)


def test_each_expert_s_product_is_that_of_whole_numbers_on_its_rows() -> None:
    torch.manual_seed(3)
    linear = StackedLinear(num_experts=4, in_features=16, out_features=24)
    for parameter in linear.parameters():
        nn.init.normal_(parameter)
    rows = [3, 0, 1, 5]
    x_RI = torch.randn(sum(rows), 16)
    with torch.no_grad():
        found = QuantizedStack(linear)(x_RI, torch.tensor(rows))
    parts = zip(x_RI.split(rows), linear.weight.detach(), linear.bias.detach(), strict=True)
    expected = torch.cat([by_integers(*part) for part in parts if len(part[0])])
    assert_mostly_close(found, expected)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0.1)


def test_experts_take_a_byte_per_weight_and_keep_no_other_copy() -> None:
    model = model_of("moe")
    stacks = [module for module in model.modules() if isinstance(module, StackedLinear)]
    weights = sum(stack.weight.numel() for stack in stacks)
    quantize(model)
    packed = [one for m in model.modules() if isinstance(m, QuantizedStack) for one in m.packed_E]
    unpacked = [torch.ops.quantized.linear_unpack(matrix)[0] for matrix in packed]
    assert sum(matrix.nbytes for matrix in unpacked) == weights
    assert not any(isinstance(module, Experts | StackedLinear) for module in model.modules())


def test_a_row_is_computed_as_if_it_were_alone() -> None:
    torch.manual_seed(2)
    layer = QuantizedLinear(torch.randn(7, 16), None)
    x_RI = torch.randn(6, 16) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 5.0, 1.0])[:, None]
    together = layer(x_RI)
    for row in range(6):
        assert torch.equal(layer(x_RI[row : row + 1])[0], together[row])
    assert not together[3].any()


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_single_row_by_the_loop_is_what_operators_give(has_bias: bool) -> None:
    torch.manual_seed(5)
    weight_OI, bias_O = torch.randn(24, 80), torch.randn(24) if has_bias else None
    packed = QuantizedLinear(weight_OI, bias_O)
    ours = QuantizedLinear(weight_OI, bias_O, for_single_rows=True)
    x_RI = torch.randn(6, 80) * torch.tensor([1e-42, 1e-3, 1.0, 1e3, 0.0, 1e30])[:, None]
    for x_I in x_RI:
        expected = packed(x_I[None])
        torch.testing.assert_close(ours(x_I[None]), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(x_I), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours(x_RI), packed(x_RI))
    with sparing_loops():
        assert torch.equal(ours(x_RI[:1]), packed(x_RI[:1]))
    x_RI[0, 7] = torch.nan
    assert ours(x_RI[:1]).isnan().all()
    largest = QuantizedLinear(torch.ones(3, 80), None, for_single_rows=True)
    torch.testing.assert_close(largest(torch.ones(1, 80)), torch.full((1, 3), 80.0))


def test_rows_are_scaled_whatever_they_hold() -> None:
    torch.manual_seed(4)
    weight_OI, bias_O = torch.randn(8, 16), torch.randn(8)
    layer = QuantizedLinear(weight_OI, bias_O)
    x_ABI = torch.randn(4, 3, 16) * torch.tensor([1e-42, 1e-3, 1.0, 1e30])[:, None, None]
    x_ABI[0, 0], x_ABI[1, 0, 5], x_ABI[2, 0, 3] = 0, torch.nan, torch.inf
    found = layer(x_ABI)
    assert found.isnan().any(2).nonzero().tolist() == [[1, 0]]
    exact = x_ABI.double() @ weight_OI.double().T + bias_O.double()
    largest = x_ABI.abs().amax(2, keepdim=True).double()
    error = (found - exact).abs() / (largest * weight_OI.abs().max() * 16 + bias_O.abs().max())
    assert error[error.isfinite()].max() < 0.01
    assert torch.equal(found[2, 0], torch.sign(weight_OI[:, 3]) * torch.inf)
    assert torch.equal(layer(x_ABI.mT.contiguous().mT)[3], found[3])


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-lgr", "moe-capacity"])
def test_a_model_in_8_bits_says_nearly_what_it_said(kind: Kind) -> None:
    model = model_of(kind, seed=3)
    examples = random_examples(model.spec, sentences=6, seed=3)
    batch = collate(examples, eos_id=EOS_ID)
    small = copy.deepcopy(model)
    quantize(small)
    assert not any(isinstance(module, Linear | Experts) for module in small.modules())
    with torch.no_grad():
        said, expected = (F.log_softmax(one(batch).logits_LV, 1) for one in (small, model))
    error = (said - expected).norm() / expected.norm()
    assert 0 < error < 0.1  # a tiny model changes more than a large one


@pytest.mark.parametrize(("beam_size", "kind"), [(1, "dense"), (4, "moe"), (4, "moe-lgr")])
def test_a_sentence_in_8_bits_is_translated_as_in_a_batch(kind: Kind, beam_size: int) -> None:
    model = model_of(kind, seed=3)
    quantize(model, for_single_rows=beam_size == 1)
    examples = random_examples(model.spec, sentences=5, seed=4, shortest=1, longest=20)
    together = translate(model, examples, beam_size=beam_size)
    for example, found in zip(examples, together, strict=True):
        (alone,) = translate(model, [example], beam_size=beam_size)
        assert alone.tokens == found.tokens


def test_a_model_elsewhere_than_on_the_cpu_is_refused() -> None:
    model = shape_of_model(model_of("dense").spec)
    model.group_of_language = model.group_of_language.to("meta")
    with pytest.raises(ConfigError, match="is for translating on CPU"):
        quantize(model)


class OwnRouter(nn.Module):
    """A router of two linear layers."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up, self.down = Linear(width, 8), Linear(8, experts)


@pytest.mark.parametrize("whole", [True, False])
def test_no_layer_of_a_router_is_in_8_bits(whole: bool) -> None:
    model = model_of("moe")
    layer = next(one for one in model.modules() if isinstance(one, MixtureOfExperts))
    layer.router = OwnRouter(16, 4) if whole else Linear(16, 4)
    quantize(model)
    assert not any(isinstance(one, QuantizedLinear) for one in layer.router.modules())


class OwnModule(nn.Module):
    """A module that reads the weights of its layers itself, or runs experts by itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, Linear(16, 32, bias=kind == "bias")
        sizes = {"num_experts": 2, "first_expert": 0, "width": 16, "hidden_width": 8}
        self.experts = Experts(**sizes, activation="relu")
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.kind == "experts":
            y_ND: Tensor = self.experts(x_ND, [len(x_ND) - 1, 1])
            return y_ND
        return F.linear(x_ND, self.up.weight, self.up.bias)[:, : self.up.in_features]


@pytest.mark.parametrize("kind", ["bias", "no bias", "experts"])
@torch.no_grad()
def test_a_module_that_reads_its_layers_itself_says_nearly_what_it_said(kind: str) -> None:
    model, x_ND = model_of("dense"), torch.randn(5, 16)
    own = model.own = OwnModule(kind)
    expected = own(x_ND)
    quantize(model)
    torch.testing.assert_close(own(x_ND), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("tables", ["per_side", "per_sublayer"])
def test_no_gate_of_language_modules_is_in_8_bits(tables: str) -> None:
    model = tiny_model(tiny_spec(model={"language_modules": {"kind": "clsr", "tables": tables}}))
    quantize(model)
    found = {name for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    assert not any("_routing" in name for name in found)
    assert "decoder.layers.0.self_attention.query" in found
