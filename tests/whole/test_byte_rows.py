"""MoCE's and LOBEF's tables: a recipe per row, and their plans on made-up text."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.raw_trees import flores, run_import, write
from support.small_plans import TINY, as_child, placed_small, write_tree
from support.stage_runs import run_stage

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction, languages, line_counts, read_lines
from pipeline.artifacts.vocabularies import ByteVocabulary
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.config.recipe import Recipe, load_recipe, parse_overrides
from pipeline.extensions.analysis import AnalysisConfig
from pipeline.extensions.byte_front_ends import AdaMshaConfig, MscConfig, NcfConfig, WsfConfig
from pipeline.jobs.plan import load_plan, stage_order
from pipeline.jobs.runner import run_plan
from pipeline.model.parameters import count_parameters

BYTES = [
    *("ted59", "opus100_bytes", "pc6", "lobef", "lobef_transfer", "lobef_domains"),
    "phrases_bytes",
]
LOBEF = ("lobef", "lobef_transfer", "lobef_domains")
MOCE = {
    "MoCE Δ5": AdaMshaConfig(max_scale=5),
    "MoCE Δ5 +lid": AdaMshaConfig(max_scale=5, language_vector=True),
    "MoCE Δ6": AdaMshaConfig(max_scale=6),
    "MoCE Δ6 +lid": AdaMshaConfig(max_scale=6, language_vector=True),
}
BODY = 44_138_496
SIDES = ("subword", "byte")
SMALL = TINY.replace("num_heads = 2", "num_heads = 8").replace(
    "encoder_layers = 2\ndecoder_layers = 2", "encoder_layers = 6\ndecoder_layers = 1"
)
"""Every front of the papers fits: eight groups of the width, fusion after up to five layers."""


def evaluations_of(plan: str) -> list[str]:
    return [name for name, stage in load_plan(plan).stages.items() if stage.run == "evaluate"]


def systems_of(plan: str, evaluation: str = "") -> dict[str, Recipe]:
    """System of an evaluation, the first, → the recipe that it is trained and translated by."""
    stages = load_plan(plan).stages
    evaluation = evaluation or evaluations_of(plan)[0]
    systems = stages[evaluation].inputs["systems"]
    assert isinstance(systems, dict)
    found = {}
    for title, translated in systems.items():
        checkpoint = stages[translated].inputs["checkpoint"]
        assert isinstance(checkpoint, str)
        trained = stages[checkpoint]
        assert trained.recipe.removesuffix("+few_shot") == stages[translated].recipe
        assert trained.set == stages[translated].set
        found[title] = load_recipe(trained.recipe, trained.set)
    return found


# Recipes


def test_all_systems_of_a_plan_differ_in_front_embeddings_and_vocabulary_alone() -> None:
    for name in BYTES:
        for evaluation in evaluations_of(name):
            systems = systems_of(name, evaluation)
            first = next(iter(systems))
            baseline = systems[first].evaluation.baseline
            named = [title for title in systems if title.partition("@")[0] == baseline]
            plain = systems[named[0] if named else first]  # MSC where bytes are not compared
            assert plain.tokenizer.kind == "bytes"
            for recipe in systems.values():
                sentences, seeds = {"tokens": plain.batches.tokens}, {"seed": plain.training.seed}
                if name == "phrases_bytes":  # equally many sentences per update, in each system
                    assert recipe.batches.model_copy(update=sentences) == plain.batches
                else:
                    assert recipe.batches == plain.batches
                assert recipe.optimizer == plain.optimizer
                assert recipe.training.model_copy(update=seeds) == plain.training
                own = {"front": recipe.model.front, "embedding": recipe.model.embedding}
                assert recipe.model == plain.model.model_copy(update=own)


def test_byte_models_of_moce_favour_long_translations_and_those_of_pieces_do_not() -> None:
    for name in set(BYTES) - set(LOBEF):
        for recipe in systems_of(name).values():
            of_characters = recipe.tokenizer.kind in ("bytes", "characters")
            assert recipe.decoding.length_penalty == (1.5 if of_characters else 1.0)
            assert recipe.decoding.beam_size == 4
            assert recipe.decoding.targets == ("en",)


def test_every_system_of_lobef_has_the_settings_of_its_paper_and_scripts() -> None:
    """§4.3, §4.6, train_byte_ncf.sh, and fairseq's defaults, which evaluate.sh leaves."""
    for name in LOBEF:
        for evaluation in evaluations_of(name):
            for title, recipe in systems_of(name, evaluation).items():
                decoding, optimizer, training = recipe.decoding, recipe.optimizer, recipe.training
                assert (decoding.beam_size, decoding.length_penalty) == (5, 1.0), title
                assert decoding.targets == ("en",)
                assert recipe.clean.max_bytes == 800
                assert recipe.max_tokens > 800  # nothing is dropped by tokens
                assert recipe.mixture.sampling_temperature == 1.5
                assert (optimizer.schedule, optimizer.learning_rate) == ("inverse_sqrt", 5e-4)
                assert (optimizer.warmup_updates, optimizer.betas) == (4000, (0.9, 0.98))
                assert (optimizer.epsilon, optimizer.weight_decay) == (1e-6, 1e-4)
                assert (recipe.loss.label_smoothing, training.dropout) == (0.1, 0.1)
                is_few = training.updates == 5000  # steps, not epochs (§4.4)
                assert training.updates_of == ("tokens" if is_few else "bytes"), title
                assert (training.patience, training.average_last) == (0, 0)
                assert recipe.batches.tokens == 7000
                assert recipe.model.max_positions == 2048
    updates = {name: load_plan_updates(name) for name in LOBEF}
    assert updates == {
        "lobef": {200_000},
        "lobef_domains": {50_000},
        "lobef_transfer": {50_000, 5000},
    }


