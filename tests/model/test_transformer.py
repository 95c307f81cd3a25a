"""The whole model: equal to Hugging Face's, causal, and blind to padding."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.forked import started_code
from support.m2m100_peer import copy_weights, padded, peer_name, peer_settings
from support.tiny_models import (
    EOS_ID,
    PAD_ID,
    language_token,
    random_batch,
    random_examples,
    tiny_model,
    tiny_spec,
)
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
)

from pipeline.batching.batch import Batch, Packing, collate
from pipeline.errors import ConfigError
from pipeline.kernels.products import Activation
from pipeline.model.building import build_model
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization, Residual


def make_peer(model_type: Any, config_type: Any, spec: ModelSpec, **more: object) -> nn.Module:
    peer: nn.Module = model_type(config_type(**peer_settings(spec, eos_id=EOS_ID), **more))
    return peer.eval()


def peer_logits(peer: nn.Module, batch: Batch) -> Tensor:
    """Logits of the peer at every label, sentence after sentence."""
    source = padded(batch.source_N, batch.source, fill=PAD_ID)
    target = padded(batch.target_N, batch.target, fill=PAD_ID)
    logits_BTV = peer(
        input_ids=source, attention_mask=(source != PAD_ID).long(), decoder_input_ids=target
    ).logits
    return batch.target.pack(logits_BTV)[batch.label_rows_L]


def assert_equals_peer(spec: ModelSpec, peer: nn.Module) -> None:
    """Logits at all labels, and the gradient of the cross entropy in every parameter."""
    model = tiny_model(spec)
    copy_weights(model, peer)
    examples = random_examples(spec, sentences=5, seed=3, shortest=1, longest=12)
    batch = collate(examples, eos_id=EOS_ID)
    ours, theirs = model(batch).logits_LV, peer_logits(peer, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for logits in (ours, theirs):
        F.cross_entropy(logits, batch.labels_L).backward()
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[peer_name(name)], rtol=1e-4, atol=1e-5, msg=name
        )


M2M100 = M2M100ForConditionalGeneration, M2M100Config
MBART = MBartForConditionalGeneration, MBartConfig
BART = BartForConditionalGeneration, BartConfig
LEARNED = {"positions": "learned", "embedding_norm": True}
POST_NORM = {**LEARNED, "norm": "post", "scale_embedding": False}


@pytest.mark.parametrize(
    ("types", "activation", "model"),
    [
        (M2M100, "relu", {"scale_embedding": True}),
        (M2M100, "gelu", {"scale_embedding": False}),
        (M2M100, "relu", {"embedding": {"output": "untied"}}),
        (MBART, "gelu", LEARNED),
        (BART, "gelu", POST_NORM),
    ],
)
def test_a_model_equals_its_peer(
    types: tuple[Any, Any], activation: Activation, model: dict[str, Any]
) -> None:
    spec = tiny_spec(activation=activation, model=model)
    assert_equals_peer(spec, make_peer(*types, spec, tie_word_embeddings="embedding" not in model))


@pytest.mark.parametrize(("norm", "count"), [("pre", 1), ("pre", 3), ("post", 1), ("post", 2)])
def test_converter_layers_are_a_peers_with_the_target_languages_embedding_before_them(
    count: int, norm: str
) -> None:
    types: tuple[Any, Any] = BART if norm == "post" else M2M100
    model = POST_NORM if norm == "post" else {}
    spec = tiny_spec(layers=3, model={**model, "converter_layers": count})
    peer: Any = make_peer(*types, spec)
    examples = random_examples(spec, sentences=5, seed=3, shortest=1, longest=12)
    tokens = torch.tensor([language_token(spec, one.target_language) for one in examples])
    encoder = peer.model.encoder

    def add_language(module: nn.Module, states: Any) -> Any:
        del module
        return states[0] + encoder.embed_tokens(tokens)[:, None], *states[1:]

    encoder.layers[-count].register_forward_pre_hook(add_language)
    assert_equals_peer(spec, peer)


@pytest.fixture(params=["dense", "post-norm", "learned", "experts", "language groups", "converter"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    moe = MoEConfig(num_experts=4, top_k=2, every=2)
    specs = {
        "dense": tiny_spec(),
        "post-norm": tiny_spec(model={"norm": "post", "embedding_norm": True}),
        "learned": tiny_spec(model={"positions": "learned"}),
        "experts": tiny_spec(moe=moe),
        "language groups": tiny_spec(moe=moe, groups=3),
        "converter": tiny_spec(moe=moe, model={"converter_layers": 1}),
    }
    return specs[request.param]


@torch.no_grad()
def test_a_sentence_has_the_same_logits_alone_and_among_longer_ones(spec: ModelSpec) -> None:
    model = tiny_model(spec)
    short = random_examples(spec, sentences=3, seed=1, shortest=1, longest=4)
    long = random_examples(spec, sentences=3, seed=2, shortest=10, longest=20)
    together = model(collate([*short, *long], eos_id=EOS_ID)).logits_LV
    alone = [model(collate([example], eos_id=EOS_ID)).logits_LV for example in [*short, *long]]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_later_target_token_changes_later_logits_only(spec: ModelSpec) -> None:
    model = tiny_model(spec)
    (example,) = random_examples(spec, sentences=1, seed=4, shortest=8, longest=8)
    changed_at = 5
    target = [int(token) for token in example.target]
    target[changed_at] = 4 if target[changed_at] != 4 else 5
    before = model(collate([example], eos_id=EOS_ID)).logits_LV
    after = model(collate([replace(example, target=target)], eos_id=EOS_ID)).logits_LV
    change_L = (before - after).abs().amax(-1)
    assert change_L[: changed_at + 1].max() < 1e-5
    assert change_L[changed_at + 1 :].min() > 1e-3


@torch.no_grad()
def test_every_source_token_reaches_every_logit(spec: ModelSpec) -> None:
    model = tiny_model(spec)
    (example,) = random_examples(spec, sentences=1, seed=5, shortest=6, longest=6)
    before = model(collate([example], eos_id=EOS_ID)).logits_LV
    for position in range(6):
        source = [int(token) for token in example.source]
        source[position] = 4 if source[position] != 4 else 5
        after = model(collate([replace(example, source=source)], eos_id=EOS_ID)).logits_LV
        assert (before - after).abs().amax(-1).min() > 1e-5


def test_every_n_th_layer_has_experts_and_reports_them_encoder_first() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, every=3)
    spec = tiny_spec(moe=moe, layers=7, model={"decoder_layers": 3})
    model = tiny_model(spec)
    with_experts = [
        name.removesuffix(".feed_forward.router.weight")
        for name, _ in model.named_parameters()
        if name.endswith(".router.weight")
    ]
    assert with_experts == ["encoder.layers.2", "encoder.layers.5", "decoder.layers.2"]
    batch = random_batch(spec, sentences=3, seed=1)
    counts = [len(record.expert_NC) for record in model(batch).routing]
    assert counts == [len(batch.source_N), len(batch.source_N), len(batch.target_N)]


@pytest.mark.parametrize("layer", ["encoder.layers.0", "decoder.layers.1"])
def test_a_module_after_a_sublayer_may_have_no_gates(layer: str) -> None:
    model = tiny_model(tiny_spec())
    of_layer: Any = model.get_submodule(layer)
    sublayer = of_layer.sublayers["feed_forward"]
    batch, logits = random_batch(model.spec, sentences=2, seed=1), []
    for after in (lambda *given: 2 * given[1], lambda *given: (2 * given[1], None)):
        sublayer.after = after
        logits.append(model(batch).logits_LV)
    assert torch.equal(*logits)
    sublayer.after = None
    assert not torch.allclose(model(batch).logits_LV, logits[0])
    for wrong, found in ((None, "NoneType"), ((1, 2, 3), "tuple")):
        sublayer.after = lambda *_, result=wrong: result
        with pytest.raises(ConfigError, match=f"function returned a {found} where states"):
            model(batch)


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4))
    rates = Regularization(dropout=0.3, attention_dropout=0.2)
    model, plain = tiny_model(spec, regularization=rates), tiny_model(spec)
    batch = random_batch(spec, sentences=4, seed=1)

    def logits(seed: int) -> Tensor:
        found: Tensor = model(batch.keyed(seed)).logits_LV
        return found

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2), atol=1e-2)
    model.eval()
    assert torch.equal(logits(1), plain(batch).logits_LV)


def test_attention_dropout_acts_alone() -> None:
    spec = tiny_spec()
    model = tiny_model(spec, regularization=Regularization(attention_dropout=0.5))
    plain = tiny_model(spec)
    batch = random_batch(spec, sentences=4, seed=1)
    assert not torch.allclose(model(batch).logits_LV, plain(batch).logits_LV, atol=1e-3)


def test_a_dropped_sublayer_leaves_the_embedding() -> None:
    """At a rate near 1 a pre-norm residual stream keeps its input (closed form)."""
    spec = tiny_spec(layers=1)
    model = tiny_model(spec, regularization=Regularization(dropout=1 - 1e-7))
    x_ND = torch.randn(5, spec.model.width)
    packing = Packing.from_lengths([5]).keyed(1)
    language_B = torch.zeros(1, dtype=torch.int64)
    tokens = model.tokens_of(packing, language_B, language_B)
    x = model.encoder.layers[0](Residual(x_ND, tokens), packing)
    assert x.record is None
    assert torch.equal(x.sum(), x_ND)


def test_buffers_are_not_weights_and_survive_allocation() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=2), groups=3, languages=4)
    model = build_model(spec)
    assert model.group_of_language.tolist() == [0, 1, 2, 0]
    assert not {name for name, _ in model.named_buffers()} & set(model.state_dict())
    angle = 5 * 10000 ** -(3 / 7)
    expected = [torch.tensor(angle).sin(), torch.tensor(angle).cos()]
    torch.testing.assert_close(model.positions_TD[3, [3, 11]], torch.stack(expected))


def test_half_precision_is_close_to_single_precision() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4, top_k=4), groups=2)
    model = tiny_model(spec)
    batch = random_batch(spec, sentences=4, seed=1)
    with torch.no_grad():
        single = model(batch).logits_LV
        half = model.to(torch.bfloat16)(batch).logits_LV
    assert half.dtype == torch.bfloat16
    assert (half.float() - single).abs().max() < 0.05 * single.abs().max()


@pytest.mark.slow
def test_a_model_too_large_for_the_memory_is_one_sentence() -> None:
    """In a process of little memory, so that nothing large is asked of the machine."""
    script = """
