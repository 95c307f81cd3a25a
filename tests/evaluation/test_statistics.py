"""Draws equal sacreBLEU's; intervals and tests equal t tests, and cover the expected score."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, estimate_ci
from scipy import stats

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation import statistics
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.language_detector import PLAIN, LanguageAccuracy
from pipeline.evaluation.scores import (
    Column,
    Comparison,
    Difference,
    Floats,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.evaluation.statistics import (
    LineSet,
    ResampleTask,
    Runs,
    Sentences,
    compare,
    correct_tests,
    difference,
    draw_counts,
    estimate,
    group_lines,
    holm,
    resample,
    resampled_scores,
    t_quantile,
)

BLEU_INTO, CHRF_PLUS = Bleu("13a", {"en": "13a"}), Chrf()
WORDS = "a cat the dog sat on mat . , 12 houses were built near rivers".split()
ERRORS = Column("errors", "Errors", larger_is_better=False)
HITS = LanguageAccuracy(PLAIN, frozenset({"en"}), None, seed=1)
SCORES = (BLEU_INTO, CHRF_PLUS)
LINES = 100


def sentences(lines: int, *, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(3, 15))) for _ in range(lines)]


def damaged(references: Sequence[str], *, share: float, seed: int) -> list[str]:
    """The references with a share of their words replaced."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(
            str(generator.choice(WORDS)) if generator.random() < share else word
            for word in line.split()
        )
        for line in references
    ]


def line_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Rows]:
    lines = TranslatedLines(Direction("de", "en"), hypotheses, references, [])
    return {one.column.name: one.line_statistics(lines).rows for one in (BLEU_INTO, CHRF_PLUS)}


words = st.lists(st.sampled_from("a cat the dog sat . , 12".split()), max_size=7).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=6))
def test_scores_of_sums_are_sacrebleus(pairs: list[tuple[str, str]]) -> None:
    rows = line_statistics([one for one, _ in pairs], [two for _, two in pairs])
    for score in SCORES:
        found = rows[score.column.name]
        of_sums = Score.of_corpus(score, found)
        assert of_sums == pytest.approx(score.of_corpus(found), abs=1e-9)


