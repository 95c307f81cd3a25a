"""Check a machine before a plan, and an allocation before a stage, and name the faults.

``mmnmt doctor`` calls :func:`examine`, which yields one finding per check, with the fix where
something is wrong. It checks what may fail after a job has waited in a queue, for example packages,
MPI, files that a node without network could not fetch, and disk space.

The pre-flight ``python -m pipeline.doctor --out OUT`` takes seconds and names the node that fails.
It is started as the stage will be, one process per rank, by the job of a stage or by hand. The
ranks meet at a store on rank 0, not in a process group: a rank that never comes, or stops on the
way, can then be named. They compare, in rounds (:func:`check`):

1. what each has: versions, code, GPUs seen by torch and by the driver;
2. the folder of the output: write, sync, rename, see the files of all nodes, respect a lock;
3. the network: an all-reduce over all ranks.

Rank 0 judges each round, and the first with problems is the last. Ranks that are missing may come
in another start; all other problems are for the user to fix. The stage decides the backend; NCCL
has not yet run here on more than one GPU. ``mmnmt doctor`` runs the rounds with one rank.
"""

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from data_prep.settings import SEGMENTERS
from pipeline.artifacts.locks import lock_path, sole_writer
from pipeline.artifacts.manifest import why_no_data
from pipeline.artifacts.places import (
    discard_working,
    make_working,
    probe_dir,
    sync,
)
from pipeline.artifacts.segmenters import read_function_file
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.distributed.rounds import Judgment, Rounds, first_line, merged, node_name
from pipeline.distributed.watchdog import until
from pipeline.distributed.world import (
    World,
    discover,
    local_device,
    own_rank,
    refuse_shared,
    refuse_too_few_files,
)
from pipeline.errors import (
    EXIT_USER_ERROR,
    ArtifactError,
    ConfigError,
    RankLost,
    UserError,
    unwritable,
)
from pipeline.jobs.job_endings import REPORTS, End, EndReport, RankEnd
from pipeline.jobs.plan import ResolvedPlan, Task
from pipeline.jobs.site import load_site
from pipeline.machine import installed_version, prepare_process, visible_gpus
from pipeline.terminal import counted, listed, size_text

Mark = Literal["ok", "note", "wrong"]

MPI_PROBE = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)
"""Program that loads the MPI library without starting it, which can fail on a login node."""
MPI_SECONDS = 60.0
PATIENCE_SECONDS = 60.0
"""Time in which ranks must arrive, and files must be seen on other nodes."""
MESSAGE_VALUES = 2**20
"""Values (of 4 bytes) that are reduced: more than a packet, few enough to be quick."""
_SHARED_FIX = "Name an --out on storage that all nodes share."


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
class Examined:
    """A machine, and the stages of a plan that are still to run there."""

    placed: ResolvedPlan | None
    out_dir: Path
    site: Path | None

    @cached_property
    def stages(self) -> list[tuple[Task, Recipe]]:
        """The stages to run, and their recipes."""
        tasks = [] if self.placed is None else [t for t in self.placed.tasks if not t.is_made]
        return [(task, load_recipe(task.recipe or None, task.overrides)) for task in tasks]


def examine(
    placed: ResolvedPlan | None, *, out_dir: Path, site: Path | None = None
) -> Iterator[Finding]:
    """Yield the findings of all checks, in the order in which they are printed.

    Args:
        placed: the plan that is to run; None: what every plan needs.
        out_dir: directory of all its stages.
        site: site file of the cluster where it is to run; None: none is checked.
    """
    examined = Examined(placed, out_dir, site)
    for check in CHECKS:
        try:
            yield from check(examined)
        except ImportError as error:  # a package that `_packages` reports
            yield Finding("note", "skipped", f"a check that needs {error.name}.")


def _verdict(about: str, problems: Iterable[str], ok: str = "") -> Iterator[Finding]:
    """Yield the faults; without any, the state that was found."""
    wrong = [Finding("wrong", about, problem) for problem in problems]
    yield from wrong or ([Finding("ok", about, ok)] if ok else [])


