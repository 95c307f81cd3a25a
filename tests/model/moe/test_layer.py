"""The mixture of experts: against the dense layer, against a loop over tokens, and its balance."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import (
    EOS_ID,
    random_batch,
    random_examples,
    tiny_model,
    tiny_spec,
    tokens_in_groups,
)
from torch import Tensor, nn

from pipeline.batching.batch import collate
from pipeline.errors import ConfigError
from pipeline.extensions.language_modules.stack import LanguageStack
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.router import LanguageGroupRouter, TokenRouter, build_router
from pipeline.model.moe.routing import Routing, choose
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.sublayer import Regularization
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer

WIDTH = 16


def moe_layer(
    config: MoEConfig, *, regularization: Regularization | None = None
) -> MixtureOfExperts:
    """The MoE layer of a tiny encoder."""
    spec = tiny_spec(moe=config.model_copy(update={"every": 1}), width=WIDTH)
    model = tiny_model(spec, regularization=regularization)
    return cast(MixtureOfExperts, model.encoder.layers[0].feed_forward)


def random_tokens(count: int, *, seed: int = 1) -> tuple[Tensor, Tokens]:
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens_in_groups(torch.zeros(count, dtype=torch.int64))
    return torch.randn(count, WIDTH, generator=generator), tokens


def one_expert(layer: MixtureOfExperts, expert: int, x_D: Tensor) -> Tensor:
    up, down = layer.experts.up, layer.experts.down
    return F.linear(
        F.relu(F.linear(x_D, up.weight[expert], up.bias[expert])),
        down.weight[expert],
        down.bias[expert],
    )


def token_by_token(layer: MixtureOfExperts, x_ND: Tensor, kept: list[list[int]]) -> Tensor:
    """Each token's kept experts, weighted by their renormalised probabilities."""
    outputs = []
    for x_D, experts in zip(x_ND, kept, strict=True):
        probability_E = F.softmax(layer.router.weight @ x_D, dim=-1)
        total = sum(probability_E[e] for e in experts)
        y_D = torch.zeros(WIDTH)
        for expert in experts:
            y_D = y_D + probability_E[expert] / total * one_expert(layer, expert, x_D)
        outputs.append(y_D)
    return torch.stack(outputs)


def preferred(layer: MixtureOfExperts, x_ND: Tensor) -> list[list[int]]:
    top_k = layer.config.top_k
    return [(layer.router.weight @ x_D).argsort(descending=True)[:top_k].tolist() for x_D in x_ND]


class WrongRouter(nn.Module):
    """A user's router, of which one result has another shape."""

    def __init__(self, **wrong: Tensor | None) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        return replace(choose(x_ND[:, :4], top_k=2, shares=tokens.shares), **self.wrong)  # type: ignore[arg-type]


class ReturnsNothing(nn.Module):
    def forward(self, *_: object) -> None:
        """Forget to return."""


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("logits_NE", (9, 3), "(9, 4)"),
        ("probability_NE", (8, 4), "(9, 4)"),
        ("expert_NC", (9, 1), "(9, 2)"),
        ("made_weight_NC", (9,), "(9, 2)"),
        ("chosen_logits_NC", (9, 1), "(9, 2)"),
        ("balance_loss", (4,), "()"),
    ],
)
def test_a_router_that_returns_another_shape_is_named(
    name: str, shape: tuple[int, ...], wanted: str
) -> None:
    layer = moe_layer(MoEConfig(num_experts=4))
    layer.router = WrongRouter(**{name: torch.zeros(shape)})
    x_ND, tokens = random_tokens(9)
    with pytest.raises(ConfigError, match="WrongRouter returned a Routing") as raised:
        layer(x_ND, tokens)
    assert f"with {name} {shape}; a Routing of 9 tokens has {wanted}." in str(raised.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("expert_NC", dtype) for dtype in (torch.float32, torch.bool)),
        *(("made_weight_NC", dtype) for dtype in (torch.int64, torch.bool)),
    ],
)
def test_a_router_that_returns_numbers_of_another_kind_is_named(
    name: str, dtype: torch.dtype
) -> None:
    layer = moe_layer(MoEConfig(num_experts=4))
    layer.router = WrongRouter(**{name: torch.zeros((9, 2), dtype=dtype)})
    with pytest.raises(ConfigError, match=f"with {name} of {dtype}; a Routing of 9 tokens has"):
        layer(*random_tokens(9))


