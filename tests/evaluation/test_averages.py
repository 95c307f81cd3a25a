"""Averages agree with calculation by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.corpus import Direction, Resource
from pipeline.evaluation.averages import average_scores, mean_scores
from pipeline.evaluation.directions import DirectionProfile, Family
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.scores import Scores


def profile(name: str, family: Family, resource: Resource | None) -> DirectionProfile:
    source, target = name.split("-")
    return DirectionProfile(
        direction=Direction(source, target),
        family=family,
        resource=resource,
        training_lines=1,
        test_lines=1,
    )


def test_averages_weigh_directions_equally_and_skip_undetectable_languages() -> None:
    profiles = [
        profile("en-de", "out_of_pivot", "high"),
        profile("en-fr", "out_of_pivot", "high"),
        profile("en-yi", "out_of_pivot", "low"),
        profile("de-fr", "zero_shot", None),
    ]
    scores = {
        "en-de": Scores(30.0, 50.0, LanguageAccuracy(90.0, 100.0)),
        "en-fr": Scores(20.0, 40.0, LanguageAccuracy(80.0, 96.0)),
        "en-yi": Scores(1.0, 9.0, None),
        "de-fr": Scores(7.0, 8.0, LanguageAccuracy(5.0, 6.0)),
    }
    averages = average_scores(scores, profiles=profiles)
    assert averages == {
        "out_of_pivot": {
            "all": Scores(17.0, 33.0, LanguageAccuracy(85.0, 98.0)),
            "high": Scores(25.0, 45.0, LanguageAccuracy(85.0, 98.0)),
            "low": Scores(1.0, 9.0, None),
        },
        "zero_shot": {"all": scores["de-fr"]},
    }


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_mean_of_scores_is_numpys_mean(values: list[float]) -> None:
    found = mean_scores([Scores(value, value / 2, None) for value in values])
    assert found.bleu == pytest.approx(float(np.mean(values)))
    assert found.chrf == pytest.approx(float(np.mean(values)) / 2)
