"""The page "A module per language", command by command: on the stored run, trained for seconds."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.forked import run_line
from support.page_commands import ROOT, named_blocks
from support.raw_trees import unpack_stored_run

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config.recipe import Recipe, parse_overrides, recipe_names

pytestmark = pytest.mark.slow

PAGE_PATH = ROOT / "docs" / "tutorials" / "module_per_language.md"
PAGE = PAGE_PATH.read_text(encoding="utf-8")
FEW = """
parent = "dense.toml"
[training]
updates = 6
validate_every = 3
[evaluation]
language_accuracy = false
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command of the page has succeeded."""
    folder = tmp_path_factory.mktemp("page")
    run = unpack_stored_run(folder)
    shutil.copytree(run / "translations", run / "translate_dense")
    (folder / "runs").mkdir()
    run.rename(folder / "runs" / "demo")
    (folder / "few.toml").write_text(FEW, encoding="utf-8")
    (folder / "grown.toml").write_text(PAGE.split("```toml\n# grown.toml\n")[1].split("```")[0])
    for line in named_blocks(PAGE_PATH, "bash")["demo"].splitlines():
        run_line(re.sub("demo_dense\\b", "few.toml", line), folder)
    return folder


def texts(directory: Path) -> dict[str, str]:
    translations: Artifact = open_artifact(directory, kind="translations")
    names = [name for name in translations.names() if name.endswith(".jsonl")]
    assert names
    return {name: translations.file(name).read_text(encoding="utf-8") for name in names}


def test_the_folded_checkpoint_is_plain_and_translates_by_the_shared_route(done: Path) -> None:
    runs = done / "runs"
    folded, whole, plain = (
        read_spec(open_artifact(runs / name, kind="checkpoint"))
        for name in ("folded", "modules", "demo/dense")
    )
    assert folded.model == plain.model
    assert whole.model.language_modules is not None
    assert texts(runs / "folded-translations") == texts(runs / "modules-shared")


def test_its_export_says_what_it_is(done: Path) -> None:
    config = json.loads((done / "runs" / "hf-folded" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "m2m_100"


def test_both_routes_stand_in_the_report_beside_the_baseline(done: Path) -> None:
    """Which after a few updates does not translate, so that nothing is decided."""
    scores = open_artifact(done / "runs" / "modules-scores", kind="evaluation")
    document = scores.read_json("scores.json")
    assert document["verdicts"]["baseline"] == "plain"
    assert set(document["wins"]) == {"specific", "shared"}
    report = scores.file("report.md").read_text(encoding="utf-8")
    assert "Not decided: plain does not translate in any direction." in report


def test_a_language_whose_module_is_gone_translates_by_the_shared_route_alone(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(done)
    command = ["translate", "--recipe=few.toml", "--checkpoint=runs/modules-de"]
    command += ["--corpus=runs/demo/clean"]
    assert cli.main([*command, "--out=runs/pruned"]) == 0
    assert "6 directions skipped: the model lacks one of" in capsys.readouterr().out
    assert all("ru" not in name and "fr" not in name for name in texts(done / "runs" / "pruned"))
    assert cli.main([*command, "--set=decoding.route=shared", "--out=runs/pruned-shared"]) == 0
    assert texts(done / "runs" / "pruned-shared") == texts(done / "runs" / "modules-shared")


def test_a_plain_model_is_given_modules_and_stays_the_function_that_it_was(done: Path) -> None:
    receipt = open_artifact(done / "runs" / "grown", kind="checkpoint").read_json("receipt.json")
    assert receipt["function_check"]["largest"] == 0
    fresh = [entry["target"] for entry in receipt["tensors"] if entry["rule"] == "fresh"]
    assert fresh
    assert all(".low_rank." in name for name in fresh)


def test_the_overlays_of_the_page_exist() -> None:
    named = {
        names
        for row in re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE)
        for names in re.findall(r"`([^`]+)`", row)
    }
    overrides = {name for name in named if name.startswith("--set ")}
    overlays = named - overrides
    assert overlays == {"lms", "lms_fd", "language_experts_fd", "clsr", "switch16"}
    assert overlays <= set(recipe_names())
    for override in overrides:
        changed = parse_overrides(shlex.split(override)[1:])
        assert changed.keys() <= Recipe.model_fields.keys()
