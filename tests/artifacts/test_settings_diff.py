"""Differences of settings are named by their path, whatever comes, goes or changes."""

import pytest

from pipeline.artifacts.manifest import (
    describe_change,
    setting_changes,
    with_defaults,
    without_settings,
)
from pipeline.config.recipe import Recipe


def test_setting_changes_go_down_into_tables_and_name_what_comes_and_goes() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "d": {}}
    new = {"a": {"b": 2, "c": [1, 2], "e": None}, "d": {"f": True}}
    assert setting_changes(old, new) == [
        "a.b: 1 → 2",
        "a.e: unset → None",
        "d: {} → unset",
        "d.f: unset → True",
    ]


def test_settings_are_left_out_by_their_path_at_any_depth() -> None:
    tree = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4, "g": {"b": 5}}
    assert without_settings(tree, ["a.b.c", "f", "g.b", "a.x.y", "f.x", "x"]) == {
        "a": {"b": {"d": 2}, "e": 3},
        "g": {},
    }
    assert tree["a"] == {"b": {"c": 1, "d": 2}, "e": 3}, "the settings given stay as they are"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": {"c": 1}}, "z": 0}, {"a": {"b": {"c": 2}}, "z": 1}, "a.b.c: 1 → 2"),
        ({}, {"a": 1}, "a: unset → 1"),
        ({"a": {"b": 1}}, {"a": None}, "a: unset → None"),
        ({"b": 1, "a": 1}, {"a": 1}, "b: 1 → unset"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a: [1, 2] → [1, 3]"),
    ],
)
def test_the_first_difference_of_two_settings_is_described_by_its_path(
    old: dict[str, object], new: dict[str, object], expected: str | None
) -> None:
    assert describe_change(old, new) == expected


def test_settings_that_there_were_not_yet_are_at_their_defaults() -> None:
    sections = ("mixture", "training")
    today = Recipe(name="defaults").sections(sections)
    noted = {"training": {"updates": 10}, "ds_config": {"zero": 1}}
    training = {**today["training"], "updates": 10}
    filled = {"mixture": today["mixture"], "training": training, "ds_config": {"zero": 1}}
    assert with_defaults(noted, sections=sections) == filled
    assert with_defaults(filled, sections=sections) == filled


def test_a_removed_setting_counts_where_its_effect_was_another_than_todays() -> None:
    """Manifests of earlier versions note settings that there are no more."""
    today = Recipe(name="defaults").sections(("clean", "training"))
    noted = {
        "clean": {**today["clean"], "near_duplicate_similarity": 0.8},
        "training": {**today["training"], "cpu_kernels": "measured"},
    }
    assert with_defaults(noted, sections=("clean", "training")) == today
    noted["clean"]["near_duplicate_similarity"] = 0.7
    found = with_defaults(noted, sections=("clean", "training"))
    assert setting_changes(found, today) == ["clean.near_duplicate_similarity: 0.7 → unset"]


@pytest.mark.parametrize("section", [{"up_dates": 10}, {"updates": "ten"}, ["updates"], None])
def test_settings_that_cannot_be_read_any_more_stay_as_noted(section: object) -> None:
    noted = {"training": section}
    assert with_defaults(noted, sections=("mixture", "training")) == noted
