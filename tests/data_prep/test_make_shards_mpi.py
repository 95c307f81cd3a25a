"""Shards over the ranks of a launcher: the same as those of one process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpora import Texts, make_corpus

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerDescription, write_tokenizer
from pipeline.errors import EXIT_USER_ERROR

MODULE = ["-m", "mpi4py.futures", "-m", "data_prep.make_shards"]
TEXTS: Texts = {
    "train": {
        pair: {code: [f"{code} {number}" for number in range(50)] for code in pair.split("-")}
        for pair in ("de-en", "en-ru", "de-ru")
    }
}


def inputs(directory: Path) -> list[str]:
    make_corpus(directory / "corpus", TEXTS)
    description = TokenizerDescription(
        kind="bytes", languages=("de", "en", "ru"), language_token_scheme="underscores"
    )
    with new_artifact(
        directory / "tokenizer", kind="tokenizer", stage="train_tokenizer", config={}, inputs={}
    ) as writer:
        write_tokenizer(writer.directory, description=description, model=None)
    (directory / "recipe.toml").write_text("[shards]\nmax_tokens = 5\n")
    names = {"corpus": "corpus", "tokenizer": "tokenizer", "recipe": "recipe.toml"}
    return [part for name, place in names.items() for part in (f"--{name}", str(directory / place))]


def made(directory: Path) -> Artifact:
    return open_artifact(directory, kind="shards")


def what_ranks_lack() -> str | None:
    """Why none can be started here."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    loads = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True)
    return "mpi4py, or its MPI library, cannot be loaded" if loads.returncode else None


def test_two_ranks_make_the_shards_that_one_process_makes(tmp_path: Path) -> None:
    if problem := what_ranks_lack():
        pytest.skip(problem)
    options = inputs(tmp_path)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-n", "2", sys.executable, *MODULE, "--mpi", *options]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "ranks")],
        env={**os.environ, **allowed},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("read 150 training lines") == 1
    assert cli.main(["make_shards", *options, "--out", str(tmp_path / "one")]) == 0
    assert made(tmp_path / "ranks").manifest.files == made(tmp_path / "one").manifest.files
    assert made(tmp_path / "ranks").statistics == made(tmp_path / "one").statistics
    assert not (tmp_path / "ranks.run").exists()


def test_ranks_that_no_launcher_started_are_refused_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["make_shards", *inputs(tmp_path), "--mpi", "--out", str(out)]) == (
        EXIT_USER_ERROR
    )
    said = capsys.readouterr().err
    assert "Start mpirun -n N python -m mpi4py.futures -m data_prep.make_shards --mpi" in said
    assert not out.exists()
