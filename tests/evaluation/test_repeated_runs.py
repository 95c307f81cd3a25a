"""Runs of a system are scored by themselves, and the system by their means."""

from dataclasses import asdict, replace

import pytest
from support.example_evaluation import MADE, PROFILES, evaluation, history

from pipeline.errors import ConfigError
from pipeline.evaluation.averages import group_runs, judge, merge_runs
from pipeline.evaluation.rendering import render_html, render_markdown
from pipeline.evaluation.report import evaluation_report
from pipeline.evaluation.scores import Evaluation, SystemScores


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
        verdicts=judge(systems, baseline="moe", profiles=PROFILES),
    )


def test_both_reports_show_the_number_of_runs_and_their_spread() -> None:
    known = replace(history("moe@2"), curves=())
    report = evaluation_report(repeated(), known, made=MADE)
    text = render_markdown(report)
    assert "| moe (2 runs) | – / 24 updates (3.0 ×) | 30.5 (± 0.7) |" in text
    assert "| baseline | no training | 3.0 |" in text
    assert "± 0.7" in render_html(report)


def test_the_document_has_every_run_and_the_spread() -> None:
    systems = asdict(repeated())["systems"]
    assert [one["name"] for one in systems[0]["runs"]] == ["moe@1", "moe@2"]
    assert systems[0]["runs"][1]["directions"]["de-en"]["scores"]["bleu"] == 31.0
    assert systems[0]["spread"]["into_pivot"]["all"]["bleu"] == pytest.approx(0.5**0.5)
    assert (systems[1]["runs"], systems[1]["spread"]) == ((), {})
