"""The paper's tables 2 and 3: a recipe per row, and both plans run whole on made-up pairs."""

from pathlib import Path

import pytest
from support.exported_models import own_checkpoint
from support.raw_trees import write
from support.small_plans import as_child, placed_small, write_tree

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import line_counts, resource_of
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.jobs.plan import Plan, load_plan, stage_order
from pipeline.jobs.runner import run_plan
from pipeline.languages import PAPER_GROUPS

ROWS = {
    "(1) Dense": ("dense_opus100", 100_000),
    "(2) Dense, 79 h": ("dense_opus100", 260_000),
    "(3) MoE": ("moe_opus100", 100_000),
    "(4) MoE, 158 h": ("moe_opus100", 200_000),
    "(5) MoE-LGR": ("moe_lgr_opus100", 100_000),
    "(6) MoE-LGR, 158 h": ("moe_lgr_opus100", 200_000),
    "(7) Enc(1)-Dec(rand)": ("mmnmt_moe_opus100", 100_000),
    "(8) Enc(1)-Dec(rand), 130 h": ("mmnmt_moe_opus100", 165_000),
    "(9) Enc(1)-Dec(1)": ("mmnmt_moe_opus100", 100_000),
    "(10) Enc(1)-Dec(1), 130 h": ("mmnmt_moe_opus100", 165_000),
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

FIGURES = {
    "states_dense": "(1) Dense",
    "states_moe": "(3) MoE",
    "states_mmnmt": "(7) Enc(1)-Dec(rand)",
    "experts_moe": "(4) MoE, 158 h",
    "experts_mmnmt": "(12) Enc(1)-Dec(5)",
}
"""Stage of Figure 4 (encoder states of FLORES' lines) or 6 (experts) → its system."""

SYSTEMS_OF_TABLE_3 = {
    "Dense": "dense_pc32",
    "MoE": "moe_pc32",
    "mRASP2": "dense_pc32",
    "M2M-100": "dense_pc32",
    "NLLB": "dense_pc32",
    "MMNMT (Dense)": "mmnmt_dense_pc32",
    "MMNMT (mRASP2)": "mmnmt_mrasp2_pc32",
}
FROM_ELSEWHERE = {"mRASP2": "mrasp2", "M2M-100": "m2m100", "NLLB": "nllb"}


def plan() -> Plan:
    return load_plan("opus100")


def systems_of(plan: Plan) -> dict[str, str]:
    """System of the evaluation → the stage that translates with it."""
    systems = plan.stages["evaluation"].inputs["systems"]
    assert isinstance(systems, dict)
    return systems


def recipe_of(system: str) -> Recipe:
    """The recipe that the plan trains a system by."""
    trained = plan().stages[trained_by(plan(), system)]
    return load_recipe(trained.recipe, trained.set)


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
    assert recipe.training.updates == updates
    assert recipe.optimizer.schedule == "polynomial"
    assert recipe.model.initialization == "fairseq"
    assert recipe.batches.tag_is_label


@pytest.mark.parametrize("system", ROWS)
def test_the_settings_of_a_row_are_those_of_section_5_1(system: str) -> None:
    recipe = recipe_of(system)
    model, optimizer, moe = recipe.model, recipe.optimizer, recipe.model.moe
    assert (model.encoder_layers, model.decoder_layers, model.width) == (12, 12, 1024)
    assert (model.num_heads, recipe.tokenizer.vocabulary_size) == (8, 64_000)
    assert recipe.tokenizer.model_type == "bpe"  # process_data.sh
    assert recipe.mixture.sampling_temperature == 5
    assert (optimizer.learning_rate, optimizer.betas) == (2e-4, (0.9, 0.98))
    assert (optimizer.warmup_updates, optimizer.final_learning_rate) == (4000, 1e-5)
    assert (recipe.batches.tokens, recipe.batches.micro_batches) == (4096, 8 * 4)
    assert (recipe.training.best_by, recipe.training.average_last) == ("all", 0)
    assert (moe is None) == ("Dense" in system)
    if moe is not None:
        assert (moe.num_experts, moe.top_k, moe.every) == (32, 2, 2)
        assert (moe.dispatch, moe.capacity_factor) == ("capacity", 1.25)
        assert recipe.loss.balance_weight == 0.1


@pytest.mark.parametrize("name", ["dense", "moe", "mmnmt_dense", "mmnmt_mrasp2"])
def test_the_settings_of_table_3_are_those_of_appendix_b(name: str) -> None:
    recipe = load_recipe(f"{name}_pc32")
    model, optimizer = recipe.model, recipe.optimizer
    assert (model.encoder_layers, model.decoder_layers, model.width) == (12, 12, 1024)
    assert (optimizer.learning_rate, optimizer.schedule) == (2e-4, "inverse_sqrt")
    assert (optimizer.warmup_updates, recipe.training.updates) == (4000, 100_000)
    assert recipe.training.best_by == "all"
    assert model.moe is None or recipe.loss.balance_weight == 0.1


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


def test_pc32_has_the_tiers_and_languages_of_the_paper() -> None:
    """32 pairs: 2, 16, 8 and 5 of them in the tiers (appendix B), and Mongolian's in none."""
    recipe = load_recipe("dense_pc32")
    assert len(recipe.corpus.languages) == 33
    assert set(recipe.corpus.untested) == {"eo", "mn", "mt"} < set(recipe.corpus.languages)
    thresholds = recipe.training.resource_thresholds
    lines = (99_999, 100_000, 999_999, 1_000_000, 9_999_999, 10_000_000)
    assert [resource_of(number, thresholds=thresholds) for number in lines] == [
        *("extremely_low", "low", "low", "medium", "medium", "high")
    ]
    batches = recipe.batches
    assert (batches.tokens, batches.micro_batches) == (2000, 8 * 23)


def test_the_rows_of_table_3_are_the_model_of_mrasp2_dense_or_with_experts() -> None:
    dense, moe, upcycled, theirs = (
        load_recipe(f"{name}_pc32").model
        for name in ("dense", "moe", "mmnmt_dense", "mmnmt_mrasp2")
    )
    assert (dense.num_heads, dense.positions, dense.moe) == (16, "learned", None)
    assert dense == moe.model_copy(update={"moe": None})
    assert upcycled == moe
    assert moe.moe == load_recipe("moe_opus100").model.moe
    norms = {"embedding_norm": True, "scale_embedding": False}
    assert theirs == moe.model_copy(update=norms)


def test_the_plan_of_table_3_takes_models_from_elsewhere_as_they_are() -> None:
    found = load_plan("pc32")
    assert stage_order(found) == list(found.stages)
    systems = systems_of(found)
    assert list(systems) == list(SYSTEMS_OF_TABLE_3)
    for system, recipe in SYSTEMS_OF_TABLE_3.items():
        translated = found.stages[systems[system]]
        assert translated.recipe == recipe
        checkpoint = translated.inputs["checkpoint"]
        if system in FROM_ELSEWHERE:
            assert checkpoint == f"${FROM_ELSEWHERE[system]}"
    sources = {"embeddings": "$mrasp2", "encoder": "$mrasp2", "decoder": "$mrasp2"}
    assert found.stages["assembled_mrasp2"].inputs == sources
    assert found.stages["assembled_dense"].inputs == dict.fromkeys(sources, "dense")


# Run whole


def tiers(run: Path, *, target: str) -> dict[str, str]:
    """Source → the tier of its direction into a target."""
    scores = open_artifact(run / "evaluation", kind="evaluation").read_json("scores.json")
    return {
        one["direction"]["source"]: one["resource"]
        for one in scores["directions"]
        if one["direction"]["target"] == target
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_rows_of_table_2_are_made_from_the_94_pairs(tmp_path: Path) -> None:
    languages = [code for code in load_recipe("dense_opus100").corpus.languages if code != "en"]
    lines = {code: 4 if code == "de" else 2 + (code == "ru") for code in languages}
    write_tree(tmp_path / "raw", lines=lines, validated=("hi", "ru", "de", "el"))
    zero_shot = {
        f"zero-shot/de-ru/opus.de-ru-test.{code}": f"{code} 3000\n" for code in ("de", "ru")
    }
    write(tmp_path / "raw", zero_shot)
    named = {"eng_Latn": "en", "zho_Hans": "zh", "tel_Telu": "te", "tam_Taml": "ta"}
    named |= {"afr_Latn": "af", "amh_Ethi": "am", "deu_Latn": "de", "fra_Latn": "fr"}
    named |= {"rus_Cyrl": "ru", "fin_Latn": "fi"}
    parallel = {
        f"{split}/{name}.{split}": "".join(f"{code} {line}\n" for line in range(2))
        for name, code in named.items()
        for split in ("dev", "devtest")
    }
    given = {"corpus": tmp_path / "raw", "flores": write(tmp_path / "flores", parallel)}
    placed = placed_small("opus100", tmp_path, thresholds=(2, 4), given=given)
    assert run_plan(placed, launcher=as_child) == 0
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
    others = dict.fromkeys(languages, "low")
    assert tiers(run, target="en") == others | {"de": "high", "ru": "medium"}
    assert len(scores["directions"]) == 188 + 2
    zero_shot_ways = [
        one["direction"] for one in scores["directions"] if one["family"] == "zero_shot"
    ]
    assert [(one["source"], one["target"]) for one in zero_shot_ways] == [
        *(("de", "ru"), ("ru", "de"))
    ]
    table_4 = open_artifact(run / "evaluation_zero_shot", kind="evaluation")
    averages = table_4.read_json("scores.json")["set_averages"]
    columns = {one["name"]: one["directions"] for one in averages if one["family"] == "zero_shot"}
    assert columns == {"De": 1, "Ru": 1}
    systems = [one["name"] for one in table_4.read_json("scores.json")["systems"]]
    assert systems == ["(4) MoE, 158 h", "(12) Enc(1)-Dec(5)", "(1) Dense, through English"]
    for stage, system in FIGURES.items():
        analysis = open_artifact(run / stage, kind="analysis")
        model = analysis.manifest.inputs["checkpoint"].path
        assert Path(model).name == trained_by(found, system)
        document = analysis.read_json("languages.json")
        if stage.startswith("states"):
            assert {*document["encoded"]} == {*named.values()} - {"fi"}
            assert document["parallel_lines"] == 2
        else:
            families = {one["family"] for one in document["directions"].values()}
            assert {"zero_shot", "into_pivot"} <= families
            assert "experts-zero_shot.svg" in analysis.names()
    report = table_4.file("report.md").read_text(encoding="utf-8")
    assert all(f"{system}, Figure" in report for system in FIGURES.values())


PC32 = [code for code in load_recipe("dense_pc32").corpus.languages if code != "en"]


@pytest.fixture(scope="module")
def inputs_of_table_3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Made-up text of the 32 pairs, and tiny models of mRASP2's conventions."""
    folder = tmp_path_factory.mktemp("pc32")
    counts = {"fr": 5, "de": 4, "ru": 3}
    lines = {code: counts.get(code, 2) for code in PC32}
    write_tree(folder / "raw", lines=lines, validated=("fr", "de", "ru", "af"))
    description = TokenizerDescription(
        kind="bytes", languages=tuple(sorted(["en", *PC32])), language_token_scheme="lang_tok"
    )
    given = {"corpus": folder / "raw"}
    for name in FROM_ELSEWHERE.values():
        given[name] = folder / name
        own_checkpoint(
            given[name],
            tokenizer=TokenizerFiles(description, None),
            positions="learned",
            embedding_norm=True,
            scale_embedding=False,
        )
    given["mrasp2_tokenizer"] = folder / "their_tokenizer"
    vocabulary = ["checkpoint", "import", str(given["mrasp2"]), "--tokenizer"]
    assert cli.main([*vocabulary, "--out", str(given["mrasp2_tokenizer"])]) == 0
    return given


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_rows_of_table_3_are_made_from_the_32_pairs(
    inputs_of_table_3: dict[str, Path], tmp_path: Path
) -> None:
    placed = placed_small("pc32", tmp_path, thresholds=(2, 3, 5), given=inputs_of_table_3)
    assert run_plan(placed, launcher=as_child) == 0
    run = tmp_path / "run"
    scores = open_artifact(run / "evaluation", kind="evaluation").read_json("scores.json")
    assert [system["name"] for system in scores["systems"]] == list(SYSTEMS_OF_TABLE_3)
    tested = dict.fromkeys(set(PC32) - {"eo", "mn", "mt"}, "extremely_low")
    expected = tested | {"fr": "high", "de": "medium", "ru": "low"}
    assert tiers(run, target="en") == expected
    assert len(scores["directions"]) == 2 * 29
    trained = line_counts(open_artifact(run / "shards_mrasp2", kind="shards"), "train")
    assert len(trained) == 32
    theirs = open_artifact(run / "mmnmt_mrasp2", kind="checkpoint")
    assert read_spec(theirs).model.moe is not None
    report = (run / "evaluation" / "report.md").read_text(encoding="utf-8")
    assert "extremely low up to 2, low up to 3, high from 5, medium between" in report