import resource, torch
from pipeline.model.settings import ModelConfig
from pipeline.errors import ConfigError
from pipeline.model.spec import ModelSpec
from pipeline.model.building import build_model
resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
model = ModelConfig(width=2**16, feed_forward_width=2**20, max_positions=2**10)
spec = ModelSpec(model=model, vocabulary_size=9, pad_id=0, languages=("de",))
try:
    build_model(spec)
except ConfigError as error:
    print(error)
"""
    with started_code(script, [], environment=os.environ) as started:
        code, out, error = started.end()
    assert code == 0, error
    assert out.startswith("There is no memory for the ")


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=4, every=1)], ids=["dense", "moe"])
def test_layers_that_are_computed_again_have_the_same_gradients_bit_for_bit(
    moe: MoEConfig | None,
) -> None:
    """Dropout and the router's noise included; fewer tensors are kept for the backward pass."""
    converted: dict[str, object] = {"converter_layers": 1} if moe else {}
    spec = tiny_spec(moe=moe, groups=2 if moe else 0, model=converted)
    rates = Regularization(dropout=0.3, attention_dropout=0.2, router_jitter=0.1)
    batch = random_batch(spec, sentences=4, seed=1)
    results, kept = [], []
    for recomputes in (False, True):
        model = tiny_model(spec, regularization=rates).train()
        model.recomputes = recomputes
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(batch)
        loss = output.logits_LV.square().sum()
        loss = loss + sum(record.balance_loss for record in output.routing)
        loss.backward()
        kept.append(len(saved))
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_a_model_that_is_built_has_all_its_tensors_on_its_device(positions: str) -> None:
    model = build_model(tiny_spec(model={"positions": positions}))
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@pytest.mark.parametrize("shape", [("groups", 4), (16, "groups", 4)])
def test_a_router_of_ones_own_that_needs_groups_is_told_where_it_gets_them(
    shape: tuple[int | str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(nn.Module):
        def __init__(self, spec: ModelSpec, *_: object, **__: object) -> None:
            super().__init__()
            sizes = [spec.num_groups if size == "groups" else int(size) for size in shape]
            self.bias = nn.Parameter(torch.zeros(sizes))

    monkeypatch.setattr("pipeline.model.moe.layer.build_router", Mine)
    moe = MoEConfig(num_experts=4, top_k=2)
    with pytest.raises(ConfigError, match=r"reads language groups, .* to GROUP_ROUTERS in"):
        build_model(tiny_spec(moe=moe))
    assert build_model(tiny_spec(moe=moe, groups=2))
