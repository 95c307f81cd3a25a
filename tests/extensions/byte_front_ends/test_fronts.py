"""Every front against a loop over tokens and taps, written from the papers' equations."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fronted_models import LANGUAGE_TOKENS, LONE_IDS, fronted_spec
from support.tiny_models import EOS_ID, random_batch, random_examples, tiny_model
from torch import Tensor, nn

from pipeline.batching.batch import Batch, collate
from pipeline.extensions.byte_front_ends.ncf_and_wsf import ORDERS, word_begins, words_as_sentences
from pipeline.model.building import build_model
from pipeline.model.front_end import Source
from pipeline.model.parameters import initialize
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import EncoderLayer, Transformer

FRONTS: dict[str, dict[str, Any]] = {
    "msc": {"kind": "msc", "kernels": (0, 1, 3, 7)},
    "msc in the second layer": {"kind": "msc", "kernels": (5, 0), "layer": 1},
    "msha": {"kind": "msha", "scales": (0, 3)},
    "msha as the code": {"kind": "msha", "scales": (1, 2), "reading": "code", "layer": 1},
    "ada-msha": {"kind": "ada_msha"},
    "ada-msha +lid": {"kind": "ada_msha", "language_vector": True, "max_scale": 4},
    "ada-msha, three scales": {"kind": "ada_msha", "top_k": 3},
    "ada-msha as the paper's equations": {"kind": "ada_msha", "reading": "equations"},
    "ada-msha as the code": {"kind": "ada_msha", "reading": "code", "layer": 1},
    "ada-msha, one scale": {"kind": "ada_msha", "top_k": 1, "max_scale": 6},
    "ada-msha as the code, one scale": {"kind": "ada_msha", "top_k": 1, "reading": "code"},
    "ada-msha, all scales": {"kind": "ada_msha", "max_scale": 2, "top_k": 3},
    "ncf": {"kind": "ncf"},
    "ncf behind all layers": {"kind": "ncf", "layers_before": 3},
    "wsf": {"kind": "wsf", "layers": 2},
}


def spec_with(front: dict[str, Any], **model: Any) -> ModelSpec:
    return fronted_spec(front, layers=3, model=model)


def double_model(spec: ModelSpec) -> Transformer:
    """In float64, its router's logits far enough apart that choices do not hang on rounding."""
    model = tiny_model(spec).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "front.router.weight":
                parameter.mul_(8)
            if name == "front.mixture":
                parameter.copy_(torch.linspace(-0.5, 1.5, len(parameter)))
    model.reset_buffers()
    model.positions_TD = model.positions_TD.double()
    return model


# ------------------------------------------------------------------- the papers, token by token


def convolved(x_TC: Tensor, convolution: nn.Module) -> Tensor:
    """y_t = b + Σ_k W_k x_(t + k - K // 2), nothing beyond the sentence."""
    weight, bias = (dict(convolution.named_parameters())[name] for name in ("weight", "bias"))
    taps = weight.shape[2]
    rows: list[Tensor] = []
    for t in range(len(x_TC)):
        row: Tensor = bias
        for k in range(taps):
            there = t + k - taps // 2
            if 0 <= there < len(x_TC):
                row = row + weight[:, :, k] @ x_TC[there]
        rows.append(row)
    return torch.stack(rows)


def attended(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, heads: int, allowed: Tensor) -> Tensor:
    """Softmax attention, head by head and query by query."""
    width = q_TD.shape[1] // heads
    columns = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        rows = []
        for t in range(len(q_TD)):
            seen = allowed[t].nonzero().flatten()
            scores = k_TD[seen, own] @ q_TD[t, own] / math.sqrt(width)
            rows.append(scores.softmax(0) @ v_TD[seen, own])
        columns.append(torch.stack(rows))
    return torch.cat(columns, dim=1)


def scales_of_vector(front: Any, logits_S: Tensor) -> list[tuple[int, Tensor]]:
    """Which scales a vector has, and how much of each."""
    config = front.config
    said = logits_S.softmax(0) if config.reading == "equations" else logits_S
    chosen = sorted(range(len(said)), key=lambda scale: -said[scale].item())[: config.top_k]
    if config.top_k == 1:
        one = torch.ones_like(said[0]) if config.reading != "code" else None
        return [(chosen[0], said[chosen[0]] if one is None else one)]
    weights = torch.stack([said[scale] for scale in chosen]).softmax(0)
    return list(zip(chosen, weights, strict=True))