@pytest.mark.parametrize(
    "recipe",
    [
        "bytes_lobef_pair+subwords_32k+english_8k",
        "bytes_lobef+subwords_64k+english_8k",
        "bytes_lobef_pair+byte_bpe_4k",
    ],
)
def test_a_few_lines_are_trained_on_for_5000_steps_of_every_vocabulary(recipe: str) -> None:
    training = load_recipe(f"{recipe}+few_shot").training
    assert (training.updates, training.updates_of) == (5000, "tokens")


def load_plan_updates(name: str) -> set[int]:
    """Updates of all trainings of a plan."""
    stages = load_plan(name).stages.values()
    training = [one for one in stages if one.run in ("pretrain", "finetune")]
    return {load_recipe(one.recipe, one.set).training.updates for one in training}


def test_the_settings_are_those_of_moce() -> None:
    for name, tokens in (
        ("bytes_ted59", 65_536),
        ("bytes_pc6", 65_536),
        ("bytes_opus100", 131_072),
    ):
        recipe = load_recipe(name)
        assert recipe.batches.tokens * recipe.batches.micro_batches == tokens
        optimizer, training = recipe.optimizer, recipe.training
        assert (optimizer.schedule, optimizer.learning_rate) == ("inverse_sqrt", 5e-4)
        assert (optimizer.warmup_updates, optimizer.betas) == (4000, (0.9, 0.98))
        assert (recipe.loss.label_smoothing, training.dropout) == (0.1, 0.1)
        assert (training.patience, training.validate_every, training.average_last) == (10, 5000, 5)
        assert training.checkpoint_every == 5000
        assert recipe.mixture.sampling_temperature == 1.5
        assert training.updates == (1_500_000 if name == "bytes_opus100" else 1_300_000)
        assert recipe.model.max_positions == 4096


def test_one_direction_is_trained_in_where_the_papers_train_one() -> None:
    trained = {name: next(iter(systems_of(name).values())).mixture.targets for name in BYTES}
    both_ways = {name for name, targets in trained.items() if not targets}
    assert both_ways == {"ted59", "opus100_bytes"}
    assert all(targets == ("en",) for name, targets in trained.items() if name not in both_ways)


