"""Xu et al. (2023): a recipe per row of its tables, of the paper's size, and a plan run whole."""

from pathlib import Path
from typing import Any

import pytest
from support.small_plans import TINY, as_child, placed_small, write_tree

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config import Recipe, load_recipe
from pipeline.jobs.plan import load_plan, stage_order
from pipeline.jobs.runner import run_plan
from pipeline.languages import PAPER_GROUPS
from pipeline.model.parameters import count_parameters

IWSLT14 = {
    "Naive MMT": (None, 48),
    "FD": ("language_experts", 161),
    "FD-LS": ("language_experts", 161),
    "Switch Transformer": (None, None),
    "CLSR": ("clsr", None),
    "CLSR*": ("clsr", None),
    "LMS, lang-wise": ("low_rank", 58),
    "LMS": ("low_rank", 58),
    "LMS+FD-Share": ("low_rank", 60),
    "LMS+FD-LS": ("low_rank", 60),
}
"""System → its modules, and its parameters in training by tables 1 and 2, in millions."""
OPUS15 = {
    "Naive MMT": 0,
    **{f"Switch Transformer, E={n}": e for n, e in ((4, 38), (8, 88), (12, 138), (16, 189))},
    **{f"LMS, d={d}": d for d in (4, 12, 20, 28, 36)},
    **{f"LMS, d={d}": d - 1 for d in (44, 52, 60)},
    "LMS, att only": None,
    "LMS, att+ffn": None,
}
"""System → its extra parameters by table 9, in millions; table 6 leaves out those of the decoder's
attention to the source, which its code has as we do."""
OPUS100 = {
    "Naive MMT": 242,
    "Switch Transformer": None,
    "CLSR": None,
    "LMS, lang-wise, d=64": 989,
    "LMS, d=64": 989,
    "LMS+FD-Share, d=64": 996,
    "LMS+FD-LS, d=64": 996,
    "LMS, d=16": 429,
    "LMS+FD-Share, d=16": 431,
    "LMS+FD-LS, d=16": 431,
    "LMS, d=4": 289,
}
"""System → its parameters in training by table 3, in millions."""
BIBLE8 = [
    *("plain", "LMS, pair-wise", "LMS, language-wise", "LMS + FD, shared", "LMS + FD, specific"),
    *("CLSR", "Switch", "language experts + FD, shared", "language experts + FD, specific"),
]
SYSTEMS = {
    "iwslt14": list(IWSLT14),
    "opus15": list(OPUS15),
    "opus100_lms": list(OPUS100),
    "bible8_lms": BIBLE8,
}
LANGUAGES = {"iwslt14": 9, "opus15": 16, "opus100_lms": 95, "bible8_lms": 9}


def stages_of(plan_name: str, system: str) -> tuple[str, str]:
    """The stage that translates as a system, and the one that trains it."""
    stages = load_plan(plan_name).stages
    systems = stages["evaluation"].inputs["systems"]
    assert isinstance(systems, dict)
    checkpoint = stages[systems[system]].inputs["checkpoint"]
    assert isinstance(checkpoint, str)
    return systems[system], checkpoint


def trained_recipe(plan_name: str, system: str) -> Recipe:
    return load_recipe(load_plan(plan_name).stages[stages_of(plan_name, system)[1]].recipe)


def translating_recipe(plan_name: str, system: str) -> Recipe:
    return load_recipe(load_plan(plan_name).stages[stages_of(plan_name, system)[0]].recipe)


def millions(plan_name: str, system: str) -> float:
    recipe, languages = trained_recipe(plan_name, system), LANGUAGES[plan_name]
    vocabulary = recipe.tokenizer.vocabulary_size + languages
    found = count_parameters(
        recipe.model, vocabulary_size=vocabulary, num_groups=0, num_languages=languages
    )
    return found["total"] / 1e6


def modules_of(plan_name: str, system: str) -> dict[str, Any]:
    modules = trained_recipe(plan_name, system).model.language_modules
    assert modules is not None
    return modules.model_dump()