def _packages(_examined: Examined) -> Iterator[Finding]:
    """Compare the installed packages with the ranges of pyproject.toml."""
    wrong, found = _compare(extra="")
    fix = "Run `pip install --upgrade mmnmt`."
    about = f"Python {platform.python_version()}, {listed(found)}."
    return _verdict("packages", [f"{problem} {fix}" for problem in wrong], about)


def _extras(examined: Examined) -> Iterator[Finding]:
    """Check the optional packages that the plan's recipes need."""
    needed: dict[str, list[str]] = {}
    for task, recipe in examined.stages:
        for extra in _extras_of(task, recipe):
            needed.setdefault(extra, []).append(task.name)
    for extra, stages in needed.items():
        wrong, found = _compare(extra=extra)
        fix = f"Run `pip install 'mmnmt[{extra}]'`."
        problems = [f"{problem} {fix}" for problem in wrong]
        yield from _verdict(f"packages of {listed(stages)}", problems, f"{listed(found)}.")


def _extras_of(task: Task, recipe: Recipe) -> Iterator[str]:
    name, ds_config = task.stage.name, task.config.get("ds_config", {})
    if name == "import_corpus" and recipe.corpus.source == "hub":
        yield "hub"
    if name == "evaluate" and "comet" in recipe.evaluation.computed_scores:
        yield "comet"
    if isinstance(ds_config, Mapping) and ds_config.get("tensorboard", {}).get("enabled"):
        yield "monitors"


def _compare(*, extra: str) -> tuple[list[str], list[str]]:
    """Return problems of the packages that an extra (empty: none) adds, and the right versions."""
    from packaging.requirements import Requirement

    try:
        requirements = [*map(Requirement, metadata.requires("mmnmt") or ())]
    except metadata.PackageNotFoundError:  # a clone
        return [], [f"mmnmt {installed_version()}, so no versions to compare with"]
    wrong, found = [], []
    for wanted in requirements:
        always, has = (
            wanted.marker is None or wanted.marker.evaluate({"extra": name}) for name in ("", extra)
        )
        if not has or (extra and always):
            continue
        version = "not installed"
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(wanted.name)
        if version == "not installed" or not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} is {version}, and {wanted.specifier} is needed.")
        else:
            found.append(f"{wanted.name} {version}")
    return wrong, found


def _fused_kernels(_examined: Examined) -> Iterator[Finding]:
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
    try:
        for one in compare(device, Sizes(), dtype=dtype):
            times = f"{1e3 * one.fused:.2f} ms, plain {1e3 * one.plain:.2f} ms"
            text = f"{one.name}: {times}, values differ by {one.distance:.2%}."
            fix = f"{text} Set the environment variable {SWITCH} to off."
            yield from _verdict(about, [] if one.agrees else [fix], text)
    except ConfigError as error:
        yield Finding("wrong", about, str(error))
    except torch.OutOfMemoryError:
        yield Finding("note", about, "not compared: the GPU has too little free memory.")


def _mpi(_examined: Examined) -> Iterator[Finding]:
    """Load the MPI library in a process of its own."""
    try:
        loaded = subprocess.run(
            [sys.executable, "-c", MPI_PROBE], capture_output=True, text=True, timeout=MPI_SECONDS
        )
        said = loaded.stderr.strip().split("\n")[-1] if loaded.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        loaded, said = None, str(error)
    if loaded is None or loaded.returncode:
        text = (
            f"cannot be loaded ({said}): mpirun and --mpi cannot be used. To use them, install an "
            "MPI library (`apt-get install openmpi-bin`, or the module of the cluster) and `pip "
            "install 'mmnmt[mpi]'`."
        )
        yield Finding("note", "MPI", text)
        return
    version = loaded.stdout.strip().split("\n")[0].rstrip("\0").split(",")[0]
    yield Finding("ok", "MPI", f"{version}, {shutil.which('mpirun') or 'no mpirun on PATH'}.")


def _slurm(examined: Examined) -> Iterator[Finding]:
    missing = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name) is None]
    if len(missing) == 3:
        yield Finding("note", "SLURM", "there is none here; jobs are submitted on a login node.")
    else:
        wrong = [f"{listed(missing)} is not on PATH. Load the module of SLURM."] if missing else []
        yield from _verdict("SLURM", wrong, "sbatch, srun and scontrol are on PATH.")
    if examined.site is not None:
        problems = []
        try:
            load_site(examined.site)
        except UserError as error:
            problems.append(str(error))
        yield from _verdict("site file", problems, f"{examined.site} can be read.")


