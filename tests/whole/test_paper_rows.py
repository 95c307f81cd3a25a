"""The paper's Table 2: a recipe per row, and the plan of them, run whole on made-up pairs."""

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.raw_trees import write

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.raw_input import RawPaths
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config import Recipe, load_recipe
from pipeline.jobs.launch import StopRequests
from pipeline.jobs.plan import PlacedPlan, Plan, load_plan, place_plan
from pipeline.jobs.runner import run_plan
from pipeline.languages import PAPER_GROUPS

ROWS = {
    "(1) Dense": ("dense_opus100", 100_000),
    "(2) Dense, 79 h": ("dense_79h_opus100", 260_000),
    "(3) MoE": ("moe_opus100", 100_000),
    "(4) MoE, 158 h": ("moe_158h_opus100", 200_000),
    "(5) MoE-LGR": ("moe_lgr_opus100", 100_000),
    "(6) MoE-LGR, 158 h": ("moe_lgr_158h_opus100", 200_000),
    "(7) Enc(1)-Dec(rand)": ("mmnmt_rand_opus100", 100_000),
    "(8) Enc(1)-Dec(rand), 130 h": ("mmnmt_rand_130h_opus100", 165_000),
    "(9) Enc(1)-Dec(1)": ("mmnmt_dense_opus100", 100_000),
    "(10) Enc(1)-Dec(1), 130 h": ("mmnmt_dense_130h_opus100", 165_000),
    "(11) Enc(1)-Dec(3)": ("mmnmt_moe_opus100", 100_000),
    "(12) Enc(1)-Dec(5)": ("mmnmt_opus100", 100_000),
}
"""System → its recipe, and its updates after the paper's wall times."""

ASSEMBLED = {
    "(7) Enc(1)-Dec(rand)": None,
    "(8) Enc(1)-Dec(rand), 130 h": None,
    "(9) Enc(1)-Dec(1)": "(1) Dense",
    "(10) Enc(1)-Dec(1), 130 h": "(1) Dense",
    "(11) Enc(1)-Dec(3)": "(3) MoE",
    "(12) Enc(1)-Dec(5)": "(5) MoE-LGR",
}
"""System → the one its decoder is from; encoder and embeddings are from row 1."""

PAIRS = ("en-hi", "en-ru", "de-en", "el-en")
"""English with a language of each of the paper's groups."""
TRAIN_LINES = {"en-hi": 30, "en-ru": 30, "de-en": 60, "el-en": 30}

TINY = """
[corpus]
languages = []
[tokenizer]
kind = "bytes"
[model]
encoder_layers = 2
decoder_layers = 2
width = 16
feed_forward_width = 32
num_heads = 2
max_positions = 64
[batches]
tokens = 400
micro_batches = 2
window_steps = 2
evaluation_tokens = 2000
[optimizer]
warmup_updates = 1
[training]
updates = 2
validate_every = 2
checkpoint_every = 2
resource_thresholds = [30, 60]
[decoding]
beam_size = 1
max_length_ratio = 0.1
max_extra_length = 2
[evaluation]
language_accuracy = false
[logging]
every = 1
"""


def plan() -> Plan:
    return load_plan("opus100")


def recipe_of(system: str) -> Recipe:
    return load_recipe(ROWS[system][0])


def trained_by(plan: Plan, system: str) -> str:
    """The stage that trains a system of the evaluation."""
    systems = plan.stages["evaluation"].inputs["systems"]
    assert isinstance(systems, dict)
    checkpoint = plan.stages[systems[system]].inputs["checkpoint"]
    assert isinstance(checkpoint, str)
    return checkpoint


# Recipes


def test_the_languages_are_those_of_the_94_pairs_that_have_test_sets() -> None:
    found = load_recipe("dense_opus100").corpus.languages
    assert list(found) == sorted(code for codes in PAPER_GROUPS.values() for code in codes)
    assert len(found) - 1 == 94
    assert not {"an", "dz", "hy", "mn", "yo"} & set(found)
    assert {"ar", "de", "fr", "nl", "ru", "zh"} <= set(found)


@pytest.mark.parametrize("system", ROWS)
def test_a_row_decays_over_updates_of_its_own(system: str) -> None:
    recipe, (_, updates) = recipe_of(system), ROWS[system]
    assert f"row {system[1:].partition(')')[0]}:" in recipe.description
    assert recipe.training.updates == updates
    assert recipe.optimizer.schedule == "polynomial"
    assert recipe.model.initialization == "fairseq"
    assert recipe.batches.tag_is_label


def test_a_row_that_is_trained_for_longer_differs_in_its_updates_alone() -> None:
    systems = list(ROWS)
    for place in (1, 3, 5, 7, 9):
        system = systems[place]
        recipe, shorter = recipe_of(system), recipe_of(systems[place - 1])
        expected = shorter.training.model_copy(update={"updates": ROWS[system][1]})
        texts = {"name": recipe.name, "description": recipe.description}
        assert recipe == shorter.model_copy(update={**texts, "training": expected})


