"""A mixture with one expert per token is the Switch Transformer's, as Hugging Face has it."""

import pytest
import torch
from support.tiny_models import tiny_spec, tokens_in_groups
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
)

from pipeline.config.recipe import load_recipe
from pipeline.model.moe.layer import MixtureOfExperts, build_mixture_of_experts
from pipeline.model.settings import MoEConfig
from pipeline.model.sublayer import Regularization

EXPERTS = 16


def ours_and_theirs() -> tuple[MixtureOfExperts, SwitchTransformersSparseMLP]:
    """With the same weights; theirs has no biases, and here no token is too many."""
    torch.manual_seed(1)
    moe = MoEConfig(num_experts=EXPERTS, top_k=1, every=2, combine_weights="probability")
    spec = tiny_spec(moe=moe)
    ours = build_mixture_of_experts(
        spec, moe, side="encoder", regularization=Regularization(), expert_parallel=None
    )
    config = SwitchTransformersConfig(  # type: ignore[no-untyped-call]
        d_model=16,
        d_ff=32,
        num_experts=EXPERTS,
        expert_capacity=1000,
        router_bias=False,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    theirs = SwitchTransformersSparseMLP(config).eval()
    with torch.no_grad():
        for parameter in (*ours.parameters(), *theirs.parameters()):
            parameter.normal_(0, 0.3)
        ours.experts.up.bias.zero_()
        ours.experts.down.bias.zero_()
        weights = dict(theirs.named_parameters())
        weights["router.classifier.weight"].copy_(dict(ours.router.named_parameters())["weight"])
        for index in range(EXPERTS):
            expert = f"experts.expert_{index}"
            weights[f"{expert}.wi.weight"].copy_(ours.experts.up.weight[index])
            weights[f"{expert}.wo.weight"].copy_(ours.experts.down.weight[index])
    return ours, theirs


def test_every_token_gets_one_expert_times_its_raw_probability() -> None:
    ours, theirs = ours_and_theirs()
    x_ND = torch.randn(60, 16)
    found, record = ours(x_ND, tokens_in_groups(torch.zeros(60, dtype=torch.int64)))
    expected = theirs(x_ND[None])
    hidden = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(found, hidden.reshape(60, 16), rtol=0, atol=1e-5)
    assert len(record.expert_NC.unique()) > EXPERTS // 2


@pytest.mark.parametrize("name", ["switch16"])
def test_the_overlay_makes_any_recipe_a_switch_transformer(name: str) -> None:
    moe = load_recipe(f"demo_dense+{name}").model.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.every) == (16, 1, 2)
    assert moe.combine_weights == "probability"
    assert load_recipe(f"demo_dense+{name}").loss.balance_weight == 0.01
