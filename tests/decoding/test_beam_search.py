"""Tests of pipeline/decoding/beam_search.py."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from support.m2m100_peer import m2m100_peer, padded
from support.tiny_models import (
    EOS_ID,
    PAD_ID,
    embedding_table,
    random_examples,
    tiny_model,
    tiny_spec,
)
from torch import Tensor

from pipeline.batching.batch import Example, collate
from pipeline.config import DecodingConfig, MoEConfig
from pipeline.decoding.beam_search import Source, Translation, beam_search, max_target_length
from pipeline.errors import CheckpointError
from pipeline.model.transformer import Transformer

TOKEN_MOE = MoEConfig(num_experts=4, top_k=2, every=1)
CAPACITY_MOE = MoEConfig(num_experts=4, top_k=2, every=2, dispatch="capacity", capacity_factor=0.5)

Kind = Literal["dense", "moe", "moe-lgr", "moe-capacity"]


def model_of(kind: Kind, *, seed: int = 1, vocabulary: int = 20, **model: object) -> Transformer:
    """A random model whose translations differ with the source, in length too.

    Fresh weights hardly look at the source and repeat one token: attention to the source is made
    stronger, and end-of-sentence more likely at the states that all positions share.
    """
    moe = {"dense": None, "moe-capacity": CAPACITY_MOE}.get(kind, TOKEN_MOE)
    groups = 3 if kind == "moe-lgr" else 0
    spec = tiny_spec(moe=moe, groups=groups, vocabulary=vocabulary, languages=4, model=model)
    made = tiny_model(spec, seed=seed).eval()
    with torch.no_grad():
        for layer in made.decoder_layers():
            for parameter in layer.cross_attention.parameters():
                parameter.mul_(5 if parameter.dim() == 2 else 1)
        embedding_table(made).mul_(1.5)
        embedding_table(made)[EOS_ID] += raising_logit(made, by=2)
    return made


def raising_logit(model: Transformer, *, by: float) -> Tensor:
    """What, added to a token's embedding, raises its logit on average."""
    norm = model.decoder.final_norm or list(model.decoder_layers())[-1].feed_forward_norm
    return by * norm.bias / norm.bias.dot(norm.bias)


def source_of(example: Example) -> Source:
    return Source(
        tokens=[*example.source_prefix, *map(int, example.source), EOS_ID],
        prompt=example.decoder_prompt,
        source_language=example.source_language,
        target_language=example.target_language,
    )


def translate(
    model: Transformer,
    examples: Sequence[Example],
    *,
    limit: int | None = None,
    eos_id: int = EOS_ID,
    **config: object,
) -> list[Translation]:
    """Beam search; ``limit`` is the number of tokens no hypothesis exceeds."""
    settings: dict[str, object] = {"max_length_ratio": 1.0, "beam_size": 4, **config}
    if limit is not None:
        settings |= {"max_length_ratio": 0.0, "max_extra_length": limit}
    return beam_search(
        model,
        [source_of(one) for one in examples],
        DecodingConfig.model_validate(settings),
        eos_id=eos_id,
    )


@torch.no_grad()
def next_log_p(model: Transformer, example: Example, prefix: Sequence[int]) -> Tensor:
    """Log-probabilities after every position of the prefix, without any cache."""
    alone = collate([replace(example, target=list(prefix))], eos_id=EOS_ID)
    logits_LV = model.eval()(alone).logits_LV
    return torch.log_softmax(logits_LV.double(), dim=1)


def full_score(
    model: Transformer, example: Example, tokens: Sequence[int], *, penalty: float
) -> float:
    """fairseq's score of a sentence that ends after the tokens."""
    ended = [*tokens, EOS_ID]
    log_p_LV = next_log_p(model, example, tokens)
    total = sum(float(log_p_LV[row, token]) for row, token in enumerate(ended))
    return total / float(len(ended) ** penalty)


def rounded(score: float) -> Any:
    """Equal up to rounding in float32."""
    return pytest.approx(score, rel=1e-5, abs=1e-5)


