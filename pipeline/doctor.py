"""Check what a machine lacks for a plan, without an allocation: ``mmnmt doctor``.

``examine`` yields one finding per check, with the fix where something is wrong. It runs the
pre-flight (``jobs/preflight.py``) with one process, and adds what is worth knowing before a job
waits in a queue: packages, compiler, MPI, files that a node without network could not fetch, open
files and disk space.
"""

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from pipeline.artifacts.segmenters import read_function_file
from pipeline.artifacts.settings import SEGMENTERS
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.distributed.world import discover
from pipeline.errors import UserError
from pipeline.jobs import preflight
from pipeline.jobs.plan import PlacedPlan, Task
from pipeline.jobs.site import load_site
from pipeline.terminal import counted, listed

Mark = Literal["ok", "note", "wrong"]

MPI_PROBE = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)
"""Program that loads the MPI library without starting it, which can fail on a login node."""
MPI_SECONDS = 60.0
FILES_OF_RANK_ZERO, FILES_PER_RANK = 64, 6
"""Files that rank 0 holds open, and how many more per rank (measured: 39 + 5.5 per rank)."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    mark: Mark
    about: str
    text: str
    """Description of what was found; where it is wrong, with its fix."""

    def line(self) -> str:
        """Return the finding as the command prints it."""
        return f"{self.mark:5}  {self.about}: {self.text}"


@dataclass(frozen=True)
class Patient:
    """All that is examined: a plan that may be None, and where its stages write."""

    placed: PlacedPlan | None
    out_dir: Path

    @property
    def tasks(self) -> list[Task]:
        """Return the stages of the plan that are still to run."""
        return [] if self.placed is None else [t for t in self.placed.tasks if not t.is_made]

    def recipes(self) -> dict[str, Recipe]:
        """Return stage → its recipe."""
        return {task.name: load_recipe(task.recipe or None, task.overrides) for task in self.tasks}


def examine(
    placed: PlacedPlan | None, *, out_dir: Path, site: Path | None = None
) -> Iterator[Finding]:
    """Yield the findings of all checks, in the order in which they are printed.

    Args:
        placed: the plan that is to run; None: what every plan needs.
        out_dir: directory of all its stages.
        site: site file of the cluster where it is to run; None: none is checked.
    """
    patient = Patient(placed, out_dir)
    checks: Sequence[Callable[[], Iterator[Finding]]] = (
        _packages,
        partial(_extras, patient),
        _fused_kernels,
        _mpi,
        partial(_slurm, site),
        partial(_preflight, patient),
        partial(_open_files, patient),
        partial(_files_to_fetch, patient),
        partial(_disk, patient),
    )
    for check in checks:
        try:
            yield from check()
        except ImportError as error:  # a package that `_packages` reports
            yield Finding("note", "skipped", f"a check that needs {error.name}.")


# ---------------------------------------------------------------- software


def _packages() -> Iterator[Finding]:
    """Compare the installed packages with the ranges of pyproject.toml."""
    wrong, found = _compare(extra="")
    for problem in wrong:
        yield Finding("wrong", "packages", f"{problem} Run `pip install --upgrade mmnmt`.")
    if not wrong:
        yield Finding("ok", "packages", f"Python {_python()}, {listed(found)}.")


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _compare(*, extra: str) -> tuple[list[str], list[str]]:
    """Return problems of the packages that an extra adds, and the versions that are right.

    Args:
        extra: name of an extra of the package; empty: what is always needed.
    """
    from packaging.requirements import Requirement

    wrong, found = [], []
    for text in metadata.requires("mmnmt") or ():
        wanted = Requirement(text)
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if always if extra else not always:
            continue
        if extra and wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is not installed, and {wanted.specifier} is needed.")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} is {version}, and {wanted.specifier} is needed.")
        else:
            found.append(f"{wanted.name} {version}")
    return wrong, found


def _extras(patient: Patient) -> Iterator[Finding]:
    """Check the optional packages that the plan's recipes need."""
    needed: dict[str, list[str]] = {}
    recipes = patient.recipes()
    for task in patient.tasks:
        for extra in _extras_of(task, recipes[task.name]):
            needed.setdefault(extra, []).append(task.name)
    for extra, stages in needed.items():
        wrong, found = _compare(extra=extra)
        for problem in wrong:
            fix = f"Run `pip install 'mmnmt[{extra}]'`."
            yield Finding("wrong", f"packages of {listed(stages)}", f"{problem} {fix}")
        if not wrong:
            yield Finding("ok", f"packages of {listed(stages)}", f"{listed(found)}.")


