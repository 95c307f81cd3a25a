"""What may import what, and what must not exist."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
from support.page_commands import PAGES
from support.stage_runs import make_call
from support.tiny_training import make_inputs, make_recipe

from pipeline.registry import STAGES
from pipeline.stages import pretrain

ROOT = Path(__file__).resolve().parents[2]

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("errors", "seeds", "terminal", "languages", "temperature_sampling", "machine"),
        *("kernels", "config", "settings"),
    ),
    ("distributed",),
    ("artifacts",),
    ("stage", "registry"),
    ("batching", "jobs"),
    ("model",),
    ("checkpoints",),
    ("training",),
    ("decoding", "evaluation", "estimates", "extensions"),
    ("doctor", "serving"),
    ("stages",),
    ("cli",),
    ("__main__",),
)
"""Packages and modules of ``pipeline``, the lowest first: each may import its own layer and those
before it. ``settings`` are the modules of that name, one per package, which hold the sections of
recipes; ``stages`` are the modules that launchers start, those of extensions included."""

EXTENSIONS = {
    "pipeline.extensions.byte_front_ends": "model",
    "pipeline.extensions.language_modules": "model",
    "pipeline.extensions.analysis": "extensions",
    "pipeline.extensions.tasks": "extensions",
}
"""Extension → the layer of its modules. Its settings and its list of them lie below everything,
since recipes are made of them."""

LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
TRAINING = LAYER_OF["training"]
STAGE_MODULES = {stage.module for stage in STAGES.values()}

SLIM_STAGES = (
    *(f"pipeline.stages.{name}" for name in ("pretrain", "finetune", "translate", "upcycle")),
    "pipeline.extensions.tasks.finetune_task",
    "pipeline.extensions.tasks.evaluate_task",
)
SLIM_PACKAGES = {
    *("torch", "deepspeed", "numba", "numpy"),
    *("sentencepiece", "safetensors", "pydantic", "tqdm"),
}
"""All that training and decoding may import beside the standard library."""


@dataclass(frozen=True)
class Import:
    """A module that some module imports."""

    target: str
    in_function: bool


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(part for part in relative.parts if part != "__init__")


def sources(*folders: str) -> dict[str, Path]:
    """Module name → file of everything below the folders."""
    return {
        module_name(path): path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


PACKAGES = sources("pipeline", "data_prep")


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """All imports but those of the block that runs a module as a script."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8")), in_function=False))


