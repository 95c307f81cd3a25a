"""Losses into and out of the pivot, by resource tier, are means over directions."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from support.recorded_runs import artifact

from pipeline.artifacts.artifact import Artifact
from pipeline.evaluation.history import trace_history
from pipeline.evaluation.history_tables import curve_figures
from pipeline.evaluation.validation_tiers import read_tiers

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
    assert [point.sides for point in curve.validation] == [
        {
            "into_pivot": {
                "high": fmean([1.0, 1.5]) / update,
                "low": fmean([3.0, 4.5]) / update,
            },
            "out_of_pivot": {
                "high": fmean([2.0, 2.25]) / update,
                **({"low": fmean([5.0, 4.0])} if update == 1 else {}),
            },
        }
        for update in (1, 2)
    ]
    split = [one for one in curve_figures(history, places={"dense": 0}) if "→" in one.title]
    assert [one.title for one in split] == [
        "Validation, high resource, Any → En",
        "Validation, high resource, En → Any",
        "Validation, low resource, Any → En",
        "Validation, low resource, En → Any",
    ]
    assert "dense: 0.625 at 2" in split[0].svg, "the lowest loss"


@pytest.mark.parametrize("training", [None, {}, {"resource_thresholds": "many"}])
def test_without_tiers_or_shards_there_are_no_sides(tmp_path: Path, training: object) -> None:
    of = shards(tmp_path / "shards")
    assert read_tiers(trained(tmp_path / "alone", None)) is None
    run = trained(tmp_path / "dense", of, training)
    assert read_tiers(run) is None
    history = trace_history({"dense": run})
    assert [point.sides for point in history.curves[0].validation] == [{}, {}]
    assert not any("→" in one.title for one in curve_figures(history, places={"dense": 0}))