def _extras_of(task: Task, recipe: Recipe) -> Iterator[str]:
    name = task.stage.name
    if name == "import_corpus" and recipe.corpus.source == "hub":
        yield "hub"
    if name == "evaluate" and "comet" in recipe.evaluation.computed_scores:
        yield "comet"
    ds_config = task.config.get("ds_config", {})
    if isinstance(ds_config, Mapping) and ds_config.get("tensorboard", {}).get("enabled"):
        yield "monitors"


def _fused_kernels() -> Iterator[Finding]:
    """Compare the fused kernels with their plain forms on this machine's GPU."""
    import torch

    from pipeline.kernels.launching import SWITCH, is_fused
    from pipeline.model.fused_comparison import Sizes, compare

    if not torch.cuda.is_available():
        return
    device, dtype = torch.device("cuda"), torch.bfloat16
    about = "fused kernels"
    if not is_fused(torch.empty(1, device=device, dtype=dtype)):
        yield Finding("note", about, f"not used: {SWITCH} is off, or the GPU is older than Ampere.")
        return
    for one in compare(device, Sizes(), dtype=dtype):
        times = f"{1e3 * one.fused:.2f} ms, plain {1e3 * one.plain:.2f} ms"
        text = f"{one.name}: {times}, values differ by {one.distance:.2%}"
        fix = f". Set the environment variable {SWITCH} to off."
        yield Finding("ok" if one.agrees else "wrong", about, text + ("." if one.agrees else fix))


def _mpi() -> Iterator[Finding]:
    """Load the MPI library in a process of its own."""
    fix = (
        "mpirun and --mpi cannot be used. To use them, install an MPI library (`apt-get install "
        "openmpi-bin`, or the module of the cluster) and `pip install 'mmnmt[mpi]'`."
    )
    try:
        loaded = subprocess.run(
            [sys.executable, "-c", MPI_PROBE], capture_output=True, text=True, timeout=MPI_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("note", "MPI", f"cannot be loaded ({error}): {fix}")
        return
    if loaded.returncode:
        said = (loaded.stderr.strip().split("\n") or [""])[-1]
        yield Finding("note", "MPI", f"cannot be loaded ({said}): {fix}")
        return
    version = loaded.stdout.strip().split("\n")[0].rstrip("\0").split(",")[0]
    launcher = shutil.which("mpirun") or "no mpirun on PATH"
    yield Finding("ok", "MPI", f"{version}, {launcher}.")


def _slurm(site: Path | None) -> Iterator[Finding]:
    missing = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name) is None]
    if not missing:
        yield Finding("ok", "SLURM", "sbatch, srun and scontrol are on PATH.")
    elif len(missing) == 3:
        yield Finding("note", "SLURM", "there is none here; jobs are submitted on a login node.")
    else:
        yield Finding(
            "wrong", "SLURM", f"{listed(missing)} is not on PATH. Load the module of SLURM."
        )
    if site is None:
        return
    try:
        load_site(site)
    except UserError as error:
        yield Finding("wrong", "site file", str(error))
    else:
        yield Finding("ok", "site file", f"{site} can be read.")


# ---------------------------------------------------------------- machine


