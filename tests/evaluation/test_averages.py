"""Averages agree with calculation by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.corpus import Direction, Resource
from pipeline.evaluation.averages import average_scores, mean_scores
from pipeline.evaluation.directions import DirectionProfile, Family
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
    scores: dict[str, Scores] = {
        "en-de": {"bleu": 30.0, "language": 90.0},
        "en-fr": {"bleu": 20.0, "language": 80.0},
        "en-yi": {"bleu": 1.0},
        "de-fr": {"bleu": 7.0, "language": 5.0},
    }
    averages = average_scores(scores, profiles=profiles)
    assert averages == {
        "out_of_pivot": {
            "all": {"bleu": 17.0, "language": 85.0},
            "high": {"bleu": 25.0, "language": 85.0},
            "low": {"bleu": 1.0},
        },
        "zero_shot": {"all": scores["de-fr"]},
    }


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_mean_of_scores_is_numpys_mean(values: list[float]) -> None:
    found = mean_scores([{"bleu": value, "chrf": value / 2} for value in values])
    assert found["bleu"] == pytest.approx(float(np.mean(values)))
    assert found["chrf"] == pytest.approx(float(np.mean(values)) / 2)
