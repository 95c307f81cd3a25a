"""One feed-forward per language: those of its sentences, and the one of all on its route."""

import pytest
import torch
from support.tiny_models import EOS_ID, random_examples, tiny_model, tiny_spec
from torch import nn

from pipeline.batching.batch import Packing, collate
from pipeline.extensions.language_modules.language_experts import LanguageExperts
from pipeline.model.parameters import count_parameters_of, named_slices
from pipeline.model.tokens import Tokens

MODULES = {"kind": "language_experts", "shared": True}


def experts_and_tokens(*, route: str) -> tuple[LanguageExperts, Tokens]:
    model = tiny_model(tiny_spec(model={"language_modules": MODULES}))
    layer = next(iter(model.decoder_layers())).feed_forward
    assert isinstance(layer, LanguageExperts)
    packing = Packing.from_lengths([2, 3, 1])
    target_B = torch.tensor([3, 1, 3])
    tokens = Tokens(
        packing.sentence_N,
        packing.position_N,
        torch.zeros_like(target_B),
        target_B,
        torch.zeros_like(target_B),
        route="shared" if route == "shared" else "specific",
    )
    return layer, tokens


@pytest.mark.parametrize("route", ["specific", "shared"])
def test_a_row_is_served_by_its_target_language_in_the_decoder_or_by_the_shared_one(
    route: str,
) -> None:
    layer, tokens = experts_and_tokens(route=route)
    x_ND = torch.randn(6, 16)
    found, _ = layer(x_ND, tokens)
    up, down = layer.of_language.up, layer.of_language.down
    for row, language in enumerate(tokens.target_language_N.tolist()):
        if route == "shared":
            expected = layer.down(torch.relu(layer.up(x_ND[row])))
        else:
            hidden = torch.relu(up.weight[language] @ x_ND[row] + up.bias[language])
            expected = down.weight[language] @ hidden + down.bias[language]
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-5)


def test_gradients_are_those_of_a_feed_forward_per_language() -> None:
    layer, tokens = experts_and_tokens(route="specific")
    x_ND = torch.randn(6, 16, requires_grad=True)
    found, _ = layer(x_ND, tokens)
    found.square().sum().backward()
    up, down = layer.of_language.up, layer.of_language.down
    rows = tokens.target_language_N == 3
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    weights = (up.weight[3], up.bias[3], down.weight[3], down.bias[3])
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), weights, strict=True):
            parameter.copy_(value)
    plain(x_ND.detach()[rows]).square().sum().backward()
    stacked = (up.weight, up.bias, down.weight, down.bias)
    for one, parameter in zip(stacked, plain.parameters(), strict=True):
        assert one.grad is not None
        assert parameter.grad is not None
        torch.testing.assert_close(one.grad[3], parameter.grad, rtol=1e-5, atol=1e-5)
        assert one.grad[[0, 2]].abs().max() == 0


def test_a_mixed_batch_is_the_batches_of_its_directions() -> None:
    spec = tiny_spec(model={"language_modules": MODULES})
    model = tiny_model(spec)
    examples = random_examples(spec, sentences=8, seed=2)
    together = model(collate(examples, eos_id=EOS_ID)).logits_LV
    apart = torch.cat([model(collate([one], eos_id=EOS_ID)).logits_LV for one in examples])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6 * apart.abs().max().item())


def test_languages_start_from_values_of_their_own() -> None:
    model = tiny_model(tiny_spec(model={"language_modules": MODULES}))
    values = [e.value for e in named_slices(model) if ".0.feed_forward.of_language." in e.name]
    of_up = [one for one in values if one.dim() == 2]
    assert len({tuple(one.flatten().tolist()) for one in of_up}) == len(of_up) == 2 * 2 * 4


def test_a_token_meets_one_of_them() -> None:
    plain = count_parameters_of(tiny_spec())
    counts = count_parameters_of(tiny_spec(model={"language_modules": MODULES}))
    one = 2 * 16 * 32 + 16 + 32
    assert counts["language modules"] == 4 * 4 * one
    assert counts["active"] == plain["total"], "that of a language, or the shared one"