def test_only_row_12_of_those_assembled_routes_by_language_group() -> None:
    routers = {
        system: moe.decoder_router for system in ASSEMBLED if (moe := recipe_of(system).model.moe)
    }
    assert {system for system in routers if routers[system] == "language_group"} == {
        "(12) Enc(1)-Dec(5)"
    }
    assert set(routers) == set(ASSEMBLED)


# The plan


def test_the_plan_trains_every_row_by_its_recipe_and_translates_with_it() -> None:
    found = plan()
    systems = found.stages["evaluation"].inputs["systems"]
    assert isinstance(systems, dict)
    assert list(systems) == list(ROWS)
    for system, (recipe, _) in ROWS.items():
        trained = found.stages[trained_by(found, system)]
        assert trained.recipe == found.stages[systems[system]].recipe == recipe
        assert trained.run == ("finetune" if system in ASSEMBLED else "pretrain")
        assert 32 % trained.processes == 0


@pytest.mark.parametrize("system", ASSEMBLED)
def test_a_row_is_assembled_from_the_sources_of_table_2(system: str) -> None:
    found, decoder = plan(), ASSEMBLED[system]
    checkpoint = found.stages[trained_by(found, system)].inputs["checkpoint"]
    assert isinstance(checkpoint, str)
    sources = {"embeddings": trained_by(found, "(1) Dense")}
    sources["encoder"] = sources["embeddings"]
    if decoder is not None:
        sources["decoder"] = trained_by(found, decoder)
    assert found.stages[checkpoint].inputs == sources


def placed_small(folder: Path) -> PlacedPlan:
    """The plan as it stands, on CPU, one process a stage, with tiny models."""
    overlay = folder / "tiny.toml"
    overlay.write_text(TINY, encoding="utf-8")
    whole = plan()
    on_cpu = {
        name: stage.model_copy(update={"ds_config": "cpu_fp32"})
        for name, stage in whole.stages.items()
    }
    return place_plan(
        whole.model_copy(update={"stages": on_cpu}),
        out_dir=folder / "run",
        overlay=str(overlay),
        given={"corpus": RawPaths((folder / "raw",))},
        processes=1,
    )


def write_tree(root: Path) -> None:
    words = {"hi": "घर", "ru": "дом", "de": "Haus", "el": "σπίτι", "en": "house"}
    files = {
        f"supervised/{pair}/opus.{pair}-{split}.{code}": "".join(
            f"{words[code]} {start + number}\n" for number in range(lines)
        )
        for pair in PAIRS
        for split, start, lines in (
            ("train", 100, TRAIN_LINES[pair]),
            ("dev", 1000, 2),
            ("test", 2000, 2),
        )
        for code in pair.split("-")
    }
    files |= {
        f"zero-shot/de-ru/opus.de-ru-test.{code}": f"{words[code]} 3000\n" for code in ("de", "ru")
    }
    write(root, files)


LOADED = [
    *("pipeline.training.loop", "pipeline.translate", "pipeline.evaluate", "pipeline.upcycle"),
    *("torch._refs", "deepspeed.runtime.zero.muon.muon_optimizer"),
]
"""What takes seconds to load, and would in each of 35 stages; the last two on first use."""


def as_child(
    arguments: Sequence[str], *, processes: int, threads: int, requests: StopRequests
) -> int:
    """Run a stage in a process of its own, forked from one that has loaded its code."""
    del processes, threads, requests
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    child = context.Process(target=run_stage, args=(list(arguments[2:]),))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def run_stage(arguments: list[str]) -> None:
    sys.exit(cli.main(arguments))


@pytest.mark.timeout(300)
def test_all_rows_are_trained_translated_and_scored_on_a_small_tree(tmp_path: Path) -> None:
    write_tree(tmp_path / "raw")
    assert run_plan(placed_small(tmp_path), launcher=as_child) == 0
    run = tmp_path / "run"
    scores = open_artifact(run / "evaluation", kind="evaluation").read_json("scores.json")
    assert [system["name"] for system in scores["systems"]] == list(ROWS)
    found = plan()
    for system in ROWS:
        checkpoint = open_artifact(run / trained_by(found, system), kind="checkpoint")
        by_group = read_spec(checkpoint).language_groups is not None
        assert by_group == ("LGR" in system or "Dec(5)" in system)
    groups = open_artifact(run / "groups", kind="groups").read_json("groups.json")["groups"]
    assert len(set(groups.values())) == 4
    assert {
        one["direction"]["source"]: one["resource"]
        for one in scores["directions"]
        if one["direction"]["target"] == "en"
    } == {"de": "high", "el": "low", "hi": "low", "ru": "low"}
    zero_shot = [one["direction"] for one in scores["directions"] if one["family"] == "zero_shot"]
    assert [(one["source"], one["target"]) for one in zero_shot] == [("de", "ru"), ("ru", "de")]
