"""Tests of pipeline/decoding/beam_search.py."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.fronted_models import FRONTS, fronted_spec
from support.m2m100_peer import m2m100_peer, padded
from support.searched_models import (
    TOKEN_MOE,
    Kind,
    banned_texts,
    full_score,
    model_of,
    next_log_p,
    rounded,
    translate,
)
from support.tiny_models import (
    EOS_ID,
    PAD_ID,
    embedding_table,
    random_examples,
    source_of,
    tiny_model,
)
from torch import Tensor

from pipeline.batching.batch import Example, collate
from pipeline.decoding import cached_keys
from pipeline.decoding.beam_search import Search, beam_search_n_best
from pipeline.decoding.cached_keys import ListedKeys
from pipeline.decoding.hypotheses import (
    HuggingFaceRule,
    Source,
    Translation,
    max_target_length,
    stopping_rule,
)
from pipeline.decoding.sampling import sample
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.transformer import Transformer


@pytest.mark.parametrize(
    ("norm", "positions", "kind"),
    [
        *(("pre", "sinusoidal", "dense"), ("post", "learned", "dense")),
        *(("pre", "learned", "moe"), ("post", "sinusoidal", "moe")),
        *(("pre", "sinusoidal", "moe-lgr"), ("post", "learned", "moe-lgr")),
    ],
)
def test_logits_of_every_step_equal_those_of_the_whole_prefix(
    monkeypatch: pytest.MonkeyPatch, norm: str, positions: str, kind: Kind
) -> None:
    assert_steps_equal_whole_prefixes(model_of(kind, norm=norm, positions=positions), monkeypatch)


@pytest.mark.parametrize("front", [*FRONTS, "converter layers"])
def test_logits_of_every_step_equal_those_of_the_whole_prefix_with_every_front(
    monkeypatch: pytest.MonkeyPatch, front: str
) -> None:
    if front in FRONTS:
        model = tiny_model(fronted_spec(FRONTS[front], moe=TOKEN_MOE, groups=3)).eval()
    else:
        model = model_of("moe-lgr", converter_layers=1)
    assert_steps_equal_whole_prefixes(model, monkeypatch)


def test_a_source_into_two_languages_is_converted_into_each() -> None:
    model = model_of("dense", converter_layers=1)
    (one,) = random_examples(model.spec, sentences=1, seed=3, shortest=9)
    other = replace(one, target_language=(one.target_language + 1) % len(model.spec.languages))
    together = translate(model, [one, other])
    for example, found in zip([one, other], together, strict=True):
        (alone,) = translate(model, [example])
        assert alone.tokens == found.tokens
        assert found.score == rounded(full_score(model, example, found.tokens, penalty=1.0))
    assert together[0].score != rounded(together[1].score), "the prompts are equal"


def assert_steps_equal_whole_prefixes(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    example = random_examples(model.spec, sentences=1, seed=3)[0]
    steps: list[Tensor] = []

    def record(x_ND: Tensor) -> Tensor:
        logits_RV = project(x_ND)
        steps.append(logits_RV.clone())  # the search writes into what it is given
        return logits_RV

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


@pytest.mark.parametrize(
    ("penalty", "kind"),
    [(0.0, "dense"), (1.0, "moe"), (1.7, "moe-lgr"), (1.0, "moe-capacity")],
)
def test_a_score_is_the_normalised_log_probability_of_the_tokens_and_the_end(
    penalty: float, kind: Kind
) -> None:
    model = model_of(kind, seed=2)
    examples = random_examples(model.spec, sentences=6, seed=2)
    every = translate(model, examples, length_penalty=penalty)
    for example, found in zip(examples, every, strict=True):
        assert found.score == rounded(full_score(model, example, found.tokens, penalty=penalty))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopping", "kind"),
    [
        *(("fairseq", "dense"), ("huggingface", "moe")),
        *(("huggingface", "moe-lgr"), ("fairseq", "moe-capacity")),
    ],
)
def test_a_sentence_alone_is_translated_as_in_a_batch(stopping: str, kind: Kind) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=9, seed=4, shortest=1, longest=20)
    together = translate(model, examples, stopping=stopping)
    assert len({len(found.tokens) for found in together}) > 2
    for example, found in zip(examples, together, strict=True):
        (alone,) = translate(model, [example], stopping=stopping)
        assert alone.tokens == found.tokens
        assert alone.score == rounded(found.score)


@pytest.mark.parametrize(
    ("stopping", "kind"),
    [
        *(("fairseq", "dense"), ("huggingface", "dense")),
        ("fairseq", "moe-lgr"),
        ("huggingface", "moe-capacity"),
    ],
)
def test_sentences_that_join_a_running_search_are_translated_as_in_a_batch(
    stopping: str, kind: Kind
) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=24, seed=4, shortest=1, longest=20)
    config = DecodingConfig.model_validate({"beam_size": 4, "n_best": 2, "stopping": stopping})
    sources = [source_of(one) for one in examples]
    together = beam_search_n_best(model, sources, config, eos_id=EOS_ID)
    found: dict[int, list[Translation]] = {}
    entries: list[int] = []
    with torch.inference_mode():
        search = Search(model, sources[:6], config, eos_id=EOS_ID)
        found |= search.step()
        for first in range(6, 24, 2):
            late = Search(model, sources[first : first + 2], config, eos_id=EOS_ID)
            done = late.step()
            assert search.can_be_joined
            shift = search.join(late)
            found |= {shift + index: of for index, of in done.items()} | search.step()
            assert isinstance(search.states.keys, ListedKeys)
            entries.append(search.states.keys.made)
        while search.active:
            found |= search.step()
    assert max(len(of[0].tokens) for of in together) > 9
    for index, expected in enumerate(together):
        assert [one.tokens for one in found[index]] == [one.tokens for one in expected]
        assert [one.score for one in found[index]] == [rounded(one.score) for one in expected]
    assert entries[-1] < 24 * 4 * 9 / 2  # those that nothing reads any more are dropped


@pytest.mark.parametrize(("kind", "grid"), [("dense", False), ("dense", True), ("moe-lgr", True)])
def test_sentences_that_are_dropped_leave_the_caches_and_the_others_as_they_are(
    kind: Kind, grid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grid:
        monkeypatch.setattr(cached_keys, "can_loop", lambda _: False)
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=12, seed=4, shortest=1, longest=20)
    config = DecodingConfig(beam_size=4, n_best=2)
    sources = [source_of(one) for one in examples]
    together = beam_search_n_best(model, sources, config, eos_id=EOS_ID)
    with torch.inference_mode():
        search = Search(model, sources, config, eos_id=EOS_ID)
        found = {**search.step(), **search.step()}
        dropped = {index for index in search.active if index % 3}
        assert len(dropped) > 3
        search.drop({*dropped, 99})
        left = len(search.active)
        assert len(search.states.languages_B2) == left == 12 - len(dropped) - len(found)
        assert search.beams.next_BJ.shape == (left, 4)
        while search.active:
            found |= search.step()
    assert {*found} == {*range(12)} - dropped
    for index, of in found.items():
        assert [one.tokens for one in of] == [one.tokens for one in together[index]]
        assert [one.score for one in of] == [rounded(one.score) for one in together[index]]


def test_a_search_whose_sentences_are_all_dropped_is_over() -> None:
    model = model_of("dense")
    sources = [source_of(one) for one in random_examples(model.spec, sentences=3, seed=4)]
    with torch.inference_mode():
        search = Search(model, sources, DecodingConfig(), eos_id=EOS_ID)
        search.step()
        search.drop(range(3))
    assert search.active == []


@pytest.mark.slow
def test_half_precision_changes_scores_by_rounding_only() -> None:
    model, half = model_of("moe-lgr", seed=5), model_of("moe-lgr", seed=5).to(torch.bfloat16)
    examples = random_examples(model.spec, sentences=5, seed=5)
    for example, found in zip(examples, translate(half, examples), strict=True):
        expected = full_score(model, example, found.tokens, penalty=1.0)
        assert found.score == pytest.approx(expected, rel=0.05)


def every_hypothesis(pieces: Sequence[int], *, longest: int) -> Iterator[tuple[int, ...]]:
    """Yield all token sequences that end by the limit, without the end-of-sentence."""
    for length in range(longest):
        yield from itertools.product(pieces, repeat=length)


def score_of_every_hypothesis(
    model: Transformer, example: Example, *, penalty: float
) -> dict[tuple[int, ...], float]:
    """Score all hypotheses over a vocabulary of six with at most two tokens before the end."""
    pieces = [token for token in range(6) if token not in (PAD_ID, EOS_ID)]
    return {
        tokens: full_score(model, example, tokens, penalty=penalty)
        for tokens in every_hypothesis(pieces, longest=3)
    }


def wide_search(
    model: Transformer, source: Source, *, n_best: int = 21, penalty: float = 1.0
) -> list[Translation]:
    """Search with more beams than there are hypotheses."""
    limits = {"max_length_ratio": 0.0, "max_extra_length": 3}
    config = DecodingConfig(beam_size=36, n_best=n_best, length_penalty=penalty, **limits)
    (found,) = beam_search_n_best(model, [source], config, eos_id=EOS_ID)
    return found


EXAMPLE_OF_SIX = Example([0, 3, 4], [], (5,), (EOS_ID, 4), source_language=0, target_language=1)


@pytest.mark.parametrize(
    ("seed", "penalty"), [(0, 0.0), (1, 0.7), (2, 1.0), (3, 0.7), (4, 1.0), (5, 0.0)]
)
def test_a_beam_as_wide_as_the_space_finds_all_sequences_in_order(
    seed: int, penalty: float
) -> None:
    model = model_of("moe-lgr", seed=seed, vocabulary=6)
    languages: dict[str, Any] = {"source_language": seed % 4, "target_language": (seed + 1) % 4}
    example = replace(EXAMPLE_OF_SIX, source=[0, 3, 4][: 1 + seed % 3], **languages)
    scores = score_of_every_hypothesis(model, example, penalty=penalty)
    assert len(scores) == 1 + 4 + 16
    found = wide_search(model, source_of(example), penalty=penalty)
    assert [one.tokens for one in found] == sorted(scores, key=lambda one: -scores[one])
    assert [one.score for one in found] == [rounded(scores[one.tokens]) for one in found]
    assert wide_search(model, source_of(example), penalty=penalty, n_best=5) == found[:5]


@pytest.mark.parametrize(
    "restriction",
    [
        {"prefix": (3,)},
        {"prefix": (5, 0)},
        {"banned": ((3,),)},
        {"banned": ((3, 4), (0,))},
        {"prefix": (4,), "banned": ((4, 4), (4, 0), (4, 3, 5))},
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_restricted_hypotheses_are_all_that_keep_to_it_in_order_with_unchanged_scores(
    seed: int, restriction: dict[str, Any]
) -> None:
    model = model_of("moe-lgr", seed=seed, vocabulary=6)
    prefix = restriction.get("prefix", ())
    banned = [" ".join(map(str, one)) for one in restriction.get("banned", ())]

    def keeps(tokens: tuple[int, ...]) -> bool:
        text = " ".join(map(str, tokens))
        return tokens[: len(prefix)] == prefix and not any(one in text for one in banned)

    scores = score_of_every_hypothesis(model, EXAMPLE_OF_SIX, penalty=1.0)
    expected = sorted(filter(keeps, scores), key=lambda one: -scores[one])
    if "banned" in restriction:
        restriction = restriction | {"banned": banned_texts(*restriction["banned"], vocabulary=6)}
    found = wide_search(model, replace(source_of(EXAMPLE_OF_SIX), **restriction))
    assert [one.tokens for one in found] == expected
    assert [one.score for one in found] == [rounded(scores[one]) for one in expected]


@pytest.mark.parametrize("stopping", ["fairseq", "huggingface"])
def test_what_restricts_one_sentence_leaves_the_others_of_its_batch_alone(stopping: str) -> None:
    model = model_of("moe", seed=4)
    examples = random_examples(model.spec, sentences=6, seed=4)
    config = DecodingConfig.model_validate({"stopping": stopping, "max_length_ratio": 1.0})
    plain = [source_of(one) for one in examples]
    changed = list(plain)
    changed[1] = replace(plain[1], prefix=(9, 9, 8))
    changed[4] = replace(plain[4], banned=banned_texts((5,), (6, 7)), prefix=(10,))
    found = beam_search_n_best(model, changed, config, eos_id=EOS_ID)
    free = beam_search_n_best(model, plain, config, eos_id=EOS_ID)
    for index, source in enumerate(changed):
        (alone,) = beam_search_n_best(model, [source], config, eos_id=EOS_ID)
        assert [one.tokens for one in alone] == [one.tokens for one in found[index]]
        if source == plain[index]:
            assert [one.tokens for one in free[index]] == [one.tokens for one in found[index]]
        assert found[index][0].tokens[: len(source.prefix)] == source.prefix


def test_a_prefix_is_kept_beyond_the_length_limit_and_refused_beyond_the_positions() -> None:
    model = model_of("dense", max_positions=12, positions="learned")
    (example,) = random_examples(model.spec, sentences=1, seed=1)
    config = DecodingConfig(max_length_ratio=0.0, max_extra_length=2)
    fits = replace(source_of(example), prefix=(7,) * 9)
    ((found,),) = beam_search_n_best(model, [fits], config, eos_id=EOS_ID)
    assert found.tokens == (7,) * 9
    longer = replace(fits, prefix=(7,) * 10)
    with pytest.raises(ConfigError, match=r"have 10 tokens, and the model .* for 9"):
        beam_search_n_best(model, [longer], config, eos_id=EOS_ID)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_best": 6}, "n_best 6 exceeds beam_size 5"),
        ({"top_p": 0.5}, 'top_p is a setting of sampling, and search is "beam"'),
        ({"search": "sampling", "top_p": 1.5}, "top_p"),
        ({"search": "sampling", "sampling_temperature": 0}, "sampling_temperature"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        DecodingConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("seed", "beams", "penalty", "n_best"),
    [(0, 3, 1.0, 1), (1, 4, 0.0, 1), (1, 5, 2.0, 1), (0, 5, 0.0, 4), (1, 5, 1.0, 4)],
)
def test_the_huggingface_rule_finds_what_generate_finds(
    seed: int, beams: int, penalty: float, n_best: int
) -> None:
    limit = 10
    model = model_of("dense", seed=seed)
    examples = [
        replace(one, decoder_prompt=(EOS_ID, 17), target_language=1)
        for one in random_examples(model.spec, sentences=7, seed=seed)
    ]
    limits = {"max_length_ratio": 0.0, "max_extra_length": limit}
    sizes = {"beam_size": beams, "n_best": n_best, "length_penalty": penalty, **limits}
    config = DecodingConfig.model_validate({**sizes, "stopping": "huggingface"})
    found = beam_search_n_best(model, [source_of(one) for one in examples], config, eos_id=EOS_ID)
    source = collate(examples, eos_id=EOS_ID)
    ids = padded(source.source_N, source.source, fill=PAD_ID)
    generated = m2m100_peer(model, eos_id=EOS_ID).generate(
        input_ids=ids,
        attention_mask=ids.ne(PAD_ID).long(),
        forced_bos_token_id=17,
        num_beams=beams,
        num_return_sequences=n_best,
        suppress_tokens=[PAD_ID] if n_best > 1 else None,
        early_stopping=False,
        length_penalty=penalty,
        max_new_tokens=limit + 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    every = [one for of_sentence in found for one in of_sentence]
    assert [one.tokens for one in every] == [strip(t.tolist()) for t in generated.sequences]
    scores = torch.tensor([one.score for one in every])
    torch.testing.assert_close(scores, generated.sequences_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("result", [None, torch.ones(3), torch.ones(3, 3, dtype=torch.bool)])
def test_a_stopping_rule_that_decides_nothing_is_named(
    result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = "pipeline.decoding.hypotheses.FairseqRule.is_done"
    monkeypatch.setattr(rule, lambda *_, **__: result)
    model = model_of("dense")
    sources = [source_of(one) for one in random_examples(model.spec, sentences=3, seed=1)]
    with pytest.raises(ConfigError, match="is_done of FairseqRule returned a"):
        beam_search_n_best(model, sources, DecodingConfig(beam_size=2), eos_id=EOS_ID)


@pytest.mark.parametrize(
    ("sampling", "result"),
    [
        (False, None),
        (False, 1),
        (False, torch.ones(7)),
        (False, lambda length: length - 1),
        (False, lambda length: -length),
        (False, lambda length: length * math.nan),
        (True, "5"),
        (True, 0),
        (True, None),
    ],
    ids=lambda value: "numbers" if callable(value) else str(value),
)
def test_a_stopping_rule_that_counts_no_length_is_named(
    sampling: bool, result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = "pipeline.decoding.hypotheses.FairseqRule.counted_length"
    answer = result if callable(result) else lambda _: result
    monkeypatch.setattr(rule, lambda _, length, **__: answer(length))
    model = model_of("dense")
    sources = [source_of(one) for one in random_examples(model.spec, sentences=3, seed=1)]
    config = DecodingConfig(beam_size=2, max_length_ratio=0.0, max_extra_length=3)
    with pytest.raises(ConfigError, match="counted_length of FairseqRule returned a"):
        if sampling:
            sample(model, sources, config.model_copy(update={"search": "sampling"}), eos_id=EOS_ID)
        else:
            beam_search_n_best(model, sources, config, eos_id=EOS_ID)


@pytest.mark.parametrize("made", [lambda: None, lambda: HuggingFaceRule])
def test_a_case_that_makes_no_stopping_rule_is_named(
    made: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.decoding.hypotheses.FairseqRule", made)
    with pytest.raises(ConfigError, match="no case for 'fairseq' that returns an object with"):
        stopping_rule(DecodingConfig())


def strip(tokens: list[int]) -> tuple[int, ...]:
    """Remove start, tag, end-of-sentence and padding from a sequence of the peer."""
    return tuple(token for token in tokens[2:] if token not in (EOS_ID, PAD_ID))


@pytest.mark.parametrize(
    ("source_tokens", "ratio", "extra", "expected"),
    [(7, 2.0, 10, 24), (7, 1.5, 0, 10), (7, 0.0, 3, 3), (7, 0.1, 0, 1), (100, 2.0, 10, 60)],
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


def test_a_model_in_training_mode_is_searched_without_dropout() -> None:
    model = model_of("dense")
    examples = random_examples(model.spec, sentences=3, seed=7)
    expected = translate(model, examples)
    model.decoder.dropout = 0.5
    model.train()
    assert translate(model, examples) == expected