def _preflight(examined: Examined) -> Iterator[Finding]:
    """Check this process as an allocation of one rank."""
    try:
        outcome = check(discover({}), out_dir=_existing(examined.out_dir) / "doctor")
    except UserError as error:
        outcome = Judgment((str(error),), "")
    except OSError as error:  # a library that torch loads
        text = f"torch cannot be loaded ({error}). Install a build that suits this machine."
        outcome = Judgment((text,), "")
    return _verdict("pre-flight", outcome.problems, f"{outcome.summary}.")


def _open_files(examined: Examined) -> Iterator[Finding]:
    """Compare the limit of open files with what rank 0 of the largest stage holds."""
    counts = [
        task.planned.processes for task, _ in examined.stages if task.stage.parallel == "ranks"
    ]
    ranks, problems = max(counts, default=1), []
    try:
        refuse_too_few_files(ranks)
    except ConfigError as error:
        problems = [str(error)]
    return _verdict("open files", problems, f"enough for {counted(ranks, 'rank')}.")


def _files_to_fetch(examined: Examined) -> Iterator[Finding]:
    """Check files that a stage would fetch, or that the recipe names."""
    for task, recipe in examined.stages:
        yield from _verdict(task.name, _missing_files(task.stage.name, recipe))


def _missing_files(stage: str, recipe: Recipe) -> Iterator[str]:
    scoring = recipe.evaluation
    options = {scoring.bleu_tokenizer} & {"flores101", "flores200"}
    if "spbleu" in scoring.computed_scores:
        options.add("flores200")
    for option in sorted(options) if stage == "evaluate" else ():
        yield from _missing_bleu_model(option)
    model = recipe.clean.language_model if stage == "clean" else None
    if model is not None and not model.is_file():
        yield (
            f"clean.identify_languages {recipe.clean.identify_languages!r} is no file. Fetch "
            "lid.176.bin or GlotLID's model.bin, and name it."
        )
    if stage in ("train_tokenizer", "make_shards"):
        for code, name in recipe.tokenizer.segmenters.items():
            if name == "mecab":
                needed = {"MeCab": "mecab-python3", "ipadic": "ipadic"}
                yield from _missing_modules(f"the segmenter of {code}", **needed)
            elif name not in SEGMENTERS:
                try:
                    read_function_file(name)
                except UserError as error:
                    yield str(error)


def _missing_modules(user: str, **packages: str) -> Iterator[str]:
    """Yield a sentence if a module is missing; ``packages`` are its packages by module."""
    missing = [package for module, package in packages.items() if util.find_spec(module) is None]
    if missing:
        yield f"{user} needs {listed(missing)}. Run `pip install {' '.join(missing)}`."


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


def _inputs(examined: Examined) -> Iterator[Finding]:
    """Check that the data from outside that the plan is given exists."""
    for name, raw in (examined.placed.given if examined.placed else {}).items():
        yield from _verdict(
            f"input {name}", filter(None, map(why_no_data, raw.named(name).values()))
        )


def _disk(examined: Examined) -> Iterator[Finding]:
    """Compare the free space with what models and training states will take."""
    if examined.placed is None:
        return
    from pipeline.estimates.disk import plan_space

    recipes = {task.name: recipe for task, recipe in examined.stages}
    sizes = plan_space(examined.placed, recipes)
    place = _existing(examined.out_dir)
    free = shutil.disk_usage(place).free
    peak, kept = map(size_text, sizes)
    takes = f"models and states take {peak} at most and {kept} in the end"
    there = f"{size_text(free)} are free in {place}"
    fix = "Make room, name another --out, or lower training.keep_last or training.average_last."
    problems = [] if free >= sizes[0] else [f"{there}, and {takes}. {fix}"]
    yield from _verdict("disk", problems, f"{there}; {takes}, without data.")


