"""The objective against PyTorch's losses and against single predictions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import EOS_ID, random_batch, random_examples, tiny_model, tiny_spec

from pipeline.batching.batch import Example, collate
from pipeline.batching.settings import TagScheme
from pipeline.errors import ConfigError
from pipeline.model.moe.routing import z_loss
from pipeline.model.settings import MoEConfig
from pipeline.model.transformer import Transformer
from pipeline.training.losses import LossTerms, training_loss, translation_loss
from pipeline.training.settings import LossConfig


@torch.no_grad()
def log_probability(model: Transformer, example: Example, *, after: int, token: int) -> float:
    """Of a token after the first ``after`` target tokens, in a batch of its own."""
    prefix = replace(example, target=list(example.target)[:after])
    logits_V = model(collate([prefix], eos_id=EOS_ID)).logits_LV[-1]
    return float(logits_V.double().log_softmax(-1)[token])


@pytest.mark.parametrize("scheme", ["src-tgt", "tgt"])
@pytest.mark.parametrize("tag_is_label", [False, True])
def test_every_target_token_and_the_end_is_predicted_and_a_forced_tag_if_it_is_a_label(
    scheme: TagScheme, tag_is_label: bool
) -> None:
    """The tag is predicted from the source; all else of the prompt is given."""
    spec = tiny_spec().model_copy(update={"tag_scheme": scheme})
    model = tiny_model(spec)
    examples = random_examples(spec, sentences=3, seed=1, shortest=1, longest=5)
    expected, labels = 0.0, 0
    for example in examples:
        tokens = [*map(int, example.target), EOS_ID]
        labels += len(tokens)
        for position, token in enumerate(tokens):
            expected -= log_probability(model, example, after=position, token=token)
        start, *tags = example.decoder_prompt
        for tag in tags * tag_is_label:
            labels += 1
            untagged = replace(example, decoder_prompt=(start,))
            expected -= log_probability(model, untagged, after=0, token=tag)
    batch = collate(examples, eos_id=EOS_ID, tag_is_label=tag_is_label)
    terms = translation_loss(model, batch, LossConfig())
    assert terms.cross_entropy.item() == pytest.approx(expected, rel=1e-5)
    assert terms.objective.item() == pytest.approx(expected, rel=1e-5)
    assert (terms.balance.item(), batch.num_labels) == (0, labels)


def test_the_objective_weighs_the_router_losses_by_the_labels() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4, every=1), groups=2)
    model = tiny_model(spec)
    batch = random_batch(spec, sentences=4, seed=1)
    config = LossConfig(balance_weight=0.3, router_z_weight=0.02, label_smoothing=0.1)
    terms = translation_loss(model, batch, config)
    records = model(batch).routing
    assert len(records) == len(terms.routing) == 4
    balance = sum(record.balance_loss.item() for record in records)
    router_z = sum(z_loss(record.logits_NE).item() for record in records)
    smoothed = F.cross_entropy(
        model(batch).logits_LV, batch.labels_L, label_smoothing=0.1, reduction="sum"
    )
    assert terms.balance.item() == pytest.approx(balance, rel=1e-5)
    assert router_z > 0.1
    expected = smoothed.item() + (0.3 * balance + 0.02 * router_z) * batch.num_labels
    assert terms.objective.item() == pytest.approx(expected, rel=1e-5)


def test_reported_terms_carry_no_gradient_and_no_smoothing() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4))
    model = tiny_model(spec)
    batch = random_batch(spec, sentences=4, seed=1)
    terms = translation_loss(model, batch, LossConfig(label_smoothing=0.3))
    plain = F.cross_entropy(model(batch).logits_LV, batch.labels_L, reduction="sum")
    assert terms.cross_entropy.item() == pytest.approx(plain.item(), rel=1e-6)
    assert not terms.cross_entropy.requires_grad
    assert not terms.balance.requires_grad
    assert terms.objective.requires_grad


def test_the_balance_loss_reaches_every_router() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4, top_k=1, every=1))
    model = tiny_model(spec)
    batch = random_batch(spec, sentences=4, seed=1)
    translation_loss(model, batch, LossConfig(balance_weight=1.0)).objective.backward()
    routers = [p for name, p in model.named_parameters() if ".router." in name]
    assert len(routers) == 4
    for router in routers:
        assert router.grad is not None
        assert router.grad.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["focal", ""])
def test_an_objective_without_a_case_is_no_loss_of_none(name: str) -> None:
    config = LossConfig.model_construct(objective=name)  # type: ignore[arg-type]
    batch = collate(random_examples(tiny_spec(), sentences=2, seed=1), eos_id=EOS_ID)
    with pytest.raises(ConfigError, match=f"no case for {name!r}"):
        training_loss(tiny_model(tiny_spec()), batch, config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda terms: terms.objective, "a Tensor in which objective is no"),
        (lambda _: None, "a NoneType in which objective is no"),
        (lambda terms: replace(terms, objective=terms.objective.detach()), "objective is no diff"),
        (lambda terms: replace(terms, objective=terms.objective.expand(3)), "objective is no diff"),
        (lambda terms: replace(terms, cross_entropy=2.5), "a LossTerms in which cross_entropy"),
        (lambda terms: replace(terms, routing=()), "routing of 0 layers, where the model has 2"),
        (lambda terms: replace(terms, routing=iter(terms.routing)), "routing of 0 layers, where"),
        (lambda terms: replace(terms, routing=(None, None)), "routing of 0 layers, where"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(
    change: Callable[[LossTerms], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*given: Any, **options: Any) -> object:
        return change(translation_loss(*given, **options))

    monkeypatch.setattr("pipeline.training.losses._configured_loss", loss)
    spec = tiny_spec(moe=MoEConfig(num_experts=4))
    batch = collate(random_examples(spec, sentences=2, seed=1), eos_id=EOS_ID)
    with pytest.raises(ConfigError, match=f"The loss 'cross_entropy' returned .*{told}"):
        training_loss(tiny_model(spec), batch, LossConfig())
