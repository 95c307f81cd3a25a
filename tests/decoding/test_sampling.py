"""Tests of pipeline/decoding/sampling.py."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.searched_models import (
    Kind,
    banned_texts,
    full_score,
    model_of,
    next_log_p,
    rounded,
    translate,
)
from support.tiny_models import EOS_ID, PAD_ID, embedding_table, random_examples, source_of
from torch import Tensor

from pipeline.batching.batch import Example
from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.sampling import draw, probabilities, sample
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError
from pipeline.model.transformer import Transformer


def sampling(**settings: object) -> DecodingConfig:
    return DecodingConfig.model_validate({"search": "sampling", **settings})


def samples(
    model: Transformer, examples: Sequence[Example], **settings: object
) -> list[list[Translation]]:
    config = sampling(**{"max_length_ratio": 1.0, **settings})
    return sample(model, [source_of(one) for one in examples], config, eos_id=EOS_ID)


def test_probabilities_are_those_of_the_logits_over_the_temperature() -> None:
    logits_RV = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    for temperature in (0.3, 1.0, 2.5):
        config = sampling(sampling_temperature=temperature)
        found = probabilities(logits_RV.log_softmax(1), config)
        expected = (logits_RV.double() / temperature).softmax(1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_at_an_infinite_temperature_all_that_may_come_is_equally_likely() -> None:
    log_p_RV = torch.tensor([[0.9, 0.1, 0.0]]).log()
    found = probabilities(log_p_RV, sampling(sampling_temperature=math.inf))
    assert found.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_k": 50}, {0, 1, 2, 3}),
        ({"top_p": 0.05}, {1}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.81}, {0, 1, 3}),
        ({"top_p": 0.999}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.83}, {1, 3}),  # 0.8 of the 0.95 that top k leaves
    ],
)
def test_only_the_likeliest_tokens_are_drawn_from(
    settings: dict[str, float], kept: set[int]
) -> None:
    p_V = torch.tensor([0.15, 0.5, 0.05, 0.3])
    found_V = probabilities(p_V.log()[None], sampling(**settings))[0]
    assert set(found_V.nonzero().flatten().tolist()) == kept
    ratio = found_V[sorted(kept)] / p_V[sorted(kept)]
    torch.testing.assert_close(ratio, ratio[:1].expand(len(kept)), rtol=1e-5, atol=0)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """Pearson's chi-square of 20,000 draws, below the 99.9th percentile at 4 degrees of freedom."""
    p_V = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.2, 0.1])
    count = 20_000
    uniform_R = torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    token_R = draw(p_V.log().expand(count, -1), uniform_R, sampling())
    counts_V = torch.bincount(token_R, minlength=6)
    assert counts_V[2] == 0
    is_likely = p_V > 0
    expected_V = count * p_V[is_likely]
    assert float(((counts_V[is_likely] - expected_V) ** 2 / expected_V).sum()) < 18.47


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_no_number_draws_what_cannot_come(number: float) -> None:
    log_p_RV = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log()
    (token,) = draw(log_p_RV, torch.tensor([number], dtype=torch.float64), sampling()).tolist()
    assert token in (1, 3)


TEMPERATURE = 3.0


