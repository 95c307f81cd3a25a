"""Intervals and tests equal sacreBLEU's and calculations by hand, and find what differs."""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, estimate_ci
from support.damaged_lines import (
    BLEU_INTO,
    CHRF_PLUS,
    damaged,
    line_statistics,
    sentences,
    stored,
)

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation import significance
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.language_accuracy import PLAIN, RESTRICTED, LanguageAccuracy
from pipeline.evaluation.line_sets import Sentences
from pipeline.evaluation.score_slot import Floats, Score
from pipeline.evaluation.scores import Quality, Significance, Verdicts
from pipeline.evaluation.seed_errors import LEVEL
from pipeline.evaluation.significance import (
    MOST_RESAMPLES,
    SETTLED,
    BootstrapTask,
    PairedBootstrapTask,
    PValues,
    RandomisationTask,
    bootstrap_p_value,
    bootstrap_p_values,
    compare,
    compare_all,
    compare_with_baseline,
    draw_counts,
    holm,
    in_two_rounds,
    middle_95,
    p_values_of_draws,
    randomisation_p_values,
    resample,
    resampled_scores,
    second_round,
)

# Intervals

KNOWN = frozenset({"en"})
SCORES: tuple[Score, ...] = (
    BLEU_INTO,
    CHRF_PLUS,
    LanguageAccuracy(PLAIN, KNOWN, None, seed=1),
    LanguageAccuracy(RESTRICTED, KNOWN, KNOWN, seed=1),
)
HITS = LanguageAccuracy(PLAIN, KNOWN, None, seed=1)

words = st.lists(st.sampled_from("a cat the dog sat . , 12".split()), max_size=7).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=6))
def test_scores_of_sums_are_sacrebleus(pairs: list[tuple[str, str]]) -> None:
    rows = line_statistics([one for one, _ in pairs], [two for _, two in pairs])
    for score in (BLEU_INTO, CHRF_PLUS):
        found = rows[score.column.name]
        of_sums = Score.of_corpus(score, found)
        assert of_sums == pytest.approx(score.of_corpus(found), abs=1e-9)


def test_draws_means_and_intervals_are_those_of_sacrebleus_paired_bootstrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = sentences(60, seed=1)
    systems = {
        name: damaged(references, share=share, seed=seed)
        for name, share, seed in (("base", 0.4, 2), ("near", 0.39, 3), ("far", 0.1, 4))
    }
    monkeypatch.setitem(os.environ, "SACREBLEU_SEED", "77")
    peer = PairedTest(
        list(systems.items()),
        {"BLEU": BLEU(), "chrF2++": CHRF(word_order=2)},
        [references],
        test_type="bs",
        n_samples=400,
    )
    expected: Any = peer()[1]
    paths = [
        stored(tmp_path / name, line_statistics(texts, references))
        for name, texts in systems.items()
    ]
    found = resampled_scores(BootstrapTask(paths=paths, scores=SCORES, seed=77, resamples=400))
    for metric, title in (("bleu", "BLEU"), ("chrf", "chrF2++")):
        for place in range(len(systems)):
            mean, half = estimate_ci(found[metric][place])
            assert mean == pytest.approx(expected[title][place].mean, abs=1e-3)
            assert half == pytest.approx(expected[title][place].ci, abs=1e-3)
            low, high = middle_95(found[metric][place])
            assert (high - low) / 2 == pytest.approx(half, abs=1e-9)


def test_draws_do_not_depend_on_how_many_are_counted_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = np.zeros((50, 7))
    for row, lines in zip(expected, np.random.default_rng(5).choice(7, size=(50, 7)), strict=True):
        np.add.at(row, lines, 1.0)
    monkeypatch.setattr(significance, "BLOCK_ELEMENTS", 30)
    blocks = list(draw_counts(7, resamples=50, seed=5))
    assert {len(block) for block in blocks} == {4, 2}
    np.testing.assert_array_equal(np.concatenate(blocks), expected)


def test_only_a_lead_over_every_other_system_makes_a_best_one() -> None:
    generator = np.random.default_rng(3)
    noise = generator.normal(size=1000)
    draws = np.stack([30 + noise, 31 + noise, 31.5 + generator.normal(size=1000)])
    assert compare(["a", "b"], [30.0, 31.0], draws[:2]).best == "b"
    assert compare(["b", "c"], [31.0, 31.5], draws[1:]).best is None
    assert compare(["a", "b", "c"], [30.0, 31.0, 31.5], draws).best is None
    assert compare(["a"], [30.0], draws[:1]).best is None
    assert compare(["a", "b"], [30.0, 31.0], draws[:2], larger_is_better=False).best == "a"
    assert compare(["a", "twin"], [30.0, 30.0], draws[[0, 0]]).best is None