def _preflight(patient: Patient) -> Iterator[Finding]:
    """Run the pre-flight of a job with this process alone."""
    place = _existing(patient.out_dir)
    try:
        outcome = preflight.check(discover({}), out_dir=place / "doctor")
    except UserError as error:
        yield Finding("wrong", "pre-flight", str(error))
        return
    except OSError as error:  # a library that torch loads
        text = f"torch cannot be loaded ({error}). Install a build that suits this machine."
        yield Finding("wrong", "pre-flight", text)
        return
    for problem in outcome.problems:
        yield Finding("wrong", "pre-flight", problem)
    if not outcome.problems:
        yield Finding("ok", "pre-flight", f"{outcome.summary}.")


def _existing(path: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def _open_files(patient: Patient) -> Iterator[Finding]:
    """Compare the limit of open files with what rank 0 of the largest stage holds."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = [task.planned.processes for task in patient.tasks if task.stage.parallel == "ranks"]
    needed = FILES_OF_RANK_ZERO + FILES_PER_RANK * max(ranks, default=1)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        yield Finding("ok", "open files", f"{needed:,} are needed at most.")
        return
    may_raise = most == resource.RLIM_INFINITY or most >= needed
    fix = "" if may_raise else " Ask the administrator to raise the hard limit first."
    yield Finding(
        "wrong",
        "open files",
        f"the limit is {limit:,}, and rank 0 of {counted(max(ranks, default=1), 'rank')} holds "
        f"about {needed:,}. Run `ulimit -n {needed}` before.{fix}",
    )


def _files_to_fetch(patient: Patient) -> Iterator[Finding]:
    """Check files that a stage would fetch, or that the recipe names."""
    recipes = patient.recipes()
    for task in patient.tasks:
        for problem in _missing_files(task.stage.name, recipes[task.name]):
            yield Finding("wrong", task.name, problem)


def _missing_files(stage: str, recipe: Recipe) -> Iterator[str]:
    option = recipe.evaluation.bleu_tokenizer
    if stage == "evaluate" and option in ("flores101", "flores200"):
        yield from _missing_bleu_model(option)
    if stage == "clean" and recipe.clean.identify_languages == "fasttext":
        if not Path(recipe.clean.language_model).is_file():
            yield (
                f"clean.language_model {recipe.clean.language_model!r} is no file. Fetch "
                "lid.176.bin or GlotLID's model.bin, and name it."
            )
        if util.find_spec("fasttext") is None:
            yield "fasttext is not installed. Run `pip install fasttext`."
    if stage in ("train_tokenizer", "make_shards"):
        for code, name in recipe.tokenizer.segmenters.items():
            yield from _missing_segmenter(code, name)


def _missing_bleu_model(option: str) -> Iterator[str]:
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    url = SPM_MODELS[option]["url"]
    path = Path(SACREBLEU_DIR) / "models" / Path(url).name
    if not path.is_file():
        yield (
            f"sacreBLEU's tokenizer {option} is not at {path}. Fetch {url} there where there is a "
            "network."
        )


def _missing_segmenter(code: str, name: str) -> Iterator[str]:
    if name not in SEGMENTERS:
        try:
            read_function_file(name)
        except UserError as error:
            yield str(error)
    elif name == "mecab":
        missing = [package for package in ("MeCab", "ipadic") if util.find_spec(package) is None]
        if missing:
            yield (
                f"the segmenter of {code} needs {listed(missing)}. Run `pip install "
                "mecab-python3 ipadic`."
            )


# ---------------------------------------------------------------- the plan


def _disk(patient: Patient) -> Iterator[Finding]:
    """Compare the free space with what models and training states will take."""
    if patient.placed is None:
        return
    from pipeline.estimates.disk import plan_space

    peak, kept = plan_space(patient.placed, patient.recipes())
    place = _existing(patient.out_dir)
    free = shutil.disk_usage(place).free
    takes = f"models and states take {_gib(peak)} at most and {_gib(kept)} in the end"
    if free >= peak:
        yield Finding("ok", "disk", f"{_gib(free)} are free in {place}; {takes}, without data.")
        return
    yield Finding(
        "wrong",
        "disk",
        f"{_gib(free)} are free in {place}, and {takes}. Make room, name another --out, or lower "
        "training.keep_last or training.average_last.",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