def adaptive(model: Transformer, states: list[Tensor], lid_D: Tensor) -> list[Tensor]:
    """Each head of each of q, k, v as the sum of what its scales see."""
    front: Any = model.front
    heads = model.spec.model.num_heads
    found = []
    for state in states:
        columns = []
        for head, x_TK in enumerate(state.chunk(heads, dim=1)):
            seen = [x_TK] + [convolved(x_TK, expert) for expert in front.experts.values()]
            router = front.router.weight[0]
            rows = []
            for t in range(len(x_TK)):
                lid = [lid_D.chunk(heads)[head]] if front.config.language_vector else []
                logits = router @ torch.cat([x_TK[t], *lid])
                rows.append(sum(w * seen[s][t] for s, w in scales_of_vector(front, logits)))
            columns.append(torch.stack([torch.as_tensor(row) for row in rows]))
        found.append(torch.cat(columns, dim=1))
    return found


def layer_by_hand(
    model: Transformer,
    layer: EncoderLayer,
    x_TD: Tensor,
    *,
    number: int,
    ids: Tensor,
    lid: Tensor,
    begins: list[bool],
) -> Tensor:
    front: Any = model.front
    settings = model.spec.model
    config: Any = settings.front
    kind, heads, attention = config.kind, settings.num_heads, layer.self_attention
    here = kind in ("msc", "msha", "ada_msha") and config.layer == number
    entered = layer.self_attention_norm(x_TD) if settings.norm == "pre" else x_TD
    projected = entered
    if kind == "msc" and here:
        groups = entered.chunk(len(config.kernels), dim=1)
        projected = torch.cat(
            [
                convolved(x, front.convolutions[str(group)]) if config.kernels[group] else x
                for group, x in enumerate(groups)
            ],
            dim=1,
        )
    states = [F.linear(projected, p.weight, p.bias) for p in (attention.query, attention.key)]
    states.append(F.linear(projected, attention.value.weight, attention.value.bias))
    scale = math.sqrt(settings.width // heads)
    before = kind in ("msha", "ada_msha") and here and config.reading == "code"
    if before:
        states[0] = states[0] / scale
    if kind == "msha" and here:
        states = [
            torch.cat(
                [
                    convolved(x, front.heads[str(head)]) if config.scales[head] else x
                    for head, x in enumerate(state.chunk(heads, dim=1))
                ],
                dim=1,
            )
            for state in states
        ]
    if kind == "ada_msha" and here:
        states = adaptive(model, states, lid)
    if before:
        states[0] = states[0] * scale
    allowed = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool)
    if kind == "wsf" and number < config.layers:
        allowed = same_word(ids, begins)
    context = attended(*(states[0], states[1], states[2]), heads, allowed)
    x_TD = x_TD + attention.output(context)
    x_TD = x_TD if settings.norm == "pre" else layer.self_attention_norm(x_TD)
    entered = layer.feed_forward_norm(x_TD) if settings.norm == "pre" else x_TD
    feed_forward: Any = layer.feed_forward
    hidden = F.linear(entered, feed_forward.up.weight, feed_forward.up.bias).relu()
    x_TD = x_TD + F.linear(hidden, feed_forward.down.weight, feed_forward.down.bias)
    return x_TD if settings.norm == "pre" else layer.feed_forward_norm(x_TD)


def same_word(ids: Tensor, begins: list[bool]) -> Tensor:
    word, words, last_was_lone = 0, [], True
    for index, is_given in zip(ids.tolist(), begins, strict=True):
        is_lone = index in LONE_IDS
        word += is_lone or last_was_lone or is_given
        words.append(word)
        last_was_lone = is_lone
    number = torch.tensor(words)
    return number[:, None] == number[None, :]


def ngrams_by_hand(model: Transformer, x_TD: Tensor) -> Tensor:
    front: Any = model.front
    total = torch.zeros_like(x_TD)
    for share, n in zip(front.mixture, ORDERS, strict=True):
        for t in range(len(x_TD)):
            if n == 1:
                seen = x_TD[t]
            else:
                first = t // n * n
                seen = front.orders[str(n)].bias
                for k in range(n):
                    if first + k < len(x_TD):
                        seen = seen + front.orders[str(n)].weight[:, :, k] @ x_TD[first + k]
            total[t] = total[t] + share * seen
    return total