def test_the_interval_of_a_difference_is_that_of_the_same_resamples() -> None:
    """Both systems find the same lines hard, so that it is narrower than those of their scores."""
    generator = np.random.default_rng(3)
    lines, noise = generator.normal(size=1000), generator.normal(size=1000)
    draws = np.stack([31 + lines, 30 + lines + 0.1 * noise, 29 + lines])
    found = compare(["a", "b", "c"], [31.0, 30.0, 29.0], draws, baseline="b")
    assert found.differences.keys() == {"a", "c"}
    low, high = middle_95(1 - 0.1 * noise)
    assert found.differences["a"].low == pytest.approx(low)
    assert found.differences["a"].high == pytest.approx(high)
    assert high - low < 0.2 * (found.intervals["a"].high - found.intervals["a"].low)
    assert compare(["a"], [30.0], draws[:1]).differences == {}


@pytest.mark.slow
@pytest.mark.parametrize(("share", "separated"), [(0.40, False), (0.20, True)])
def test_two_systems_alike_are_not_told_apart_and_two_unlike_ones_are(
    tmp_path: Path, share: float, separated: bool
) -> None:
    """Of twenty pairs of systems of one quality, chance may single out one or two."""
    found = 0
    for trial in range(20):
        references = sentences(80, seed=100 + trial)
        texts = [
            damaged(references, share=0.40, seed=trial),
            damaged(references, share=share, seed=1000 + trial),
        ]
        rows = [line_statistics(one, references) for one in texts]
        paths = [stored(tmp_path / f"{trial}-{i}", one) for i, one in enumerate(rows)]
        draws = resampled_scores(BootstrapTask(paths, SCORES, seed=trial, resamples=200))
        points = [BLEU_INTO.of_corpus(one["bleu"]) for one in rows]
        found += compare(["a", "b"], points, draws["bleu"]).best is not None
    assert found >= 18 if separated else found <= 4


# Lines that directions share

DIRECTIONS, LINES, TRIALS_OF_COVERAGE = 4, 100, 600


def hits_of_shared_sentences(generator: np.random.Generator) -> list[dict[str, Floats]]:
    """Hits of a system in directions that find the same sentences easy; half of all are hits."""
    ease = generator.beta(0.3, 0.3, size=LINES)
    drawn = generator.random((DIRECTIONS, LINES)) < ease
    return [{"language": row.astype(np.float64)[:, None]} for row in drawn]