# ---------------------------------------------------------------- against decoding without a cache


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-lgr"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_logits_of_every_step_equal_those_of_the_whole_prefix(
    monkeypatch: pytest.MonkeyPatch, norm: str, positions: str, kind: Kind
) -> None:
    model = model_of(kind, norm=norm, positions=positions)
    example = random_examples(model.spec, sentences=1, seed=3)[0]
    steps: list[Tensor] = []

    def record(x_ND: Tensor) -> Tensor:
        steps.append(project(x_ND))
        return steps[-1]

    project = model.project
    monkeypatch.setattr(model, "project", record)
    (found,) = translate(
        model, [example], eos_id=PAD_ID, beam_size=1, stopping="huggingface", limit=40
    )
    monkeypatch.undo()
    assert len(found.tokens) == len(steps) == 40
    stepped = torch.log_softmax(torch.cat(steps).double(), dim=1)
    expected = next_log_p(model, example, found.tokens[:-1])
    torch.testing.assert_close(stepped, expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-lgr"])
def test_one_beam_is_greedy_decoding(kind: Kind) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=8, seed=1)
    for example, found in zip(
        examples, translate(model, examples, beam_size=1, limit=20), strict=True
    ):
        tokens: list[int] = []
        while len(tokens) < 19:
            log_p_V = next_log_p(model, example, tokens)[-1]
            log_p_V[PAD_ID] = -torch.inf
            if (best := int(log_p_V.argmax())) == EOS_ID:
                break
            tokens.append(best)
        assert found.tokens == tuple(tokens)


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-lgr", "moe-capacity"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7])
def test_a_score_is_the_normalised_log_probability_of_the_tokens_and_the_end(
    penalty: float, kind: Kind
) -> None:
    model = model_of(kind, seed=2)
    examples = random_examples(model.spec, sentences=6, seed=2)
    for example, found in zip(
        examples, translate(model, examples, length_penalty=penalty), strict=True
    ):
        expected = full_score(model, example, found.tokens, penalty=penalty)
        assert found.score == rounded(expected)


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-lgr", "moe-capacity"])
@pytest.mark.parametrize("stopping", ["fairseq", "huggingface"])
def test_a_sentence_alone_is_translated_as_in_a_batch(stopping: str, kind: Kind) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=9, seed=4, shortest=1, longest=20)
    together = translate(model, examples, stopping=stopping)
    assert len({len(found.tokens) for found in together}) > 2
    for example, found in zip(examples, together, strict=True):
        (alone,) = translate(model, [example], stopping=stopping)
        assert alone.tokens == found.tokens
        assert alone.score == rounded(found.score)


def test_half_precision_changes_scores_by_rounding_only() -> None:
    model, half = model_of("moe-lgr", seed=5), model_of("moe-lgr", seed=5).to(torch.bfloat16)
    examples = random_examples(model.spec, sentences=5, seed=5)
    for example, found in zip(examples, translate(half, examples), strict=True):
        expected = full_score(model, example, found.tokens, penalty=1.0)
        assert found.score == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------- the search


def every_hypothesis(pieces: Sequence[int], *, longest: int) -> Iterator[tuple[int, ...]]:
    """All token sequences that end by the limit, without the end-of-sentence."""
    for length in range(longest):
        yield from itertools.product(pieces, repeat=length)


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_beam_as_wide_as_the_space_finds_the_best_of_all_sequences(
    seed: int, penalty: float
) -> None:
    model = model_of("moe-lgr", seed=seed, vocabulary=6)
    example = Example(
        source=[0, 3, 4][: 1 + seed % 3],
        target=[],
        source_prefix=(5,),
        decoder_prompt=(EOS_ID, 4),
        source_language=seed % 4,
        target_language=(seed + 1) % 4,
    )
    (found,) = translate(model, [example], beam_size=36, length_penalty=penalty, limit=3)
    pieces = [token for token in range(6) if token not in (PAD_ID, EOS_ID)]
    scores = {
        tokens: full_score(model, example, tokens, penalty=penalty)
        for tokens in every_hypothesis(pieces, longest=3)
    }
    assert len(scores) == 1 + 4 + 16
    best = max(scores, key=lambda tokens: scores[tokens])
    assert found.tokens == best
    assert found.score == rounded(scores[best])


