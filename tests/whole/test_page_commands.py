"""Run every command of README.md, CONTRIBUTING.md and docs/ on made-up text, with small models.

A command is run as it stands there except for its size: a plan is run dry; an overlay makes a stage
small, which runs in one process on a CPU without the launcher that the page names.
"""

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
from support.forked import run_command
from support.page_commands import ROOT, blocks, without_launcher
from support.raw_trees import flores, write
from support.small_plans import COMMON, TINY, as_child, placed_small, write_tree
from support.tiny_xlmr import write_entities, write_questions, write_xlmr

from pipeline import cli
from pipeline.cli.stage_commands import find_stage, stage_parser
from pipeline.config.recipe import load_recipe
from pipeline.jobs.runner import run_plan

pytestmark = pytest.mark.slow

HERE = ("run", "demo", "needs-data", "cluster")
"""Tags of blocks whose commands are run here."""
ELSEWHERE = {
    ("docs/how-to/make_more_data.md", "demo"): "test_make_more_data_page",
    ("docs/tutorials/from_bytes.md", "bytes"): "test_bytes_page",
    ("docs/tutorials/your_own_data.md", "walk"): "test_own_data_page",
    ("docs/tutorials/add_a_language.md", "walk"): "test_add_a_language_page",
    ("docs/tutorials/module_per_language.md", "demo"): "test_language_modules_page",
    ("docs/how-to/serve.md", "demo"): "test_serve_page",
    ("docs/tutorials/experts_in_your_checkpoint.md", "demo"): "test_upcycling_example",
}
"""Page and tag of blocks whose commands another test runs, in order → that test."""
PARSED_ALONE = ("logs", "cancel")
"""Commands that need jobs of a cluster: their options are looked at alone."""
FROM_THE_NETWORK = ("hub:",)
"""What a command reads that no test does: its options and its recipe are looked at alone."""
DEMO = f"""
corpus = {{ max_train_lines = 60, max_valid_lines = 2, max_test_lines = 2 }}
tokenizer = {{ vocabulary_size = 300 }}
shards = {{ max_tokens = 100 }}
batches = {{ tokens = 400, micro_batches = 2, window_steps = 2 }}
tasks = {{ max_tokens = 48 }}
{COMMON}
"""
BYTES = TINY.replace("num_heads = 2", "num_heads = 8") + "[tests]\nlanguages = []\n"


def commands(*tags: str) -> list[tuple[str, str]]:
    """(page, command) of all blocks of these tags that no other test runs, in order."""
    return [
        (block.page, command)
        for block in blocks()
        if block.tag in tags and (block.page, block.tag) not in ELSEWHERE
        for command in block.commands()
    ]


def test_every_block_with_commands_says_how_it_is_run() -> None:
    """A block of commands without a tag is one that nobody has tried."""
    assert {block.tag for block in blocks()} >= set(HERE)
    untold = []
    for block in blocks():
        elsewhere = (block.page, block.tag) in ELSEWHERE
        if block.has_commands() and block.tag not in HERE and not elsewhere:
            untold.append(f"{block.page}, {block.section}: ```{block.info}")
    assert not untold
    for test in ELSEWHERE.values():
        assert (Path(__file__).parent / f"{test}.py").exists()