def test_whole_sentences_come_as_often_as_the_model_says() -> None:
    """Chi-square over all sentences expected at least 10 times; the rest counts as one."""
    model = model_of("moe-lgr", seed=2, vocabulary=6)
    example = Example([0, 3, 4], [], (5,), (EOS_ID, 4), source_language=0, target_language=1)
    count, limit = 1000, 3

    @cache
    def log_p_after(prefix: tuple[int, ...]) -> Tensor:
        log_p_V = next_log_p(model, example, prefix)[-1]
        log_p_V[PAD_ID] = -torch.inf
        return (log_p_V / TEMPERATURE).log_softmax(0)

    def likelihood(tokens: tuple[int, ...]) -> float:
        """Score a sentence by one pass per prefix; at the limit the end is certain."""
        ended = (*tokens, EOS_ID)[: limit - 1]
        return math.exp(
            sum(float(log_p_after(tokens[:place])[token]) for place, token in enumerate(ended))
        )

    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(4):
        limits = {"max_length_ratio": 0.0, "max_extra_length": limit}
        drawn = {"n_best": count, "seed": seed, "sampling_temperature": TEMPERATURE, **limits}
        (found,) = samples(model, [example], **drawn)
        counts.update(one.tokens for one in found)
    total = 4 * count
    statistic, others, degrees = 0.0, float(total), 0
    counted = 0
    for tokens, times in counts.items():
        expected = total * likelihood(tokens)
        if expected >= 10:
            statistic += (times - expected) ** 2 / expected
            others, counted, degrees = others - expected, counted + times, degrees + 1
    statistic += (total - counted - others) ** 2 / max(others, 1.0)
    assert degrees > 5
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)  # mean and 4 standard deviations


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-lgr"])
def test_a_temperature_towards_zero_is_greedy_decoding(kind: Kind) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=8, seed=1)
    greedy = translate(model, examples, beam_size=1)
    for settings in ({"sampling_temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-9}):
        found = samples(model, examples, **settings)
        assert [one.tokens for (one,) in found] == [one.tokens for one in greedy]
        assert [one.score for (one,) in found] == [rounded(one.score) for one in greedy]


@pytest.mark.parametrize(("kind", "stopping"), [("dense", "fairseq"), ("moe-lgr", "huggingface")])
def test_samples_of_a_sentence_do_not_depend_on_its_batch(kind: Kind, stopping: str) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=9, seed=4, shortest=1, longest=20)
    settings = {"stopping": stopping, "sampling_temperature": 2.0}
    together = samples(model, examples, n_best=3, **settings)
    assert len({one.tokens for found in together for one in found}) > 10
    for example, found in zip(examples, together, strict=True):
        (alone,) = samples(model, [example], n_best=3, **settings)
        ((first,),) = samples(model, [example], n_best=1, **settings)
        assert [one.tokens for one in alone] == [one.tokens for one in found]
        assert first.tokens == found[0].tokens
    backwards = samples(model, examples[::-1], n_best=3, **settings)[::-1]
    assert [[o.tokens for o in f] for f in backwards] == [[o.tokens for o in f] for f in together]


def test_another_seed_gives_other_samples() -> None:
    model = model_of("dense")
    examples = random_examples(model.spec, sentences=5, seed=4)
    one, other, again = (samples(model, examples, seed=seed) for seed in (1, 2, 1))
    assert one == again
    assert one != other


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_sample_s_score_is_the_model_s_own_whatever_the_temperature(temperature: float) -> None:
    model = model_of("moe", seed=2)
    examples = random_examples(model.spec, sentences=5, seed=2)
    found = samples(model, examples, n_best=2, sampling_temperature=temperature)
    for example, of_example in zip(examples, found, strict=True):
        for one in of_example:
            assert one.score == rounded(full_score(model, example, one.tokens, penalty=1.0))


def test_a_sample_begins_with_its_prefix_and_has_no_banned_sequence() -> None:
    model = model_of("dense", seed=3)
    examples = random_examples(model.spec, sentences=4, seed=3)
    banned = banned_texts((7,), (8, 9), (6, 10))
    sources = [replace(source_of(one), prefix=(5, 6), banned=banned) for one in examples]
    found = sample(model, sources, sampling(n_best=30, sampling_temperature=2.0), eos_id=EOS_ID)
    for of_source in found:
        for one in of_source:
            assert one.tokens[:2] == (5, 6)
            assert 7 not in one.tokens
            assert not {(8, 9), (6, 10)} & set(zip(one.tokens, one.tokens[1:], strict=False))


def test_scores_that_are_no_numbers_are_one_sentence() -> None:
    model = model_of("dense")
    with torch.no_grad():
        embedding_table(model).fill_(3e38)
    examples = random_examples(model.spec, sentences=2, seed=3)
    with pytest.raises(CheckpointError, match="scores are not numbers"):
        samples(model, examples)
