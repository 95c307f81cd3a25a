"""``mmnmt doctor``: what is wrong is made up here, one thing at a time."""

import json
import os
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import cli, doctor
from pipeline.config.ds_config import ds_config_path
from pipeline.config.recipe import load_recipe
from pipeline.errors import EXIT_USER_ERROR, ConfigError
from pipeline.kernels import launching
from pipeline.model import fused_comparison

RECIPE = """
[tokenizer]
vocabulary_size = 1000
[model]
encoder_layers = 1
decoder_layers = 1
width = 16
feed_forward_width = 32
num_heads = 2
[optimizer]
warmup_updates = 1
[training]
updates = 2
"""
PLAN = """
[inputs]
shards = "shards"
[stages.corpus]
run = "import_corpus"
recipe = "{recipe}"
[stages.tokenizer]
run = "train_tokenizer"
recipe = "{recipe}"
inputs = {{ corpus = "corpus" }}
[stages.shards]
run = "make_shards"
recipe = "{recipe}"
inputs = {{ corpus = "corpus", tokenizer = "tokenizer" }}
[stages.mixture]
run = "mix"
recipe = "{recipe}"
inputs = {{ shards = "shards" }}
[stages.model]
run = "pretrain"
recipe = "{recipe}"
ds_config = "{ds_config}"
processes = 4
inputs = {{ shards = "shards", mixture = "mixture" }}
"""


class Visit:
    """A plan in a folder, and what the doctor says of it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.recipe, self.ds_config = RECIPE, "cpu_fp32"

    def __call__(self, *options: str) -> tuple[int, dict[str, str]]:
        """Return the exit code, and what is wrong or noted: subject → text."""
        recipe, plan = self.folder / "recipe.toml", self.folder / "plan.toml"
        recipe.write_text(self.recipe)
        text = PLAN.format(recipe=recipe, ds_config=self.ds_config)
        declared = "--input" in options
        plan.write_text(text if declared else text.replace('[inputs]\nshards = "shards"\n', ""))
        code = cli.main(["doctor", str(plan), "--out", str(self.folder / "runs"), *options])
        captured = self._capsys.readouterr()
        assert captured.err == ""
        self.lines = captured.out.splitlines()
        wrong = [line.split(None, 1)[1] for line in self.lines if line.startswith("wrong")]
        return code, dict(line.split(": ", 1) for line in wrong)


@pytest.fixture
def visit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Visit:
    return Visit(tmp_path, capsys)


def test_a_sound_machine_is_told_so_line_by_line_and_nothing_is_left_behind(visit: Visit) -> None:
    assert visit() == (0, {})
    subjects = [line.split(None, 1)[1].split(":")[0] for line in visit.lines]
    assert subjects[0] == "packages"
    assert {"MPI", "SLURM", "pre-flight", "open files", "disk"} <= {*subjects}
    assert {path.name for path in visit.folder.iterdir()} == {"plan.toml", "recipe.toml"}


def test_without_a_plan_the_machine_alone_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "ok     packages: Python 3." in said
    assert "disk" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_wrong_and_names_what_the_plan_needs(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.statvfs(visit.folder)

    def full(_path: Any) -> os.statvfs_result:
        values = list(os.statvfs_result(whole))
        values[4] = 0  # f_bavail, the blocks that a user may take
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    code, wrong = visit()
    assert code == EXIT_USER_ERROR
    assert [*wrong] == ["disk"]
    assert "0 MiB are free in" in wrong["disk"]
    assert "Make room, name another --out" in wrong["disk"]


def test_data_from_outside_that_is_missing_is_named(visit: Visit) -> None:
    nosuch, pipe = visit.folder / "nosuch", visit.folder / "pipe"
    os.mkfifo(pipe)
    for path, problem in ((nosuch, "does not exist"), (pipe, "is a pipe or a device")):
        code, wrong = visit("--input", f"shards={path}")
        assert code == EXIT_USER_ERROR
        assert wrong == {"input shards": f"{path} {problem}. Name an existing file or folder."}
    assert visit("--input", f"shards={visit.folder / 'recipe.toml'}") == (0, {})


Versions = Callable[[str, str | None], None]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Lets a package have another version, or be missing (None)."""
    true_version = metadata.version

    def arrange(package: str, version: str | None) -> None:
        def other(name: str) -> str:
            if name != package:
                return true_version(name)
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", other)

    return arrange