CHECKS: Sequence[Callable[[Examined], Iterator[Finding]]] = (
    *(_packages, _extras, _fused_kernels, _mpi, _slurm),
    *(_preflight, _open_files, _files_to_fetch, _inputs, _disk),
)
"""The checks of ``mmnmt doctor``, software first."""


# ---------------------------------------------------------------- the rounds of a pre-flight


@dataclass
class Facts:
    """Versions and device of a rank, which it finds out without the others."""

    node: str
    rank: int
    local_rank: int
    versions: dict[str, str]
    """Name → version, for what must be equal on all nodes."""
    device: str = "cpu"
    """Type of the device that the rank will use."""
    device_id: str = ""
    gpu: str = ""
    """Name of the GPU."""
    problems: list[str] = field(default_factory=list)


def check(world: World, *, out_dir: Path, patience: float = PATIENCE_SECONDS) -> Judgment:
    """Run all rounds; every rank calls this, and all get rank 0's judgment.

    The folder that holds ``out_dir`` is tried. Ranks and files are waited for ``patience`` seconds.

    Raises:
        UserError: rank 0 cannot be reached, or its port is taken.
    """
    rounds = Rounds(world, patience=patience)
    steps: tuple[Callable[[], Judgment], ...] = (
        lambda: rounds.round(
            lambda: asdict(find_facts(world)),
            lambda found: judge_facts([Facts(**facts) for facts in found]),
        ),
        lambda: _share(rounds, probe_dir(out_dir)),
        lambda: rounds.round(
            lambda: _exchange(rounds),
            lambda found: Judgment((), f"all {len(found)} connected"),
        ),
    )
    said: list[str] = []
    try:
        for step in steps:
            judgment = step()
            if judgment.problems:
                return judgment
            said.append(judgment.summary)
        return Judgment((), "; ".join(said))
    finally:
        rounds.leave()


# ---------------------------------------------------------------- what each rank has


def find_facts(world: World) -> Facts:
    """Return the versions and the device of this rank; it computes on the device once."""
    import torch

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mmnmt": installed_version(),
    }
    if world.local_rank == 0:  # one rank per node reads the files
        versions["the code of mmnmt"] = code_digest()
    facts = Facts(node_name(), world.rank, world.local_rank, versions)
    if problem := interface_problem(os.environ.get("GLOO_SOCKET_IFNAME", "")):
        facts.problems.append(problem)
    # Without CUDA, torch counts the GPUs of a driver that is too old for it.
    in_torch = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = driver_problem(
        visible_gpus().count, in_torch, version=torch.__version__, cuda=torch.version.cuda
    )
    if problem:
        facts.problems.append(problem)
    if in_torch:
        device = local_device(world.local_rank)
        facts.device = device.type
        try:
            properties = torch.cuda.get_device_properties(device)
            facts.device_id, facts.gpu = str(properties.uuid), properties.name
            torch.ones(1, device=device).add_(1).item()
        except RuntimeError as error:
            facts.problems.append(
                f"GPU {device.index} does not compute ({first_line(error)}). Reset it or leave "
                "the node out (--exclude)."
            )
    return facts


def driver_problem(by_driver: int, in_torch: int, *, version: str, cuda: str | None) -> str | None:
    """Return why torch and the driver do not agree; None if they do.

    Args:
        by_driver: GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES does not hide.
        in_torch: GPUs that torch can use.
        version: torch's version.
        cuda: CUDA version that torch is built for; None: a build for CPU.
    """
    hide = "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on CPU"
    if by_driver and cuda is None:
        return (
            f"There {_are(by_driver)}, and torch {version} is built for CPU. Install a build for "
            f"CUDA, {hide}."
        )
    if by_driver > in_torch:
        return (
            f"There {_are(by_driver)}, and torch {version} (CUDA {cuda}) can use {in_torch}. "
            f"Update the driver or install a torch that suits it, {hide}."
        )
    if in_torch and not by_driver:
        return (
            f"torch can use {counted(in_torch, 'GPU')}, and nvidia-smi lists none. Put nvidia-smi "
            "on PATH: the ds_config auto asks it."
        )
    return None


def _are(gpus: int) -> str:
    return f"{'is' if gpus == 1 else 'are'} {counted(gpus, 'GPU')}"


