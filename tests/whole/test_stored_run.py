"""A run made before the house was rebuilt is read by the house as it is.

``stored_run.tar.gz`` holds a plan, its recipes, and what ``mmnmt run plan.toml --out run`` made of
them: artifacts of every kind, and the working folder of one training stage.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.raw_trees import unpack_stored_run
from support.small_plans import as_child

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact, read_manifest
from pipeline.artifacts.corpus import Direction
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.jobs.plan import load_plan, resolve_plan
from pipeline.jobs.runner import run_plan

CHECKPOINTS = ("dense", "moe_lgr", "assembled", "mmnmt")
STAGES = (
    *("corpus", "clean", "tokenizer", "shards", "mixture", "dense", "groups", "moe_lgr"),
    *("assembled", "mmnmt", "translations"),
)
GONE = "\n[stages.nearest]"
"""Beginning of the stages that are gone: retrieve, and an evaluation of its translations."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    unpack_stored_run(folder)
    plan = folder / "plan.toml"
    plan.write_text(plan.read_text("utf-8").partition(GONE)[0], encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def there(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored)


def printed(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_status_finds_every_stage_done(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(["status", "plan.toml", "--out", "run"], capsys).splitlines()
    states = {line.split()[0]: line.split()[1] for line in lines if line.split()[0] in STAGES}
    assert states == dict.fromkeys(STAGES, "done")


def test_a_plan_runs_nothing_again(capsys: pytest.CaptureFixture[str]) -> None:
    dry = printed(["run", "plan.toml", "--out", "run", "--dry-run"], capsys)
    assert "missing" not in dry
    assert "→" not in dry


@pytest.mark.slow
def test_its_model_translates_as_it_did() -> None:
    """All directions of its test lines, as they were translated then."""
    translator = Translator(
        open_artifact(Path("run/mmnmt"), kind="checkpoint"),
        DecodingConfig(beam_size=2, tokens=2000, max_length_ratio=0.5),
    )
    answers = sorted(Path("run/translations/hypotheses").glob("*.jsonl"))
    assert len(answers) == 8
    for path in answers:
        source, target = path.stem.split("-")
        pair = "-".join(sorted((source, target)))
        lines = Path(f"run/clean/test/{pair}/{source}.txt").read_text("utf-8").splitlines()
        jobs = [Job(Direction(source, target), i, line) for i, line in enumerate(lines)]
        then = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        now = translator.translate(jobs)
        assert [hypothesis.text for hypothesis in now] == [answer["text"] for answer in then]
        assert [hypothesis.score for hypothesis in now] == pytest.approx(
            [answer["score"] for answer in then], abs=2e-4
        )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_are_inspected_and_verified(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(["checkpoint", "inspect", f"run/{name}", "--json"], capsys))
    assert found["parameters"]["total"] > 10_000
    assert "as its manifest says" in printed(["checkpoint", "verify", f"run/{name}"], capsys)


@pytest.mark.slow
def test_checkpoints_are_compared_averaged_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "embedding.weight" in printed(
        ["checkpoint", "diff", "run/assembled", "run/mmnmt"], capsys
    )
    out = ["--out", str(tmp_path / "mean")]
    printed(["checkpoint", "average", "run/assembled", "run/mmnmt", *out], capsys)
    out = ["--out", str(tmp_path / "last")]
    printed(["checkpoint", "average", "--run", "run/moe_lgr.run", "--last", "1", *out], capsys)
    out = ["--out", str(tmp_path / "pruned")]
    experts = ["--languages", "de", "fr", "--experts", "2"]
    printed(["checkpoint", "prune", "run/mmnmt", *experts, *out], capsys)


def test_settings_that_decide_nothing_of_a_stage_make_nothing_of_it_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its manifest notes them, as those of mixtures did then."""
    beside, dropout = tmp_path / "beside.toml", tmp_path / "dropout.toml"
    beside.write_text("[training]\nkeep_last = 7\ncheckpoint_every = 3\n[logging]\nevery = 9\n")
    dropout.write_text("[training]\ndropout = 0.375\n[batches]\nmicro_batches = 64\n")
    plan = ["run", "plan.toml", "--out", "run", "--dry-run"]
    lines = printed([*plan, "--with", str(beside)], capsys)
    assert "→" not in lines
    lines = printed([*plan, "--with", str(dropout)], capsys)
    assert "mixture: done" in lines.splitlines()
    assert "dense: would run (batches.micro_batches" in lines


@pytest.mark.slow
def test_two_runs_of_its_plan_in_two_folders_make_the_same_and_so_does_a_repair(
    tmp_path: Path,
) -> None:
    """Artifact by artifact, wherever and whenever they are made, of shorter trainings."""
    plan, overlay = load_plan("plan.toml"), tmp_path / "short.toml"
    overlay.write_text("[training]\nupdates = 8\nvalidate_every = 4\ncheckpoint_every = 4\n")

    def ran(folder: Path, **chosen: Sequence[str]) -> list[str]:
        lines: list[str] = []
        resolved = resolve_plan(plan, out_dir=folder, overlay=str(overlay), processes=1)
        assert run_plan(resolved.chosen(**chosen), launcher=as_child, say=lines.append) == 0
        return [line.partition(":")[0] for line in lines if ": running " in line]

    def made(folder: Path) -> dict[str, tuple[str, str]]:
        manifests = {name: read_manifest(folder / name) for name in plan.stages}
        return {name: (one.key, one.digest) for name, one in manifests.items() if one is not None}

    one, other = tmp_path / "one", tmp_path / "a folder" / "deeper"
    assert ran(one) == ran(other) == [*plan.stages]
    assert made(one) == made(other)
    assert [*made(one)] == [*plan.stages]
    before = made(one)
    for name in ("dense", "assembled", "tokenizer"):
        shutil.rmtree(one / name)
        assert ran(one, only=[name]) == [name]
        assert ran(one) == []
    assert made(one) == before