def test_draws_are_those_of_sacrebleus_paired_bootstrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their normal intervals are ours; sacreBLEU takes quantiles instead of standard errors."""
    references = sentences(60, seed=1)
    systems = {
        name: damaged(references, share=share, seed=seed)
        for name, share, seed in (("base", 0.4, 2), ("near", 0.39, 3), ("far", 0.1, 4))
    }
    monkeypatch.setitem(os.environ, "SACREBLEU_SEED", "77")
    metrics: Any = {"BLEU": BLEU(), "chrF2++": CHRF(word_order=2)}
    expected: Any = PairedTest(
        list(systems.items()), metrics, [references], test_type="bs", n_samples=400
    )()[1]
    rows = [line_statistics(texts, references) for texts in systems.values()]
    paths = [tmp_path / f"{place}.npz" for place in range(len(rows))]
    for path, one in zip(paths, rows, strict=True):
        np.savez_compressed(path, **one)
    found = resampled_scores(ResampleTask(paths=paths, scores=SCORES, seed=77, resamples=400))
    for score, title in zip(SCORES, metrics, strict=True):
        name = score.column.name
        for place in range(len(systems)):
            mean, half = estimate_ci(found[name][place])
            assert mean == pytest.approx(expected[title][place].mean, abs=1e-3)
            assert half == pytest.approx(expected[title][place].ci, abs=1e-3)
            measured = np.array([score.of_corpus(rows[place][name])])
            ours = estimate(Runs(("",), measured, found[name][[place]]), lines=60)
            assert ours.half_width(0.05) == pytest.approx(half, rel=0.15)


def test_draws_do_not_depend_on_how_many_are_counted_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = np.zeros((50, 7))
    for row, lines in zip(expected, np.random.default_rng(5).choice(7, size=(50, 7)), strict=True):
        np.add.at(row, lines, 1.0)
    monkeypatch.setattr(statistics, "BLOCK_ELEMENTS", 30)
    blocks = list(draw_counts(7, resamples=50, seed=5))
    assert {len(block) for block in blocks} == {4, 2}
    np.testing.assert_array_equal(np.concatenate(blocks), expected)


def test_resamples_of_lines_that_directions_share_are_those_of_brute_force() -> None:
    """Every draw scores the drawn sentences that the direction has."""
    rows, here = np.arange(1.0, 6.0)[:, None] / 10, np.array([0, 2, 3, 6, 8])
    task = ResampleTask([], (HITS,), seed=4, resamples=30, sentences=Sentences(here, 9))
    (found,) = resample([{"language": rows}], task)["language"]
    of_sentence = dict(zip(here.tolist(), rows[:, 0].tolist(), strict=True))
    for score, drawn in zip(found, np.random.default_rng(4).choice(9, (30, 9)), strict=True):
        kept = [of_sentence[one] for one in drawn.tolist() if one in of_sentence]
        assert score == pytest.approx(100 * np.mean(kept) if kept else 0.0)


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 19, 40, 1999])
@pytest.mark.parametrize("level", [0.5, 0.05, 1e-3, 1e-5])
def test_quantiles_of_t_are_scipys(freedom: int, level: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(stats.t.isf(level / 2, freedom), rel=2e-3)


def sample(rows: list[Floats], *, resamples: int = 1000, seed: int = 1) -> Runs:
    """Percentages of hits of runs with seeds 1, 2, …, measured and resampled."""
    task = ResampleTask([], (HITS,), seed=seed, resamples=resamples)
    draws = resample([{"language": row[:, None]} for row in rows], task)["language"]
    seeds = tuple(str(place) for place in range(1, len(rows) + 1))
    return Runs(seeds, np.array([100.0 * float(row.mean()) for row in rows]), draws)


def test_of_one_run_each_the_test_is_the_paired_t_test() -> None:
    generator = np.random.default_rng(1)
    base = generator.normal(0.5, 0.2, 50)
    ours = base + generator.normal(0.05, 0.2, 50)
    runs = [sample([one], resamples=20_000) for one in (ours, base)]
    found, expected = difference(*runs, lines=50), stats.ttest_rel(ours, base)
    assert found.p_value == pytest.approx(expected.pvalue, rel=0.1)
    low, high = expected.confidence_interval()
    assert (found.interval.low, found.interval.high) == pytest.approx((100 * low, 100 * high), 0.02)


@pytest.mark.parametrize("paired", [True, False])
def test_of_runs_that_only_seeds_tell_apart_the_test_is_the_t_test_over_seeds(paired: bool) -> None:
    theirs, ours = (0.40, 0.45, 0.50), (0.41, 0.47, 0.53)
    base, found = (sample([np.full(30, one) for one in side]) for side in (theirs, ours))
    found = found if paired else replace(found, seeds=("4", "5", "6"))
    compared = difference(found, base, lines=30)
    assert compared.value == pytest.approx(2.0)
    expected = stats.ttest_rel(ours, theirs).pvalue
    if paired:
        assert compared.p_value == pytest.approx(expected, rel=1e-3)
    else:
        assert compared.p_value > 0.5
    mean, half = 45.0, stats.t.isf(0.025, 2) * 5.0 / np.sqrt(3)
    interval = estimate(base, lines=30).interval
    assert (interval.low, interval.high) == pytest.approx((mean - half, mean + half))


def test_luck_with_lines_counts_once_and_is_never_forgotten() -> None:
    """Runs that differ by luck with lines have the t interval; equal runs that of their lines."""
    own = np.random.default_rng(1).normal(size=(3, 4000))
    differing, equal = (
        estimate(Runs(("1", "2", "3"), measured, own + measured[:, None]), lines=2000)
        for measured in (np.array([-1.0, 0.0, 1.0]), np.zeros(3))
    )
    expected = stats.t.isf(0.025, 2) / np.sqrt(3)
    assert differing.half_width(0.05) == pytest.approx(expected, rel=0.02)
    assert equal.half_width(0.05) == pytest.approx(1.96 * own.mean(axis=0).std(), rel=0.01)


def hits(generator: np.random.Generator, *, runs: int, spread: float) -> list[Floats]:
    """Hits of runs that are better or worse by chance, on lines that are easy for all; half hit."""
    ease = generator.beta(2.0, 2.0, size=LINES)
    of_runs = np.clip(ease + spread * generator.standard_normal((runs, 1)), 0.0, 1.0)
    return [*(generator.random((runs, LINES)) < of_runs).astype(np.float64)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "spread", "most"),
    [(1, 0.0, 0.97), (2, 0.2, 0.98), (3, 0.0, 1.0), (3, 0.05, 0.99), (3, 0.2, 0.97)],
)
def test_intervals_cover_the_expected_score(runs: int, spread: float, most: float) -> None:
    """Of few runs that differ no more than their lines do, intervals are too wide."""
    generator, covered, studies = np.random.default_rng(2), 0, 600
    for study in range(studies):
        found = sample(hits(generator, runs=runs, spread=spread), resamples=200, seed=study)
        interval = estimate(found, lines=LINES).interval
        covered += interval.low <= 50.0 <= interval.high
    assert 0.93 <= covered / studies <= most


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_intervals_of_averages_over_parallel_directions_cover_the_expected_score(
    kept: float,
) -> None:
    """Independent draws do not, in one case of four; also where directions lack sentences."""
    generator, directions = np.random.default_rng(1), 4
    studies, covered = {"together": 600, "independent": 150}, Counter[str]()
    for study in range(600):
        ease = generator.beta(0.3, 0.3, size=LINES)
        rows = (generator.random((directions, LINES)) < ease).astype(np.float64)
        here = [np.flatnonzero(generator.random(LINES) < kept) for _ in rows]
        for kind in (kind for kind, count in studies.items() if study < count):
            samples = []
            for place, (row, of) in enumerate(zip(rows, here, strict=True)):
                task = (
                    ResampleTask([], (HITS,), study, 200, sentences=Sentences(of, LINES))
                    if kind == "together"
                    else ResampleTask([], (HITS,), seed=study * directions + place, resamples=200)
                )
                draws = resample([{"language": row[of, None]}], task)["language"]
                samples.append(Runs(("",), np.array([100.0 * row[of].mean()]), draws))
            interval = estimate(Runs.mean(samples), lines=min(map(len, here))).interval
            covered[kind] += interval.low <= 50.0 <= interval.high
    assert covered["independent"] / 150 < 0.85
    assert 0.93 <= covered["together"] / 600 <= 0.97


def compared(
    values: Mapping[str, Floats], column: Column = Bleu.column, *, without: tuple[str, ...] = ()
) -> Comparison:
    return compare(
        {name: sample([row]) for name, row in values.items()},
        lines=LINES,
        column=column,
        baseline=next(iter(values)),
        translating={name: name not in without for name in values},
    )


def test_only_a_system_that_translates_and_leads_all_others_is_the_best() -> None:
    generator = np.random.default_rng(3)
    base = generator.normal(0.3, 0.05, LINES)
    better = base + generator.normal(0.1, 0.05, LINES)
    near = better + generator.normal(0.0, 0.05, LINES)
    assert compared({"a": base, "b": better}).best == "b"
    assert compared({"a": base, "b": better, "c": near}).best is None
    assert compared({"a": base}).best is None
    assert compared({"a": base, "b": better}, ERRORS).best == "a", "less is better"
    assert compared({"a": base, "twin": base}).best is None
    assert compared({"a": base, "b": better}, without=("b",)).best is None
    assert compared({"a": base, "b": better}, without=("a",)).best is None, "the baseline"
    found = compared({"a": base, "b": better})
    assert found.differences.keys() == {"b"}
    interval, own = found.differences["b"], found.intervals["b"]
    assert interval.high - interval.low < own.high - own.low + 5
    assert interval.low < interval.value < interval.high


@pytest.mark.parametrize("column", [HITS.column, Bleu.column])
def test_intervals_of_scores_out_of_100_and_of_their_differences_end_there(column: Column) -> None:
    ends = np.eye(LINES)[0]  # one line of a hundred; near 0, 98 and 100 in percent
    rows = {"low": 0.9 * ends, "high": 1.0 - ends - np.eye(LINES)[1], "all": 1.0 - 0.9 * ends}
    free, found = compared(rows, replace(column, out_of_100=False)), compared(rows, column)
    assert free.intervals["low"].low < 0
    assert free.intervals["high"].high > 100
    for name, own in found.intervals.items():
        assert own.low == max(free.intervals[name].low, 0.0)
        assert own.high == min(free.intervals[name].high, 100.0)
    assert free.differences["all"].high > 100 == found.differences["all"].high
    assert found.differences["all"].low == free.differences["all"].low


def test_holms_correction_is_that_of_its_definition() -> None:
    found = holm([0.01, 0.04, 0.03, 0.005], tests=4)
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, 0.5], tests=10) == pytest.approx([0.1, 1.0])


def test_of_many_directions_only_those_far_apart_are_significant_once_corrected() -> None:
    """Of two hundred systems as good as the baseline, one in twenty seems to differ."""
    generator = np.random.default_rng(1)
    comparisons = {
        f"d{place}-en": {
            "bleu": compared({name: generator.normal(0.5, 0.2, LINES) for name in ("base", "ours")})
        }
        for place in range(200)
    }
    decided = [*comparisons][1:]
    found = correct_tests(comparisons, decided=decided, tests=200)
    assert found["d0-en"] == comparisons["d0-en"], "not decided"
    tests = [found[name]["bleu"].differences["ours"] for name in decided]
    assert 3 <= sum(one.p_value <= 0.05 for one in tests) <= 20
    assert sum(one.p_value_holm <= 0.05 for one in tests if one.p_value_holm is not None) <= 1
    far = {"bleu": Comparison({}, None, {"ours": Difference(1.0, 3.0, 2.0, 1e-9)})}
    found = correct_tests({"de-en": far}, decided=["de-en"], tests=12_001)
    assert found["de-en"]["bleu"].differences["ours"].p_value_holm == pytest.approx(12_001e-9)


LANGUAGES = ("de", "en", "fr", "ja")
PAIRS = tuple("-".join(pair) for pair in combinations(LANGUAGES, 2))


def parallel(kept: Mapping[str, Sequence[int]]) -> dict[str, dict[str, list[str]]]:
    """The lines of the kept sentences of every pair; a sentence has its number as its text."""
    return {
        pair: {code: [f"{code} {number}" for number in numbers] for code in pair.split("-")}
        for pair, numbers in kept.items()
    }


def units(found: LineSet) -> list[tuple[str, int]]:
    """The pair and sentence of every line."""
    return [(pair, one) for pair in found.pairs for one in found.of_lines[pair].tolist()]


def test_test_sets_with_the_same_lines_are_one_set_in_their_order() -> None:
    (found,) = group_lines(parallel(dict.fromkeys(PAIRS, range(30))))
    assert found.pairs == PAIRS
    assert found.sentences == 30
    for pair in PAIRS:
        np.testing.assert_array_equal(found.of_lines[pair], np.arange(30))


def test_lines_that_are_missing_from_some_pairs_do_not_shift_the_others() -> None:
    generator = np.random.default_rng(1)
    kept = {pair: np.flatnonzero(generator.random(60) < 0.8).tolist() for pair in PAIRS}
    (found,) = group_lines(parallel(kept))
    sentence_of = {
        (number, int(one))
        for pair, numbers in kept.items()
        for number, one in zip(numbers, found.of_lines[pair], strict=True)
    }
    assert len(sentence_of) == len({number for number, _ in sentence_of}) == found.sentences


def test_pairs_without_a_common_language_are_parallel_by_way_of_others() -> None:
    chain = parallel(dict.fromkeys(("de-fr", "de-en", "en-ja"), range(25)))
    (found,) = group_lines(chain)
    assert set(found.pairs) == {"de-fr", "de-en", "en-ja"}
    assert found.sentences == 25
    for pair in ("de-en", "de-fr", "en-ja"):  # two test sets without a common line, one, none
        del chain[pair]
        assert group_lines(chain) == []


def test_a_few_equal_lines_make_no_parallel_test_sets() -> None:
    """Short lines such as "Yes." are in many test sets."""
    english = ["Yes.", "No.", "Thanks."]
    sides = {
        f"en-{code}": {
            "en": [*english, *(f"{code} {number}" for number in range(10))],
            code: [f"text {number}" for number in range(13)],
        }
        for code in ("fr", "ja")
    }
    assert group_lines(sides) == []


def test_a_short_test_set_is_parallel_to_a_long_one_that_has_its_lines() -> None:
    (found,) = group_lines(parallel({"de-en": range(100), "en-fr": range(40, 60)}))
    np.testing.assert_array_equal(found.of_lines["en-fr"], np.arange(40, 60))
    assert found.sentences == 100


def test_a_line_that_is_repeated_stays_with_its_own_translation() -> None:
    """Verses begin alike: one text in English, two in German."""
    english = ["and he said", "go", "and he said", "stop"]
    sides = {
        "de-en": {"de": ["und er sagte", "geh", "er sprach", "halt"], "en": english},
        "en-fr": {"en": english, "fr": ["il dit", "va", "il dit", "arrête"]},
    }
    (found,) = group_lines(sides)
    assert found.sentences == 4
    for of_lines in found.of_lines.values():
        np.testing.assert_array_equal(of_lines, np.arange(4))


def test_a_line_repeated_more_often_in_one_pair_is_not_taken_for_another() -> None:
    sides = parallel({"de-en": range(20), "en-fr": range(20)})
    sides["en-fr"]["en"][3] = sides["en-fr"]["en"][7]
    (found,) = group_lines(sides)
    assert found.sentences == 22
    shared = set(found.of_lines["de-en"].tolist()) & set(found.of_lines["en-fr"].tolist())
    assert shared == set(range(20)) - {3, 7}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 6, 40]))
def test_no_sentence_has_two_lines_of_a_pair(seed: int, texts: int) -> None:
    """Even where most lines are repeated, in languages that each repeat other ones."""
    generator = np.random.default_rng(seed)
    text_of = {code: generator.integers(texts, size=12) for code in LANGUAGES}
    sides = {}
    for pair in PAIRS:
        kept = np.flatnonzero(generator.random(12) < 0.9)
        sides[pair] = {
            code: [f"{code} {one}" for one in text_of[code][kept]] for code in pair.split("-")
        }
    for found in group_lines(sides):
        assert max(Counter(units(found)).values()) == 1
        assert {one for _, one in units(found)} == set(range(found.sentences))