def interval_of_average(
    of_directions: Sequence[dict[str, Floats]], tasks: Sequence[BootstrapTask]
) -> tuple[float, float]:
    draws = [
        resample([found], task)["language"][0]
        for found, task in zip(of_directions, tasks, strict=True)
    ]
    return middle_95(np.mean(draws, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_intervals_of_averages_over_parallel_directions_cover_what_they_say(kept: float) -> None:
    """Nineteen in twenty intervals hold the expected score, 50; independent draws: three in four.

    Also where every direction lacks some of the sentences.
    """
    generator = np.random.default_rng(1)
    independent, shared = 0, 0
    for trial in range(TRIALS_OF_COVERAGE):
        found = hits_of_shared_sentences(generator)
        here = [np.flatnonzero(generator.random(LINES) < kept) for _ in found]
        found = [{"language": one["language"][of]} for one, of in zip(found, here, strict=True)]
        alone = [
            BootstrapTask([], (HITS,), seed=trial * DIRECTIONS + place, resamples=200)
            for place in range(DIRECTIONS)
        ]
        together = [
            BootstrapTask([], (HITS,), trial, resamples=200, sentences=Sentences(of, LINES))
            for of in here
        ]
        low, high = interval_of_average(found, alone)
        independent += low <= 50.0 <= high
        low, high = interval_of_average(found, together)
        shared += low <= 50.0 <= high
    assert independent / TRIALS_OF_COVERAGE < 0.85
    assert 0.93 <= shared / TRIALS_OF_COVERAGE <= 0.97


def test_parallel_directions_with_all_sentences_have_the_draws_of_sacrebleu(tmp_path: Path) -> None:
    references = sentences(40, seed=9)
    path = stored(
        tmp_path / "a", line_statistics(damaged(references, share=0.3, seed=1), references)
    )
    alone = BootstrapTask([path], (BLEU_INTO, CHRF_PLUS), seed=5, resamples=100)
    together = replace(alone, sentences=Sentences(np.arange(40), 40))
    for name, draws in resampled_scores(alone).items():
        np.testing.assert_array_equal(resampled_scores(together)[name], draws)


def test_a_draw_without_any_line_of_a_direction_scores_nothing() -> None:
    task = BootstrapTask([], (HITS,), seed=1, resamples=200, sentences=Sentences(np.array([7]), 9))
    (draws,) = resample([{"language": np.ones((1, 1))}], task)["language"]
    assert set(draws.tolist()) == {0.0, 100.0}


def profile(source: str, target: str) -> DirectionProfile:
    return DirectionProfile(Direction(source, target), "zero_shot", None, 0, 30)


def verdicts(profiles: list[DirectionProfile], **translating: bool) -> Verdicts:
    """Of systems that do or do not translate, wherever they are asked; the first: the baseline."""
    judged = {name: Quality(30.0, 99.0, one) for name, one in translating.items()}
    return Verdicts(
        baseline=next(iter(translating)),
        directions={str(one.direction): judged for one in profiles},
        averages={"zero_shot": {"all": judged}},
    )


def test_an_average_is_resampled_within_its_directions_and_needs_all_of_them() -> None:
    profiles = [profile("de", "fr"), profile("fr", "de")]
    judged = verdicts(profiles, a=True, b=True)
    generator = np.random.default_rng(1)
    draws = {str(one.direction): {"bleu": generator.normal(30, 1, (2, 1000))} for one in profiles}
    scores = {name: {"bleu": [30.0, 30.0]} for name in draws}

    def compared() -> Significance:
        columns, systems = [Bleu.column], ["a", "b"]
        return compare_all(
            scores, draws, columns=columns, systems=systems, profiles=profiles, verdicts=judged
        )

    found = compared()
    interval = found.averages["zero_shot"]["all"]["bleu"].intervals["a"]
    mean = (draws["de-fr"]["bleu"][0] + draws["fr-de"]["bleu"][0]) / 2
    assert (interval.low, interval.high) == middle_95(mean)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 / np.sqrt(2), rel=0.1)
    del draws["fr-de"]
    found = compared()
    assert found.averages["zero_shot"]["all"] == {}
    assert list(found.directions["de-fr"]) == ["bleu"]
    assert found.directions["fr-de"] == {}


@pytest.mark.parametrize(
    ("translating", "best"),
    [
        ({"base": True, "better": True, "worse": False}, "better"),
        ({"base": True, "better": False, "worse": True}, None),
        ({"base": False, "better": True, "worse": True}, None),
    ],
)
def test_the_best_system_and_the_baseline_must_translate(
    translating: dict[str, bool], best: str | None
) -> None:
    profiles = [profile("de", "fr")]
    draws = {"de-fr": {"bleu": np.array([[30.0], [40.0], [20.0]]) + np.zeros((3, 1000))}}
    found = compare_all(
        {"de-fr": {"bleu": [30.0, 40.0, 20.0]}},
        draws,
        columns=[Bleu.column],
        systems=list(translating),
        profiles=profiles,
        verdicts=verdicts(profiles, **translating),
    )
    assert found.directions["de-fr"]["bleu"].best == best
    assert found.averages["zero_shot"]["all"]["bleu"].best == best
    assert found.directions["de-fr"]["bleu"].intervals.keys() == translating.keys()


def test_language_accuracies_are_resampled_where_they_were_measured(tmp_path: Path) -> None:
    references = sentences(40, seed=9)
    rows = line_statistics(references, references)
    hits = np.arange(40) % 4 > 0
    path = stored(tmp_path / "a", rows, language=hits, language_restricted=np.ones(40, dtype=bool))
    found = resampled_scores(BootstrapTask(paths=[path], scores=SCORES, seed=1, resamples=300))
    assert found["language"].mean() == pytest.approx(75.0, abs=2.0)
    assert (found["language_restricted"] == 100.0).all()
    assert found["bleu"] == pytest.approx(100.0)
    bare = stored(tmp_path / "b", rows)
    assert list(resampled_scores(BootstrapTask([bare], SCORES, seed=1, resamples=2))) == [
        "bleu",
        "chrf",
    ]


# Tests against the baseline

TRIALS = 300


@pytest.fixture
def texts() -> tuple[list[str], dict[str, list[str]]]:
    """References, and a baseline with a system much like it and one better than it."""
    references = sentences(50, seed=1)
    shares = {"base": (0.4, 2), "near": (0.38, 3), "far": (0.3, 4)}
    return references, {
        name: damaged(references, share=share, seed=seed) for name, (share, seed) in shares.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("test_type", ["bs", "ar"])
def test_p_values_are_those_of_sacrebleus_paired_tests(
    test_type: str,
    texts: tuple[list[str], dict[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references, systems = texts
    monkeypatch.setitem(os.environ, "SACREBLEU_SEED", "77")
    metrics: Any = {"BLEU": BLEU(), "chrF2++": CHRF(word_order=2)}
    peer = PairedTest(
        list(systems.items()), metrics, [references], test_type=test_type, n_samples=TRIALS
    )
    expected: Any = peer()[1]
    rows = {name: line_statistics(one, references) for name, one in systems.items()}
    paths = [stored(tmp_path / name, one) for name, one in rows.items()]
    scores = (BLEU_INTO, CHRF_PLUS)
    draws = resampled_scores(BootstrapTask(paths, scores, seed=77, resamples=TRIALS))
    swapped = randomisation_p_values(RandomisationTask(paths, 0, scores, seed=77, trials=TRIALS))
    for score, title in ((BLEU_INTO, "BLEU"), (CHRF_PLUS, "chrF2++")):
        name = score.column.name
        values = [score.of_corpus(one[name]) for one in rows.values()]
        for place in (1, 2):
            found = (
                bootstrap_p_value(
                    draws[name][place] - draws[name][0], difference=values[place] - values[0]
                )
                if test_type == "bs"
                else swapped[name][place]
            )
            assert found == pytest.approx(expected[title][place].p_value, abs=1.5 / TRIALS)


def test_randomisation_of_hits_is_the_exact_test_of_all_tosses(tmp_path: Path) -> None:
    """Six lines that differ, five of them in one system's favour: 14 tosses of 64 are as far."""
    ours = np.array([True] * 5 + [False] + [True] * 10)
    theirs = np.array([False] * 5 + [True] + [True] * 10)
    paths = []
    for name, hits in (("base", theirs), ("system", ours), ("twin", theirs)):
        path = tmp_path / f"{name}.npz"
        np.savez_compressed(path, language=hits)
        paths.append(path)
    task = RandomisationTask(paths, 0, (HITS,), seed=3, trials=20_000)
    base, system, twin = randomisation_p_values(task)["language"]
    signs = itertools.product((1, -1), repeat=6)
    exact = np.mean([abs(sum(one)) >= 4 for one in signs])
    assert exact == 14 / 64
    assert system == pytest.approx(exact, abs=0.01)
    assert base == twin == 1.0, "what does not differ at all does not differ beyond chance"


def test_holms_correction_is_that_of_its_definition() -> None:
    values = [0.01, 0.04, 0.03, 0.005]
    assert holm(values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_tests_that_are_missing_count_in_holms_correction_as_ones() -> None:
    assert holm([0.01, 0.02], tests=5) == pytest.approx(holm([0.01, 0.02, 1.0, 1.0, 1.0])[:2])


def test_of_many_directions_alike_hardly_any_is_significant_once_corrected() -> None:
    """Without correction one in twenty of them is."""
    generator = np.random.default_rng(1)
    names = [f"d{number}-en" for number in range(200)]
    scores, of_draws, swapped = {}, {}, {}
    for name in names:
        difference = generator.normal()
        noise = generator.normal(size=(2, 1000)) / np.sqrt(2)
        scores[name] = {"bleu": [30.0, 30.0 + difference]}
        of_draws[name] = p_values_of_draws(
            {"bleu": noise + np.array([[30.0], [30.0 + difference]])},
            baseline=0,
            scores={"bleu": scores[name]["bleu"]},
        )
        swapped[name] = {"bleu": [1.0, 0.5]}
    found = compare_with_baseline(
        scores, of_draws, swapped, systems=["base", "ours"], baseline=0, resamples=1000
    )
    tests = [found.directions[name]["bleu"]["ours"] for name in names]
    assert found.tests == 200
    assert sum(one.bootstrap <= 0.05 for one in tests) >= 3
    assert sum(one.bootstrap_holm <= 0.05 for one in tests) <= 1
    assert {one.randomisation_holm for one in tests} == {1.0}


def test_directions_that_are_not_decided_are_corrected_for_and_not_tested() -> None:
    values = {"de-en": {"bleu": [1.0, 0.02]}}
    found = compare_with_baseline(
        {"de-en": {"bleu": [30.0, 31.0]}},
        values,
        values,
        systems=["base", "ours"],
        baseline=0,
        resamples=1000,
        undecided=["fr-en", "ja-en"],
    )
    assert found.directions.keys() == {"de-en"}
    assert found.directions["de-en"]["bleu"]["ours"].bootstrap_holm == pytest.approx(3 * 0.02)


# As many trials as the tests need


@pytest.mark.parametrize("tests", [1, 21, 140, 141, 564, 2499])
def test_with_the_second_round_every_number_of_tests_can_be_significant(tests: int) -> None:
    """140 are the demo's: 1,000 resamples could tell none of its systems apart."""
    resamples = second_round(tests, resamples=1000) or 1000
    assert tests * 1 / (resamples + 1) <= LEVEL
    if resamples > 1000:
        assert tests * 1 / (resamples - 1) > LEVEL, "no more than they need"
    assert second_round(tests, resamples=resamples) is None


def test_tests_that_need_more_than_are_drawn_at_most_have_no_second_round() -> None:
    assert second_round(int(LEVEL * MOST_RESAMPLES) + 1, resamples=1000) is None


def test_only_p_values_that_the_first_round_left_small_are_those_of_the_second() -> None:
    settled, small = (SETTLED + 1) / 101, SETTLED / 101
    first = {
        "a": {"bleu": [1.0, small, settled], "chrf": [1.0, 0.5, 0.5]},
        "b": {"bleu": [1.0, settled, settled]},
    }
    asked: dict[str, Sequence[str]] = {}

    def again(columns: Mapping[str, Sequence[str]]) -> Mapping[str, PValues]:
        asked.update(columns)
        return {"a": {"bleu": [1.0, 0.25, 0.0]}}

    found = in_two_rounds(first, again, resamples=100)
    assert asked == {"a": ["bleu"]}
    assert found == {**first, "a": {**first["a"], "bleu": [1.0, 0.25, settled]}}


def answering(
    found: Mapping[str, PValues],
) -> Callable[[Mapping[str, Sequence[str]]], Mapping[str, PValues]]:
    """A second round that gives the same to whatever is asked."""
    return lambda _: found


@pytest.mark.parametrize(("first_round", "second"), [(99, 399), (200, 333)])
def test_two_rounds_are_as_honest_as_one(first_round: int, second: int) -> None:
    """Under the null hypothesis a p-value is at most a with a probability of at most a.

    The number of trials as far apart as the systems is then uniform over what it can be, and that
    of the first round is hypergeometric given that of the second: summed over all of both.
    """
    chance: dict[float, float] = {}
    for beyond in range(second + 1):
        for of_first in range(min(beyond, first_round) + 1):
            if first_round - of_first > second - beyond:
                continue
            ways = math.comb(beyond, of_first) * math.comb(second - beyond, first_round - of_first)
            share = ways / math.comb(second, first_round) / (second + 1)
            one, two = (of_first + 1) / (first_round + 1), (beyond + 1) / (second + 1)
            found = in_two_rounds(
                {"d": {"bleu": [one]}},
                answering({"d": {"bleu": [two]}}),
                resamples=first_round,
            )["d"]["bleu"][0]
            chance[found] = chance.get(found, 0.0) + share
    assert sum(chance.values()) == pytest.approx(1.0)
    total = 0.0
    for p_value, share in sorted(chance.items()):
        total += share
        assert total <= p_value + 1e-9
    smallest = min(chance)
    assert smallest == 1 / (second + 1)


def test_a_second_round_finds_what_the_first_could_not(tmp_path: Path) -> None:
    """Of 140 tests, with systems as far apart as 0.8 and 59.7 BLEU."""
    references = sentences(50, seed=1)
    rows = {
        "base": line_statistics(damaged(references, share=0.2, seed=2), references),
        "poor": line_statistics(damaged(references, share=0.9, seed=3), references),
    }
    paths = [stored(tmp_path / name, one) for name, one in rows.items()]
    points = [BLEU_INTO.of_corpus(one["bleu"]) for one in rows.values()]
    draws = BootstrapTask(paths, (BLEU_INTO, CHRF_PLUS), seed=7, resamples=1000)
    bootstrap = PairedBootstrapTask(draws, 0, {"bleu": points})
    tosses = RandomisationTask(paths, 0, (BLEU_INTO, CHRF_PLUS), seed=7, trials=1000)
    more = second_round(140, resamples=1000)
    assert more is not None
    for first, again in (
        (
            {"bleu": bootstrap_p_values(bootstrap.again(["bleu"], resamples=1000))["bleu"]},
            bootstrap_p_values(bootstrap.again(["bleu"], resamples=more)),
        ),
        (
            {"bleu": randomisation_p_values(tosses)["bleu"]},
            randomisation_p_values(tosses.again(["bleu"], trials=more)),
        ),
    ):
        assert again.keys() == {"bleu"}
        alone = holm([first["bleu"][1]], tests=140)
        assert alone[0] > LEVEL
        found = in_two_rounds({"de-en": first}, answering({"de-en": again}), resamples=1000)
        assert holm([found["de-en"]["bleu"][1]], tests=140)[0] <= LEVEL