# Rows


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_scores_the_rows_of_its_table_in_its_order(name: str) -> None:
    plan = load_plan(name)
    assert stage_order(plan) == list(plan.stages)
    systems = plan.stages["evaluation"].inputs["systems"]
    assert isinstance(systems, dict)
    assert list(systems) == SYSTEMS[name]
    corpus = trained_recipe(name, SYSTEMS[name][0]).corpus
    assert len(corpus.languages) == len(set(corpus.languages)) == LANGUAGES[name]
    assert "en" in corpus.languages


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_systems_of_a_plan_have_equal_updates_and_batches_but_switch_mixes_directions(
    name: str,
) -> None:
    first, *others = (trained_recipe(name, system) for system in SYSTEMS[name])
    for recipe in others:
        for section in ("corpus", "tokenizer", "mixture", "optimizer", "training"):
            assert getattr(recipe, section) == getattr(first, section)
        mixes = {"one_direction": False} if recipe.model.moe else {}
        assert recipe.batches == first.batches.model_copy(update=mixes)
        body = {"language_modules": None, "moe": None}
        assert recipe.model.model_copy(update=body) == first.model


@pytest.mark.parametrize("name", SYSTEMS)
def test_shared_routes_are_of_the_model_that_the_languages_routes_are_of(name: str) -> None:
    pairs = {"FD": "FD-LS", "shared": "specific"}
    for system in SYSTEMS[name]:
        is_shared = system == "FD" or system.endswith("shared") or "Share" in system
        recipe = translating_recipe(name, system)
        assert recipe.decoding.route == ("shared" if is_shared else "specific")
        if is_shared:
            assert trained_recipe(name, system).loss.objective == "fuse_distillation"
            own = pairs.get(system) or system.replace("Share", "LS").replace("shared", "specific")
            assert stages_of(name, own)[1] == stages_of(name, system)[1]


@pytest.mark.parametrize("system", IWSLT14)
def test_the_systems_of_iwslt14_are_the_papers(system: str) -> None:
    kind, size = IWSLT14[system]
    modules = trained_recipe("iwslt14", system).model.language_modules
    assert (modules and modules.kind) == kind
    if size is not None:
        assert millions("iwslt14", system) == pytest.approx(size, abs=0.6)
    if system == "LMS, lang-wise":
        assert modules_of("iwslt14", system)["synthesis"] == "language_wise"


@pytest.mark.parametrize("system", [one for one, extra in OPUS15.items() if extra is not None])
def test_the_systems_of_opus15_have_the_extra_parameters_of_table_9(system: str) -> None:
    extra = millions("opus15", system) - millions("opus15", "Naive MMT")
    assert extra == pytest.approx(OPUS15[system], abs=0.75)


def test_modules_of_table_6_stand_in_attention_in_feed_forwards_or_in_both() -> None:
    places = {
        system: modules_of("opus15", system)["within"]
        for system in ("LMS, d=20", "LMS, att only", "LMS, att+ffn")
    }
    assert list(places.values()) == ["feed_forward", "attention", "both"]
    assert {modules_of("opus15", system)["rank"] for system in places} == {20}
    projections = 4 * 20 * 16 * (512 + 512) / 1e6
    both, alone = (millions("opus15", one) for one in ("LMS, att+ffn", "LMS, d=20"))
    assert both - alone == pytest.approx((6 + 2 * 6) * projections)


@pytest.mark.parametrize("system", OPUS100)
def test_the_systems_of_opus100_have_the_parameters_of_table_3(system: str) -> None:
    size = OPUS100[system]
    if size is not None:
        assert millions("opus100_lms", system) == pytest.approx(size, abs=1)


def test_opus100_has_the_languages_that_have_test_sets() -> None:
    found = trained_recipe("opus100_lms", "Naive MMT").corpus.languages
    assert list(found) == sorted(code for codes in PAPER_GROUPS.values() for code in codes)


