"""The page "Make more data", command by command: on the stored run, trained for seconds."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_command, run_script
from support.page_commands import ROOT, blocks, without_launcher
from support.raw_trees import unpack_stored_run
from support.small_plans import TINY, as_child, placed_small

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction, line_counts, provenance_name, read_lines
from pipeline.artifacts.shards import read_mixture
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.scores import TranslatedLines
from pipeline.jobs.runner import run_plan

pytestmark = pytest.mark.slow

PAGE = blocks([ROOT / "docs" / "how-to" / "make_more_data.md"])
FEW = """
parent = "dense.toml"
[training]
updates = 4
validate_every = 2
[evaluation]
language_accuracy = false
"""
INTO = 'targets = ["de", "fr", "ru"]'
PLAN = TINY.replace('tokenizer = { kind = "bytes" }\n', f"mixture = {{ {INTO} }}\n")
PLAN = PLAN.replace("decoding = {", f"decoding = {{ {INTO},")
LEAST = 5.0
"""The round trips of a model this small are worse than the page's threshold."""


def commands() -> Iterator[list[str]]:
    """The arguments of every command of the page that needs the demo, made small."""
    for block in PAGE:
        for command in block.commands() if block.tag == "demo" else ():
            words = [
                re.sub(r"^demo_(dense|moe)$", "few.toml", w) for w in without_launcher(command)
            ]
            if "--processes" in words:
                place = words.index("--processes")
                del words[place : place + 2]
            yield [re.sub(r"(min_round_trip)=\d+", rf"\1={LEAST}", word) for word in words]


def run_distill(words: list[str], folder: Path) -> None:
    """Run the plan with the inputs of the page's command."""
    entries = [words[place + 1] for place, word in enumerate(words) if word == "--input"]
    given = {name: folder / path for name, _, path in (one.partition("=") for one in entries)}
    (folder / "plan").mkdir()
    placed = placed_small("distill", folder / "plan", thresholds=(20, 50), given=given, tiny=PLAN)
    assert run_plan(placed, launcher=as_child) == 0
    (folder / "plan" / "run").rename(folder / words[words.index("--out") + 1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs after every command of the page has succeeded."""
    folder = tmp_path_factory.mktemp("page")
    runs = folder / "runs"
    runs.mkdir()
    unpack_stored_run(folder).rename(runs / "demo")
    shutil.copytree(runs / "demo" / "mmnmt", runs / "demo" / "moe")
    (folder / "few.toml").write_text(FEW, encoding="utf-8")
    for words in commands():
        if words[0] == "run":
            run_distill(words, folder)
        else:
            done = run_command(words, folder=folder)
            assert done.returncode == 0, f"{words}\n{done.stderr}"
    return runs


def corpus(directory: Path) -> Artifact:
    return open_artifact(directory, kind="corpus")


def test_lines_have_their_origin_and_those_below_the_round_trip_are_gone(runs: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("back-clean", "checked-added", "checked-clean"):
        made = corpus(runs / name)
        counts = {pair: n for pair, n in line_counts(made, "train").items() if "+" in pair}
        assert set(counts) <= {"de+back-en", "en-fr+back"}
        for pair, number in counts.items():
            text = made.file(provenance_name(pair)).read_text(encoding="utf-8")
            records = [json.loads(line) for line in text.splitlines()]
            assert len(records) == number
            assert {one["system"] for one in records} == {"moe"}
            found.setdefault(name, []).extend(records)
    assert all(one["round_trip"] >= LEAST for one in found["checked-added"])
    assert not any("round_trip" in one for one in found["back-clean"])
    assert len(found["checked-clean"]) <= len(found["checked-added"])


def test_joined_lines_are_those_of_equal_english_lines(runs: Path) -> None:
    made = corpus(runs / "joined-clean")
    into = {
        code: dict(
            zip(
                read_lines(made, "train", pair, "en"),
                read_lines(made, "train", pair, code),
                strict=True,
            )
        )
        for code, pair in (("de", "de-en"), ("fr", "en-fr"), ("ru", "en-ru"))
    }
    for one, other in (("de", "fr"), ("fr", "ru")):
        sides = [read_lines(made, "train", f"{one}-{other}", code) for code in (one, other)]
        expected = {
            (text, into[other][line]) for line, text in into[one].items() if line in into[other]
        }
        assert len(sides[0]) > 9
        assert set(zip(*sides, strict=True)) <= expected


def test_the_plan_trains_a_student_on_the_teachers_lines_alone(runs: Path) -> None:
    run = runs / "distill"
    shares = {}
    for row in ("alone", "distilled"):
        (phase,) = read_mixture(open_artifact(run / f"mixture_{row}", kind="mixture")).phases
        shares[row] = {pair: share for pair, share in phase.probabilities.items() if share}
    assert set(shares["alone"]) == {"de-en", "en-fr", "en-ru"}
    cleaned = corpus(run / "clean")
    added = {pair for pair in line_counts(cleaned, "train") if "+" in pair}
    assert set(shares["distilled"]) == added >= {"de+distilled-en"}
    lines = read_lines(cleaned, "train", "de+distilled-en", "de+distilled")
    translated = open_artifact(run / "translated", kind="translated_text")
    path = translated.file("text/de/en.txt")
    assert set(lines) <= {*path.read_text(encoding="utf-8").split("\n")}


def test_the_report_has_scores_and_speed_of_teacher_and_student(runs: Path) -> None:
    evaluation = open_artifact(runs / "distill" / "evaluation", kind="evaluation")
    named = {"dense", "dense, distilled", "dense, distilled, int8", "teacher"}
    assert {one["name"] for one in evaluation.read_json("scores.json")["systems"]} == named
    history = evaluation.read_json("history.json")
    speeds = {one["system"]: one["lines_per_second"] for one in history["trainings"]}
    assert speeds.keys() == named
    assert min(speeds.values()) > 0
    report = evaluation.file("report.md").read_text(encoding="utf-8")
    assert "lines per second" in report[report.index("## Training budgets") :]


def test_ctranslate2_translates_by_the_student_and_is_scored(runs: Path) -> None:
    (script,) = (block.text for block in PAGE if block.info == "python ct2")
    path = runs.parent / "ct2.py"
    path.write_text(script, encoding="utf-8")
    done = run_script(path, [], folder=runs.parent, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = re.fullmatch(r"[\d.]+ lines per second, en-de chrF\+\+ ([\d.]+)\n", done.stdout)
    assert printed is not None
    given = corpus(runs / "demo" / "clean")
    sources, references = (read_lines(given, "test", "de-en", code) for code in ("en", "de"))
    texts = (runs / "ct2-distilled.de.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(texts) == len(references)
    lines = TranslatedLines(Direction("en", "de"), texts, references, sources)
    chrf = Chrf()
    assert f"{chrf.of_corpus(chrf.line_statistics(lines).rows):.1f}" == printed[1]