def interface_problem(wanted: str) -> str | None:
    """Return which of the network interfaces ``A,B`` this node lacks; None if it has all."""
    there = [name for _, name in socket.if_nameindex()]
    missing = [name for name in wanted.split(",") if name and name not in there]
    if not missing:
        return None
    return (
        f"There is no network interface {listed(missing)}. Set `interface` in the site file, or "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, to one of {listed(there)}."
    )


def code_digest() -> str:
    """Return a checksum of the package's sources, which nodes may have copies of."""
    root, checksum = Path(__file__).resolve().parent, 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        checksum = zlib.crc32(name.encode() + path.read_bytes(), checksum)
    return f"{checksum:08x}"


def judge_facts(found: Sequence[Facts]) -> Judgment:
    """Compare what the ranks have."""
    problems = [(facts.node, text) for facts in found for text in facts.problems]
    problems += _other_versions(found)
    lines = [*merged(problems)]
    try:
        refuse_shared([(facts.node, facts.device_id, facts.device) for facts in found])
    except ConfigError as error:
        lines.append(str(error))
    nodes = len({facts.node for facts in found})
    gpus = Counter(facts.gpu for facts in found if facts.gpu)
    on = listed(f"{count} {name}" for name, count in gpus.items()) or "CPU"
    versions = found[0].versions
    return Judgment(
        tuple(lines),
        f"{counted(nodes, 'node')}, {counted(len(found), 'rank')} on {on}, torch "
        f"{versions['torch']}, mmnmt {versions['mmnmt']}",
    )


def _other_versions(found: Sequence[Facts]) -> list[tuple[str, str]]:
    """Return nodes with versions other than most nodes have; the first wins a tie."""
    problems: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for facts in found for name in facts.versions):
        versions = {f.node: f.versions[name] for f in found if name in f.versions}
        usual = Counter(versions.values()).most_common(1)[0][0]
        example = next(node for node, version in versions.items() if version == usual)
        fix = "Give all nodes the same environment."
        problems += [
            (node, f"{name} is {version}, and {usual} on {example}. {fix}")
            for node, version in versions.items()
            if version != usual
        ]
    return problems


# ---------------------------------------------------------------- the folder of the output


def _share(rounds: Rounds, folder: Path) -> Judgment:
    """Let every node write a file to a folder of rank 0, and respect its lock; rank 0 looks.

    Two nodes that both share the folder with rank 0 share it with each other.
    """
    with ExitStack() as held:
        made = rounds.round(lambda: _make_folder(rounds, folder, held), lambda _: Judgment(()))
        if made.problems:
            return made
        return rounds.round(
            lambda: _write_file(rounds, folder),
            lambda found: _see_files(found, folder, patience=rounds.patience),
        )


def _make_folder(rounds: Rounds, folder: Path, held: ExitStack) -> None:
    """Make the folder on rank 0, which holds its lock until ``held`` is closed."""
    if rounds.world.rank != 0:
        return
    try:
        held.enter_context(sole_writer(folder))
        held.callback(discard_working, folder)
        make_working(folder)
    except OSError as error:
        raise unwritable(folder.parent, error, "name another --out") from error


def _write_file(rounds: Rounds, folder: Path) -> dict[str, Any]:
    """Write this node's file; return its name, and whether rank 0's lock keeps the node out."""
    found: dict[str, Any] = {"node": rounds.node}
    if rounds.world.local_rank != 0:
        return found
    if not until(folder.is_dir, seconds=rounds.patience):
        raise ArtifactError(
            f"the folder that rank 0 made in {folder.parent} is not seen. {_SHARED_FIX}"
        )
    found["file"] = f"node-{rounds.world.rank}"
    try:
        unfinished = folder / f"{found['file']}.unfinished"
        unfinished.write_text(found["file"], encoding="ascii")
        sync(unfinished)
        unfinished.rename(folder / found["file"])
        sync(folder)
    except OSError as error:
        raise unwritable(folder.parent, error, "name another --out") from error
    found["excluded"] = rounds.world.rank == 0 or _is_locked_out(folder)
    return found