@pytest.mark.parametrize(("version", "found"), [(None, "is not installed"), ("0.1", "is 0.1")])
def test_a_package_that_is_missing_or_too_old_is_named_with_its_range(
    visit: Visit, versions: Versions, version: str | None, found: str
) -> None:
    versions("safetensors", version)
    code, wrong = visit()
    assert code == EXIT_USER_ERROR
    assert wrong == {
        "packages": f"safetensors {found}, and >=0.8 is needed. Run `pip install --upgrade mmnmt`."
    }


def test_a_package_that_only_this_plan_needs_is_named_with_its_extra(
    visit: Visit, versions: Versions
) -> None:
    versions("tensorboard", None)
    assert visit()[1] == {}
    config = json.loads(ds_config_path("cpu_fp32").read_text())
    config["tensorboard"] = {"enabled": True}
    path = visit.folder / "monitored.json"
    path.write_text(json.dumps(config))
    visit.ds_config = str(path)
    code, wrong = visit()
    assert code == EXIT_USER_ERROR
    assert "tensorboard is not installed" in wrong["packages of model"]
    assert "Run `pip install 'mmnmt[monitors]'`." in wrong["packages of model"]


def test_half_of_slurm_is_wrong(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    (visit.folder / "bin").mkdir()
    (visit.folder / "bin" / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(visit.folder / "bin"))
    _, wrong = visit()
    assert wrong == {"SLURM": "srun, scontrol is not on PATH. Load the module of SLURM."}


def test_a_site_file_is_checked_where_one_is_named(visit: Visit) -> None:
    site = visit.folder / "site.toml"
    site.write_text("[node]\ncpus = 8\n")
    assert visit("--site", str(site)) == (0, {})
    assert f"site file: {site} can be read." in "\n".join(visit.lines)
    site.write_text("[node]\ncpus = 8\ngpu_memory = 'much'\n")
    code, wrong = visit("--site", str(site))
    assert (code, [*wrong]) == (EXIT_USER_ERROR, ["site file"])
    assert str(site) in wrong["site file"]
    assert 'is "much". Write a size of memory' in wrong["site file"]
    site.unlink()
    assert [*visit("--site", str(site))[1]] == ["site file"]


def test_too_few_open_files_are_wrong_with_the_number_to_set(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 4096))
    code, wrong = visit()
    assert (code, [*wrong]) == (EXIT_USER_ERROR, ["open files"])
    assert "Rank 0 of 4 ranks needs about 112 open files, the limit is 32" in wrong["open files"]
    assert "Ask for ulimit -n 112" in wrong["open files"]


def test_a_file_that_the_recipe_names_is_missed_beforehand(visit: Visit) -> None:
    visit.recipe = RECIPE.replace(
        "[tokenizer]\n",
        f'[tokenizer]\nkind = "bytes"\nsegmenters = {{ my = "{visit.folder}/no.py:words" }}\n',
    )
    code, wrong = visit()
    assert code == EXIT_USER_ERROR
    assert {*wrong} == {"tokenizer", "shards"}
    assert "no.py" in wrong["tokenizer"]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ('bleu_tokenizer = "flores101"', "flores101"),
        ('bleu_tokenizer = "flores200"', "flores200"),
        ('scores = ["spbleu", "chrf"]', "flores200"),
    ],
)
def test_a_tokenizer_that_sacrebleu_would_fetch_is_missed_where_sacrebleu_looks(
    setting: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sacrebleu import utils

    from pipeline.doctor import _missing_files

    monkeypatch.setattr(utils, "SACREBLEU_DIR", str(tmp_path))
    path = tmp_path / "recipe.toml"
    path.write_text(f"[evaluation]\n{setting}\n", encoding="utf-8")
    recipe = load_recipe(str(path))
    (problem,) = _missing_files("evaluate", recipe)
    assert f"tokenizer {name} is not at" in problem
    model = Path(problem.split(" is not at ")[1].split(". Fetch")[0])
    assert model.is_relative_to(tmp_path)
    model.parent.mkdir()
    model.touch()
    assert not [*_missing_files("evaluate", recipe)]


@pytest.mark.parametrize(
    ("error", "mark", "said"),
    [
        (ConfigError("Triton cannot compile."), "wrong", "Triton cannot compile."),
        (torch.OutOfMemoryError("CUDA out of memory."), "note", "too little free memory"),
    ],
)
def test_a_gpu_on_which_nothing_can_be_compared_is_named(
    error: Exception, mark: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: object, **__: object) -> Any:
        raise error
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(launching, "is_fused", lambda _: True)
    monkeypatch.setattr(fused_comparison, "compare", compare)
    (finding,) = doctor._fused_kernels(doctor.Examined(None, Path(), None))
    assert (finding.mark, finding.about) == (mark, "fused kernels")
    assert said in finding.text
