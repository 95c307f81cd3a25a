"""Paired bootstrap: sacreBLEU's own scores and intervals, and no best system by chance."""

import os
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
from pipeline.evaluation.score_slot import Score
from pipeline.evaluation.scores import Quality, Significance, Verdicts
from pipeline.evaluation.significance import (
    BootstrapTask,
    compare,
    compare_all,
    draw_counts,
    middle_95,
    resampled_scores,
)

KNOWN = frozenset({"en"})
SCORES: tuple[Score, ...] = (
    BLEU_INTO,
    CHRF_PLUS,
    LanguageAccuracy(PLAIN, KNOWN, None, seed=1),
    LanguageAccuracy(RESTRICTED, KNOWN, KNOWN, seed=1),
)

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