@pytest.mark.parametrize("languages", [1, 60])
def test_every_row_has_the_parameters_of_its_paper(languages: int) -> None:
    vocabulary = ByteVocabulary.size + languages
    plain = BODY + 512 * vocabulary
    expected = {
        "bytes": plain,
        "bytes+one_hot": BODY + 3,
        "bytes+lobef_code": BODY + 512 * vocabulary,
        "bytes+msc": plain + 123_264,
        "bytes+msc kernels=[0,0,1,1,3,5,5,7]": plain + 90_496,
        "bytes+ncf": plain + 9 * 512 * 512 + 3 * 512 + 4,
        "bytes+wsf": plain,
        "bytes+ada_msha max_scale=4": plain + 65_792 + 64 * 5,
        "bytes+ada_msha": plain + 102_720 + 64 * 6,
        "bytes+ada_msha language_vector=true": plain + 102_720 + 128 * 6,
        "bytes+ada_msha max_scale=6": plain + 147_840 + 64 * 7,
    }
    for row, total in expected.items():
        name, *settings = row.split()
        overrides = parse_overrides([f"model.front.{setting}" for setting in settings])
        model = load_recipe(name, overrides).model
        found = count_parameters(model, vocabulary_size=vocabulary, num_groups=0)
        assert found["total"] == total, row


