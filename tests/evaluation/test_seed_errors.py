"""Errors over seeds: intervals cover what they say, p-values are those of the t test."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.damaged_lines import BLEU_INTO, damaged, line_statistics, sentences, stored

from pipeline.evaluation.chrf import CHARACTER_ORDERS, WORD_ORDERS, Chrf
from pipeline.evaluation.language_accuracy import PLAIN, LanguageAccuracy
from pipeline.evaluation.line_sets import Sentences
from pipeline.evaluation.score_slot import Floats
from pipeline.evaluation.seed_errors import (
    LEVEL,
    MOST_ERRORS,
    SeedErrors,
    can_find,
    needed_errors,
    tail_of_t,
)
from pipeline.evaluation.significance import (
    BootstrapTask,
    compare,
    middle_95,
    p_values_of_draws,
    resample,
    resampled_scores,
)

HITS = LanguageAccuracy(PLAIN, frozenset({"en"}), None, seed=1)
LINES, STUDIES = 100, 600


def hits_of_runs(
    generator: np.random.Generator, *, runs: int, spread: float
) -> list[dict[str, Floats]]:
    """Hits of the runs of a system, which are better or worse by chance; half of all are hits."""
    ease = generator.beta(2.0, 2.0, size=LINES)
    of_runs = np.clip(ease + spread * generator.standard_normal((runs, 1)), 0.0, 1.0)
    drawn = generator.random((runs, LINES)) < of_runs
    return [{"language": row.astype(np.float64)[:, None]} for row in drawn]


def hits_measured(runs: Sequence[dict[str, Floats]]) -> Floats:
    return np.array([100.0 * one["language"].mean() for one in runs])


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.02, 0.2])
@pytest.mark.parametrize("runs", [2, 3])
def test_intervals_over_seeds_cover_what_they_say(runs: int, spread: float) -> None:
    """Drawing the seeds with replacement does not, if runs differ by more than their lines do.

    Where lines and seeds add as much to the error of two runs, intervals are a little too wide.
    """
    generator = np.random.default_rng(2)
    labels, places = tuple(map(str, range(runs))), tuple(range(runs))
    covered, drawn = 0, 0
    for study in range(STUDIES):
        found = hits_of_runs(generator, runs=runs, spread=spread)
        seeds = SeedErrors((places,), (labels,), seed=study)
        task = BootstrapTask([], (HITS,), seed=study, resamples=200)
        of_runs = resample(found, task)["language"]
        low, high = middle_95(seeds.of_system(0, of_runs, hits_measured(found)))
        covered += low <= 50.0 <= high
        chosen = generator.integers(runs, size=(runs, 200))
        low, high = middle_95(np.take_along_axis(of_runs, chosen, axis=0).mean(axis=0))
        drawn += low <= 50.0 <= high
    assert 0.93 <= covered / STUDIES <= (0.97 if spread > 0.1 else 0.99)
    if spread > 0.1:
        assert drawn / STUDIES < 0.85


# Differences of averages over shared lines, which the studies' claims rest on

DIRECTIONS, SEEDS, CLAIMS = 4, 3, 300
ORDERS = np.array([*range(1, CHARACTER_ORDERS + 1), *range(1, WORD_ORDERS + 1)])
CHRF = Chrf()
NAMES = ("base", "ours")


def study(generator: np.random.Generator, *, spread: float) -> list[list[Floats]]:
    """Statistics of chrF++ of every run in every direction: runs of the baseline, then of ours.

    All directions translate the same sentences, some of which are easy, and some easy for one
    system. A seed is good or bad for both systems, and for each; every run has luck with lines.
    """
    characters = generator.integers(8, 60, size=(LINES, 1))
    words = np.maximum(characters // 5, 2)
    reference = np.concatenate(
        [
            np.maximum(characters - ORDERS[:CHARACTER_ORDERS] + 1, 0),
            words - ORDERS[CHARACTER_ORDERS:] + 1,
        ],
        axis=1,
    ).astype(np.float64)
    ease, of_both = generator.normal(size=LINES), generator.normal(size=SEEDS)
    found = []
    for system in range(2):
        taste = 0.4 * generator.normal(size=LINES)
        for seed in range(SEEDS):
            luck = spread * (of_both[seed] + generator.normal())
            of_run = []
            for direction in range(DIRECTIONS):
                noise = 0.5 * generator.normal(size=LINES)
                logit = 0.3 * system - 0.3 * direction + 1.0 + luck + ease + taste + noise
                share = (1.0 / (1.0 + np.exp(-logit)))[:, None] ** ORDERS
                length = reference * np.exp(0.1 * generator.normal(size=(LINES, 1)))
                matches = share * np.minimum(reference, length)
                of_run.append(np.stack([length, reference, matches], axis=2).reshape(LINES, -1))
            found.append(of_run)
    return found


def chrf_of(runs: Sequence[Sequence[Floats]]) -> Floats:
    """chrF++ of every run in every direction, (runs, directions)."""
    sums = np.array([[rows.sum(axis=0) for rows in of_run] for of_run in runs])
    scores = CHRF.of_sums(sums.reshape(-1, sums.shape[2]), lines=LINES)
    return scores.reshape(sums.shape[:2])


def difference_of(measured: Floats) -> float:
    return float(measured[SEEDS:].mean() - measured[:SEEDS].mean())


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.03, 0.2])
def test_intervals_of_differences_of_averages_cover_what_they_say(spread: float) -> None:
    """Lines shared by directions and runs, three paired seeds, a difference of two averages.

    From runs that differ by their luck with lines alone to runs that differ by a chrF++ or more.
    The expected difference is that of further studies. Intervals are too narrow if directions draw
    their lines independently. Without a spread, 98 % hold it if luck with lines counts twice.
    """
    generator = np.random.default_rng(3)
    further = [difference_of(chrf_of(study(generator, spread=spread))) for _ in range(600)]
    truth = float(np.mean(further))
    places = (tuple(range(SEEDS)), tuple(range(SEEDS, 2 * SEEDS)))
    labels = ("1", "2", "3")
    covered = {"shared": 0, "independent": 0} if spread == 0.0 else {"shared": 0}
    for number in range(CLAIMS):
        runs = study(generator, spread=spread)
        measured = chrf_of(runs)
        seeds = SeedErrors(places, (labels, labels), seed=number)
        shared = BootstrapTask(
            [], (CHRF,), number, resamples=200, sentences=Sentences(np.arange(LINES), LINES)
        )
        for kind in covered:
            draws = [
                resample(
                    [{"chrf": of_run[direction]} for of_run in runs],
                    shared
                    if kind == "shared"
                    else replace(shared, seed=number * DIRECTIONS + direction),
                )["chrf"]
                for direction in range(DIRECTIONS)
            ]
            found = compare(
                NAMES,
                [measured[:SEEDS].mean(), measured[SEEDS:].mean()],
                np.mean(draws, axis=0),
                seeds=seeds,
                of_runs=measured.mean(axis=1).tolist(),
            ).differences["ours"]
            covered[kind] += found.low <= truth <= found.high
    assert 0.92 <= covered["shared"] / CLAIMS <= 0.975
    assert covered.get("independent", 0) / CLAIMS < 0.88


# Draws and p-values


def constant(score: float) -> dict[str, Floats]:
    """A run whose every line has one score, so that lines add nothing to its error."""
    return {"language": np.full((30, 1), score / 100.0)}


@pytest.mark.parametrize("paired", [True, False])
def test_p_values_of_runs_are_those_of_the_t_test(paired: bool) -> None:
    """Paired by seed, the differences 1, 2 and 3; |t| with 2 degrees of freedom is in closed form.

    Unpaired, both systems vary by themselves, and the same difference may be chance.
    """
    scores = (40.0, 45.0, 50.0, 41.0, 47.0, 53.0)
    labels = ("1", "2", "3")
    seeds = SeedErrors(
        ((0, 1, 2), (3, 4, 5)), (labels, labels if paired else ("4", "5", "6")), seed=3
    )
    task = BootstrapTask([], (HITS,), seed=1, resamples=20_000)
    draws = resample([constant(one) for one in scores], task)
    found = p_values_of_draws(draws, baseline=0, scores={"language": scores}, seeds=seeds)[
        "language"
    ]
    t = 2.0 / (1.0 / math.sqrt(3))
    expected = 1.0 - t / math.sqrt(2.0 + t**2)
    assert found[0] == 1.0
    if paired:
        assert found[1] == pytest.approx(expected, abs=0.01)
    else:
        assert found[1] > 0.5
    low, high = middle_95(seeds.of_system(0, draws["language"], np.array(scores)))
    half = 4.303 * 5.0 / math.sqrt(3)
    assert (low, high) == pytest.approx((45.0 - half, 45.0 + half), rel=0.05)


def test_an_average_over_directions_is_as_uncertain_as_its_runs() -> None:
    """A run has one model for all directions, so that their errors over seeds do not cancel."""
    scores = (40.0, 45.0, 50.0)
    seeds = SeedErrors(((0, 1, 2),), (("1", "2", "3"),), seed=3)
    draws = [
        resample([constant(one) for one in scores], BootstrapTask([], (HITS,), seed=direction))
        for direction in range(4)
    ]
    alone, average = (
        seeds.of_system(0, one, np.array(scores))
        for one in (draws[0]["language"], np.mean([one["language"] for one in draws], axis=0))
    )
    assert middle_95(average) == pytest.approx(middle_95(alone))


def test_seeds_are_paired_by_name_in_any_order() -> None:
    seeds = SeedErrors((), (), seed=1)
    forth = seeds.weights(("1", "2", "3"), resamples=50)
    back = seeds.weights(("3", "2", "1"), resamples=50)
    np.testing.assert_array_equal(forth, back[:, ::-1])
    np.testing.assert_allclose(forth.sum(axis=1), 0.0, atol=1e-9)
    draws = np.random.default_rng(1).normal(size=(4, 50))
    one, other = (
        SeedErrors(((0, 1), places), (("1", "2"), labels), seed=1)
        for places, labels in [((2, 3), ("1", "2")), ((3, 2), ("2", "1"))]
    )
    measured = np.array([1.0, 2.0, 3.0, 5.0])
    np.testing.assert_array_equal(
        one.of_difference(1, 0, draws, measured), other.of_difference(1, 0, draws, measured)
    )


def test_a_system_with_one_run_has_the_draws_it_has_without_seeds(tmp_path: Path) -> None:
    references = sentences(40, seed=9)
    paths = [
        stored(
            tmp_path / str(seed),
            line_statistics(damaged(references, share=0.3, seed=seed), references),
        )
        for seed in range(3)
    ]
    draws = resampled_scores(BootstrapTask(paths, (BLEU_INTO,), seed=5, resamples=100))["bleu"]
    seeds = SeedErrors(((0,), (1, 2)), (("",), ("1", "2")), seed=1)
    measured = np.array([30.0, 31.0, 32.0])
    np.testing.assert_array_equal(seeds.of_system(0, draws, measured), draws[0])
    single = SeedErrors.of_single_runs(3)
    found = single.of_difference(2, 1, draws, measured)
    np.testing.assert_array_equal(found, draws[2] - draws[1])


def test_luck_with_lines_counts_once() -> None:
    """Runs that differ only by luck with lines have the t interval; no draw of lines is added."""
    generator, resamples = np.random.default_rng(1), 4000
    own = generator.normal(size=(3, resamples))
    seeds = SeedErrors(((0, 1, 2),), (("1", "2", "3"),), seed=1)
    measured = np.array([-3.0, 0.0, 3.0])
    found = seeds.of_system(0, own, measured)
    half_width = np.quantile(found, 0.975)
    assert half_width == pytest.approx(stats.t.ppf(0.975, 2) * 3.0 / np.sqrt(3), rel=0.1)


def test_runs_that_agree_by_chance_are_no_surer_than_their_lines() -> None:
    generator, resamples = np.random.default_rng(1), 4000
    own = generator.normal(size=(3, resamples))
    seeds = SeedErrors(((0, 1, 2),), (("1", "2", "3"),), seed=1)
    np.testing.assert_array_equal(seeds.of_system(0, own, np.zeros(3)), own.mean(axis=0))


# What tests can find


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("value", [0.0, 0.3, 2.0, 9.0, 90.0])
def test_the_tail_of_t_is_scipys(freedom: int, value: float) -> None:
    assert tail_of_t(value, freedom=freedom) == pytest.approx(
        2 * stats.t.sf(value, freedom), abs=1e-12
    )


@pytest.mark.parametrize(("tests", "runs"), [(1, 2), (5, 3), (392, 3), (88, 5), (40, 10)])
def test_the_least_difference_is_the_quantile_of_t(tests: int, runs: int) -> None:
    expected = stats.t.isf(LEVEL / tests / 2, runs - 1)
    assert needed_errors(tests, runs=runs) == pytest.approx(expected, rel=1e-6)
    assert can_find(tests, runs=runs) == (expected <= MOST_ERRORS)
    assert can_find(tests, runs=None)


def test_three_seeds_allow_five_tests_and_five_seeds_88() -> None:
    for runs, tests in ((3, 5), (5, 88)):
        assert can_find(tests, runs=runs)
        assert not can_find(tests + 1, runs=runs)