def encoded_by_hand(model: Transformer, batch: Batch) -> Tensor:
    """The encoder's states, one sentence after the other."""
    config: Any = model.spec.model.front
    width = model.spec.model.width
    bounds = batch.source.bound_B.tolist()
    table = model.embedding.weight
    assert table is not None
    found = []
    for sentence, (start, stop) in enumerate(pairwise(bounds)):
        ids = batch.source_N[start:stop]
        given = batch.source_begins_N
        begins = [False] * len(ids) if given is None else given[start:stop].tolist()
        lid = table[LANGUAGE_TOKENS[batch.source_language_B[sentence]]]
        x_TD = table[ids] * math.sqrt(width) + model.positions_TD[: len(ids)]
        for number, layer in enumerate(model.encoder.layers):
            if config.kind == "ncf" and config.layers_before == number:
                x_TD = ngrams_by_hand(model, x_TD)
            assert isinstance(layer, EncoderLayer)
            x_TD = layer_by_hand(model, layer, x_TD, number=number, ids=ids, lid=lid, begins=begins)
        if config.kind == "ncf" and config.layers_before == len(model.encoder.layers):
            x_TD = ngrams_by_hand(model, x_TD)
        found.append(model.encoder.leave(x_TD))
    return torch.cat(found)


def encoded(model: Transformer, batch: Batch) -> Tensor:
    tokens = model.tokens_of(batch.source, batch.source_language_B, batch.target_language_B)
    embedded = model.embedding(batch.source_N)
    begins = batch.source_begins_N
    memory, _ = model.encode(batch.source_N, embedded, batch.source, tokens, begins_N=begins)
    return memory


def with_given_words(batch: Batch, *, seed: int) -> Batch:
    """Words given in every other sentence, as if its language had a segmenter."""
    generator = torch.Generator().manual_seed(seed)
    drawn_N = torch.rand(len(batch.source_N), generator=generator) < 0.4
    return replace(batch, source_begins_N=drawn_N & (batch.source.sentence_N % 2 == 0))


def gradients(model: Transformer, run: Callable[[Transformer, Batch], Tensor], batch: Batch) -> Any:
    model.zero_grad()
    states = run(model, batch)
    weight = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    (states * weight).sum().backward()
    named = model.named_parameters()
    return states.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", FRONTS)
def test_a_front_and_its_gradients_equal_a_loop_over_tokens_and_taps(name: str) -> None:
    spec = spec_with(FRONTS[name], norm="post" if "msc" in name or "ncf" in name else "pre")
    model = double_model(spec)
    examples = random_examples(spec, sentences=4, seed=3, shortest=1, longest=13)
    examples += random_examples(spec, sentences=2, seed=4, shortest=1, longest=1)
    batch = collate(examples, eos_id=EOS_ID)
    states, of_states = gradients(model, encoded, batch)
    expected, of_expected = gradients(model, encoded_by_hand, batch)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)
    straight_through = name == "ada-msha, one scale"
    assert {"front.router.weight"} >= set(of_states) ^ set(of_expected)
    assert straight_through == ("front.router.weight" in set(of_states) ^ set(of_expected))
    for parameter, gradient in of_expected.items():
        if not straight_through:
            torch.testing.assert_close(of_states[parameter], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_given_words_part_attention_beside_those_of_white_space(norm: str) -> None:
    spec = spec_with(FRONTS["wsf"], norm=norm)
    model = double_model(spec)
    examples = random_examples(spec, sentences=6, seed=3, shortest=1, longest=13)
    plain = collate(examples, eos_id=EOS_ID)
    batch = with_given_words(plain, seed=1)
    states, of_states = gradients(model, encoded, batch)
    expected, of_expected = gradients(model, encoded_by_hand, batch)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)
    assert of_states.keys() == of_expected.keys()
    for parameter, gradient in of_expected.items():
        torch.testing.assert_close(of_states[parameter], gradient, rtol=0, atol=1e-10)
    changed_N = (states - encoded(model, plain)).abs().amax(1) > 1e-6
    changed = set(batch.source.sentence_N[changed_N].tolist())
    assert changed
    assert changed <= {0, 2, 4}


def test_packed_attention_is_given_the_same_words_as_the_mask() -> None:
    spec = spec_with(FRONTS["wsf"])
    batch = with_given_words(random_batch(spec, sentences=5, seed=7, longest=20), seed=4)
    given_N = batch.source_begins_N
    assert given_N is not None
    model = double_model(spec)
    tokens = model.tokens_of(batch.source, batch.source_language_B, batch.target_language_B)
    front: Any = model.front
    source = Source(batch.source_N, batch.source, tokens, model.embedding, given_N)
    begins_N = word_begins(source, front.lone_ids)
    spans = words_as_sentences(begins_N, batch.source).bound_B.tolist()
    mask_NN = torch.zeros(len(begins_N), len(begins_N), dtype=torch.bool)
    for start, stop in pairwise(spans):
        mask_NN[start:stop, start:stop] = True
    expected = torch.block_diag(
        *(
            same_word(batch.source_N[a:b], given_N[a:b].tolist())
            for a, b in pairwise(batch.source.bound_B.tolist())
        )
    )
    assert torch.equal(mask_NN, expected)