def _imports(node: ast.AST, *, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                continue
            case ast.Import(names=names):
                yield from (Import(alias.name, in_function) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, "imports are absolute"
                assert module is not None
                for alias in names:
                    whole = f"{module}.{alias.name}"
                    yield Import(whole if whole in PACKAGES else module, in_function)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, in_function=True)
            case _:
                yield from _imports(child, in_function=in_function)


def own_imports(name: str, *, at_once: bool = False) -> set[str]:
    """Modules of this project that a module imports, anywhere in it or as soon as it is loaded."""
    entries = [entry for entry in imports_of(PACKAGES[name]) if not (at_once and entry.in_function)]
    targets = {entry.target for entry in entries}
    return {target for target in targets if target.startswith(("pipeline.", "data_prep."))}


def layer(name: str) -> int:
    """Return the layer of a module of ``pipeline``; the modules of a package share one."""
    return LAYER_OF[key_of(name)]


def key_of(name: str) -> str:
    """Return the entry of ``LAYERS`` that a module belongs to."""
    if name in STAGE_MODULES:
        return "stages"
    if name.startswith("pipeline.extensions"):
        if name in EXTENSIONS or name.endswith((".extensions", ".installed")):
            return "settings"
        return EXTENSIONS[name.rpartition(".")[0]]
    if name.endswith(".settings"):
        return "settings"
    below = name.removeprefix("pipeline.")
    return below if below in LAYER_OF else below.split(".")[0]


JUDGES_OF_LINES = {"pipeline.evaluation.language_detector", "pipeline.evaluation.chrf"}
"""The language of a line and its chrF++, of translations and of training text alike."""
PIPELINE = [name for name in PACKAGES if name.startswith("pipeline.")]
COMMAND = [name for name in PIPELINE if name.split(".")[1] == "cli"]
READERS = "data_prep.readers"
"""Package within ``data_prep``; it holds nothing but its modules."""
DATA_PREP = [name for name in PACKAGES if name.startswith("data_prep.")]
DATA_SETTINGS = "data_prep.settings"
"""Settings of the data stages, of which recipes are made: the only such module of ``data_prep``."""


def test_every_module_of_the_pipeline_has_a_layer_and_every_layer_its_modules() -> None:
    assert set(map(key_of, PIPELINE)) == set(LAYER_OF)


@pytest.mark.slow
def test_imports_point_down() -> None:
    above = [
        f"{name} → {target}"
        for name in PIPELINE
        for target in own_imports(name, at_once=name in EXTENSIONS)
        if target != DATA_SETTINGS
        and (target.startswith("data_prep") or layer(target) > layer(name))
    ]
    assert not above


@pytest.mark.slow
def test_imports_form_no_circle() -> None:
    # Extensions name their settings at once and load their part of the model later.
    graph = {name: own_imports(name, at_once=name in EXTENSIONS) for name in PACKAGES}
    order = TopologicalSorter(graph).static_order()
    assert set(order) >= set(PIPELINE)


@pytest.mark.parametrize("name", DATA_PREP)
def test_data_preparation_uses_only_what_lies_below_training(name: str) -> None:
    used = {target for target in own_imports(name) if target.startswith("pipeline.")}
    assert used or name == READERS, "data_prep reads or writes what is the pipeline's"
    assert not {target for target in used if layer(target) >= TRAINING} - JUDGES_OF_LINES


@pytest.mark.slow
def test_the_command_line_loads_neither_stages_nor_torch_until_one_is_to_run() -> None:
    for name in COMMAND:
        below = own_imports(name, at_once=True) - {*COMMAND, DATA_SETTINGS}
        assert max(map(layer, below), default=0) <= LAYER_OF["jobs"]
        assert not STAGE_MODULES & own_imports(name)
    loaded = modules_after("import pipeline.cli")
    assert set(COMMAND) <= loaded
    assert not {"torch", "deepspeed", "transformers", "datasets", "comet", "mpi4py"} & loaded


class FirstUpdateError(Exception):
    """Training is about to make its first update."""


@pytest.mark.slow
def test_few_modules_are_passed_on_the_way_to_the_first_update(tmp_path: Path) -> None:
    """Modules of `pretrain` in the order in which they are entered, besides the model's own."""
    inputs = make_inputs(tmp_path)
    recipe = make_recipe(expert_parallel_size=1)
    call = make_call("pretrain", recipe, inputs.artifacts(), tmp_path / "model")
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event != "call" or not name.startswith("pipeline.") or function == "<module>":
            return
        if (name, function) == ("pipeline.training.engine", "train_step"):
            raise FirstUpdateError
        if not name.startswith(("pipeline.model.", "pipeline.kernels.", "pipeline.extensions.")):
            entered[name] = None

    sys.setprofile(note)
    try:
        with pytest.raises(FirstUpdateError):
            pretrain.run(call)
    finally:
        sys.setprofile(None)
    passed = list(entered)
    climbs = [(one, other) for one, other in pairwise(passed) if layer(other) > layer(one)]
    assert len(passed) <= 25, passed
    assert len(climbs) <= 8, climbs


def test_every_recipe_plan_and_template_is_installed() -> None:
    """A file that is left out is missed by nobody who works in a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = {
        path
        for name, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / name.replace(".", "/")).glob(pattern)
    }
    files = {
        path
        for top in ("pipeline", "data_prep", "ds_configs")
        for path in (ROOT / top).rglob("*.*")
        if path.suffix in (".toml", ".json", ".css", ".j2", ".sbatch", ".html")
    }
    assert files == installed


def test_only_the_list_of_extensions_and_the_scales_name_an_extension_of_others() -> None:
    def is_within(name: str, package: str) -> bool:
        return f"{name}.".startswith(f"{package}.")

    importers = {
        (name, extension)
        for name in PACKAGES
        for target in own_imports(name)
        for extension in EXTENSIONS
        if is_within(target, extension) and not is_within(name, extension)
    }
    scales = ("pipeline.extensions.analysis.analyze_scales", "pipeline.extensions.byte_front_ends")
    listed = {("pipeline.extensions.installed", extension) for extension in EXTENSIONS}
    assert importers == listed | {scales}


@pytest.mark.slow
def test_deepspeed_is_imported_by_the_engine_alone() -> None:
    importers = {
        name
        for name, path in PACKAGES.items()
        if any(entry.target.split(".")[0] == "deepspeed" for entry in imports_of(path))
    }
    assert importers == {"pipeline.training.engine"}


def modules_after(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has loaded after a statement."""
    script = f"import sys\n{statement}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    return set(done.stderr.splitlines())


@pytest.mark.slow
def test_training_and_decoding_import_few_packages() -> None:
    loaded = modules_after("\n".join(f"import {stage}" for stage in SLIM_STAGES))
    ours = {name for name in loaded if name in PACKAGES}
    assert {
        "pipeline.training.loop",
        "pipeline.decoding.beam_search",
        "pipeline.checkpoints.assembly.rules",
    } <= ours
    assert {name for name in ours if name.startswith("data_prep.")} == {DATA_SETTINGS}
    third_party = {
        entry.target.split(".")[0]
        for name in ours
        for entry in imports_of(PACKAGES[name])
        if not entry.in_function
    } - {"pipeline", "data_prep", *sys.stdlib_module_names}
    assert third_party == SLIM_PACKAGES


def test_whatever_had_a_process_group_ends_by_leaving() -> None:
    """Or its threads might abort the process when all is done; the command and stages of ranks."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert scripts["scripts"] == {"mmnmt": "pipeline.__main__:command"}
    stages = [stage.module for stage in STAGES.values() if stage.parallel == "ranks"]
    assert len(stages) >= 3
    for name, ending in [
        ("pipeline.__main__", "command()"),
        *((name, "leave(") for name in stages),
    ]:
        last = PACKAGES[name].read_text(encoding="utf-8").splitlines()[-1]
        assert last.strip().startswith(ending)


MODEL = [name for name in PACKAGES if name.startswith(("pipeline.model.", "pipeline.extensions."))]
KERNELS = [name for name in PACKAGES if name.startswith("pipeline.kernels.")]


@pytest.mark.parametrize("name", MODEL)
def test_the_models_story_asks_no_tensor_where_it_is(name: str) -> None:
    """What is faster on a CPU or a GPU is one call into the kernels, which ask."""
    tree = ast.parse(PACKAGES[name].read_text(encoding="utf-8"))
    asked = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu", "mkldnn"))
        or (
            isinstance(node, ast.Attribute)
            and node.attr == "type"
            and isinstance(node.value, ast.Attribute | ast.Name)
            and (getattr(node.value, "attr", None) or getattr(node.value, "id", None)) == "device"
        )
    ]
    assert not asked


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_know_of_nothing_but_tensors_and_errors(name: str) -> None:
    allowed = ("pipeline.kernels.", "pipeline.errors")
    assert not {target for target in own_imports(name) if not target.startswith(allowed)}


def test_docstrings_cite_only_pages_that_are_here() -> None:
    pages = re.compile(r"([\w/]+\.md) *(?:§|section|p\.)")
    cited = {
        page
        for path in sources("pipeline", "data_prep", "tests").values()
        for page in pages.findall(path.read_text(encoding="utf-8"))
    }
    assert not {page for page in cited if not (ROOT / page).is_file()}


NAMED_PATH = re.compile(
    r"(?<![\w./-])(?P<path>(?:pipeline|data_prep|ds_configs|slurm|tests|docs)/[\w./*-]*)"
    r"(?:::(?P<test>\w+))?"
)
"""A path of this repository in a page; of a test file also ``tests/….py::test_name``. Tables of
tests may leave out ``tests/`` and ``.py``."""


def missing_paths(text: str) -> list[str]:
    """What a page names that is not there; ``test_readme`` checks links."""
    missing = []
    for match in NAMED_PATH.finditer(text):
        path, test = match["path"].rstrip("."), match["test"]
        found = [*ROOT.glob(path), *ROOT.glob(f"tests/{path}.py")]
        defined = test is None or any(
            f"def {test}(" in file.read_text(encoding="utf-8") for file in found
        )
        if not (found and defined):
            missing.append(match[0])
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_and_test_of_a_page_exists(page: Path) -> None:
    assert not missing_paths(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "See `pipeline/no_such.py`.",
        "Every `pipeline/recipes/no_such_*.toml`",
        "`tests/whole/test_architecture.py::test_no_such_name`",
    ],
)
def test_a_path_that_is_gone_is_found(text: str) -> None:
    assert len(missing_paths(text)) == 1


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_module_is_a_drawer(name: str) -> None:
    files = sources("pipeline", "data_prep", "tests")
    assert not [module for module in files if module.rsplit(".", 1)[-1] == name]


@pytest.mark.slow
def test_every_module_says_what_it_is_for() -> None:
    files = sources("pipeline", "data_prep", "tests")
    docstring = re.compile(r'(#.*\n|\s)*r?"""')
    assert not [n for n, path in files.items() if not docstring.match(path.read_text("utf-8"))]