def _see_files(found: Sequence[Mapping[str, Any]], folder: Path, *, patience: float) -> Judgment:
    """Wait on rank 0 until it sees the files of all nodes, and judge the findings."""
    begun, first = time.monotonic(), found[0]["node"]
    of_nodes = [entry for entry in found if "file" in entry]
    until(lambda: all((folder / e["file"]).is_file() for e in of_nodes), seconds=patience)
    problems: list[tuple[str, str]] = []
    for entry in of_nodes:
        if not (folder / entry["file"]).is_file():
            text = (
                f"the file that it wrote in {folder.parent} is not seen on {first}. {_SHARED_FIX}"
            )
            problems.append((entry["node"], text))
        elif not entry["excluded"]:
            text = (
                f"the lock that {first} holds does not keep this node out, so that two jobs could "
                "write one output. Mount the file system with locks, or use another."
            )
            problems.append((entry["node"], text))
    seconds = time.monotonic() - begun
    return Judgment(merged(problems), f"files seen by all nodes after {seconds:.2f} s")


def _existing(path: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def _is_locked_out(folder: Path) -> bool:
    """Return whether the lock that another node holds keeps this node out.

    ``sole_writer`` would wait for a sign of life from that node.
    """
    place = lock_path(folder)
    try:
        place.mkdir()
    except FileExistsError:
        return True
    place.rmdir()
    return False


# ---------------------------------------------------------------- the network


def _exchange(rounds: Rounds) -> None:
    """Reduce over all ranks; ConfigError if they cannot connect or the sum is wrong."""
    import torch
    from torch import distributed as dist

    world = rounds.world
    device = local_device(world.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", rounds.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=rounds.patience),
    )
    try:
        values = torch.empty(MESSAGE_VALUES, device=device)
        dist.all_reduce(values.fill_(world.rank + 1.0))
        expected = world.size * (world.size + 1) / 2
        if not bool((values == expected).all()):
            raise ConfigError(
                f"an all-reduce over {device.type} gives {values[0].item():g}, not {expected:g}. "
                "Look at the network and the GPUs of this node."
            )
        dist.barrier()
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Check an allocation; print one line, or one per problem; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.doctor", description="Check an allocation before a stage."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="stage's output")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="longest wait")
    options = parser.parse_args(argv)
    # torch's C++ code reports every time-out, too; the lines below say what it means.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Otherwise a thread of NCCL's group aborts the rank when an all-reduce takes too long.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    prepare_process()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each rank connects to all others
    folder = os.environ.get(REPORTS)
    report = EndReport(Path(folder), describe=_describe) if folder else None
    with report.noting_sigterm() if report else nullcontext():
        end, problems, is_said = _outcome(options.out.absolute(), patience=options.patience)
        text = f"pre-flight: {' '.join(problems)}"
        is_reported = report is not None and problems and is_said and report.write(end, text)
        for problem in problems if is_said and not is_reported else ():
            print(f"mmnmt preflight: {problem}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR if problems else 0


def _outcome(out_dir: Path, *, patience: float) -> tuple[End, Sequence[str], bool]:
    """Check this rank; return its end, the problems, and whether this rank says them.

    Rank 0 prints the summary if all is well.
    """
    is_first = True
    try:
        world = discover(os.environ)
        is_first = world.local_rank == 0  # its node's others would say the same
        outcome = check(world, out_dir=out_dir, patience=patience)
    except UserError as error:
        end: End = "lost" if isinstance(error, RankLost) else "failed"
        return end, [f"{node_name()}: {error}"], is_first
    except (ImportError, OSError) as error:  # torch, or a library that it loads
        fix = "Install the requirements of mmnmt on that node."
        return "failed", [f"{node_name()}: {first_line(error)}. {fix}"], is_first
    if world.rank != 0:  # rank 0 itself may be silent
        return "lost", outcome.problems, outcome.is_lost
    if not outcome.problems:
        print(f"mmnmt preflight: {outcome.summary}.", flush=True)
    return "crashed" if outcome.is_lost else "failed", outcome.problems, True


def _describe(end: End, cause: str) -> RankEnd:
    size = 1
    with suppress(ConfigError):  # as the report may say
        size = discover(os.environ).size
    return RankEnd(own_rank(), size, node_name(), end, cause)


if __name__ == "__main__":
    sys.exit(main())