@pytest.mark.parametrize("name", [name for name in FRONTS if name != "wsf"])
@torch.no_grad()
def test_other_fronts_do_not_look_at_given_words(name: str) -> None:
    spec = spec_with(FRONTS[name])
    model = double_model(spec)
    plain = random_batch(spec, sentences=4, seed=6)
    given = with_given_words(plain, seed=2)
    assert torch.equal(model(given).logits_LV, model(plain).logits_LV)


def test_the_straight_through_router_learns_from_the_value_of_its_scale() -> None:
    """d loss / d logit of the chosen scale = ⟨d loss / d y, g(x)⟩, as if its weight were it."""
    from pipeline.extensions.byte_front_ends import AdaMshaConfig
    from pipeline.extensions.byte_front_ends.ada_msha import choose_scales

    logits = torch.tensor([[0.1, 0.7, 0.2]], requires_grad=True)
    scale, weight = choose_scales(logits, AdaMshaConfig(top_k=1, max_scale=2))
    assert scale.tolist() == [[1]]
    assert weight.tolist() == [[1.0]]
    (5 * weight).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 5.0, 0.0]]


@pytest.mark.parametrize("name", FRONTS)
@torch.no_grad()
def test_a_sentence_has_the_same_states_alone_and_among_others(name: str) -> None:
    spec = spec_with(FRONTS[name])
    model = double_model(spec)
    examples = random_examples(spec, sentences=5, seed=5, shortest=1, longest=19)
    together = model(collate(examples, eos_id=EOS_ID)).logits_LV
    alone = [model(collate([example], eos_id=EOS_ID)).logits_LV for example in examples]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FRONTS)
def test_layers_computed_again_make_the_same_gradients(name: str) -> None:
    spec = spec_with(FRONTS[name])
    model = tiny_model(spec).train()
    batch = random_batch(spec, sentences=4, seed=1)
    found = []
    for recomputes in (False, True):
        model.recomputes = recomputes
        found.append(gradients(model, encoded, batch))
    assert torch.equal(found[0][0], found[1][0])
    for parameter, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][parameter])


@pytest.mark.parametrize("name", FRONTS)
@torch.no_grad()
def test_half_precision_changes_states_by_rounding_only(name: str) -> None:
    """Two scales that a router finds alike may change places; few vectors are so."""
    spec = spec_with(FRONTS[name])
    model, half = tiny_model(spec).eval(), tiny_model(spec).to(torch.bfloat16).eval()
    batch = random_batch(spec, sentences=6, seed=2)
    expected, found = encoded(model, batch), encoded(half, batch)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).norm() / expected.norm()) < 0.04


def test_the_mixture_of_ngrams_starts_as_pytorchs_linear_layer_of_four_inputs() -> None:
    """LOBEF's code has ``nn.Linear(4, 1, bias=False)``: the same range and spread, any sign."""
    spec = spec_with({"kind": "ncf"})
    model = build_model(spec)
    found = torch.stack(
        [
            initialize("front.mixture", torch.Size([4]), spec=spec, seed=seed, owner=model.front)
            for seed in range(500)
        ]
    )
    torch.manual_seed(0)
    theirs = torch.cat([torch.nn.Linear(4, 1, bias=False).weight.detach() for _ in range(500)])
    assert found.abs().max() <= 0.5
    assert theirs.abs().max() <= 0.5
    assert found.std() == pytest.approx(float(theirs.std()), rel=0.06)
    assert abs(float(found.mean())) < 0.03


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_gradient_of_a_languages_vector_is_summed_in_a_fixed_order(top_k: int) -> None:
    """On a GPU, that of rows that are selected more than once is not: labels select each once."""
    model = double_model(spec_with(FRONTS["ada-msha +lid"] | {"top_k": top_k})).train()
    batch = random_batch(model.spec, sentences=5, seed=2)
    nodes, found = [model(batch).logits_LV.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes += [before for before, _ in node.next_functions]
    assert [node.name() for node in found].count("IndexSelectBackward0") == 1
