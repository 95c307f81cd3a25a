"""``mmnmt report``: losses, experts and translations of any runs, on a page that is sound."""

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from support.browser import CHROMIUM, browser
from support.corpora import make_corpus, make_translations, writing
from support.example_evaluation import evaluation
from support.recorded_runs import artifact, training_run

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.errors import EXIT_USER_ERROR
from pipeline.evaluation.history import trace_history
from pipeline.evaluation.report import averages_section
from pipeline.evaluation.runs_report import DEAD, OVERLOADED
from pipeline.evaluation.scores import Evaluation

HOSTILE = "<script>alert('x')</script> & \"quoted\""


def report(tmp_path: Path, *runs: str) -> str:
    """The page of runs, written by the command."""
    out = tmp_path / "page.html"
    assert cli.main(["report", *runs, "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], *runs: str) -> str:
    """The message of a report that is not written."""
    out = tmp_path / "page.html"
    assert cli.main(["report", *runs, "--out", str(out)]) == EXIT_USER_ERROR
    assert not out.exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def body(page: str) -> ElementTree.Element:
    """The content of a page, parsed as XML: every tag closed, every character escaped."""
    start, end = page.index("<main>"), page.index("</main>") + len("</main>")
    return ElementTree.fromstring(page[start:end])


def section(page: str, title: str) -> ElementTree.Element:
    (found,) = [one for one in body(page).iter("section") if one[0].text == title]
    return found


def said(page: str, title: str = "Notes") -> str:
    """The text of a section."""
    return " ".join(section(page, title).itertext())


def titles(page: str) -> list[str | None]:
    return [one.text for one in body(page).iter("h2")]


def rows(part: ElementTree.Element) -> list[list[str]]:
    """The printed cells of all rows below the headings."""
    return [
        [" ".join("".join(cell.itertext()).split()) for cell in row]
        for table in part.iter("tbody")
        for row in table
    ]


def names_in(page: str, title: str = "Training budgets") -> list[str]:
    """The first cells of a section's rows."""
    return [line[0] for line in rows(section(page, title))]


def validations(run: Artifact) -> dict[int, float]:
    """Update → validation loss, read from the file of metrics alone."""
    lines = (run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return {one["update"]: one["loss"] for one in entries if one["kind"] == "validation"}


def test_the_table_of_losses_has_the_means_and_ranges_of_the_files_of_metrics(
    tmp_path: Path,
) -> None:
    runs = {
        1: training_run(tmp_path / "one", [4.0, 2.5, 2.75]),
        2: training_run(tmp_path / "two", [4.5, 3.25, 3.0]),
    }
    page = report(tmp_path, *(f"dense@{seed}={run.directory}" for seed, run in runs.items()))
    losses = [validations(run) for run in runs.values()]
    lowest, last = [min(one.values()) for one in losses], [one[3] for one in losses]
    assert rows(section(page, "Validation losses")) == [
        [
            *("dense", "2", f"{fmean(lowest):.3f} {min(lowest):.3f}–{max(lowest):.3f}", "2–3"),
            *(f"{fmean(last):.3f} {min(last):.3f}–{max(last):.3f}", "3"),
            f"{fmean(lowest):.3f} {min(lowest):.3f}–{max(lowest):.3f}",
        ]
    ]


def test_a_mean_of_seeds_ends_with_the_shortest_of_them(tmp_path: Path) -> None:
    """A mean over fewer runs jumps where one of them ends."""
    long = training_run(tmp_path / "long", [4.0, 3.0, 2.0, 1.0])
    short = training_run(tmp_path / "short", [6.0, 5.0])
    page = report(tmp_path, f"dense@1={long.directory}", f"dense@2={short.directory}")
    figure = next(section(page, "Loss curves").iter("figure"))
    (line,) = figure.iter("polyline")
    (band,) = figure.iter("polygon")
    heights = [
        [float(point.split(",")[1]) for point in one.attrib["points"].split()]
        for one in (line, band)
    ]
    assert [len(one) for one in heights] == [2, 4]
    means, (*low, high_last, high_first) = heights
    assert means[0] == pytest.approx((low[0] + high_first) / 2, abs=0.1), "5.0 of 4.0 and 6.0"
    assert means[1] == pytest.approx((low[1] + high_last) / 2, abs=0.1), "4.0 of 3.0 and 5.0"
    assert "dense (2 runs)" in " ".join(figure.itertext())


def test_runs_without_an_update_in_common_are_left_out_and_named(tmp_path: Path) -> None:
    one = training_run(tmp_path / "one", [4.0, None])
    other = training_run(tmp_path / "other", [None, 5.0])
    alone = training_run(tmp_path / "alone", [2.0])
    runs = (f"a@1={one.directory}", f"a@2={other.directory}", f"b={alone.directory}")
    assert "points are not known: a." in said(report(tmp_path, *runs), "Loss curves")


def test_a_run_without_validations_costs_its_losses_alone(tmp_path: Path) -> None:
    without = artifact(
        tmp_path / "without",
        "checkpoint",
        "pretrain",
        files={"metrics.jsonl": '{"kind": "train", "update": 1, "seconds": 1.0, "loss": 2.0}\n'},
        statistics={"updates": 1},
    )
    bare = artifact(tmp_path / "bare", "checkpoint", "pretrain", statistics={"updates": 1})
    whole = training_run(tmp_path / "whole", [3.0])
    page = report(tmp_path, *(str(one.directory) for one in (without, bare, whole)))
    assert names_in(page, "Validation losses") == ["whole"]
    assert "a run of them has no validation loss: without." in said(page, "Validation losses")
    assert "No losses are recorded for bare." in said(page)
    assert "Validation losses" not in titles(report(tmp_path, str(without.directory)))


def test_what_is_no_run_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = artifact(tmp_path / "corpus", "corpus", "clean")
    (tmp_path / "empty").mkdir()
    for text, error in [
        (str(tmp_path / "nowhere"), "is not a folder"),
        ("name=", "is not a folder"),
        (str(tmp_path / "empty"), "holds no run"),
        (str(corpus.directory), "is a corpus artifact, which report does not show"),
    ]:
        assert error in refusal(tmp_path, capsys, text)


def test_two_runs_of_one_name_are_refused_and_one_run_named_twice_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = training_run(tmp_path / "a" / "dense", [3.0])
    other = training_run(tmp_path / "b" / "dense", [2.0])
    error = refusal(tmp_path, capsys, str(one.directory), str(other.directory))
    assert "Two runs are named 'dense'" in error
    assert f"dense-2={other.directory}" in error
    mixed = (f"x@1={one.directory}", f"x={other.directory}")
    assert "named without a seed" in refusal(tmp_path, capsys, *mixed)
    page = report(tmp_path, str(one.directory), str(tmp_path / "a"))
    assert names_in(page) == ["dense"]
    page = report(tmp_path, f"old={tmp_path / 'a'}", f"new={tmp_path / 'b'}")
    assert names_in(page) == ["old/dense", "new/dense"]


@pytest.mark.parametrize("seed", ["", "@1"])
def test_a_name_may_have_an_equals_sign_as_in_evaluate(
    seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [training_run(tmp_path / name, [3.0]).directory for name in ("one", "two")]
    page = report(tmp_path, f"d\\=64{seed}={runs[0]}", f"d\\=128{seed}={runs[1]}")
    assert names_in(page) == [f"d=64{seed}", f"d=128{seed}"]
    (tmp_path / "page.html").unlink()
    error = refusal(tmp_path, capsys, *(f"d\\=64{seed}={run}" for run in runs))
    assert f"for example d\\=64{seed}-2={runs[1]}." in error


@pytest.mark.parametrize("twin", ["one", "copy"])
def test_a_run_that_is_named_as_two_seeds_is_pointed_out(twin: str, tmp_path: Path) -> None:
    """Its range over seeds would be 0, whether the run is named twice or a copy of it."""
    one, other = (training_run(tmp_path / name, [3.0]) for name in ("one", "other"))
    shutil.copytree(one.directory, tmp_path / "copy")
    given = (f"x@1={one.directory}", f"x@2={tmp_path / twin}", f"x@3={other.directory}")
    said_of_twins = "x@1 and x@2 are the same run: ranges over seeds are too narrow."
    assert said_of_twins in said(report(tmp_path, *given))
    page = report(tmp_path, f"x@1={one.directory}", f"x@2={other.directory}", f"y={one.directory}")
    assert "Notes" not in titles(page)


def test_nothing_but_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    run = str(training_run(tmp_path / "dense", [3.0]).directory)
    out = tmp_path / "page.html"
    out.write_text("mine", encoding="utf-8")
    assert cli.main(["report", run, "--out", str(out)]) == EXIT_USER_ERROR
    link = tmp_path / "link.html"
    link.symlink_to(out)
    assert cli.main(["report", run, "--out", str(link)]) == EXIT_USER_ERROR
    assert out.read_text(encoding="utf-8") == "mine"
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it, and a read would wait
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    for other in ("pipe", "to_pipe", "loop"):
        assert cli.main(["report", run, "--out", str(tmp_path / other)]) == EXIT_USER_ERROR
    corpus = make_corpus(tmp_path / "corpus", {"test": {"de-en": {"de": ["a"], "en": ["b"]}}})
    model = open_artifact(Path(run), kind="checkpoint")
    inputs = {"corpus": corpus, "checkpoint": model}
    lines = make_translations(tmp_path / "lines", {"de-en": ["b"]}, inputs)
    for folder in (Path(run) / "new", lines.directory, corpus.directory / "test"):
        inside = folder / "page.html"
        assert cli.main(["report", str(tmp_path), "--out", str(inside)]) == EXIT_USER_ERROR
        assert not inside.exists()
    out.unlink()
    assert cli.main(["report", run, "--out", str(out)]) == 0
    assert cli.main(["report", f"other={run}", "--out", str(out)]) == 0
    assert "other" in out.read_text(encoding="utf-8")


ROUTED = {
    "de": [[80.0, 0.0, 20.0, 0.0], [25.0, 25.0, 25.0, 25.0]],
    "fr": [[90.0, 0.0, 0.0, 10.0], [100.0, 0.0, 0.0, 0.0]],
    "xx": [[0.0] * 4, [0.0] * 4],
}
"""Language → layer → routes of each expert."""


def with_experts(path: Path, losses: Sequence[float], routed: Mapping[str, object]) -> Artifact:
    run = training_run(path.with_name("plain"), losses)
    counts = np.array([*routed.values()]).swapaxes(0, 1)
    document = {
        "layers": ["encoder.layers.1", "decoder.layers.1"],
        "languages": [*routed],
        "tokens": counts.sum(2).tolist(),
        "entropy": counts.sum(2).tolist(),
        "routed": counts.tolist(),
        "kept": (counts / 2).tolist(),
    }
    files = {name: (run.directory / name).read_text() for name in run.names()}
    return artifact(
        path, "checkpoint", "pretrain", files={**files, "routing.json": json.dumps(document)}
    )


def test_the_load_of_experts_is_that_of_routing_json(tmp_path: Path) -> None:
    run = with_experts(tmp_path / "moe", [3.0], ROUTED)
    page = report(tmp_path, str(run.directory))
    expected = []
    for number, layer in enumerate(("encoder.layers.1", "decoder.layers.1")):
        totals = [sum(ROUTED[code][number][expert] for code in ROUTED) for expert in range(4)]
        loads = [total / (sum(totals) / 4) for total in totals]
        dead, overloaded = sum(x < DEAD for x in loads), sum(x > OVERLOADED for x in loads)
        expected.append(
            ["moe", layer, "4", str(dead), str(overloaded), f"{max(loads):.2f}", "50.0%", "1.00"]
        )
    assert rows(section(page, "Load of experts")) == expected
    assert expected[0][3:5] == ["1", "1"]


def test_alarms_of_training_stand_on_the_page_with_their_updates(tmp_path: Path) -> None:
    alarms = {20: "routes are dropped", 30: HOSTILE}
    lines = [
        {"kind": "alarm", "update": update, "seconds": 1.0, "text": text}
        for update, text in alarms.items()
    ]
    files = {"metrics.jsonl": "".join(f"{json.dumps(line)}\n" for line in lines)}
    run = artifact(tmp_path / "moe", "checkpoint", "pretrain", files=files)
    found = section(report(tmp_path, f"moe={run.directory}"), "Alarms of training")
    texts = ["".join(one.itertext()) for one in found.iter("li")]
    assert texts == ["moe, update 20: routes are dropped", f"moe, update 30: {HOSTILE}"]


def test_damaged_routing_statistics_cost_the_experts_alone(tmp_path: Path) -> None:
    run = artifact(
        tmp_path / "moe", "checkpoint", "pretrain", files={"routing.json": '{"layers": 3}'}
    )
    page = report(tmp_path, str(run.directory))
    assert "Load of experts" not in titles(page)
    assert "the routing statistics of moe (damaged" in said(page)


def evaluation_of(
    path: Path, inputs: Mapping[str, Artifact], document: str | None = None
) -> Artifact:
    """The example evaluation, or a file of scores with other contents."""
    text = json.dumps(asdict(evaluation())) if document is None else document
    return artifact(path, "evaluation", "evaluate", inputs, files={"scores.json": text})


def test_an_evaluation_brings_its_scores_and_systems_and_names_those_that_are_gone(
    tmp_path: Path,
) -> None:
    dense = training_run(tmp_path / "dense", [3.0, 2.0])
    lines = {
        name: artifact(tmp_path / name, "translations", "translate", inputs)
        for name, inputs in (("lines", {"checkpoint": dense}), ("old", {}))
    }
    inputs = {"systems/dense": lines["lines"], "systems/gone": lines["old"]}
    made = evaluation_of(tmp_path / "scores", inputs)
    shutil.rmtree(lines["old"].directory)
    page = report(tmp_path, str(made.directory))
    found = evaluation()
    own = averages_section(found, trace_history({"dense": dense}))
    shown = [row.cells for table in own.tables for row in table.rows]
    assert rows(section(page, "Scores of scores")) == [
        [f"{cell.text} {cell.note}".strip() for cell in cells] for cells in shown
    ]
    assert names_in(page, "Validation losses") == ["dense"]
    assert "gone (its translations have moved or changed)" in said(page)


@pytest.mark.parametrize("parts", [1, 2])
def test_an_evaluation_in_a_folder_that_was_moved_brings_its_systems(
    tmp_path: Path, parts: int
) -> None:
    folder, inputs = tmp_path / "plan", dict[str, Artifact]()
    for number in range(parts):
        run = training_run(folder / f"run{number}", [3.0, 2.0 - number])
        made = {"checkpoint": run}
        lines = artifact(folder / f"lines{number}", "translations", "translate", made)
        inputs[f"systems/s{number}"] = lines
    evaluation_of(folder / "scores", inputs)
    folder.rename(tmp_path / "moved")
    page = report(tmp_path, str(tmp_path / "moved" / "scores"))
    assert names_in(page, "Validation losses") == [f"s{number}" for number in range(parts)]
    assert "Notes" not in titles(page), "nothing is left out"


@pytest.mark.parametrize("text", ["{", "[]", '{"significance": {"averages": {"into_pivot": 3}}}'])
def test_damaged_scores_cost_the_scores_alone(tmp_path: Path, text: str) -> None:
    made = evaluation_of(tmp_path / "scores", {}, text)
    page = report(tmp_path, str(made.directory))
    assert "Scores of scores" not in titles(page)
    assert "the scores of scores" in said(page)


def test_scores_of_an_earlier_version_are_shown(tmp_path: Path) -> None:
    document = asdict(evaluation()) | {"references": {}, "tokenizers": {"en": "13a"}}
    for column in document["columns"]:
        column |= {"section": {"title": "Old", "lead": "", "note": ""}, "ceiling": True}
    document["columns"][0]["larger_is_better"] = None
    document["undetectable"] = ["mg"]
    text = json.dumps(document)
    read = TypeAdapter(Evaluation).validate_json(text)
    assert read.undetectable == {"langdetect": ("mg",)}
    made = evaluation_of(tmp_path / "scores", {}, text)
    shown = section(report(tmp_path, str(made.directory)), "Scores of scores")
    assert [one.text for one in shown.iter("h3")][:3] == [
        *("BLEU", "chrF++", "langdetect as it is, %")
    ]


LANGUAGES = {
    "analysis": "languages",
    "pivot": "en",
    "layers": ["decoder.layers.1"],
    "directions": {
        "de-en": {"family": "into_pivot", "lines": 2, "routed": [[3, 1]]},
        "de-fr": {"family": "zero_shot", "lines": 2, "routed": [[1, 9]]},
    },
    "parallel_lines": 2,
    "encoded": {},
    "pairs": {},
    "points": {"de": [[0.0, 0.0], [1.0, 3.0]], "fr": [[2.0, 2.0]]},
    "outlines": {"de": [[[[0.0, 1.0], [4.0, 1.0]]], []], "fr": []},
}


def analysis(path: Path, document: Mapping[str, object]) -> Artifact:
    with writing(path, "analysis", "analyze_languages") as writer:
        writer.write_json("languages.json", document)
        writer.statistics["analysis"] = "languages"
    return open_artifact(path, kind="analysis")


def test_an_analysis_shows_experts_of_zero_shot_and_of_english_and_the_map_of_states(
    tmp_path: Path,
) -> None:
    """By itself, by name, and in the folder of a plan beside a checkpoint."""
    made = analysis(tmp_path / "plan" / "inside", LANGUAGES)
    for named, title in [
        (str(made.directory), "Languages inside inside"),
        (f"moe={made.directory}", "Languages inside moe"),
        (str(tmp_path / "plan"), "Languages inside inside"),
    ]:
        part = section(report(tmp_path, named), title)
        into, zero, states = part.iter("figure")
        captions = ["".join(one[0].itertext()).strip() for one in (into, zero, states)]
        assert captions == ["Any → En", "Zero-shot", "Encoder states of the same lines, t-SNE"]
        assert [one.text for one in into.iter("title")] == ["de, 0: 0.75", "de, 1: 0.25"]
        assert [one.text for one in zero.iter("title")] == ["fr, 0: 0.1", "fr, 1: 0.9"]
        classes = [one.attrib.get("class") for one in states[1]]
        assert classes[:4] == ["marker s0", "marker s0", "marker s1", "outline s0"]
        assert "50 and 90 %" in "".join(states.itertext())
    training_run(tmp_path / "plan" / "dense", [3.0])
    page = report(tmp_path, str(tmp_path / "plan"))
    assert {"Languages inside inside", "Validation losses"} <= {*titles(page)}


def test_equal_names_in_two_evaluations_of_a_plan_are_told_apart(tmp_path: Path) -> None:
    """A baseline without a model has other translations of every corpus."""
    plan = tmp_path / "plan"
    dense = training_run(plan / "first" / "dense", [3.0])
    for name in ("flores", "tests"):
        corpus = make_corpus(tmp_path / f"{name}-corpus", {"test": {"de-en": {"de": [name]}}})
        systems = {
            system: artifact(
                tmp_path / f"{name}-{system}", "translations", "t", {"corpus": corpus, **model}
            )
            for system, model in (("dense", {"checkpoint": dense}), ("nearest", {}))
        }
        inputs = {f"systems/{system}": one for system, one in systems.items()}
        artifact(plan / name, "evaluation", "evaluate", {"corpus": corpus, **inputs})
    page = report(tmp_path, str(plan))
    assert names_in(page) == ["dense", "nearest", "tests/nearest"]


def test_folders_of_artifacts_within_a_folder_of_runs_are_named(tmp_path: Path) -> None:
    training_run(tmp_path / "runs" / "mine", [3.0])
    for plan, stage in (("demo", "clean"), ("other", "dense.before-1")):
        artifact(tmp_path / "runs" / plan / stage, "corpus", "clean")
    artifact(tmp_path / "runs" / "mine.run" / "best", "corpus", "clean")
    page = report(tmp_path, str(tmp_path / "runs"))
    assert "demo (a folder of artifacts: name it, too)" in page
    assert "other (a folder of artifacts: name it, too)" in page
    assert "mine.run" not in page


def test_a_folder_that_adds_nothing_is_refused_beside_others_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_run(tmp_path / "plan" / "dense", [3.0])
    (tmp_path / "strange" / "pictures").mkdir(parents=True)
    plan, strange = (str(tmp_path / name) for name in ("plan", "strange"))
    assert f"{strange} holds no run" in refusal(tmp_path, capsys, plan, strange)


def test_a_damaged_manifest_in_a_folder_costs_its_artifact_alone(tmp_path: Path) -> None:
    training_run(tmp_path / "plan" / "dense", [3.0])
    for name in ("moe", "web app"):
        (tmp_path / "plan" / name).mkdir()
        (tmp_path / "plan" / name / "manifest.json").write_text('{"name": "x"}', encoding="utf-8")
    page = report(tmp_path, str(tmp_path / "plan"))
    assert names_in(page) == ["dense"]
    assert "moe (it has no manifest that can be read), web app (" in said(page)


def all_parts(tmp_path: Path) -> None:
    """A page with tables, scores, charts, notes and translations; one name is hostile."""
    experts = with_experts(tmp_path / "moe", [3.0, 2.0], ROUTED)
    dense = [training_run(tmp_path / f"d{n}", [4.0 + n, 3.0 + n]) for n in (1, 2)]
    models = {HOSTILE: experts, **{f"dense@{n}": run for n, run in enumerate(dense, start=1)}}
    text = {"de": ["Das Haus " * 20, "W" * 300], "en": ["The house " * 20, "w" * 300]}
    corpus = make_corpus(tmp_path / "corpus", {"train": {"de-en": text}, "test": {"de-en": text}})
    lines = {
        name: make_translations(
            tmp_path / f"lines-{place}",
            {"de-en": [f"A {name} " * 9, "w" * 299], "en-de": ["Ein Haus", "W" * 280]},
            {"corpus": corpus, "checkpoint": model},
        )
        for place, (name, model) in enumerate(models.items())
    }
    inputs = {"corpus": corpus, **{f"systems/{name}": one for name, one in lines.items()}}
    bare = artifact(tmp_path / "bare", "checkpoint", "pretrain", statistics={"updates": 1})
    scores = evaluation_of(tmp_path / "scores", inputs)
    report(tmp_path, str(scores.directory), str(bare.directory))


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What the body of a function in JavaScript returns of a page with all parts."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    folder = tmp_path_factory.mktemp("page")
    all_parts(folder)
    with browser(folder / "profile") as tab:

        def run(script: str, *, width: int = 1280, theme: str = "light") -> Any:
            tab.open()
            screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            tab.tell("Emulation.setDeviceMetricsOverride", **screen)
            scheme = {"name": "prefers-color-scheme", "value": theme}
            tab.tell("Emulation.setEmulatedMedia", features=[scheme])
            tab.tell("Page.navigate", url=(folder / "page.html").as_uri())
            tab.wait_for("document.readyState === 'complete'")
            return tab.run(f"(() => {{{script}}})()")

        yield run


OVERFLOW = "return [innerWidth, document.documentElement.scrollWidth]"


def test_the_page_fits_the_screen_of_a_phone(browse: Callable[..., Any]) -> None:
    screen, page = browse(OVERFLOW, width=360)
    assert page <= screen == 360


CONTRASTS = """
const channels = (text) => {
  const [red, green, blue, alpha = 1] = text.match(/[\\d.]+/g).map(Number);
  return [[red, green, blue], alpha];
};
const mix = (above, alpha, below) => above.map((one, at) => alpha * one + (1 - alpha) * below[at]);
const luminance = (color) => color
  .map((one) => one / 255)
  .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
  .reduce((sum, one, at) => sum + [0.2126, 0.7152, 0.0722][at] * one, 0);
const background = (element) => {
  const layers = [];
  for (let one = element; one; one = one.parentElement) {
    layers.unshift(channels(getComputedStyle(one).backgroundColor));
  }
  return layers.reduce((below, [color, alpha]) => mix(color, alpha, below), [255, 255, 255]);
};
const found = {};
for (const element of document.body.querySelectorAll("*")) {
  const texts = [...element.childNodes].filter((one) => one.nodeType === 3 && one.data.trim());
  if (!texts.length || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  const paint = element.closest("svg") ? style.fill : style.color;
  const [color, alpha] = channels(paint), below = background(element);
  const both = [luminance(mix(color, alpha * style.opacity, below)), luminance(below)];
  const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  const name = `${element.parentElement.tagName} ${element.tagName} ${element.className}`;
  found[name] = Math.min(found[name] ?? 99, ratio);
}
return [matchMedia("(prefers-color-scheme: dark)").matches, found];
"""
"""Returns the least contrast of the texts of every kind of element (WCAG 2.2, 1.4.3)."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_the_contrast_that_readers_need(
    browse: Callable[..., Any], theme: str
) -> None:
    is_dark, found = browse(CONTRASTS, theme=theme)
    assert is_dark == (theme == "dark")
    kinds = " ".join(found)
    assert all(tag in kinds for tag in ("TD", "SMALL", "text", "H1", "LI"))
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