@pytest.mark.parametrize(
    ("name", "updates", "temperature", "micro_batches"),
    [("iwslt14", 150_000, 2, 4), ("opus15", 50_000, 5, 4), ("opus100_lms", 100_000, 5, 16)],
)
def test_training_is_the_papers(
    name: str, updates: int, temperature: float, micro_batches: int
) -> None:
    recipe = trained_recipe(name, "Naive MMT")
    assert recipe.model.initialization == "fairseq"
    optimizer, batches = recipe.optimizer, recipe.batches
    assert (recipe.training.updates, optimizer.warmup_updates) == (updates, 8000)
    assert (optimizer.learning_rate, optimizer.epsilon) == (5e-4, 1e-6)
    assert recipe.mixture.sampling_temperature == temperature
    assert (batches.tokens, batches.micro_batches, batches.one_direction) == (
        *(4096, micro_batches),
        True,
    )


# Dry


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_dry_run_names_every_stage_and_makes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path / "raw", lines={"de": 2}, validated=["de"])
    options = ["--out", str(tmp_path / "run"), "--input", f"corpus={tmp_path / 'raw'}"]
    assert cli.main(["run", name, "--dry-run", *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{stage}: would run (missing)" for stage in load_plan(name).stages]
    assert not (tmp_path / "run").exists()


def test_the_tasks_are_trained_three_times_each_and_scored_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("xlmr", "ner", "qa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x", encoding="utf-8")
    given = [f"{name}={tmp_path / name}" for name in ("xlmr", "ner", "qa")]
    assert (
        cli.main(
            ["run", "xlmr_tasks", "--dry-run", "--out", str(tmp_path / "run"), "--input", *given]
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    plan = load_plan("xlmr_tasks")
    assert printed == [f"{stage}: would run (missing)" for stage in plan.stages]
    for task, languages, size in (("ner", 24, 340), ("qa", 6, 287)):
        systems = plan.stages[f"evaluate_{task}"].inputs["systems"]
        assert isinstance(systems, dict)
        assert list(systems) == [
            f"{system}@{seed}" for system in ("plain", "LMS", "LMS+FD") for seed in (1, 2, 3)
        ]
        recipes = {name: load_recipe(plan.stages[stage].recipe) for name, stage in systems.items()}
        for name, recipe in recipes.items():
            assert recipe.training.seed == int(name.partition("@")[2])
            assert len(recipe.tasks.languages) == languages
            modules = recipe.model.language_modules
            assert (modules is None) == name.startswith("plain")
            assert (recipe.loss.objective == "fuse_distillation") == name.startswith("LMS+FD")
            if modules is not None:
                low_rank = 12 * 2 * languages * 32 * (768 + 3072) / 1e6
                assert modules.model_dump()["synthesis"] == "language_wise"
                assert 270 + low_rank == pytest.approx(size, abs=2)


# Run whole


SMALL = TINY.replace(
    "language_accuracy = false", 'language_accuracy = false\nbleu_tokenizer = "13a"'
)


@pytest.mark.timeout(300)
def test_all_rows_of_iwslt14_are_made_from_its_8_pairs(tmp_path: Path) -> None:
    languages = [code for code in load_recipe("dense_iwslt14").corpus.languages if code != "en"]
    write_tree(
        tmp_path / "raw", lines=dict.fromkeys(languages, 3), validated=("ar", "de", "he", "pl")
    )
    placed = placed_small(
        "iwslt14", tmp_path, thresholds=(2, 4), given={"corpus": tmp_path / "raw"}, tiny=SMALL
    )
    assert run_plan(placed, launcher=as_child) == 0
    run = tmp_path / "run"
    scores = open_artifact(run / "evaluation", kind="evaluation").read_json("scores.json")
    assert [system["name"] for system in scores["systems"]] == list(IWSLT14)
    assert len(scores["directions"]) == 2 * 8
    assert set(scores["wins"]["systems"]) == set(IWSLT14) - {"Naive MMT"}
    assert scores["wins"]["baseline"] == "Naive MMT"
    for system, (kind, _) in IWSLT14.items():
        translated, trained = stages_of("iwslt14", system)
        modules = read_spec(open_artifact(run / trained, kind="checkpoint")).model.language_modules
        assert (modules and modules.kind) == kind
        manifest = open_artifact(run / translated, kind="translations").manifest
        expected = translating_recipe("iwslt14", system).decoding.route
        assert manifest.config["decoding"]["route"] == expected
    report = (run / "evaluation" / "report.md").read_text(encoding="utf-8")
    assert "LMS+FD-Share" in report
