"""Tests of pipeline/decoding/constraints.py."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.searched_models import banned_texts, full_score, model_of, rounded
from support.tiny_models import EOS_ID, random_examples, source_of

from pipeline.batching.batch import Example
from pipeline.decoding.beam_search import beam_search_n_best
from pipeline.decoding.constraints import BannedTexts, progress_of, read_phrases
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import ConfigError

EXAMPLE = Example([0, 3, 4], [], (5,), (EOS_ID, 4), source_language=0, target_language=1)
PIECES = (0, 3, 4, 5)


def has(tokens: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return " ".join(map(str, phrase)) in " ".join(map(str, tokens))


@pytest.mark.parametrize(("seed", "stopping"), [(0, "fairseq"), (1, "huggingface")])
@pytest.mark.parametrize(
    "asked",
    [
        {"required": ((3,),)},
        {"required": ((3, 3),)},
        {"required": ((4,), (0,))},
        {"required": ((3, 4), (4, 0))},  # they may share a token
        {"required": ((3,), (3,))},
        {"required": ((4,),), "prefix": (0,)},
        {"required": ((4,),), "banned": ((4, 4), (0,))},
    ],
)
def test_a_beam_as_wide_as_the_space_finds_all_that_have_the_phrases_in_order(
    seed: int, asked: dict[str, Any], stopping: str
) -> None:
    """By enumeration: at most three of four pieces, or as many as the phrases have together."""
    longest = max(3, sum(map(len, asked["required"])))
    model = model_of("moe-lgr", seed=seed, vocabulary=6)
    every = [
        tokens
        for length in range(longest + 1)
        for tokens in itertools.product(PIECES, repeat=length)
        if all(has(tokens, phrase) for phrase in asked["required"])
        and tokens[: len(asked.get("prefix", ()))] == asked.get("prefix", ())
        and not any(has(tokens, phrase) for phrase in asked.get("banned", ()))
    ]
    config = DecodingConfig.model_validate(
        {
            "beam_size": 700,
            "n_best": 700,
            "max_length_ratio": 0.0,
            "max_extra_length": 4,
            "stopping": stopping,
            "length_penalty": 0.0,
        }
    )
    if "banned" in asked:
        asked = asked | {"banned": banned_texts(*asked["banned"], vocabulary=6)}
    source = replace(source_of(EXAMPLE), **asked)
    (found,) = beam_search_n_best(model, [source], config, eos_id=EOS_ID)
    ended = [one for one in found if len(one.tokens) <= longest]
    assert stopping == "huggingface" or ended == found  # it keeps what the limit cuts off, too
    scores = {one: full_score(model, EXAMPLE, one, penalty=0.0) for one in every}
    assert [one.tokens for one in ended] == sorted(every, key=lambda one: -scores[one])
    assert [one.score for one in ended] == [rounded(scores[one.tokens]) for one in ended]
    assert all(has(one.tokens, phrase) for one in found for phrase in asked["required"])


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("stopping", ["fairseq", "huggingface"])
def test_every_hypothesis_has_its_phrases_however_few_beams_there_are(
    stopping: str, beams: int
) -> None:
    model = model_of("dense", seed=2)
    examples = random_examples(model.spec, sentences=5, seed=4)
    config = DecodingConfig.model_validate(
        {"beam_size": beams, "n_best": beams, "stopping": stopping, "max_length_ratio": 0.5}
    )
    asked = [((9, 8), (7,)), (), ((6, 6, 6, 6),), ((19,), (18,), (17,), (16,), (15,)), ((5,),)]
    plain = [source_of(one) for one in examples]
    sources = [replace(one, required=more) for one, more in zip(plain, asked, strict=True)]
    found = beam_search_n_best(model, sources, config, eos_id=EOS_ID)
    for example, source, hypotheses in zip(examples, sources, found, strict=True):
        for one in hypotheses:
            assert all(has(one.tokens, phrase) for phrase in source.required)
        if stopping == "fairseq":
            best = hypotheses[0]
            assert best.score == rounded(full_score(model, example, best.tokens, penalty=1.0))
        (alone,) = beam_search_n_best(model, [source], config, eos_id=EOS_ID)
        assert [one.tokens for one in alone] == [one.tokens for one in hypotheses]
    (free,) = beam_search_n_best(model, [plain[1]], config, eos_id=EOS_ID)
    assert [one.tokens for one in free] == [one.tokens for one in found[1]]


def test_progress_counts_phrases_that_stand_there_and_the_one_begun() -> None:
    phrases = [(1, 2, 3), (3, 4)]
    assert progress_of((), phrases).tokens == 0
    begun = progress_of((9, 1, 2), phrases)
    assert (begun.tokens, begun.missing, set(begun.next_tokens)) == (2, 3, {3, 1})
    shared = progress_of((1, 2, 3), phrases)
    assert (shared.tokens, shared.missing, set(shared.next_tokens)) == (4, 1, {4, 3})
    assert progress_of((1, 2, 3, 4, 9), phrases).missing == 0
    assert progress_of((1, 1, 2), [(1, 1, 2, 1)]).tokens == 3
    assert progress_of((3, 9), phrases).tokens == 0  # begun and given up


PARTS = [b"", b"a", b"b", b"ab", b" b", b"%", b"9%", b"\xc3", b"\xa9", b"\xa9b", b"a\xc3", b"\xff"]


@pytest.mark.parametrize("phrase", ["%", "ab", "a b", "\u00e9", "b\u00e9b", "9%b"])
@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_pieces_that_complete_a_banned_text_are_forbidden(
    phrase: str, seed: int
) -> None:
    """Text decides, in whatever pieces and parts of characters it is written."""
    drawn, banned = random.Random(seed), BannedTexts([phrase, "aaa"], PARTS)
    for _ in range(50):
        past: list[int] = []
        for _ in range(8):
            texts = [
                b"".join(PARTS[one] for one in (*past, more)).decode(errors="ignore")
                for more in range(len(PARTS))
            ]
            log_p_JV = torch.zeros(1, len(PARTS))
            banned.forbid(log_p_JV, [past])
            completes = [phrase in text or "aaa" in text for text in texts]
            assert (log_p_JV[0] == -torch.inf).tolist() == completes
            past.append(drawn.choice([more for more, is_out in enumerate(completes) if not is_out]))


def test_phrases_that_exceed_the_model_are_refused() -> None:
    model = model_of("dense")
    (example,) = random_examples(model.spec, sentences=1, seed=1)
    source = replace(source_of(example), required=((7,) * 200,))
    with pytest.raises(ConfigError, match="have 200 tokens"):
        beam_search_n_best(model, [source], DecodingConfig(), eos_id=EOS_ID)


def test_phrases_that_what_is_banned_keeps_apart_are_refused_in_one_sentence() -> None:
    model = model_of("dense", vocabulary=6)
    # Nothing stands before it but the beginning.
    around = banned_texts(*((one, 3) for one in PIECES), vocabulary=6)
    source = replace(source_of(EXAMPLE), prefix=(4,), required=((3,),), banned=around)
    with pytest.raises(ConfigError, match="No translation was found that has all the phrases"):
        beam_search_n_best(model, [source], DecodingConfig(), eos_id=EOS_ID)


@pytest.mark.parametrize("before", ["", "ein\tzwei\n"])
def test_a_line_of_phrases_without_end_is_refused(before: str, tmp_path: Path) -> None:
    path = tmp_path / "phrases"
    path.write_text(f"{before}{'x' * 2**20}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has a line of more than 1,048,576 characters\."):
        list(read_phrases(path))
