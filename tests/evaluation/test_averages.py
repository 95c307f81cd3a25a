"""Averages over directions and runs, verdicts, win ratios and confusion matrices, by hand."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.example_evaluation import BLEU, MADE, PROFILES, evaluation, history

from pipeline.artifacts.corpus import Direction, Resource
from pipeline.errors import ConfigError
from pipeline.evaluation.averages import (
    assess,
    average_by_set,
    average_scores,
    confuse_languages,
    distinct_share,
    group_runs,
    merge_runs,
    quality,
    win_ratios,
)
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.report import (
    baseline_section,
    evaluation_report,
    output_languages_section,
    sets_section,
)
from pipeline.evaluation.scores import (
    Column,
    Confusion,
    DirectionProfile,
    DirectionScores,
    Evaluation,
    Family,
    Scores,
    SystemScores,
)
from pipeline.evaluation.scoring import baseline_of, undecided
from pipeline.evaluation.tables import Table, render_html, render_markdown

FOUND = {"de-en": {"en": 27, "de": 3}, "de-fr": {"fr": 10, "en": 15, "de": 4, "none": 1}}


def both_forms(found: Evaluation, *, system: str = "experts") -> tuple[str, str]:
    """Return the report as Markdown and as HTML."""
    report = evaluation_report(found, history(system), made=MADE, covers="")
    return render_markdown(report), render_html(report)


def titles(table: Table) -> list[str]:
    return [heading.title for heading in table.headings]


def with_directions(change: Callable[[str, str, DirectionScores], DirectionScores]) -> Evaluation:
    """The example with the scores of each system and direction changed."""
    found = evaluation()
    systems = (
        replace(one, directions={n: change(one.name, n, s) for n, s in one.directions.items()})
        for one in found.systems
    )
    return replace(found, systems=tuple(systems))


def profile(name: str, family: Family, resource: Resource | None) -> DirectionProfile:
    return DirectionProfile(Direction(*name.split("-")), family, resource, 1, 1)


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

    def judge(system: str, _: str, one: DirectionScores) -> DirectionScores:
        share = distinct.get(system, one.quality.distinct)
        return replace(one, quality=quality(bleu=one.scores["bleu"], distinct=share))

    found = with_directions(judge)
    verdicts = assess(found.systems, baseline="dense", profiles=PROFILES)
    return replace(found, verdicts=verdicts, warnings=(*undecided(verdicts),))


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
    text, page = both_forms(found)
    assert "Zero-shot (2 directions, not decided)" in text
    assert page.count("<small>2 directions, not decided</small>") >= 2
    rows = [line for line in text.split("\n") if line.startswith(("| de → fr (", "| de → mg ("))]
    assert [("not decided" in row) for row in rows] == [False, True] * 2
    assert page.count("<small>German → Malagasy, not decided</small>") == 2
    (warning,) = found.warnings
    assert "Not decided in 1 of 5 directions" in warning
    assert "does not translate there: de-mg." in warning


def test_of_one_system_nothing_is_called_undecided() -> None:
    """There is no baseline that could have decided anything."""
    found = evaluation()
    alone = replace(
        found,
        systems=found.systems[:1],
        verdicts=assess(found.systems[:1], baseline="dense", profiles=PROFILES),
        significance=None,
        warnings=(),
    )
    assert undecided(alone.verdicts) == []
    assert "not decided" not in both_forms(alone, system="dense")[0]


P_VALUES = {
    "de-en": {"experts": (1.0, 0.01), "baseline": (-27.0, 0.0)},
    "de-fr": {"experts": (-1.0, 0.04), "baseline": (-4.0, 0.06)},
}
"""Direction → system → difference of BLEU to the baseline, and its corrected p-value."""


def whole_evaluation() -> Evaluation:
    """The example with all that stands beside its averages."""
    found = with_outcomes(FOUND)
    assert found.significance is not None
    compared = dict(found.significance.directions)
    for name, p_values in P_VALUES.items():
        before = compared[name]["bleu"]
        differences = {
            system: replace(before.differences[system], value=value, p_value_holm=p_value)
            for system, (value, p_value) in p_values.items()
        }
        compared[name] = {"bleu": replace(before, differences=differences)}
    small = {"en-de", "en-fr"}
    compared = {name: {} if name in small else one for name, one in compared.items()}
    significance = replace(found.significance, directions=compared, tests=8)
    return replace(
        found,
        significance=significance,
        set_averages=tuple(
            average_by_set(found.systems, profiles=PROFILES, pivot="en", sets={"German": ["de"]})
        ),
        wins=won(found.columns),
    )


def won(columns: Sequence[Column]) -> Mapping[str, Any]:
    """Of the example, against its dense system."""
    found = evaluation()
    return win_ratios(found.systems, columns=columns, profiles=PROFILES, verdicts=found.verdicts)


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
    found = average_by_set(systems, profiles=profiles, pivot="en", sets=sets)
    counts = {one.name: one.directions for one in found}
    assert counts == {"Canada": 1, "all": 2, "France": 1}


@pytest.mark.parametrize(
    ("codes", "spelling", "meant"),
    [(("zh", "zh_Hant"), "zh-TW", "zh_Hant"), (("zh", "de"), "zho_Hant", "zh")],
)
def test_a_set_of_languages_means_codes_as_other_settings_do(
    codes: tuple[str, str], spelling: str, meant: str
) -> None:
    """Traditional Chinese has the plain code if it is the only Chinese."""
    like = evaluation().systems[0].directions["en-de"]
    scores = {f"en-{code}": replace(like, scores={"bleu": float(len(code))}) for code in codes}
    profiles = [profile(name, "out_of_pivot", "high") for name in scores]
    systems = [SystemScores("dense", scores, {})]
    found = average_by_set(systems, profiles=profiles, pivot="en", sets={"Far": [spelling]})
    assert [one.directions for one in found] == [1]
    assert found[0].systems["dense"] == {"bleu": len(meant)}


def test_win_ratios_are_shares_of_directions_won_and_ties_are_none() -> None:
    wins = won(evaluation().columns)
    assert wins.keys() == {"experts", "baseline"}
    ours = wins["experts"]
    won_out = [BLEU["second"][name] > BLEU["dense"][name] for name in ("en-de", "en-fr")]
    assert ours["out_of_pivot"]["all"]["bleu"] == 100 * sum(won_out) / 2 == 100.0
    assert ours["out_of_pivot"]["high"]["chrf"] == 100.0
    assert ours["zero_shot"]["all"]["language"] == 0.0, "equal"
    assert wins["baseline"]["into_pivot"]["all"]["bleu"] == 0.0


def test_a_score_with_less_is_better_is_won_by_the_lower() -> None:
    found = evaluation()
    columns = [replace(Bleu.column, larger_is_better=False), replace(Chrf.column)]
    wins = won(columns)
    assert wins["baseline"]["zero_shot"]["all"] == {"bleu": 100.0, "chrf": 0.0}
    alone = win_ratios(
        found.systems[:1], columns=columns, profiles=PROFILES, verdicts=found.verdicts
    )
    assert alone == {}


def test_directions_whose_baseline_does_not_translate_are_won_by_none() -> None:
    """Into Malagasy the baseline has 1 BLEU: of both zero-shot directions, de-fr alone counts."""
    wins = won(evaluation().columns)
    assert BLEU["second"]["de-mg"] > BLEU["dense"]["de-mg"]
    assert BLEU["second"]["de-fr"] < BLEU["dense"]["de-fr"]
    assert wins["experts"]["zero_shot"]["all"]["bleu"] == 0.0


def test_tests_are_counted_by_what_is_significant_and_languages_by_lines() -> None:
    whole = whole_evaluation()
    baseline, averages = baseline_section(whole), sets_section(whole)
    languages = output_languages_section(whole)
    by_set, _ = averages.tables
    assert [table.title for table in averages.tables] == ["BLEU by set", "chrF++ by set"]
    systems = ["dense", "experts", "baseline"]
    assert titles(by_set) == ["Set and direction type", "Directions", *systems]
    assert by_set.rows[1].texts == ("German, En → Any", "1", "20.0", "22.0", "2.0")
    tables = {
        table.title: {row.texts[0]: row.texts[1:] for row in table.rows}
        for table in baseline.tables
    }
    assert tables["BLEU: directions with a significant difference"] == {
        "experts": ("1", "1", "0", "1"),
        "baseline": ("0", "1", "1", "1"),
    }
    assert tables["BLEU: win ratio, %"]["experts"][0] == "100.0"
    # as in evaluations of earlier versions: a score of which neither more nor less is better
    neither = [replace(one, larger_is_better=None) for one in whole.columns if one.name == "bleu"]
    of_neither = {one.title for one in baseline_section(replace(whole, columns=(*neither,))).tables}
    assert of_neither == {"BLEU: difference to dense"}
    (table,) = languages.tables
    assert table.rows[0].texts == ("baseline", "Zero-shot", "fr", "en", "50.0")
    assert {row.texts[1:] for row in table.rows if row.texts[0] == "dense"} == {
        ("Any → En", "en", "de", "10.0"),
        ("Zero-shot", "fr", "en", "50.0"),
        ("Zero-shot", "fr", "de", "13.3"),
        ("Zero-shot", "fr", "none", "3.3"),
    }


def test_averages_by_set_are_means_over_the_languages_that_are_not_the_pivot() -> None:
    sets = {"Germanic": ["de"], "all": ["de", "fr", "mg"]}
    found = average_by_set(evaluation().systems, profiles=PROFILES, pivot="en", sets=sets)
    means = {
        (one.name, one.family): (one.directions, one.systems["dense"]["bleu"]) for one in found
    }
    bleu = BLEU["dense"]
    assert means["Germanic", "into_pivot"] == (1, bleu["de-en"])
    assert means["all", "zero_shot"] == (2, (bleu["de-fr"] + bleu["de-mg"]) / 2)
    assert means["all", "out_of_pivot"] == (2, (bleu["en-de"] + bleu["en-fr"]) / 2)


def test_the_baseline_is_the_first_system_or_the_one_that_is_named() -> None:
    assert baseline_of(["a", "b"], "") == "a"
    assert baseline_of(["a", "b"], "b") == "b"
    with pytest.raises(ConfigError, match="'c', which is none of the systems a, b"):
        baseline_of(["a", "b"], "c")


def with_outcomes(found: dict[str, dict[str, int]]) -> Evaluation:
    """Every system has these outcomes, in the directions that are named."""
    example = with_directions(
        lambda _, name, one: (
            replace(one, outcomes={"language": found[name]}) if name in found else one
        )
    )
    return replace(example, confusion=confuse_languages(example.systems, profiles=PROFILES))


def test_counts_of_a_familys_directions_into_a_language_are_summed() -> None:
    names = [str(one.direction) for one in PROFILES]
    found = {name: {"en": place + 1, "none": 2} for place, name in enumerate(names)}
    confusion = with_outcomes(found).confusion
    assert confusion.keys() == {"language"}
    for families in confusion["language"].values():
        for family, targets in families.items():
            for target, counts in targets.items():
                members = [
                    found[str(one.direction)]
                    for one in PROFILES
                    if one.family == family and one.direction.target == target
                ]
                assert counts == sum(map(Counter, members), Counter())
    assert sum(map(len, families.values())) == len(
        {(one.family, one.direction.target) for one in PROFILES}
    )


@pytest.mark.parametrize(("target", "code"), [("fr_CA", "fr"), ("pt_BR", "pt")])
def test_a_region_is_no_other_language_and_the_identifier_is_named(target: str, code: str) -> None:
    lines: Confusion = {"language": {"dense": {"zero_shot": {target: {code: 9, "de": 1}}}}}
    section = output_languages_section(replace(evaluation(), confusion=lines))
    (table,) = section.tables
    assert [line.texts for line in table.rows] == [("dense", "Zero-shot", target, "de", "10.0")]
    assert "(langdetect as it is)" in section.lead


def test_runs_are_grouped_by_the_name_before_the_mark() -> None:
    assert group_runs(["moe@1", "dense", "moe@2", "own@1", "@x"]) == {
        "moe": ("moe@1", "moe@2"),
        "dense": ("dense",),
        "own@1": ("own@1",),
        "@x": ("@x",),
    }


@pytest.mark.parametrize("names", [["moe", "moe@1"], ["moe@1", "dense", "moe"]])
def test_a_system_with_and_without_a_seed_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"'moe' is named without a seed, and 'moe@1' with one"):
        group_runs(names)


def runs() -> tuple[SystemScores, ...]:
    """Two runs of one system, of 30 and 31 BLEU from German to English."""
    first, second, _ = evaluation().systems
    return replace(first, name="moe@1"), replace(second, name="moe@2")


def merged() -> SystemScores:
    (found,) = merge_runs(runs(), {"moe": ("moe@1", "moe@2")}, profiles=PROFILES)
    return found


def test_scores_of_a_system_are_means_and_its_counts_are_sums() -> None:
    found = merged()
    scored = found.directions["de-en"]
    assert scored.scores["bleu"] == 30.5
    assert scored.quality.bleu == 30.5
    assert scored.quality.distinct == (97.0 + 90.0) / 2
    assert scored.lines == 60
    assert found.averages["into_pivot"]["high"]["bleu"] == 30.5
    assert found.averages["out_of_pivot"]["all"]["bleu"] == pytest.approx(
        ((20.0 + 11.0) / 2 + (22.0 + 11.04) / 2) / 2
    )
    assert found.spread["into_pivot"]["all"]["bleu"] == pytest.approx(0.5**0.5)
    assert "language" not in found.directions["de-mg"].scores


def test_a_system_with_one_run_is_left_as_it_is() -> None:
    (first, second) = runs()
    assert merge_runs([first], {"moe@1": ("moe@1",)}, profiles=PROFILES) == [first]
    assert second.run_names == ("moe@2",)


def repeated() -> Evaluation:
    found = evaluation()
    systems = (merged(), found.systems[2])
    return replace(
        found,
        systems=systems,
        significance=None,
        verdicts=assess(systems, baseline="moe", profiles=PROFILES),
    )


def test_both_reports_show_the_number_of_runs_and_their_spread() -> None:
    known = replace(history("moe@2"), curves=())
    report = evaluation_report(repeated(), known, made=MADE, covers="")
    text = render_markdown(report)
    assert "| moe (2 runs) | – / 24 updates (3.0 ×) | 30.5 (± 0.7) |" in text
    assert "| baseline | no training | 3.0 |" in text
    assert "± 0.7" in render_html(report)
