"""A baseline that does not translate decides nothing, and a report says so wherever it could."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.example_evaluation import IMPRINT, PROFILES, evaluation, history

from pipeline.evaluation.caveats import undecided
from pipeline.evaluation.comparison_tables import comparison_sections
from pipeline.evaluation.markdown import markdown_report
from pipeline.evaluation.page import html_report
from pipeline.evaluation.scores import Evaluation, scores_document
from pipeline.evaluation.tables import score_tables
from pipeline.evaluation.verdicts import distinct_share, judge, quality
from pipeline.evaluation.wins import win_ratios

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    ("bleu", "distinct", "translates"),
    [(5.0, 50.0, True), (4.99, 100.0, False), (40.0, 49.9, False), (0.1, 1.0, False)],
)
def test_a_system_translates_from_5_bleu_and_half_as_many_outputs_as_sources(
    bleu: float, distinct: float, translates: bool
) -> None:
    assert quality(bleu=bleu, distinct=distinct).translates == translates


def test_distinct_outputs_are_counted_over_distinct_sources_and_without_white_space() -> None:
    sources = ["one", "two", "two ", "three", "four"]
    assert distinct_share(["a", "a ", " a", "b", ""], sources) == 100 * 3 / 4
    assert distinct_share([""], [""]) == 100.0


def judged(**distinct: float) -> Evaluation:
    """The example with other shares of distinct outputs, in all directions."""
    found = evaluation()
    systems = [
        replace(
            one,
            directions={
                name: replace(
                    scored,
                    quality=quality(
                        bleu=scored.scores["bleu"],
                        distinct=distinct.get(one.name, scored.quality.distinct),
                    ),
                )
                for name, scored in one.directions.items()
            },
        )
        for one in found.systems
    ]
    verdicts = judge(systems, baseline="dense", profiles=PROFILES)
    return replace(
        found, systems=tuple(systems), verdicts=verdicts, warnings=(*undecided(verdicts),)
    )


def test_an_average_is_judged_by_its_mean_and_a_direction_by_itself() -> None:
    """The baseline has 5 BLEU into French and 1 into Malagasy."""
    verdicts = judged().verdicts
    assert verdicts.decides("de-fr")
    assert not verdicts.decides("de-mg")
    assert verdicts.averages["zero_shot"]["all"]["dense"].bleu == 3.0
    assert not verdicts.decides_average("zero_shot", "all")
    assert verdicts.decides_average("out_of_pivot", "low")
    assert not judged(dense=49.0).verdicts.decides("de-en"), "30 BLEU, but the same outputs"


def test_both_reports_say_not_decided_where_the_baseline_does_not_translate() -> None:
    found = judged()
    assert [(one.family, one.decided) for one in score_tables(found)[0].columns][-2:] == [
        ("out_of_pivot", True),
        ("zero_shot", False),
    ]
    text = markdown_report(found, history("experts"), imprint=IMPRINT)
    page = html_report(found, history("experts"), [], imprint=IMPRINT)
    assert "Zero-shot all (2, not decided)" in text
    assert page.count("<small>2 directions, not decided</small>") >= 2
    rows = [line for line in text.split("\n") if line.startswith(("| de-fr (", "| de-mg ("))]
    assert [("not decided" in row) for row in rows] == [False, True]
    assert len(re.findall(r"→ Malagasy</span><small>not decided</small>", page)) == 1
    (warning,) = found.warnings
    assert "Not decided in 1 of 5 directions" in warning
    assert "does not translate there: de-mg." in warning


def test_the_share_of_distinct_outputs_stands_per_system_in_both_reports_and_the_document() -> None:
    found = judged(experts=42.5)
    (table,) = comparison_sections(found)[0].tables
    assert table.rows[0] == ("dense", *["97.0"] * 6)
    assert table.rows[1] == ("experts", *["42.5"] * 6)
    assert table.rows[-1] == ("Against dense", *["decided"] * 5, "not decided")
    text = markdown_report(found, history("experts"), imprint=IMPRINT)
    assert f"| experts | {' | '.join(['42.5'] * 6)} |" in text
    page = html_report(found, history("experts"), [], imprint=IMPRINT)
    assert "<td>42.5</td>" in page
    verdicts = scores_document(found)["verdicts"]
    assert verdicts["directions"]["de-en"]["experts"] == {
        "bleu": 31.0,
        "distinct": 42.5,
        "translates": False,
    }
    assert verdicts["averages"]["zero_shot"]["all"]["dense"]["translates"] is False


def test_where_nothing_is_decided_there_are_no_tables_of_directions_won() -> None:
    found = judged(dense=10.0)
    wins = win_ratios(
        found.systems,
        baseline="dense",
        columns=found.columns,
        profiles=PROFILES,
        verdicts=found.verdicts,
    )
    section = comparison_sections(replace(found, wins=wins))[1]
    assert section.tables == ()
    assert section.lead == "Not decided: dense does not translate in any direction."


def test_of_one_system_the_share_is_given_and_nothing_is_called_undecided() -> None:
    """There is no baseline that could have decided anything."""
    found = evaluation()
    alone = replace(
        found,
        systems=found.systems[:1],
        verdicts=judge(found.systems[:1], baseline="dense", profiles=PROFILES),
        significance=None,
        warnings=(),
    )
    assert undecided(alone.verdicts) == []
    text = markdown_report(alone, history("dense"), imprint=IMPRINT)
    assert "| dense | 97.0 |" in text
    assert "not decided" not in text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_that_are_kept_show_no_verdict_where_the_baseline_does_not_translate(
    path: Path,
) -> None:
    """Not even in bold: the 0.5 BLEU of one system was, against 0.3."""
    found = json.loads(path.read_text("utf-8"))
    baseline = found["baseline_tests"]["baseline"]
    (scored,) = [one["directions"] for one in found["systems"] if one["name"] == baseline]
    text = path.with_suffix(".md").read_text("utf-8")
    rows = text[text.index("## All directions") :].split("\n")
    for name, one in scored.items():
        (row,) = [row for row in rows if row.startswith(f"| {name} (")]
        if one["scores"]["bleu"] < 5:
            assert "not decided" in row
            assert "**" not in row
        else:
            assert "not decided" not in row
    if all(one["scores"]["bleu"] < 5 for one in scored.values()):
        assert f"Not decided: {baseline} does not translate in any direction." in text
        assert "**" not in text