def test_a_router_that_returns_nothing_is_named() -> None:
    layer = moe_layer(MoEConfig(num_experts=4))
    layer.router = WrongRouter(expert_NC=None)
    with pytest.raises(ConfigError, match="WrongRouter returned a Routing with expert_NC no tens"):
        layer(*random_tokens(9))
    layer.router = ReturnsNothing()
    with pytest.raises(
        ConfigError, match="ReturnsNothing returned a NoneType with logits_NE no tensor"
    ):
        layer(*random_tokens(9))


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_a_router_without_weights_is_named(dispatch: str) -> None:
    layer = moe_layer(MoEConfig.model_validate({"num_experts": 4, "dispatch": dispatch}))
    layer.router = WrongRouter(made_weight_NC=None, chosen_logits_NC=None)
    with pytest.raises(ConfigError, match=r"with made_weight_NC no tensor; .* has \(9, 2\)"):
        layer(*random_tokens(9))
    layer.router = WrongRouter(made_weight_NC=None, chosen_logits_NC=torch.zeros((9, 2)))
    layer(*random_tokens(9))


@pytest.mark.parametrize("prioritized", [True, False])
def test_weights_that_a_router_made_are_those_of_routes_within_the_capacity(
    prioritized: bool,
) -> None:
    """A router that begins with ``choose`` has the logits of that choice as well."""
    layer = moe_layer(
        MoEConfig(
            num_experts=4,
            dispatch="capacity",
            capacity_factor=0.5,
            batch_prioritized=prioritized,
        )
    ).train()
    x_ND, tokens = random_tokens(9)
    made = torch.tensor([0.9, 0.1]).expand(9, 2)
    outputs = []
    for more in ({}, {"chosen_logits_NC": None}):
        layer.router = WrongRouter(made_weight_NC=made, **more)
        outputs.append(layer(x_ND, tokens)[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("result", [None, "router", TokenRouter])
@pytest.mark.parametrize(
    ("place", "kind"),
    [("moe.layer.build_router", "token"), ("building.build_feed_forward", "dense")],
)
def test_a_name_without_a_case_or_with_no_module_is_told(
    place: str, kind: str, result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"pipeline.model.{place}", lambda *_, **__: result)
    told = f"{place.split('.')[-1]} has no case for '{kind}' that returns a torch.nn.Module"
    with pytest.raises(ConfigError, match=told):
        moe_layer(MoEConfig(num_experts=4))


def test_a_front_end_without_a_case_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.model.building.SubwordsConfig", str)
    with pytest.raises(ConfigError, match="build_front has no case for 'subwords'"):
        moe_layer(MoEConfig(num_experts=4))


def stack_of(rows: int) -> LanguageStack:
    """Modules of four languages with a parameter of so many rows."""
    stack = LanguageStack(("de", "en", "fr", "ru"))
    stack.factor = nn.Parameter(torch.ones(rows, 2))
    return stack


def on_cpu() -> Tensor:
    return torch.zeros(4, device="cpu")


@pytest.mark.parametrize(
    ("add", "told"),
    [
        (lambda router: router.register_buffer("load", torch.zeros(4)), "load is a buffer"),
        (lambda router: router.register_buffer("load", on_cpu()), "load is a tensor outside"),
        (lambda router: setattr(router, "scale", torch.ones(4)), "scale is a tensor outside"),
        (lambda router: setattr(router, "scale", on_cpu()), "scale is a tensor outside"),
        (lambda router: setattr(router, "twin", router.weight), r"twin is the parameter .*weight,"),
        (
            lambda router: setattr(router, "heat", nn.Parameter(torch.ones(()))),
            "heat .* dimens",
        ),
        (lambda router: setattr(router, "drop", nn.Dropout(0.1)), "drop is a Dropout, which draws"),
        *(
            (lambda router, rows=rows: setattr(router, "own", stack_of(rows)), "own.factor has the")
            for rows in (1, 5)
        ),
    ],
)
def test_what_checkpoints_or_training_cannot_hold_is_refused(
    add: Callable[[nn.Module], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer would have no value after loading, and checkpoints would not have it."""

    def with_more(spec: ModelSpec, moe: MoEConfig, *, side: Side) -> nn.Module:
        router = build_router(spec, moe, side=side)
        add(router)
        return router

    monkeypatch.setattr("pipeline.model.moe.layer.build_router", with_more)
    with pytest.raises(ConfigError, match=rf"encoder\.layers\.0\.feed_forward\.router\.{told}"):
        moe_layer(MoEConfig(num_experts=4))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda x_ND: x_ND[:, :3], r"returned \(\d+, 3\) where states"),
        (lambda x_ND: x_ND[1:], r"returned \(\d+, \d+\) where states"),
        (lambda _: None, "returned a NoneType where states"),
        (lambda x_ND: x_ND.double(), r"returned \(\d+, \d+\) of torch.float64 where states .*32"),
        (lambda x_ND: x_ND.long(), r"returned \(\d+, \d+\) of torch.int64 where states .*32"),
    ],
)
@pytest.mark.parametrize("place", ["encoder.layers.0.feed_forward", "front"])
def test_a_module_that_returns_no_states_is_named(
    place: str, made: Callable[[Tensor], object], told: str
) -> None:
    model = tiny_model(tiny_spec())
    module = model.get_submodule(place)
    module.forward = lambda x_ND, *_: made(x_ND)
    batch = collate(random_examples(model.spec, sentences=2, seed=1), eos_id=EOS_ID)
    with pytest.raises(ConfigError, match=f"{type(module).__name__} {told}"):
        model(batch)


@pytest.mark.parametrize("report", ["routing", 0.5], ids=["str", "float"])
def test_a_module_that_returns_another_report_next_to_its_states_is_named(report: object) -> None:
    model = tiny_model(tiny_spec())
    layer: Any = model.get_submodule("encoder.layers.0")
    layer.feed_forward.forward = lambda x_ND, *_: (x_ND, report)
    batch = collate(random_examples(model.spec, sentences=2, seed=1), eos_id=EOS_ID)
    told = f"returned a {type(report).__name__} next to its states, where a"
    with pytest.raises(ConfigError, match=f"FeedForward {told} RoutingRecord or None"):
        model(batch)
    del layer.feed_forward.forward

    class Gate(nn.Module):
        def forward(self, _: Tensor, y_ND: Tensor, *__: object) -> tuple[Tensor, object]:
            return y_ND, report

    layer.sublayers["feed_forward"].after = Gate()
    with pytest.raises(ConfigError, match=f"Gate {told} Tensor or None"):
        model(batch)


@pytest.mark.parametrize("count", [0, 1])
def test_a_front_end_that_leaves_layers_out_is_named(count: int) -> None:
    model = tiny_model(tiny_spec())
    model.front.forward = lambda x_ND, _, passage: passage.through(x_ND, count)
    batch = collate(random_examples(model.spec, sentences=2, seed=1), eos_id=EOS_ID)
    with pytest.raises(ConfigError, match=f"SubwordFront left {2 - count} layers? of the encoder"):
        model(batch)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_every_token_gets_its_weighted_experts(top_k: int, dispatch: str) -> None:
    """With room for all, both dispatch forms equal the loop, gradients included."""
    config = MoEConfig.model_validate(
        {"num_experts": 4, "top_k": top_k, "dispatch": dispatch, "capacity_factor": 4.0}
    )
    layer = moe_layer(config)
    x_ND, tokens = random_tokens(9)
    slope_ND, _ = random_tokens(9, seed=2)
    y_ND, record = layer(x_ND, tokens)
    expected_ND = token_by_token(layer, x_ND, preferred(layer, x_ND))
    torch.testing.assert_close(y_ND, expected_ND, rtol=0, atol=1e-6)
    assert torch.equal(record.kept_E, record.routed_E)
    parameters = list(layer.parameters())
    found = torch.autograd.grad((y_ND * slope_ND).sum(), parameters)
    expected = torch.autograd.grad((expected_ND * slope_ND).sum(), parameters)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def tight(**changes: object) -> MoEConfig:
    """Room for half of all routes."""
    settings = {"num_experts": 4, "top_k": 2, "dispatch": "capacity", "capacity_factor": 0.5}
    return MoEConfig.model_validate({**settings, **changes})


def test_training_keeps_no_more_routes_than_the_capacity() -> None:
    layer = moe_layer(tight(batch_prioritized=False))
    x_ND, tokens = random_tokens(16)
    slots = 4
    kept: list[list[int]] = [[] for _ in x_ND]
    taken = [0] * 4
    for choice in range(2):
        for token, experts in enumerate(preferred(layer, x_ND)):
            if taken[experts[choice]] < slots:
                taken[experts[choice]] += 1
                kept[token].append(experts[choice])
    y_ND, record = layer.train()(x_ND, tokens)
    assert record.kept_E.tolist() == taken
    assert int(record.routed_E.sum()) == 32 > sum(taken)
    torch.testing.assert_close(y_ND, token_by_token(layer, x_ND, kept), rtol=0, atol=1e-6)


def test_evaluation_drops_nothing_unless_it_is_told_to() -> None:
    x_ND, tokens = random_tokens(16)
    for factor, slots in ((None, 16), (0.5, 4)):
        layer = moe_layer(tight(evaluation_capacity_factor=factor)).eval()
        _, record = layer(x_ND, tokens)
        assert int(record.routed_E.max()) > 4
        assert torch.equal(record.kept_E, record.routed_E.clamp_max(slots))


def dense_and_one_expert() -> tuple[Transformer, Transformer]:
    """A dense model, and one whose every feed-forward is a single expert with its weights."""
    dense = tiny_model(tiny_spec())
    moe = tiny_model(tiny_spec(moe=MoEConfig(num_experts=1, top_k=1, every=1)), seed=2)
    source = dict(dense.named_parameters())
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            if ".router." not in name:
                value = source[name.replace(".experts.", ".")]
                parameter.copy_(value.view_as(parameter))
    return dense, moe


def test_one_expert_is_the_dense_layer() -> None:
    dense, moe = dense_and_one_expert()
    batch = random_batch(dense.spec, sentences=5, seed=1)
    outputs = [model(batch).logits_LV for model in (dense, moe)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
    for logits_LV in outputs:
        F.cross_entropy(logits_LV, batch.labels_L).backward()
    gradients = {name: parameter.grad for name, parameter in dense.named_parameters()}
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None
        expected = gradients.get(name.replace(".experts.", "."))
        if ".router." in name:
            expected = torch.zeros_like(parameter)
        assert expected is not None
        torch.testing.assert_close(
            parameter.grad.view_as(expected), expected, rtol=0, atol=1e-6, msg=name
        )


def routing_of(probability_NE: Tensor) -> Routing:
    return choose(probability_NE.log(), top_k=2)


def test_the_balance_loss_of_an_even_load_is_one() -> None:
    probability_NE = torch.full((4, 4), 0.2) + 0.2 * torch.eye(4)
    assert routing_of(probability_NE).balance_loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize("probability", [0.4, 0.7, 0.97])
def test_the_balance_loss_of_one_favourite_is_its_mean_probability_times_experts(
    probability: float,
) -> None:
    row_E = torch.tensor([probability, *[(1 - probability) / 4] * 4])
    routing = routing_of(row_E.expand(7, 5))
    assert routing.balance_loss.item() == pytest.approx(5 * probability)


def brute_force_balance(probability_NE: Tensor) -> float:
    """E · Σ_e (mean probability of e) · (share of tokens that like e best)."""
    rows = probability_NE.tolist()
    experts = range(len(rows[0]))
    first = [max(experts, key=lambda e: row[e]) for row in rows]
    total = sum(sum(row[e] for row in rows) * first.count(e) for e in experts)
    return float(len(experts) * total / len(rows) ** 2)


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_the_balance_loss_counts_first_choices_before_capacity(dispatch: str) -> None:
    layer = moe_layer(tight(dispatch=dispatch))
    _, record = layer.train()(*random_tokens(30))
    expected = brute_force_balance(record.probability_NE)
    assert record.balance_loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_balance_loss_is_taken_over_real_tokens_only() -> None:
    """Routed sentence by sentence, without any padding, the tokens are the same."""
    spec = tiny_spec(moe=MoEConfig(num_experts=4, every=1), groups=2)
    model = tiny_model(spec)
    examples = [
        *random_examples(spec, sentences=4, seed=1, shortest=1, longest=2),
        *random_examples(spec, sentences=1, seed=2, shortest=15, longest=15),
    ]
    together = model(collate(examples, eos_id=EOS_ID)).routing
    alone = [model(collate([example], eos_id=EOS_ID)).routing for example in examples]
    for layer, record in enumerate(together):
        probability_NE = torch.cat([records[layer].probability_NE for records in alone])
        torch.testing.assert_close(record.probability_NE, probability_NE, rtol=0, atol=1e-5)
        expected = brute_force_balance(probability_NE)
        assert record.balance_loss.item() == pytest.approx(expected, rel=1e-4)
        assert int(record.routed_E.sum()) == 2 * len(probability_NE)


def test_the_balance_loss_moves_probability_away_from_the_favourite() -> None:
    logits_NE = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    logits_NE.requires_grad_()
    choose(logits_NE, top_k=2).balance_loss.backward()
    probability_NE = logits_NE.detach().softmax(-1)
    share_E = torch.tensor([2 / 3, 1 / 3, 0.0])
    mean_N1 = (probability_NE * share_E).sum(-1, keepdim=True)
    assert logits_NE.grad is not None
    torch.testing.assert_close(logits_NE.grad, probability_NE * (share_E - mean_N1))


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_no_tokens_give_nothing_and_gradients_of_zero(dispatch: str) -> None:
    layer = moe_layer(tight(dispatch=dispatch))
    x_ND, tokens = random_tokens(0)
    y_ND, record = layer(x_ND.requires_grad_(), tokens)
    assert y_ND.shape == (0, WIDTH)
    assert record.balance_loss.item() == 0
    (y_ND.sum() + record.balance_loss).backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() == 0


def test_statistics_hold_no_gradient_but_the_router_losses_do() -> None:
    layer = moe_layer(tight())
    _, record = layer(*random_tokens(5))
    assert record.balance_loss.requires_grad
    assert record.logits_NE.requires_grad
    for value in (record.probability_NE, record.expert_NC, record.routed_E, record.kept_E):
        assert not value.requires_grad


@pytest.fixture
def grouped() -> Transformer:
    """Four languages in two groups: 0 and 2, 1 and 3."""
    return tiny_model(tiny_spec(moe=MoEConfig(num_experts=4, every=1), groups=2)).eval()


def group_weights(model: Transformer) -> list[Tensor]:
    routers = [m for m in model.modules() if isinstance(m, LanguageGroupRouter)]
    return [router.group_weight for router in routers]


@torch.no_grad()
def test_a_sentence_is_routed_by_the_group_of_its_target_language(grouped: Transformer) -> None:
    examples = random_examples(grouped.spec, sentences=8, seed=1)
    batch = collate(examples, eos_id=EOS_ID)
    sentence_L = batch.target.sentence_N[batch.label_rows_L]
    group_L = batch.target_language_B[sentence_L] % 2
    before = grouped(batch).logits_LV
    for weight_GED in group_weights(grouped):
        weight_GED[1] *= -3
    changed_L = (grouped(batch).logits_LV - before).abs().amax(-1)
    assert changed_L[group_L == 0].max() < 1e-5
    assert changed_L[group_L == 1].min() > 1e-3


def test_a_group_that_is_no_target_gets_a_gradient_of_zero(grouped: Transformer) -> None:
    examples = [
        example
        for example in random_examples(grouped.spec, sentences=20, seed=1)
        if example.target_language % 2 == 0
    ]
    grouped(collate(examples, eos_id=EOS_ID)).logits_LV.square().sum().backward()
    assert len(group_weights(grouped)) == 2
    for weight_GED in group_weights(grouped):
        assert weight_GED.grad is not None
        assert weight_GED.grad[1].count_nonzero() == 0
        assert weight_GED.grad[0].abs().max() > 1e-4


def test_only_the_decoder_routes_by_language_group(grouped: Transformer) -> None:
    names = {name for name, _ in grouped.named_parameters() if name.endswith("group_weight")}
    assert names == {
        "decoder.layers.0.feed_forward.router.group_weight",
        "decoder.layers.1.feed_forward.router.group_weight",
    }


@torch.no_grad()
def test_in_evaluation_a_sentence_does_not_depend_on_its_batch() -> None:
    spec = tiny_spec(moe=tight(every=1))
    model = tiny_model(spec).eval()
    examples = random_examples(spec, sentences=6, seed=3)
    together = model(collate(examples, eos_id=EOS_ID)).logits_LV
    alone = [model(collate([example], eos_id=EOS_ID)).logits_LV for example in examples]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


@torch.no_grad()
def test_jitter_moves_the_routing_of_training_but_not_what_experts_read() -> None:
    rates = Regularization(router_jitter=0.3)
    config = MoEConfig(num_experts=4)
    layer, plain = moe_layer(config, regularization=rates), moe_layer(config)
    x_ND, tokens = random_tokens(200)
    exact_NE = plain(x_ND, tokens)[1].probability_NE
    moved_NE = layer.train()(x_ND, tokens)[1].probability_NE
    assert 1e-3 < (moved_NE - exact_NE).abs().mean() < 0.1
    assert torch.equal(layer.eval()(x_ND, tokens)[1].probability_NE, exact_NE)

    alone = MoEConfig(num_experts=1, top_k=1)
    y_ND, _ = moe_layer(alone, regularization=rates).train()(x_ND, tokens)
    torch.testing.assert_close(y_ND, moe_layer(alone)(x_ND, tokens)[0])


@torch.no_grad()
def test_masking_takes_an_experts_output_whole_and_scales_up_the_rest() -> None:
    config = MoEConfig(num_experts=1, top_k=1)
    rates = Regularization(expert_output_masking=0.25)
    layer = moe_layer(config, regularization=rates).train()
    x_ND, tokens = random_tokens(400)
    exact_ND = moe_layer(config)(x_ND, tokens)[0]
    masked_ND = layer(x_ND, tokens)[0]
    kept_N = masked_ND.abs().amax(-1) > 0
    assert 0.65 < kept_N.float().mean() < 0.85
    torch.testing.assert_close(masked_ND[kept_N], exact_ND[kept_N] / 0.75)
    assert torch.equal(layer.eval()(x_ND, tokens)[0], exact_ND)


@torch.no_grad()
def test_moe_dropout_acts_on_moe_layers_only() -> None:
    """At a rate near 1 nothing is left of an MoE layer's feed-forward, and a dense one stays."""
    spec = tiny_spec(moe=MoEConfig(num_experts=4, every=2))
    rates = Regularization(moe_dropout=1 - 1e-7)
    model, plain = tiny_model(spec, regularization=rates), tiny_model(spec)
    silenced = tiny_model(spec)
    for side in (silenced.encoder, silenced.decoder):
        layer = cast(MixtureOfExperts, side.layers[1].feed_forward)
        layer.experts.down.weight.zero_()
        layer.experts.down.bias.zero_()
    batch = random_batch(spec, sentences=3, seed=1)
    assert torch.equal(model(batch).logits_LV, silenced(batch).logits_LV)
    assert not torch.allclose(plain(batch).logits_LV, silenced(batch).logits_LV, atol=1e-2)
