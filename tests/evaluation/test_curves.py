"""Loss curves begin where earlier runs end; losses by tier and side are means over directions."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from support.example_evaluation import history as example_history
from support.recorded_runs import artifact

from pipeline.artifacts.artifact import Artifact
from pipeline.evaluation.curves import Curve, CurvePoint, curves_section, read_tiers
from pipeline.evaluation.history import trace_history
from pipeline.evaluation.tables import Figure

IMPORTED = {"de-en": 900, "en-fr": 900, "en-mg": 20, "en-sw": 10}
TRAINING = {"resource_thresholds": [100, 500]}
LOSSES = {
    "de-en": 1.0,
    "fr-en": 1.5,
    "mg-en": 3.0,
    "sw-en": 4.5,
    "en-de": 2.0,
    "en-fr": 2.25,
    "en-mg": 5.0,
}
"""Direction → loss of the first validation; the second has half of it."""


def shards(path: Path) -> Artifact:
    """Shards of a corpus from which cleaning dropped half of all lines."""
    return artifact(
        path,
        "shards",
        "make_shards",
        statistics={
            "pairs": {pair: {"train": lines // 2} for pair, lines in IMPORTED.items()},
            "imported": {pair: {"train": lines} for pair, lines in IMPORTED.items()},
        },
    )


def trained(path: Path, of: Artifact | None, training: object = TRAINING) -> Artifact:
    lines = [
        {
            "kind": "validation",
            "update": update,
            "seconds": 1.0 * update,
            "loss": 2.0,
            "directions": {
                **{name: loss / update for name, loss in LOSSES.items()},
                "en-sw": 4.0 if update == 1 else None,
            },
        }
        for update in (1, 2)
    ]
    return artifact(
        path,
        "checkpoint",
        "pretrain",
        {} if of is None else {"shards": of},
        files={"metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines)},
        statistics={"updates": 2},
        config={"training": training},
    )


def test_losses_are_means_over_the_directions_of_a_tier(tmp_path: Path) -> None:
    run = trained(tmp_path / "dense", shards(tmp_path / "shards"))
    history = trace_history({"dense": run})
    (curve,) = history.curves
    assert curve.pivot == "en"
    assert [
        {key: loss for key, loss in point.losses.items() if "/" in key}
        for point in curve.validation
    ] == [
        {
            "high/into_pivot": fmean([1.0, 1.5]) / update,
            "low/into_pivot": fmean([3.0, 4.5]) / update,
            "high/out_of_pivot": fmean([2.0, 2.25]) / update,
            **({"low/out_of_pivot": fmean([5.0, 4.0])} if update == 1 else {}),
        }
        for update in (1, 2)
    ]
    assert [title for title in figures(history.curves) if "→" in title] == [
        "Validation, high resource, Any → En by updates",
        "Validation, high resource, En → Any by updates",
        "Validation, low resource, Any → En by updates",
        "Validation, low resource, En → Any by updates",
    ]


@pytest.mark.parametrize("training", [None, {}, {"resource_thresholds": "many"}])
def test_without_tiers_or_shards_there_are_no_sides(tmp_path: Path, training: object) -> None:
    of = shards(tmp_path / "shards")
    assert read_tiers(trained(tmp_path / "alone", None)) == (None, {})
    run = trained(tmp_path / "dense", of, training)
    assert read_tiers(run) == (None, {})
    history = trace_history({"dense": run})
    assert [point.losses for point in history.curves[0].validation] == [{"all": 2.0}] * 2
    assert not any("→" in title for title in figures(history.curves))


# Charts


def figures(curves: Sequence[Curve]) -> dict[str, Figure]:
    section = curves_section(curves, {"dense": 0, "experts": 1})
    return {one.title: one for one in section.figures}


def test_there_is_a_chart_by_updates_per_tier() -> None:
    assert list(figures(example_history("experts").curves)) == [
        "Validation by updates",
        "Validation, high resource by updates",
        "Validation, low resource by updates",
    ]


def test_the_curve_of_an_assembled_model_begins_where_its_parts_trainings_end() -> None:
    """Its parts took 16 updates; with its own 8 it ends at 24, the right end of the axis."""
    chart = figures(example_history("experts").curves)["Validation by updates"].svg
    root = ElementTree.fromstring(f"<figure>{chart}</figure>")
    ticks = {
        float(one.text or ""): float(one.attrib["x"])
        for one in root.iter("text")
        if one.get("class") == "tick" and one.get("text-anchor") == "middle"
    }
    line = next(root.iter("polyline"))
    xs = [float(point.split(",")[0]) for point in line.attrib["points"].split()]
    unit = (ticks[20.0] - ticks[0.0]) / 20
    assert (xs[0] - ticks[0.0]) / unit == pytest.approx(17, abs=0.1)
    assert (xs[-1] - ticks[0.0]) / unit == pytest.approx(24, abs=0.1)


def test_a_curve_whose_ancestors_are_gone_is_left_out_and_named() -> None:
    points = (CurvePoint(1, {"all": 3.0}),)
    found = figures([Curve("dense", points), Curve("experts", points, before=None)])
    assert len(found) == 1
    for figure in found.values():
        assert figure.svg.count("<polyline") == 1
        assert "points are not known: experts." in figure.note