def line_of(size: int, *, letter: str, start: str) -> str:
    """The longest line of a letter that has at most so many bytes, distinct by its start."""
    return start + letter * ((size - len(start)) // len(letter.encode()))


@pytest.mark.parametrize("name", ["bytes_ted59", "bytes_opus100", "bytes_pc6"])
def test_a_line_that_fits_4096_positions_is_trained_on_in_whatever_script(
    name: str, tmp_path: Path
) -> None:
    """With its tag and end-of-sentence a line of 4,094 bytes has as many positions as the model."""
    lines = {
        f"{split}.{code}": "".join(
            f"{line_of(size, letter=letter, start=code)}\n" for size in sizes for letter in "ကa"
        )
        for split, sizes in (("train", (4094, 4097)), ("test", (90,)))
        for code in ("en", "kk")
    }
    raw = write(tmp_path / "raw" / "en-kk", lines).parent
    recipe = load_recipe(name, {"corpus": {"source": "tree", "languages": []}})
    imported = run_import("import_corpus", tmp_path / "imported", raw, recipe)
    clean = run_stage("clean", tmp_path / "clean", {"corpus": imported}, recipe)
    given = {"corpus": clean}
    given["tokenizer"] = run_stage("train_tokenizer", tmp_path / "tokenizer", given, recipe)
    shards = run_stage("make_shards", tmp_path / "shards", given, recipe)
    assert line_counts(shards, "train") == {"en-kk": 2}


SAME = ""
NCF, ROUNDED = 9 * 512 * 512 + 3 * 512 + 4, "44.3 + 2.4, each rounded before they were added"
DENSE_BYTES = BODY + 512 * (260 + 8)
NONE_GIVEN = "the paper gives no number"
LOBEF_SIZES: dict[str, tuple[int, float | None, str]] = {
    # recipe: our parameters, the paper's in millions (Table 7), why they differ
    "bytes_lobef": (DENSE_BYTES, 44.3, SAME),
    "bytes_lobef+ncf": (DENSE_BYTES + NCF, 46.7, ROUNDED),
    "bytes_lobef+wsf": (DENSE_BYTES, 44.1, "WSF adds none to Byte's 44.3: its one-hot number"),
    "bytes_lobef+one_hot": (BODY + 3, 44.1, SAME),
    "bytes_lobef+one_hot+ncf": (BODY + 3 + NCF, 46.5, SAME),
    "bytes_lobef+one_hot+wsf": (BODY + 3, 44.1, SAME),
    "bytes_lobef+subwords_32k+english_8k": (BODY + 512 * (39_996 + 8 + 8_000), 68.7, SAME),
    "bytes_lobef+subwords_64k+english_8k": (
        BODY + 512 * (71_996 + 8 + 8_000),
        None,
        "Table 7 counts 32,000 source pieces, §4.3 trains 64,000",
    ),
    "bytes_lobef+characters": (
        BODY + 512 * (64_000 + 8),
        None,
        f"{NONE_GIVEN}; ours is of the largest vocabulary that there may be",
    ),
    "bytes_lobef+byte_bpe_2k": (BODY + 512 * (2_000 + 8), None, NONE_GIVEN),
    "bytes_lobef+byte_bpe_4k": (BODY + 512 * (4_000 + 8), None, NONE_GIVEN),
}
"""Of eight languages, which have a token each."""


@pytest.mark.parametrize("name", LOBEF_SIZES)
def test_every_row_of_lobef_has_the_parameters_of_its_paper_or_a_reason(name: str) -> None:
    expected, papers, reason = LOBEF_SIZES[name]
    recipe = load_recipe(name)
    tokenizer, languages = recipe.tokenizer, len(recipe.corpus.languages)
    found = count_parameters(
        recipe.model,
        vocabulary_size=tokenizer.ids + languages,
        num_groups=0,
        output_size=tokenizer.output_ids,
    )
    assert found["total"] == expected
    if reason == SAME:
        assert round(expected / 1e6, 1) == papers
    else:
        assert papers is None or round(expected / 1e6, 1) != papers


def test_every_system_of_lobef_has_its_size_pinned() -> None:
    for plan in LOBEF:
        trained = {
            one.recipe.replace("_pair", "").replace("+words_lobef", "").partition("+few_shot")[0]
            for one in load_plan(plan).stages.values()
            if one.run in ("pretrain", "finetune")
        }
        assert trained <= LOBEF_SIZES.keys()


@pytest.mark.parametrize("layers", range(1, 6))
def test_the_layers_before_a_front_of_lobef_add_no_parameters(layers: int) -> None:
    for name, setting in (("ncf", "layers_before"), ("wsf", "layers")):
        plain = load_recipe(f"bytes_lobef+{name}").model
        found = load_recipe(f"bytes_lobef+{name}", {"model": {"front": {setting: layers}}}).model
        first, second = (
            count_parameters(model, vocabulary_size=268, num_groups=0) for model in (plain, found)
        )
        assert first["total"] == second["total"]


# Plans


@pytest.mark.parametrize("name", BYTES)
def test_stages_stand_in_the_order_in_which_they_run_and_each_is_of_use(name: str) -> None:
    found = load_plan(name)
    assert stage_order(found) == list(found.stages)
    read = {source for stage in found.stages.values() for source in stage.dependencies()}
    unread = set(found.stages) - read
    assert unread == set(evaluations_of(name))
    titles = [title for one in unread for title in systems_of(name, one)]
    assert not any("=" in title for title in titles)  # a name ends there on the command line


def test_table_3_of_moce_has_its_systems_and_so_have_the_tables_of_other_data() -> None:
    ted59 = systems_of("ted59")
    fronts = {title: recipe.model.front for title, recipe in ted59.items()}
    titles = [*(f"Transformer ({side})" for side in SIDES), "Byte-nCF", "MSC", *MOCE]
    assert list(fronts) == titles
    assert fronts["Byte-nCF"] == NcfConfig(layers_before=4)
    assert fronts["MSC"] == MscConfig(kernels=(0, 0, 3, 3, 5, 5, 7, 7))
    assert {title: fronts[title] for title in MOCE} == MOCE
    assert ted59["Transformer (subword)"].tokenizer.vocabulary_size == 32_000
    opus100 = systems_of("opus100_bytes")
    assert list(opus100) == [title for title in titles if title != "Byte-nCF"]
    assert opus100["Transformer (subword)"].tokenizer.vocabulary_size == 64_000
    assert list(systems_of("pc6")) == titles[1:]
    for other in (opus100, systems_of("pc6")):
        assert other["MSC"].model.front == MscConfig(kernels=(0, 0, 1, 1, 3, 5, 5, 7))
        assert {title: other[title].model.front for title in MOCE} == MOCE


def test_tables_5_7_and_13_of_moce_are_evaluations_of_their_own() -> None:
    top = {
        title: recipe.model.front.top_k
        for title, recipe in systems_of("ted59", "evaluation_top_k").items()
        if isinstance(recipe.model.front, AdaMshaConfig)
    }
    assert [*top.values()] == [2, 1, 3]
    of_subwords = systems_of("ted59", "evaluation_subwords")
    del of_subwords["Transformer (byte)"]
    assert {one.tokenizer.kind for one in of_subwords.values()} == {"sentencepiece"}
    assert [
        (front.max_scale, front.language_vector)
        for one in of_subwords.values()
        if isinstance(front := one.model.front, AdaMshaConfig)
    ] == [(4, False), (4, True), (5, False), (5, True)]
    low = systems_of("ted59", "evaluation_low")
    assert list(low) == [*list(systems_of("ted59"))[:6]]
    assert {len(one.corpus.languages) for one in low.values()} == {30}


def sets_of(plan: str, evaluation: str) -> set[str]:
    recipe = load_recipe(load_plan(plan).stages[evaluation].recipe)
    return set(recipe.evaluation.language_sets)


def test_every_table_of_moce_has_the_columns_of_its_sets_of_languages() -> None:
    """Tables 3, 5, 7, 8; 4, 9 and 11; 13. Table 12 names its five languages."""
    of_table_2 = {"Long", "Medium", "Short", "L.R.", "H.R.", "OPUS4"}
    for evaluation in evaluations_of("ted59"):
        low = {"Long", "Medium", "Short", "L.R.", "E.L.R."}
        expected = low if evaluation == "evaluation_low" else of_table_2
        assert sets_of("ted59", evaluation) == expected
    assert sets_of("opus100_bytes", "evaluation") == of_table_2
    assert not sets_of("pc6", "evaluation")


def test_figures_3_to_7_of_moce_are_stages() -> None:
    stages = load_plan("ted59").stages
    scales = [
        (front.max_scale, front.language_vector)
        for one in systems_of("ted59", "evaluation_scales").values()
        if isinstance(front := one.model.front, AdaMshaConfig)
    ]
    assert scales == [(4, True), (5, True), (6, True)]
    layers = [
        front
        for one in systems_of("ted59", "evaluation_layers").values()
        if isinstance(front := one.model.front, AdaMshaConfig)
    ]
    assert [front.layer for front in layers] == [0, 1, 2, 3, 4, 5]
    assert {front.model_copy(update={"layer": 0}) for front in layers} == {layers[0]}
    analyses = stages["evaluation"].inputs["analyses"]
    assert isinstance(analyses, dict)
    shown = {stages[stage].run: stages[stage].inputs for stage in analyses.values()}
    assert shown["analyze_lengths"] == {"corpus": "flores"}
    assert shown["analyze_vectors"]["without"] == "moce_5"
    recipe = load_recipe(stages["vectors"].recipe, stages["vectors"].set)
    assert recipe.section_of(AnalysisConfig).directions == ("ro-en",)
    checkpoints = [stages[stage].inputs["checkpoint"] for stage in ("scales_5", "scales_6")]
    assert checkpoints == ["moce_5_lid", "moce_6_lid"]


def test_the_tables_of_lobef_have_their_rows() -> None:
    table_3 = systems_of("lobef")
    dense = ["Subword", "Char", "Byte", "Byte-nCF", "Byte-WSF"]
    one_hot = [f"{name}, one-hot" for name in dense[2:]]
    assert list(table_3) == dense + one_hot
    assert [one.model.embedding.input for one in table_3.values()] == [
        *(["learned"] * 5 + ["one_hot_two_scales"] * 3)
    ]
    pieces = table_3["Subword"].tokenizer
    assert (pieces.model_type, pieces.vocabulary_size) == ("bpe", 64_000)
    assert (pieces.target_languages, pieces.target_vocabulary_size) == (("en",), 8_000)
    assert table_3["Byte-nCF"].model.front == NcfConfig()
    assert table_3["Byte-WSF"].model.front == WsfConfig()
    layers = [one.model.front for one in systems_of("lobef", "evaluation_ncf").values()]
    assert [one.layers_before for one in layers if isinstance(one, NcfConfig)] == [1, 2, 3, 4, 5]
    fronts = [one.model.front for one in systems_of("lobef", "evaluation_wsf").values()]
    assert sorted(one.layers for one in fronts if isinstance(one, WsfConfig)) == [1, 2, 3, 4, 5]
    for evaluation in ("evaluation", "evaluation_wsf"):
        for one in systems_of("lobef", evaluation).values():
            parts_words = one.tokenizer.segmenters.get("de") == "punctuation"
            assert parts_words == isinstance(one.model.front, WsfConfig)
    kinds = {one.tokenizer.kind for one in systems_of("lobef", "evaluation_byte_bpe").values()}
    assert kinds == {"bytes", "byte_bpe"}
    without_wsf = ["Subword", "Byte", "Byte-nCF", "Byte, one-hot", "Byte-nCF, one-hot"]
    assert list(systems_of("lobef_transfer")) == [*without_wsf, "Byte BPE, 4k"]
    for thousands in (1, 2, 3, 4):
        few = systems_of("lobef_transfer", f"evaluation_{thousands}k")
        assert list(few) == ["Subword", "Byte", "Byte-nCF"]
        corpus = load_plan("lobef_transfer").stages[f"corpus_{thousands}k"]
        lines = load_recipe(corpus.recipe, corpus.set).corpus.max_train_lines
        assert lines == 1000 * thousands
        inputs = [one.model.embedding.input for one in few.values()]
        assert inputs == ["learned", "one_hot_two_scales", "one_hot_two_scales"]
    for evaluation in ("evaluation", "evaluation_koran", "evaluation_it", "evaluation_medical"):
        assert list(systems_of("lobef_domains", evaluation)) == without_wsf


# Run

TED_COLUMNS = """
talk_name en es pt-br fr ru he ar ko zh-cn it ja zh-tw nl ro tr de vi pl pt bg el fa sr hu hr uk cs
id th sv sk sq lt da calv my sl mk fr-ca fi hy hi nb ka mn et ku gl mr zh ur eo ms az ta bn kk be eu
bs
"""
"""English, 58 other languages (MoCE, Table 3), and two columns that are none."""
TED_SPLITS = ("train", "dev", "test")


def ted59(root: Path) -> Path:
    """Tables with a column per language; not every talk is in all of them."""
    low = [code for code in load_recipe("bytes_ted59_low").corpus.languages if code != "my"]
    low = [code.lower().replace("_", "-") for code in low]
    languages = [*low, "de", "fr", "pt", "pt-br", "ro", "zh-cn", "zh-tw", "my"]
    for split, start, count in (("train", 0, 6), ("dev", 100, 2), ("test", 200, 2)):
        rows = ["\t".join(["talk_name", *languages])]
        for number in range(start, start + count):
            cells = [f"{code} {number}" for code in languages]
            rows.append(
                "\t".join([f"talk_{number}", *cells[:-1], "__NULL__" if number % 2 else cells[-1]])
            )
        write(root, {f"all_talks_{split}.tsv": "\n".join(rows) + "\n"})
    return root


def inputs_of(name: str, folder: Path) -> Mapping[str, Path]:
    """Made-up data from outside for a plan."""
    given = {key: folder / key for key in load_plan(name).inputs}
    match name:
        case "ted59":
            ted59(given["corpus"])
            codes = [*load_recipe("bytes_ted59").tests.languages, "lao_Laoo"]
            theirs = {"az": "azj", "et": "est", "fa": "pes", "ku": "kmr", "mn": "khk", "ms": "zsm"}
            write(given["flores"], flores(theirs.get(code, code) for code in codes))
        case "lobef":
            lines = dict.fromkeys(("de", "hi", "km", "lo", "ne", "ta", "te"), 4)
            write_tree(given["corpus"], lines=lines, validated=("de", "km"))
            codes = ["eng", "deu_Latn", "hin_Deva", "khm_Khmr", "lao_Laoo", "npi_Deva"]
            write(given["flores"], flores([*codes, "tam_Taml", "tel_Telu", "fra_Latn"]))
        case "lobef_transfer":
            write_tree(given["talks"], lines={"tr": 4, "az": 0}, validated=("tr",))
            write_tree(given["few"], lines={"az": 4}, validated=("az",))
        case "lobef_domains":
            write_tree(given["corpus"], lines={"de": 4}, validated=("de",))
            for key in ("koran", "it", "medical"):
                files = {f"{key}.de-en.{code}": f"{code} {key}\n" for code in ("de", "en")}
                write(given[key], files)
        case "pc6":
            lines = {"cs": 4, "kk": 2, "ro": 3, "ru": 4, "tr": 4}
            write_tree(given["corpus"], lines=lines, validated=("cs", "tr"))
        case _:
            for key in given:
                write_tree(given[key], lines={"de": 4}, validated=("de",))
    return given


def validated(run: Path, checkpoint: str) -> set[str]:
    """Directions of the last validation of a training."""
    text = (run / checkpoint / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    return set([one for one in records if one["kind"] == "validation"][-1]["directions"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_rows_of_pc6_are_trained_validated_and_tested_into_english(tmp_path: Path) -> None:
    given = inputs_of("pc6", tmp_path / "raw")
    placed = placed_small("pc6", tmp_path, thresholds=(2, 4), given=given, tiny=SMALL)
    assert run_plan(placed, launcher=as_child) == 0
    run = tmp_path / "run"
    scores = open_artifact(run / "evaluation", kind="evaluation").read_json("scores.json")
    assert [one["name"] for one in scores["systems"]] == list(systems_of("pc6"))
    into = {f"{code}-en" for code in ("cs", "kk", "ro", "ru", "tr")}
    found = {str(Direction(**one["direction"])) for one in scores["directions"]}
    assert found == into
    assert validated(run, "moce_5_lid") == {"cs-en", "tr-en"}
    front = read_spec(open_artifact(run / "moce_6_lid", kind="checkpoint")).model.front
    assert front == MOCE["MoCE Δ6 +lid"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_row_of_the_low_resource_table_reads_its_languages_of_the_table_of_talks(
    tmp_path: Path,
) -> None:
    given = inputs_of("ted59", tmp_path / "raw")
    tiny = SMALL.replace("[corpus]\nlanguages = []\n", "")
    placed = placed_small(
        *("ted59", tmp_path),
        thresholds=(2, 4),
        given=given,
        wanted=["translate_moce_5_lid_low"],
        tiny=tiny.replace("checkpoint_every = 2", "checkpoint_every = 1"),
    )
    assert run_plan(placed, launcher=as_child) == 0
    run = tmp_path / "run"
    codes = [code for code in load_recipe("bytes_ted59_low").corpus.languages if code != "en"]
    lines = line_counts(open_artifact(run / "corpus_low", kind="corpus"), "train")
    expected = {Direction(code, "en").pair: 6 for code in codes}
    assert lines == expected | {"en-my": 3}
    corpus = open_artifact(run / "corpus_low", kind="corpus")
    french = read_lines(corpus, "train", "en-fr_CA", "fr_CA")
    assert french[0] == "fr-ca 0"
    translations = open_artifact(run / "translate_moce_5_lid_low", kind="translations")
    into = {f"{code}-en" for code in codes}
    assert set(translations.statistics["directions"]) == into
    assert validated(run, "moce_5_lid_low") == into | {f"en-{code}" for code in codes}
    model = open_artifact(run / "moce_5_lid_low", kind="checkpoint")
    assert model.statistics["averaged_updates"] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_figures_3_4_and_7_are_drawn_by_the_plan(tmp_path: Path) -> None:
    given = inputs_of("ted59", tmp_path / "raw")
    placed = placed_small(
        *("ted59", tmp_path),
        thresholds=(2, 4),
        given=given,
        wanted=["lengths", "scales_5", "vectors"],
        tiny=SMALL.replace("checkpoint_every = 2", "checkpoint_every = 1"),
    )
    assert run_plan(placed, launcher=as_child) == 0
    run = tmp_path / "run"
    lengths = open_artifact(run / "lengths", kind="analysis").read_json("lengths.json")
    assert set(lengths["order"]) == set(load_recipe("bytes_ted59").tests.languages)
    scales = open_artifact(run / "scales_5", kind="analysis").read_json("scales.json")
    assert {"en-et", "en-my", "en-zh"} <= set(scales["pairs"])
    vectors = open_artifact(run / "vectors", kind="analysis").read_json("vectors.json")
    assert set(vectors["directions"]) == {"ro-en"}
    assert vectors["directions"]["ro-en"]["without"] is not None


def test_all_59_languages_of_the_table_of_talks_are_languages_of_their_own(tmp_path: Path) -> None:
    columns = TED_COLUMNS.split()
    row = "\t".join(f"{code} text" for code in columns)
    files = {f"all_talks_{split}.tsv": "\t".join(columns) + f"\n{row}\n" for split in TED_SPLITS}
    recipe = load_recipe("bytes_ted59")
    raw = write(tmp_path / "raw", files)
    corpus = run_import("import_corpus", tmp_path / "corpus", raw, recipe)
    assert len(corpus.statistics["pairs"]) == 58
    assert all(set(one.values()) == {1} for one in corpus.statistics["pairs"].values())
    assert len(languages(corpus)) == 59
    regional = {"fr_CA": "fr-ca", "pt_BR": "pt-br", "zh_CN": "zh-cn", "zh_TW": "zh-tw"}
    for code in languages(corpus):
        if code != "en":
            [line] = read_lines(corpus, "test", Direction(code, "en").pair, code)
            assert line == f"{regional.get(code, code)} text"
    low = load_recipe("bytes_ted59_low").corpus.languages
    assert set(low) < set(languages(corpus))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_language_is_translated_before_a_line_of_it_is_trained_on_and_after_a_few(
    tmp_path: Path,
) -> None:
    given = inputs_of("lobef_transfer", tmp_path / "raw")
    placed = placed_small(
        *("lobef_transfer", tmp_path),
        thresholds=(2, 4),
        given=given,
        wanted=["translate_ncf", "translate_one_hot_ncf_2k"],
        tiny=SMALL.replace("width = 16", "width = 288"),
    )
    assert run_plan(placed, launcher=as_child) == 0
    for name in ("translate_ncf", "translate_one_hot_ncf_2k"):
        translations = open_artifact(tmp_path / "run" / name, kind="translations")
        assert list(translations.statistics["directions"]) == ["az-en", "tr-en"]
    few = open_artifact(tmp_path / "run" / "one_hot_ncf_2k", kind="checkpoint")
    assert few.manifest.inputs["checkpoint"].digest
    assert validated(tmp_path / "run", "one_hot_ncf_2k") == {"az-en"}
    assert validated(tmp_path / "run", "one_hot_ncf") == {"tr-en"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_subwords_of_seven_languages_are_translated_into_those_of_english(tmp_path: Path) -> None:
    given = inputs_of("lobef", tmp_path / "raw")
    sizes = 'kind = "sentencepiece", vocabulary_size = 55, target_vocabulary_size = 26'
    placed = placed_small(
        *("lobef", tmp_path),
        thresholds=(2, 4),
        given=given,
        wanted=["translate_subwords"],
        tiny=SMALL.replace('kind = "bytes"', sizes),
    )
    assert run_plan(placed, launcher=as_child) == 0
    run = tmp_path / "run"
    spec = read_spec(open_artifact(run / "subwords", kind="checkpoint"))
    assert (spec.vocabulary_size, spec.output_size) == (55 + 26 - 4 + 8, 26)
    translations = open_artifact(run / "translate_subwords", kind="translations")
    assert set(translations.statistics["directions"]) == {
        f"{code}-en" for code in ("de", "hi", "km", "lo", "ne", "ta", "te")
    }
