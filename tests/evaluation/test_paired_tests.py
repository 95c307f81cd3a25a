"""Paired tests against a baseline: sacreBLEU's p-values, exact ones, Holm's own example."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest as SacrebleuTest
from support.damaged_lines import (
    BLEU_INTO,
    CHRF_PLUS,
    damaged,
    line_statistics,
    sentences,
    stored,
)

from pipeline.evaluation.language_accuracy import PLAIN, LanguageAccuracy
from pipeline.evaluation.paired_tests import (
    RandomisationTask,
    bootstrap_p_value,
    compare_with_baseline,
    holm,
    randomisation_p_values,
)
from pipeline.evaluation.significance import BootstrapTask, resampled_scores

TRIALS = 300
KNOWN = frozenset({"en"})
HITS = LanguageAccuracy(PLAIN, KNOWN, None, seed=1)


@pytest.fixture
def texts() -> tuple[list[str], dict[str, list[str]]]:
    """References, and a baseline with a system much like it and one better than it."""
    references = sentences(50, seed=1)
    shares = {"base": (0.4, 2), "near": (0.38, 3), "far": (0.3, 4)}
    return references, {
        name: damaged(references, share=share, seed=seed) for name, (share, seed) in shares.items()
    }


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
    peer = SacrebleuTest(
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
                    draws[name][place], draws[name][0], difference=values[place] - values[0]
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


def test_of_many_directions_alike_hardly_any_is_beyond_chance_once_corrected() -> None:
    """Without correction one in twenty of them is."""
    generator = np.random.default_rng(1)
    names = [f"d{number}-en" for number in range(200)]
    scores, draws, swapped = {}, {}, {}
    for name in names:
        difference = generator.normal()
        noise = generator.normal(size=(2, 1000)) / np.sqrt(2)
        scores[name] = {"bleu": [30.0, 30.0 + difference]}
        draws[name] = {"bleu": noise + np.array([[30.0], [30.0 + difference]])}
        swapped[name] = {"bleu": [1.0, 0.5]}
    found = compare_with_baseline(
        scores, draws, swapped, columns=[BLEU_INTO.column], systems=["base", "ours"], baseline=0
    )
    tests = [found.directions[name]["bleu"]["ours"] for name in names]
    assert sum(one.bootstrap <= 0.05 for one in tests) >= 3
    assert sum(one.bootstrap_holm <= 0.05 for one in tests) <= 1
    assert {one.randomisation_holm for one in tests} == {1.0}
