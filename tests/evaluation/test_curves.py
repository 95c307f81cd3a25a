"""Curves stand on their axis where what was spent puts them, or are left out with a sentence."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from support.example_evaluation import history

from pipeline.evaluation.budgets import Spent
from pipeline.evaluation.curves import UPDATES, Axis, curve_figures, place_curve
from pipeline.evaluation.history import Curve, CurvePoint, History

PLACES = {"dense": 0, "experts": 1}


def figures(found: History) -> dict[str, ElementTree.Element]:
    roots = [ElementTree.fromstring(text) for text in curve_figures(found, places=PLACES)]
    return {" ".join(next(root.iter("figcaption")).itertext()): root for root in roots}


def words(root: ElementTree.Element) -> str:
    return " ".join(root.itertext())


def test_there_is_a_chart_by_updates_by_tokens_and_by_time_and_one_per_resource() -> None:
    assert list(figures(history("experts"))) == [
        "Validation, all directions  by updates",
        "Validation, all directions  by target tokens",
        "Validation, all directions  by minutes of training",
        "Validation, high resource  by updates",
        "Validation, low resource  by updates",
        "Training  by updates",
    ]


def test_the_curve_of_an_assembled_model_begins_where_its_parts_trainings_end() -> None:
    """Its parts took 16 updates, 1,600 tokens and 300 s; the points counted from zero before."""
    (curve,) = [one for one in history("experts").curves if one.system == "experts"]
    axes = {
        16.0: UPDATES,
        1600.0: Axis("", lambda one: one.target_tokens, lambda one: one.target_tokens),
        300.0: Axis("", lambda one: one.seconds, lambda one: one.seconds),
    }
    for begin, axis in axes.items():
        series = place_curve(curve, curve.validation, place=1, axis=axis, loss=lambda one: one.loss)
        assert series is not None
        assert series.begin == begin
        own = [axis.of_point(point) for point in curve.validation]
        assert [x for x, _ in series.points] == [begin + (x or 0.0) for x in own]


def test_the_chart_says_in_one_sentence_what_its_dotted_line_stands_for() -> None:
    for title, root in figures(history("experts")).items():
        assert [one for one in root.iter("line") if one.get("class") == "lead s1"], title
        (note,) = [one for one in root.iter("p") if one.get("class") == "note"]
        assert re.fullmatch(r"A dotted line .* \(experts\): [^.]*\.", note.text or "")


def test_models_that_rest_on_nothing_need_no_sentence() -> None:
    alone = History(curves=tuple(one for one in history("experts").curves if one.system == "dense"))
    (root,) = figures(alone).values()
    assert not list(root.iter("p"))
    assert not [one for one in root.iter("line") if "lead" in one.attrib["class"]]


def test_a_curve_whose_ancestors_are_gone_is_left_out_and_named() -> None:
    points = (CurvePoint(1, 2.0, 3.0, target_tokens=5),)
    both = History(
        curves=(
            Curve("dense", (), points),
            Curve("experts", (), points, before=None),
        )
    )
    for root in figures(both).values():
        assert len(list(root.iter("polyline"))) == 1
        assert "cannot be found any more: experts." in words(root)


def test_a_curve_without_counted_tokens_is_left_out_of_the_tokens_alone() -> None:
    counted = (CurvePoint(1, 2.0, 3.0, target_tokens=5),)
    both = History(
        curves=(
            Curve("dense", (), counted),
            Curve("experts", (), (CurvePoint(1, 2.0, 3.0),), before=Spent(1, None, None, 1.0)),
        )
    )
    left_out = {title: "Left out" in words(root) for title, root in figures(both).items()}
    assert [title.split()[-1] for title, found in left_out.items() if found] == ["tokens"]
    assert len(left_out) == 3


@pytest.mark.parametrize(
    ("seconds", "label"), [(30.0, "seconds"), (300.0, "minutes"), (36_000.0, "hours")]
)
def test_the_unit_of_time_fits_the_longest_run_with_all_before_it(
    seconds: float, label: str
) -> None:
    points = (CurvePoint(1, 1.0, 3.0),)
    found = figures(History(curves=(Curve("dense", (), points, before=Spent(1, 1, 1.0, seconds)),)))
    assert f"Validation, all directions  by {label} of training" in found
