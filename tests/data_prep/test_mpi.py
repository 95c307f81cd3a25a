"""Stages over the ranks of a launcher make what one process makes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.corpora import bytes_of, make_corpus, writing
from support.small_plans import write_tree

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.manifest import run_dir
from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.errors import EXIT_USER_ERROR
from pipeline.evaluation.nearest_neighbor import retrieve_all
from pipeline.registry import STAGES


def tokenizer(directory: Path, *, languages: tuple[str, ...]) -> None:
    with writing(directory, "tokenizer", "train_tokenizer") as writer:
        TokenizerFiles(bytes_of(languages)).write(writer.directory)


def what_ranks_lack() -> str | None:
    """Why none can be started here."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    loads = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True)
    return "mpi4py, or its MPI library, cannot be loaded" if loads.returncode else None


def run_ranks(arguments: Sequence[str], *, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = ["mpirun", "--oversubscribe", "-n", str(ranks), sys.executable]
    return subprocess.run(
        [*mpirun, "-m", "mpi4py.futures", *arguments],
        env={**os.environ, **allowed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def compared(artifact: Artifact) -> dict[str, str]:
    """File → its digest; reports tell when they were made."""
    files = artifact.manifest.files.items()
    return {name: str(record) for name, record in files if not name.startswith("report.")}


END = "=== end of a stage ==="
ALL_STAGES = f"""
import json, sys
from pipeline import cli
for command in json.loads(sys.argv[1]) if __name__ == "__main__" else ():
    if code := cli.main(command):
        sys.exit(code)
    print({END!r})
"""


STEPS = {
    "import_corpus": {"raw": "raw"},
    "clean": {"corpus": "import_corpus"},
    "make_shards": {"corpus": "clean", "tokenizer": "tokenizer"},
    "evaluate": {"corpus": "clean", "systems": "near=near"},
}
"""Stage → its inputs: option → folder of an earlier stage."""


@pytest.mark.slow
def test_ranks_make_what_one_process_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := what_ranks_lack():
        pytest.skip(problem)
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "raw", lines={"de": 9, "ru": 7, "el": 5}, validated=("de", "ru"))
    Path("recipe.toml").write_text(
        "[shards]\nmax_tokens = 50\n[evaluation]\nlanguage_accuracy = false\n"
    )
    tokenizer(tmp_path / "tokenizer", languages=("de", "el", "en", "ru"))
    commands = []
    for stage, inputs in STEPS.items():
        if stage == "evaluate":
            corpus = open_artifact(Path("clean"), kind="corpus")
            retrieve_all(Path("near"), corpus, training=corpus)
        options = ["--recipe", "recipe.toml"] if STAGES[stage].sections else []
        options += [part for name, place in inputs.items() for part in (f"--{name}", place)]
        assert cli.main([stage, *options, "--out", stage]) == 0
        commands.append([stage, "--mpi", *options, "--out", f"{stage}_ranks"])
    Path("all.py").write_text(ALL_STAGES)
    ended = run_ranks(["all.py", json.dumps(commands)])
    assert ended.returncode == 0, ended.stderr
    for stage, said in zip(STEPS, ended.stdout.split(END), strict=False):
        by_ranks, kind = Path(f"{stage}_ranks"), STAGES[stage].makes
        one, other = (open_artifact(place, kind=kind) for place in (Path(stage), by_ranks))
        assert compared(one) == compared(other)
        assert one.manifest.summary == other.manifest.summary
        assert one.statistics == other.statistics
        assert all(said.count(line) == 1 for line in other.manifest.summary)
        assert not run_dir(by_ranks).exists()


@pytest.mark.slow
def test_an_error_on_a_rank_is_one_sentence_and_ends_all_ranks(tmp_path: Path) -> None:
    if problem := what_ranks_lack():
        pytest.skip(problem)
    write_tree(tmp_path / "raw", lines={"de": 4, "ru": 4}, validated=())
    broken = tmp_path / "raw" / "supervised" / "de-en" / "opus.de-en-train.de"
    broken.write_text("one line\n")
    (tmp_path / "recipe.toml").write_text("")
    options = ["--recipe", str(tmp_path / "recipe.toml"), "--raw", str(tmp_path / "raw")]
    module = ["-m", "data_prep.import_corpus", "--mpi"]
    ended = run_ranks([*module, *options, "--out", str(tmp_path / "out")])
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("mmnmt import_corpus: ") == 1
    assert "opus.de-en-train" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_ranks_that_no_launcher_started_are_refused_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    pairs = {f"{code}-en": {code: ["eins"], "en": ["one"]} for code in ("da", "de")}
    corpus = make_corpus(tmp_path / "corpus", {"train": pairs})
    (tmp_path / "recipe.toml").touch()
    options = ["--recipe", str(tmp_path / "recipe.toml"), "--corpus", str(corpus.directory)]
    assert cli.main(["clean", *options, "--mpi", "--out", str(out)]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "Start mpirun -n N python -m mpi4py.futures -m pipeline STAGE --mpi" in said
    assert not out.exists()