@pytest.mark.parametrize(("page", "command"), commands("run"))
def test_commands_marked_run_succeed_in_a_new_folder(
    page: str, command: str, tmp_path: Path
) -> None:
    done = run_command(without_launcher(command), folder=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout.strip()


# Made-up inputs


def translation_memory(lines: int) -> str:
    units = "".join(
        f'<tu><tuv xml:lang="en"><seg>old house {number}</seg></tuv>'
        f'<tuv xml:lang="de"><seg>altes Haus {number}</seg></tuv></tu>'
        for number in range(lines)
    )
    return f'<tmx version="1.4"><header/><body>{units}</body></tmx>'


def talks(languages: str) -> dict[str, str]:
    """Tables of talks with a column per language."""
    codes = languages.split()
    return {
        f"all_talks_{split}.tsv": "\t".join(codes)
        + "\n"
        + "".join("\t".join(f"{c} {start + n}" for c in codes) + "\n" for n in range(count))
        for split, start, count in (("train", 0, 6), ("dev", 100, 2), ("test", 200, 2))
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages' commands name: raw text, and small runs of three plans."""
    folder = tmp_path_factory.mktemp("pages")
    raw = folder / "path" / "to"
    for name in ("pairs", "opus-100", "pc32"):
        write_tree(raw / name, lines={"de": 4}, validated=("de",))
    write_tree(raw / "azerbaijani", lines={"az": 4}, validated=("az",))
    write_tree(raw / "turkish", lines={"tr": 4, "az": 0}, validated=("tr",))
    write(
        raw / "memories",
        {"ours.tmx": translation_memory(9), "test/ours.tmx": translation_memory(2)},
    )
    for name in ("flores200_dataset", "flores"):
        write(raw / name, flores(("eng_Latn", "deu_Latn", "fra_Latn", "ron_Latn")))
    write(raw / "talks", talks("en de my ro"))
    for name in ("xlm-roberta-base", "xlmr"):
        write_xlmr(raw / name)
    for name in ("ner", "wikiann"):
        write_entities(raw / name, ["de", "en"])
    write_questions(raw / "tydiqa", ["en"])
    shutil.copy(ROOT / "slurm" / "site.example.toml", folder / "my-site.toml")
    runs = folder / "runs"
    shutil.copytree(raw / "pairs", runs / "hundred-pairs")
    write(runs / "verses", {"en-de/train.en.gz": "house\n", "en-de/train.de.gz": "Haus\n"})
    small_run("demo", runs, {}, tiny=DEMO, wanted=())
    ted59 = {"corpus": raw / "talks", "flores": raw / "flores"}
    translated = ("translate_bytes", "translate_moce_5_lid")
    wanted = ("flores", "tokenizer_subwords", *translated, "moce_5")
    small_run("ted59", runs, ted59, tiny=BYTES, wanted=wanted)
    transfer = {"talks": raw / "turkish", "few": raw / "azerbaijani"}
    small_run("lobef_transfer", runs, transfer, tiny=BYTES, wanted=("bytes",))
    copies = {
        "bible24": ("mmnmt", "clean"),
        "opus100": ("clean", "tokenizer"),
        "hundred": ("shards", "mixture"),
        "../data": ("shards", "mixture", "groups"),
    }
    for name, stages in copies.items():
        for stage in stages:
            shutil.copytree(runs / "demo" / stage, runs / name / stage)
    for system, seed in product(("dense", "moe"), (1, 2, 3)):
        shutil.copytree(runs / "demo" / system, runs / f"{system}-{seed}" / "checkpoint")
        shutil.copytree(runs / "demo" / f"translate_{system}", runs / f"{system}-{seed}" / "lines")
    shutil.copytree(runs / "demo" / "clean", folder / "clean")
    for system, seed in product(("dense", "moe", "lgr"), (1, 2, 3)):
        lines = runs / "demo" / f"translate_{system.replace('lgr', 'moe')}"
        shutil.copytree(lines, folder / f"translate_{system}_{seed}")
    for name in ("mrasp2", "m2m100", "nllb"):
        shutil.copytree(runs / "demo" / "dense", runs / name)
    shutil.copytree(runs / "demo" / "tokenizer", runs / "mrasp2-tokenizer")
    (folder / "small.toml").write_text(DEMO.replace("{thresholds}", "[20, 50]"), encoding="utf-8")
    (folder / "bytes.toml").write_text(BYTES.replace("{thresholds}", "[2, 4]"), encoding="utf-8")
    return folder


def small_run(
    plan: str, runs: Path, given: Mapping[str, Path], *, tiny: str, wanted: tuple[str, ...]
) -> None:
    """A plan's stages in ``runs/PLAN``, small."""
    overlay = runs / f"{plan}.small"
    overlay.mkdir(parents=True)
    placed = placed_small(plan, overlay, thresholds=(2, 4), given=given, tiny=tiny, wanted=wanted)
    assert run_plan(placed, launcher=as_child) == 0
    (overlay / "run").rename(runs / plan)


# Run


RAN: set[tuple[str, ...]] = set()
"""Commands as they were run, whose repetitions on other pages are not."""


def small(command: str) -> list[str]:
    """The arguments of a command as it is run here."""
    words = without_launcher(command)
    if words[0] in ("run", "submit"):
        return [*words, *(["--dry-run"] if "--dry-run" not in words else [])]
    found: list[str] = []
    waiting = iter(words)
    for word in waiting:
        match word:
            case "--mpi":
                pass
            case "--processes" | "--ds-config":
                next(waiting)
            case "--profile":
                next(waiting)
                found += [word, "1:2"]
            case "--set":
                setting = next(waiting)  # the overlay makes few updates
                found += [] if setting.startswith("training.updates=") else [word, setting]
            case "--recipe":
                recipe = next(waiting)
                overlay = "bytes.toml" if recipe.startswith("bytes") else "small.toml"
                found += [word, f"{recipe}+{overlay}"]
            case _:
                found.append(word.removeprefix("/"))
    return found


def run_small(command: str, folder: Path) -> None:
    arguments = small(command)
    if arguments[0] in PARSED_ALONE:
        cli._parser().parse_args(arguments)
        return
    stage, options = find_stage(arguments)
    from_the_network = any(word.startswith(FROM_THE_NETWORK) for word in arguments)
    if from_the_network and stage is not None:
        stage_parser(stage).parse_args(options)
        assert load_recipe(arguments[arguments.index("--recipe") + 1].rpartition("+")[0])
    elif (stage is not None and stage.trains) or "|" in command:
        # DeepSpeed keeps a process's first process group
        given = shlex.split(command.partition("|")[0])[1] if "|" in command else ""
        done = run_command(arguments, folder=folder, given=given)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    else:
        assert cli.main(arguments) == 0, command
    if "--out" in arguments and arguments[0] != "run" and not from_the_network:
        assert (folder / arguments[arguments.index("--out") + 1]).exists(), command


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", dict.fromkeys(page for page, command in commands(*HERE) if without_launcher(command))
)
def test_every_command_of_a_page_succeeds_one_after_the_other(
    page: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    tried = 0
    for at, command in commands("demo", "needs-data", "cluster"):
        if at == page and " demo.tar.xz" in command:
            subprocess.run(command, shell=True, cwd=place, check=True)
        elif at == page and without_launcher(command):
            key = (command.rpartition("|")[0], *small(command))
            if key not in RAN:
                run_small(command, place)
                told = {"run": "would run", "submit": "$(MMNMT_SETUP="}
                assert told.get(without_launcher(command)[0], "") in capsys.readouterr().out
                RAN.add(key)
            tried += 1
    assert tried or {at for at, _ in commands("run")} >= {page}
