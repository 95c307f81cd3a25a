"""Win ratios, corrected tests and languages found: counted by hand, and shown in both reports."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.example_evaluation import BLEU, IMPRINT, PROFILES, evaluation, history

from pipeline.artifacts.corpus import Direction
from pipeline.errors import ConfigError
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.comparison_tables import comparison_sections
from pipeline.evaluation.language_averages import average_by_language
from pipeline.evaluation.length_ratio import LengthRatio
from pipeline.evaluation.markdown import markdown_report
from pipeline.evaluation.page import html_report
from pipeline.evaluation.paired_tests import LEVEL, holm
from pipeline.evaluation.score_slot import Column
from pipeline.evaluation.scores import (
    BaselineTests,
    Evaluation,
    PairedTest,
    Wins,
    scores_document,
)
from pipeline.evaluation.wins import win_ratios
from pipeline.stages.evaluate import baseline_place

FOUND = {"de-en": {"en": 27, "de": 3}, "de-fr": {"fr": 10, "en": 15, "de": 4, "none": 1}}


def paired(difference: float, bootstrap: float, randomisation: float) -> PairedTest:
    return PairedTest(difference, 0.001, bootstrap, 0.001, randomisation)


def whole_evaluation() -> Evaluation:
    """The example with all that stands beside its averages."""
    found = evaluation()
    systems = tuple(
        replace(
            system,
            directions={
                name: replace(one, outcomes={"language": FOUND[name]}) if name in FOUND else one
                for name, one in system.directions.items()
            },
        )
        for system in found.systems
    )
    tests = {
        "de-en": {"bleu": {"experts": paired(1.0, 0.01, 0.2), "baseline": paired(-27.0, 0.0, 0.0)}},
        "de-fr": {"bleu": {"experts": paired(-1.0, 0.04, 0.05), "baseline": paired(-4, 0.06, 0.5)}},
    }
    return replace(
        found,
        systems=systems,
        baseline_tests=BaselineTests("dense", tests, 8, 1000, ("de-mg",)),
        language_averages=tuple(average_by_language(systems, profiles=PROFILES, pivot="en")),
        wins=won(found.columns),
    )


def won(columns: Sequence[Column]) -> Wins | None:
    """Of the example, against its dense system."""
    found = evaluation()
    return win_ratios(
        found.systems,
        baseline="dense",
        columns=columns,
        profiles=PROFILES,
        verdicts=found.verdicts,
    )


def test_a_set_of_languages_may_name_one_of_several_regions() -> None:
    systems, profiles = evaluation().systems, list(PROFILES)
    for name, code in (("de-fr", "fr_CA"), ("de-mg", "fr")):
        renamed = Direction("de", code)
        profiles = [
            replace(one, direction=renamed) if str(one.direction) == name else one
            for one in profiles
        ]
        systems = tuple(
            replace(one, directions={**one.directions, str(renamed): one.directions[name]})
            for one in systems
        )
    sets = {"Canada": ["fra-CA"], "all": ["fr", "fr_CA"], "France": ["fr_FR"]}
    found = average_by_language(systems, profiles=profiles, pivot="en", sets=sets)
    counts = {one.value: one.directions for one in found if one.trait == "set"}
    assert counts == {"Canada": 1, "all": 2, "France": 1}


def test_win_ratios_are_shares_of_directions_won_and_ties_are_none() -> None:
    wins = won(evaluation().columns)
    assert wins is not None
    assert wins.systems.keys() == {"experts", "baseline"}
    ours = wins.systems["experts"]
    won_out = [BLEU["second"][name] > BLEU["dense"][name] for name in ("en-de", "en-fr")]
    assert ours["out_of_pivot"]["all"]["bleu"] == 100 * sum(won_out) / 2 == 100.0
    assert ours["out_of_pivot"]["high"]["chrf"] == 100.0
    assert ours["zero_shot"]["all"]["language"] == 0.0, "equal"
    assert wins.systems["baseline"]["into_pivot"]["all"]["bleu"] == 0.0


def test_a_score_with_less_is_better_is_won_by_the_lower_and_one_without_ends_by_none() -> None:
    found = evaluation()
    columns = [replace(Bleu.column, larger_is_better=False), replace(Chrf.column)]
    wins = won(columns)
    assert wins is not None
    assert wins.systems["baseline"]["zero_shot"]["all"] == {"bleu": 100.0, "chrf": 0.0}
    endless = won([LengthRatio.column])
    assert endless is not None
    assert endless.systems["experts"]["zero_shot"]["all"] == {}
    alone = win_ratios(
        found.systems[:1],
        baseline="dense",
        columns=columns,
        profiles=PROFILES,
        verdicts=found.verdicts,
    )
    assert alone is None


def test_directions_whose_baseline_does_not_translate_are_won_by_none() -> None:
    """Into Malagasy the baseline has 1 BLEU: of both zero-shot directions, de-fr alone counts."""
    wins = won(evaluation().columns)
    assert wins is not None
    assert BLEU["second"]["de-mg"] > BLEU["dense"]["de-mg"]
    assert BLEU["second"]["de-fr"] < BLEU["dense"]["de-fr"]
    assert wins.systems["experts"]["zero_shot"]["all"]["bleu"] == 0.0
    (table,) = [
        one
        for one in comparison_sections(whole_evaluation())[1].tables
        if one.title == "BLEU: win ratio, %"
    ]
    assert table.rows[-1] == ("Directions not decided", *("0" for _ in range(5)), "1")


def test_tests_are_counted_by_what_is_significant_and_languages_by_lines() -> None:
    _, baseline, averages, languages = comparison_sections(whole_evaluation())
    by_family, _, by_script, _ = averages.tables
    assert [table.title for table in averages.tables] == [
        *("BLEU by family", "chrF++ by family", "BLEU by script", "chrF++ by script")
    ]
    assert by_family.head == ("Family", "Kind", "Directions", "dense", "experts", "baseline")
    assert by_family.rows[1] == ("Germanic", "En → Any", "1", "20.0", "22.0", "2.0")
    assert {row[:3] for row in by_script.rows} == {
        ("Latn", "Any → En", "1"),
        ("Latn", "En → Any", "2"),
        ("Latn", "Zero-shot", "2"),
    }
    tables = {table.title: {row[0]: row[1:] for row in table.rows} for table in baseline.tables}
    assert tables["BLEU: directions with a significant difference"] == {
        "experts": ("1 / 0", "1 / 1", "0 / 1", "1"),
        "baseline": ("0 / 0", "1 / 1", "1 / 1", "1"),
    }
    assert tables["BLEU: win ratio, %"]["experts"][0] == "100.0"
    table = languages.tables[0]
    assert table.rows[0][:3] == ("English (en)", "Any → En", "90.0 %; de 10.0")
    assert table.rows[1][:3] == ("French (fr)", "Zero-shot", "33.3 %; en 50.0, de 13.3, none 3.3")


@pytest.mark.parametrize(("resamples", "shown"), [(158, False), (160, True)])
def test_a_table_of_differences_is_shown_only_where_one_could_be_significant(
    resamples: int, shown: bool
) -> None:
    """Eight tests: the smallest p-value there can be, 1 / (n + 1), is corrected to 8 times that."""
    smallest = holm([1 / (resamples + 1), *[1.0] * 7])[0]
    assert (smallest <= LEVEL) == shown
    found = whole_evaluation()
    assert found.baseline_tests is not None
    tests = replace(found.baseline_tests, resamples=resamples)
    section = comparison_sections(replace(found, baseline_tests=tests))[1]
    assert any("significant" in table.title for table in section.tables) == shown
    assert ("8 tests need 160 resamples" in section.lead) == (not shown)


def test_averages_by_language_are_means_over_the_languages_that_are_not_the_pivot() -> None:
    found = average_by_language(evaluation().systems, profiles=PROFILES, pivot="en")
    means = {
        (one.trait, one.value, one.family): (one.directions, one.systems["dense"]["bleu"])
        for one in found
    }
    bleu = BLEU["dense"]
    assert means["family", "Germanic", "into_pivot"] == (1, bleu["de-en"])
    assert means["family", "Romance", "zero_shot"] == (1, bleu["de-fr"])
    assert means["family", "Austronesian", "zero_shot"] == (1, bleu["de-mg"])
    assert means["script", "Latn", "out_of_pivot"] == (2, (bleu["en-de"] + bleu["en-fr"]) / 2)


def test_both_reports_and_the_document_hold_them() -> None:
    found = whole_evaluation()
    document = scores_document(found)
    assert document["wins"]["systems"]["experts"]["into_pivot"]["all"]["bleu"] == 100.0
    test = document["baseline_tests"]["directions"]["de-en"]["bleu"]["experts"]
    assert (test["bootstrap_holm"], test["randomisation_holm"]) == (0.01, 0.2)
    scored = document["systems"][0]["directions"]["de-fr"]
    assert scored["language_found"] == FOUND["de-fr"]
    text = markdown_report(found, history("experts"), imprint=IMPRINT)
    page = html_report(found, history("experts"), [], imprint=IMPRINT)
    for title in ("Directions won against dense", "Languages that came out"):
        assert f"## {title}\n" in text
        assert f"<h2>{title}</h2>" in page
    assert "| French (fr) | Zero-shot | 33.3 %; en 50.0, de 13.3, none 3.3 |" in text
    assert "33.3 %; en 50.0, de 13.3, none 3.3</td>" in page


def test_the_baseline_is_the_first_system_or_the_one_that_is_named() -> None:
    assert baseline_place(["a", "b"], "") == 0
    assert baseline_place(["a", "b"], "b") == 1
    with pytest.raises(ConfigError, match="'c', which is none of the systems a, b"):
        baseline_place(["a", "b"], "c")