def fairseq_search(
    model: Transformer, example: Example, *, beams: int, penalty: float, limit: int
) -> Translation:
    """fairseq's rule, one sentence and one hypothesis at a time."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Translation] = []
    for length in range(1, limit + 1):
        candidates = []
        for total, tokens in running:
            log_p_V = next_log_p(model, example, tokens)[-1].tolist()
            for token, log_p in enumerate(log_p_V):
                if token != PAD_ID and (length < limit or token == EOS_ID):
                    candidates.append((total + log_p, tokens, token))
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, tokens, token in candidates[:beams]:
            if token == EOS_ID and len(ended) < beams:
                ended.append(Translation(tokens, total / length**penalty))
        if len(ended) >= beams:
            break
        going_on = [(t, (*tokens, token)) for t, tokens, token in candidates if token != EOS_ID]
        running = going_on[:beams]
    return max(ended, key=lambda hypothesis: hypothesis.score)


@pytest.mark.parametrize(("beams", "penalty"), [(2, 1.0), (3, 0.0), (4, 1.5)])
@pytest.mark.parametrize("seed", range(3))
def test_a_sentence_ends_by_fairseqs_rule(seed: int, beams: int, penalty: float) -> None:
    model = model_of("dense", seed=seed)
    examples = random_examples(model.spec, sentences=5, seed=seed)
    found = translate(model, examples, beam_size=beams, length_penalty=penalty, limit=9)
    expected = [
        fairseq_search(model, one, beams=beams, penalty=penalty, limit=9) for one in examples
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.score == rounded(other.score)


@pytest.mark.parametrize(("beams", "penalty"), [(3, 1.0), (4, 0.0), (5, 1.0), (5, 2.0)])
@pytest.mark.parametrize("seed", range(4))
def test_the_huggingface_rule_finds_what_generate_finds(
    seed: int, beams: int, penalty: float
) -> None:
    limit = 10
    model = model_of("dense", seed=seed)
    examples = [
        replace(one, decoder_prompt=(EOS_ID, 17), target_language=1)
        for one in random_examples(model.spec, sentences=7, seed=seed)
    ]
    found = translate(
        model,
        examples,
        beam_size=beams,
        length_penalty=penalty,
        stopping="huggingface",
        limit=limit,
    )
    source = collate(examples, eos_id=EOS_ID)
    ids = padded(source.source_N, source.source, fill=PAD_ID)
    generated = m2m100_peer(model, eos_id=EOS_ID).generate(
        input_ids=ids,
        attention_mask=ids.ne(PAD_ID).long(),
        forced_bos_token_id=17,
        num_beams=beams,
        early_stopping=False,
        length_penalty=penalty,
        max_new_tokens=limit + 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = [strip(tokens.tolist()) for tokens in generated.sequences]
    assert [one.tokens for one in found] == expected
    scores = torch.tensor([one.score for one in found])
    torch.testing.assert_close(scores, generated.sequences_scores, rtol=1e-5, atol=1e-5)


def strip(tokens: list[int]) -> tuple[int, ...]:
    """A sequence of the peer without start, tag, end-of-sentence and padding."""
    return tuple(token for token in tokens[2:] if token not in (EOS_ID, PAD_ID))


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("source_tokens", "ratio", "extra", "expected"),
    [
        (7, 2.0, 10, 24),
        (7, 1.5, 0, 10),
        (7, 0.0, 1, 1),
        (7, 0.1, 0, 1),
        (100, 2.0, 10, 60),
        (7, 0.0, 3, 3),
    ],
)
def test_the_length_limit_follows_the_source_within_the_models_positions(
    source_tokens: int, ratio: float, extra: int, expected: int
) -> None:
    config = DecodingConfig(max_length_ratio=ratio, max_extra_length=extra)
    assert max_target_length(source_tokens, config, positions=60) == expected


@pytest.mark.parametrize("stopping", ["fairseq", "huggingface"])
def test_scores_that_are_no_numbers_are_one_sentence(stopping: str) -> None:
    model = model_of("dense")
    with torch.no_grad():
        embedding_table(model).fill_(3e38)
    examples = random_examples(model.spec, sentences=2, seed=3)
    with pytest.raises(CheckpointError, match="scores are not numbers"):
        translate(model, examples, limit=3, stopping=stopping)


def test_every_sentence_ends_at_its_own_limit_at_the_latest() -> None:
    model = model_of("moe-lgr", seed=3, vocabulary=40)
    examples = random_examples(model.spec, sentences=10, seed=3)
    free = translate(model, examples, max_length_ratio=3.0)
    bound = translate(model, examples, max_length_ratio=1.0, max_extra_length=0)
    cut = 0
    for example, longer, found in zip(examples, free, bound, strict=True):
        limit = len(source_of(example).tokens)
        assert len(found.tokens) <= limit - 1
        cut += len(longer.tokens) > limit - 1 == len(found.tokens)
        expected = full_score(model, example, found.tokens, penalty=1.0)
        assert found.score == rounded(expected)
    assert cut > 2


def test_a_hypothesis_never_outgrows_the_models_positions() -> None:
    model = model_of("dense", max_positions=12, positions="learned")
    example = random_examples(model.spec, sentences=1, seed=1)[0]
    (found,) = translate(
        model, [example], eos_id=PAD_ID, stopping="huggingface", max_extra_length=50
    )
    assert len(found.tokens) == 12 - len(example.decoder_prompt)


def test_padding_is_never_generated() -> None:
    model = model_of("dense")
    with torch.no_grad():
        embedding_table(model)[PAD_ID] += raising_logit(model, by=4)
    would_be_best = 0
    examples = random_examples(model.spec, sentences=6, seed=1)
    for example, found in zip(examples, translate(model, examples), strict=True):
        assert PAD_ID not in found.tokens
        log_p_LV = next_log_p(model, example, found.tokens)
        would_be_best += int((log_p_LV.argmax(1) == PAD_ID).sum())
        expected = full_score(model, example, found.tokens, penalty=1.0)
        assert found.score == rounded(expected)
    assert would_be_best > 0


def test_a_prompt_without_a_tag_is_searched_from_as_well() -> None:
    model = model_of("moe")
    spec = model.spec.model_copy(update={"tag_scheme": "tgt"})
    examples = random_examples(spec, sentences=4, seed=6)
    assert {one.decoder_prompt for one in examples} == {(EOS_ID,)}
    for example, found in zip(examples, translate(model, examples), strict=True):
        expected = fairseq_search(
            model, example, beams=4, penalty=1.0, limit=len(source_of(example).tokens) + 10
        )
        assert found.tokens == expected.tokens


def test_a_model_in_training_mode_is_searched_without_dropout() -> None:
    model = model_of("dense")
    examples = random_examples(model.spec, sentences=3, seed=7)
    expected = translate(model, examples)
    model.decoder.dropout = 0.5
    model.train()
    assert translate(model, examples) == expected
