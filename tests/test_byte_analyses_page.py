"""The page about analyses of byte models, and the overlays that it names."""

import shlex
from pathlib import Path

import pytest
from support.page_commands import blocks

from pipeline.config.recipe import load_recipe, recipe_names
from pipeline.evaluation.settings import LANGUAGE_ACCURACIES
from pipeline.languages import parse_tag
from pipeline.registry import STAGES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "byte_analyses.md"
COMMANDS = [line for block in blocks([PAGE]) for line in block.commands()]
BASE = "dense_opus100"


def test_the_page_has_a_command_for_every_analysis() -> None:
    begun = {" ".join(shlex.split(command)[1:3]) for command in COMMANDS}
    assert {stage.command for stage in STAGES.values() if stage.makes == "analysis"} <= begun


@pytest.mark.parametrize("thousands", [1, 2, 3, 4])
def test_few_shot_differs_in_lines_and_updates_alone(thousands: int) -> None:
    plain = load_recipe(BASE).model_dump(exclude={"name", "description"})
    lines = {"corpus": {"max_train_lines": 1000 * thousands}}
    recipe = load_recipe(f"{BASE}+few_shot", lines if thousands > 1 else None)
    found = recipe.model_dump(exclude={"name", "description"})
    plain["corpus"]["max_train_lines"] = 1000 * thousands
    plain["training"]["updates"] = 5000
    assert found == plain


def test_sets_of_languages_are_the_papers() -> None:
    evaluation = load_recipe(f"{BASE}+sets_moce").evaluation
    assert {*LANGUAGE_ACCURACIES} < {*evaluation.scores}
    sets = evaluation.language_sets
    assert sets.keys() == {"Long", "Medium", "Short", "L.R.", "H.R.", "OPUS4"}
    assert {len(codes) for codes in sets.values()} == {4}
    low = load_recipe(f"{BASE}+sets_moce_low").evaluation.language_sets
    assert (len(low["L.R."]), len(low["E.L.R."])) == (16, 13)
    assert not {*low["L.R."]} & {*low["E.L.R."]}
    for codes in (*sets.values(), *low.values()):
        assert [parse_tag(code).language for code in codes] == [code[:2] for code in codes]
    for name in ("Long", "Medium", "Short"):
        first, second = low[name][:2], low[name][2:]
        assert {*first} <= {*low["L.R."]}
        assert {*second} <= {*low["E.L.R."]}


def test_the_overlays_that_the_page_names_ship() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = {name for name in recipe_names() if f"+{name}" in text}
    assert {"sets_moce", "sets_moce_low", "few_shot"} <= named
