"""Every shipped recipe: it loads, has the paper's size, and fits every shipped ds_config."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config

from pipeline.cli.plan_commands import recipe_toml
from pipeline.config.documents import merge
from pipeline.config.ds_config import (
    SECTIONS,
    check_ranks,
    ds_config_names,
    expert_parallel_size,
    expert_parallel_sizes,
    load_ds_config,
    passes_per_update,
)
from pipeline.config.recipe import Recipe, load_recipe, recipe_names
from pipeline.config.settings import EXTRA_TOKENS
from pipeline.decoding.hypotheses import max_target_length
from pipeline.errors import ConfigError
from pipeline.jobs.plan import load_plan
from pipeline.model.parameters import count_parameters
from pipeline.model.spec import groups_of_languages
from pipeline.training.engine import merge_ds_config
from pipeline.training.settings import TrainingConfig

OVERLAYS = ("smoke",)
ONE_WAY = ("english_8k",)
"""Overlays that want subwords and a recipe of one direction: the plans of LOBEF have them."""
SYSTEMS = (
    *("ada_msha", "msc", "ncf", "wsf", "lobef_code", "one_hot"),
    *("byte_bpe_2k", "byte_bpe_4k", "characters"),
    *("subwords_3k", "subwords_32k", "subwords_64k"),
)
"""Overlays that say what the encoder's front, the embeddings or the vocabulary are."""
OF_LANGUAGES = ("words_lobef",)
"""Overlays that name languages, which a base must have."""
BASES = tuple(
    name for name in recipe_names() if name not in OVERLAYS + ONE_WAY + SYSTEMS + OF_LANGUAGES
)
ALL_RECIPES = BASES + tuple(f"{base}+{overlay}" for base in BASES for overlay in OVERLAYS)


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_every_recipe_loads_and_is_described(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    moe, size = recipe.model.moe, recipe.training.expert_parallel_size
    assert (1 if moe is None else moe.num_experts) % size == 0
    assert recipe.optimizer.warmup_updates < recipe.training.updates


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_of_bytes_is_a_recipe_on_any_body_of_bytes(system: str) -> None:
    plain = load_recipe("bytes").model_dump(exclude={"name", "description"})
    recipe = load_recipe(f"bytes+{system}")
    found = recipe.model_dump(exclude={"name", "description"})
    assert recipe.description.startswith("Overlay: ")
    differing = {section for section in plain if plain[section] != found[section]}
    assert differing in ({"model"}, {"tokenizer"}, {"tokenizer", "decoding"})
    names = {field for field in plain["model"] if plain["model"][field] != found["model"][field]}
    assert names <= {"front", "embedding"}


@pytest.mark.parametrize("name", ["bytes", "bytes_opus100", "bytes_lobef_pair+ncf"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("How are you?", "நீங்கள் எப்படி இருக்கிறீர்கள்?"),
        ("Where do you live now?", "ახლა სად ცხოვრობთ თქვენ და თქვენი ოჯახი?"),
    ],
)
def test_an_output_of_bytes_has_room_for_letters_of_three_bytes(
    name: str, source: str, target: str
) -> None:
    recipe = load_recipe(name)
    tokens, positions = len(source.encode()) + EXTRA_TOKENS, recipe.model.max_positions
    most = max_target_length(tokens, recipe.decoding, positions=positions)
    assert most > len(target.encode())


@pytest.mark.parametrize("base", BASES)
def test_an_overlay_changes_what_it_states_and_nothing_else(base: str) -> None:
    plain, laid_over, overlay = (load_recipe(n) for n in (base, f"{base}+smoke", "smoke"))
    assert laid_over.training.updates == overlay.training.updates == 20
    assert laid_over.model.width == overlay.model.width
    assert laid_over.training.seed == plain.training.seed
    assert laid_over.training.expert_parallel_size == plain.training.expert_parallel_size
    assert laid_over.training.dropout == plain.training.dropout
    assert laid_over.model.moe == plain.model.moe


def test_the_recipes_of_one_data_set_differ_only_where_they_say_so() -> None:
    dense, moe, grouped = (
        load_recipe(name).model_dump(exclude={"name", "description"})
        for name in ("dense_opus100", "moe_opus100", "moe_lgr_opus100")
    )
    assert {section for section in dense if dense[section] != moe[section]} == {"model", "training"}
    moe["model"]["moe"] |= {"decoder_router": "language_group", "num_groups": 4}
    assert moe == grouped


@pytest.mark.parametrize("vocabulary_size", [1, 64_000, 64_097])
def test_the_papers_models_have_the_papers_parameters(vocabulary_size: int) -> None:
    dense = 352_718_848 + 1024 * vocabulary_size
    expected = {
        "dense_opus100": dense,
        "moe_opus100": dense + 3_122_860_032,
        "mmnmt_moe_opus100": dense + 3_122_860_032,
        "moe_lgr_opus100": dense + 3_122_860_032 + 786_432,
        "mmnmt_opus100": dense + 3_122_860_032 + 786_432,
    }
    for name, total in expected.items():
        model = load_recipe(name).model
        num_groups = 4 if model.moe and model.moe.decoder_router == "language_group" else 0
        found = count_parameters(model, vocabulary_size=vocabulary_size, num_groups=num_groups)
        assert found["total"] == total, name


def test_parameters_are_counted_by_part() -> None:
    """12 MoE layers of 32 experts of 2 · 1024 · 4096 + 5120 parameters, of which 2 are active."""
    model = load_recipe("moe_lgr_opus100").model
    found = count_parameters(model, vocabulary_size=64_000, num_groups=4)
    expert = 2 * 1024 * 4096 + 4096 + 1024
    attention = 4 * (1024 * 1024 + 1024)
    dense, norm = expert, 2 * 1024
    assert found["embeddings"] == 64_000 * 1024
    assert found["experts"] == 12 * 32 * expert
    assert found["routers"] == 12 * 32 * 1024 + 6 * 4 * 32 * 1024
    assert found["encoder"] == 12 * (attention + 2 * norm) + 6 * dense + norm
    assert found["decoder"] == 12 * (2 * attention + 3 * norm) + 6 * dense + norm
    assert found["active"] == found["total"] - 12 * 30 * expert


def write(directory: Path, name: str, text: str) -> str:
    path = directory / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(function: Callable[[], object]) -> str:
    """The message of the ConfigError: one sentence."""
    with pytest.raises(ConfigError) as caught:
        function()
    message = str(caught.value)
    assert message[-1] in ".?"
    assert "\n" not in message
    return message


def test_a_setting_that_does_not_exist_is_refused_by_its_name(tmp_path: Path) -> None:
    for text, place in (
        ("[training]\nupdatse = 3", "'training.updatse'. Did you mean 'updates'?"),
        ("[trainnig]\nupdates = 3", "'trainnig'. Did you mean 'training'?"),
        ("[model.moe]\nnumexperts = 3", "'model.moe.numexperts'. Did you mean 'num_experts'?"),
        ("[corpus.cldr]\nzeroshot = []", "'corpus.cldr.zeroshot'. Did you mean 'zero_shot'?"),
        ("[[mixture.phases]]\nfrom_updat = 1", "'mixture.phases.0.from_updat'. Did you mean 'from"),
        (
            "[[corpus.files]]\npair = 'de-en'\npaths = ['a']\nsplt = 'train'",
            "'corpus.files.0.splt'. Did you mean 'split'?",
        ),
        ('parnt = "demo_dense"', "'parnt'. Did you mean 'parent'?"),
        ("[loss]\nfocal = 3", "'loss.focal'. Choose from objective, label_smoothing"),
    ):
        path = write(tmp_path, "wrong", text)
        assert f"there is no setting {place}" in refusal(lambda path=path: load_recipe(path))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[corpus]\nlanguages = "de"', 'corpus.languages is de. Write a list, ["de"].'),
        ('[corpus]\nlanguages = "de, en,fr"', 'Write a list, ["de", "en", "fr"].'),
        ('[decoding]\ntargets = "de,en"', 'targets is de,en. Write a list, ["de", "en"].'),
        ('[decoding]\ntargets = "de en, fr"', 'Write a list, ["de en, fr"].'),
        ("[corpus]\npivt = 1\nsorce = 2", "'pivot'? There is no setting 'corpus.sorce'. Did"),
        ('[evaluation.language_sets]\nLong = "my"', 'Long is my. Write a list, ["my"].'),
        ('[corpus]\nlanguages = " "', 'corpus.languages is "". Write a list, [].'),
        ("[decoding]\ntargets = 5", 'targets is 5. Write a list, ["5"].'),
        ("[decoding.targets]\nde = 1", "targets is {'de': 1}. Write a list."),
        ('[corpus]\nfiles = "a"', "files is a. Write it as a table, [[corpus.files]]."),
        ("[mixture]\nphases = 2", "phases is 2. Write it as a table, [[mixture.phases]]."),
        ('[corpus]\nsource = ""', 'corpus.source is "". Choose from tree, cldr, hub, tmx,'),
        ('[model]\nmoe = ""', 'model.moe is "". Write it as a table, [model.moe].'),
        ('corpus = "tmx"', "corpus is tmx. Write it as a table, [corpus]."),
        ("[corpus]\npivot = 3", "corpus.pivot is 3. Write text in quotes."),
        ("[evaluation]\nnearest_neighbor = 3", "nearest_neighbor is 3. Write true or false."),
        ('[corpus]\nsource = "mses"', "corpus.source is mses. Did you mean 'moses'?"),
        ('[corpus]\nsource = "xml"', "corpus.source is xml. Choose from tree, cldr, hub, tmx,"),
        ('[model.front]\nkind = "mcs"', "model.front.kind is mcs. Did you mean 'msc'?"),
        (
            "[model]\nfront = { kind = 'nope' }",
            "front.kind is nope. Choose from subwords, msc, msha,",
        ),
        ("[model.front]\nlayer = 1", "model.front.kind is missing. Choose from subwords, msc,"),
        (
            "[model.front]\nkind = 'msc'\nkernels = [0, 2, 3, 3]",
            ": model.front.kernels (item 2) is 2. Choose from 0, 1, 3, 5, 7, 9, 11, 13, 15.",
        ),
        ("[model.front]\nkind = 'msc'\nkernels = ['3']", '(item 1) is "3". Choose from 0, 1, 3,'),
        ("[model.front]\nkind = 'msha'\nscales = [9]", "scales (item 1) is 9. Choose a whole"),
        ("[corpus]\nfiles = [3]", "files (item 1) is 3. Write it as a table, [[corpus.files]]."),
        (
            "[[corpus.files]]\nsplit = 'train'\npair = 'de-en'\npaths = ['a', 'b', 'c']",
            "paths is ['a', 'b', 'c']. Write a list of 1 to 2 entries.",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_how_it_is_written(
    tmp_path: Path, text: str, said: str
) -> None:
    path = write(tmp_path, "wrong", text)
    assert said in refusal(lambda: load_recipe(path))


@pytest.mark.parametrize("value", ["5", "[5]", "[]", "[1, 2, 3, 4]"])
@pytest.mark.parametrize(
    ("setting", "length"),
    [
        ("training.resource_thresholds", "2 to 3 numbers, for example [200000, 500000]"),
        ("optimizer.betas", "2 numbers, for example [0.9, 0.98]"),
    ],
)
def test_a_list_of_a_wrong_length_is_refused_with_the_length_it_may_have(
    tmp_path: Path, setting: str, length: str, value: str
) -> None:
    path = write(tmp_path, "wrong", f"{setting} = {value}")
    said = refusal(lambda: load_recipe(path))
    assert said.endswith(f" {setting} is {value}. Write a list of {length}.")


@pytest.mark.parametrize(
    ("name", "nearest"), [("demo_dens", "demo_dense"), ("dense_opus100+smok", "smoke")]
)
def test_a_slip_in_the_name_of_a_recipe_is_answered_with_the_nearest(
    name: str, nearest: str
) -> None:
    assert refusal(lambda: load_recipe(name)).endswith(f". Did you mean {nearest!r}?")


def test_a_recipe_of_ones_own_needs_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "office", "")
    assert refusal(lambda: load_recipe("office")).endswith(". Did you mean 'office.toml'?")


def test_thresholds_are_inherited_with_the_corpus_that_they_describe(tmp_path: Path) -> None:
    def thresholds(text: str) -> tuple[int, ...]:
        path = write(tmp_path, "mine", f'parent = "demo_dense"\n{text}')
        return load_recipe(path).training.resource_thresholds

    default, of_the_demo = TrainingConfig().resource_thresholds, (1000, 5000)
    assert thresholds("[training]\nupdates = 600") == of_the_demo
    assert thresholds('[corpus]\nsource = "cldr"') == of_the_demo
    assert thresholds('[corpus]\nsource = "tmx"') == default
    own = '[corpus]\nsource = "tmx"\n[training]\nresource_thresholds = [5, 9]'
    assert thresholds(own) == (5, 9)
    overlay = write(tmp_path, "overlay", '[corpus]\nsource = "tmx"')
    assert load_recipe(f"demo_dense+{overlay}").training.resource_thresholds == default
    override = load_recipe("demo_dense", {"corpus": {"source": "tmx"}})
    assert override.training.resource_thresholds == default
    write(tmp_path, "child", f'parent = "{tmp_path}/mine.toml"\n[training]\nupdates = 700')
    assert load_recipe(str(tmp_path / "child.toml")).training.resource_thresholds == (5, 9)


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_what_describe_prints_is_a_recipe_with_the_same_settings(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    path = write(tmp_path, "pasted", recipe_toml(recipe))
    assert load_recipe(path).model_dump(exclude={"name"}) == recipe.model_dump(exclude={"name"})


def test_text_of_any_kind_is_described_as_toml(tmp_path: Path) -> None:
    text = """
description = "a \\"quoted\\" \\\\ line\\nand \\u007f, ü, 🙂"
[corpus]
source = "listed"
files = [{ pair = "de-en", paths = ["a.tsv"] }, { pair = "fr-en", paths = ["b.fr", "b.en"] }]
columns = { "zh_Hant" = "a column.with dots" }
[mixture]
sampling_temperature = inf
phases = [{ pairs = ["de-en"] }, { from_update = 5, sampling_temperature = 1 }]
"""
    recipe = load_recipe(write(tmp_path, "mine", text))
    pasted = load_recipe(write(tmp_path, "pasted", recipe_toml(recipe)))
    assert pasted.model_dump(exclude={"name"}) == recipe.model_dump(exclude={"name"})
    assert pasted.mixture.sampling_temperature == float("inf")
    assert pasted.corpus.columns == {"zh_Hant": "a column.with dots"}


def test_parents_lie_beside_the_recipe_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "office").mkdir()
    write(tmp_path, "base", "[training]\nupdates = 7000")
    write(tmp_path / "office", "middle", 'parent = "../base.toml"')
    write(tmp_path, "child", 'parent = "office/middle.toml"')
    for place, name in ((tmp_path, "child"), (tmp_path / "office", "../child")):
        monkeypatch.chdir(place)
        assert load_recipe(f"{name}.toml").training.updates == 7000
    write(tmp_path, "base", 'parent = "child.toml"')
    message = refusal(lambda: load_recipe("middle.toml"))
    assert "middle.toml → ../base.toml → ../child.toml → ../office/middle.toml form" in message


def test_a_missing_recipe_is_refused_with_those_there_are(tmp_path: Path) -> None:
    message = refusal(lambda: load_recipe("dense_opus200"))
    assert "'dense_opus200'" in message
    assert "dense_opus100" in message
    child = write(tmp_path, "child", 'parent = "nobody"')
    assert "There is no recipe" in refusal(lambda: load_recipe(child))
    assert "gone.toml" in refusal(lambda: load_recipe(str(tmp_path / "gone.toml")))
    links = {"loop": "loop", "one": "other", "other": "one"}
    for name, target in links.items():
        (tmp_path / f"{name}.toml").symlink_to(f"{target}.toml")
    for name in links:
        message = refusal(partial(load_recipe, str(tmp_path / f"{name}.toml")))
        assert "cannot be read (Too many levels of symbolic links)" in message


@pytest.mark.parametrize("name", ["a+b.toml", "demo_moe+b.toml"])
def test_a_file_may_have_a_plus_in_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("[training]\nseed = 7", encoding="utf-8")
    assert load_recipe(name).training.seed == 7
    Path(name).rename("b.toml")
    assert load_recipe("demo_moe+b.toml").training.seed == 7
    for missing in ("model.toml", "x/y.toml"):
        message = refusal(partial(load_recipe, f"demo_moe+{missing}"))
        assert f"mmnmt checkpoint inspect CHECKPOINT --recipe > {missing}." in message


@pytest.mark.parametrize("name", ["demo_moe+", "+smoke", "demo_moe++smoke"])
def test_a_plus_without_a_name_is_refused(name: str, tmp_path: Path) -> None:
    told = f"{name!r} has a + with no name before or after it. Write RECIPE+OVERLAY."
    assert refusal(lambda: load_recipe(name)) == told
    path = tmp_path / "plan.toml"
    path.write_text(
        f'[stages.corpus]\nrun = "import_corpus"\nrecipe = "{name}"\n', encoding="utf-8"
    )
    assert refusal(lambda: load_plan(str(path))) == told


def test_a_recipe_with_a_parent_is_no_overlay() -> None:
    message = refusal(lambda: load_recipe("dense_opus100+moe_opus100"))
    assert "'moe_opus100' has a parent" in message


def test_a_difference_replaces_values_and_keeps_the_rest_of_a_table() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 3, "c": 4}
    merged = merge(base, {"a": {"y": [5]}, "b": {"z": 6}})
    assert merged == {"a": {"x": 1, "y": [5]}, "b": {"z": 6}, "c": 4}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 3, "c": 4}


@pytest.fixture(scope="module")
def bases() -> list[Recipe]:
    return [load_recipe(name) for name in BASES]


@pytest.mark.slow
@pytest.mark.parametrize("ds_config", ds_config_names())
def test_every_recipe_merges_with_every_ds_config(bases: list[Recipe], ds_config: str) -> None:
    machine = load_ds_config(ds_config)
    assert ("bf16" in machine) == ("bf16" in ds_config)
    for recipe in bases:
        micro_batches = recipe.batches.micro_batches
        for world_size in (n for n in range(1, micro_batches + 1) if micro_batches % n == 0):
            merged = merge_ds_config(machine, recipe, world_size=world_size)
            assert merged["gradient_accumulation_steps"] * world_size == micro_batches, recipe.name
            assert merged["gradient_clipping"] == recipe.optimizer.clip_norm, recipe.name
            zero = {**machine["zero_optimization"], "contiguous_gradients": world_size > 1}
            assert merged["zero_optimization"].items() >= zero.items(), recipe.name
            assert merged.get("bf16") == machine.get("bf16"), recipe.name


def merged_with(changes: dict[str, Any], *, world_size: int = 1) -> dict[str, Any]:
    machine = {"zero_optimization": {"stage": 1}, **changes}
    return merge_ds_config(machine, load_recipe("demo_moe"), world_size=world_size)


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("train_batch_size", "batches"),
        ("train_micro_batch_size_per_gpu", "batches.tokens"),
        ("gradient_accumulation_steps", "batches.micro_batches"),
        ("gradient_clipping", "optimizer.clip_norm"),
        ("optimizer", "[optimizer]"),
        ("scheduler", "optimizer.schedule"),
        ("moe", "[model.moe]"),
        ("expert_parallel", "training.expert_parallel_size"),
    ],
)
def test_keys_the_recipe_owns_are_refused_with_the_place_they_belong(
    key: str, setting: str
) -> None:
    message = refusal(lambda: merged_with({key: 1}))
    assert repr(key) in message
    assert setting in message


def test_keys_deepspeed_would_ignore_are_refused_with_the_nearest_one() -> None:
    assert "Did you mean 'bf16'" in refusal(lambda: merged_with({"bf61": {"enabled": True}}))
    zero = {"stage": 1, "overlap_com": True}
    message = refusal(lambda: merged_with({"zero_optimization": zero}))
    assert "Did you mean 'overlap_comm'" in message


def test_any_number_of_ranks_up_to_the_micro_batches_serves_a_recipe() -> None:
    recipe = Recipe.model_validate({"name": "test", "batches": {"micro_batches": 184}})
    turns = {ranks: passes_per_update(recipe, ranks=ranks) for ranks in (1, 8, 16, 32, 64, 184)}
    assert turns == {1: 184, 8: 23, 16: 12, 32: 6, 64: 3, 184: 1}
    assert passes_per_update(recipe, ranks=16, per_pass=5) == 3
    message = refusal(lambda: passes_per_update(recipe, ranks=185))
    assert message.startswith("185 ranks are more than the 184 micro-batches of an update")
    assert "at most 184" in message


def test_ranks_that_cannot_share_the_experts_are_refused_with_the_sizes_that_can() -> None:
    def recipe(size: int) -> Recipe:
        settings = {"model": {"moe": {"num_experts": 8}}}
        return load_recipe(None, settings | {"training": {"expert_parallel_size": size}})

    check_ranks(recipe(4), ranks=12)
    assert expert_parallel_size(recipe(4), ranks=6) == 2
    check_ranks(recipe(3), ranks=4)  # their common divisor is 1
    message = refusal(lambda: check_ranks(recipe(3), ranks=12))
    assert message.startswith("8 experts cannot be spread over 3 ranks")
    assert "12 ranks can use 1, 2, 4." in message
    for size in expert_parallel_sizes(recipe(3), ranks=12):
        check_ranks(recipe(size), ranks=12)


def test_a_missing_ds_config_is_refused_with_those_there_are() -> None:
    message = refusal(lambda: load_ds_config("zero9"))
    assert "'zero9'" in message
    assert "zero1_bf16" in message


def test_a_ds_config_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text, reason in (
        ("{", "not valid JSON"),
        ("[]", "no JSON object"),
        ('{"optimizer": {}}', "sets 'optimizer', which the recipe owns"),
        ('{"gradient_clipping": 1.0}', "sets 'gradient_clipping', which the recipe owns"),
    ):
        path.write_text(text, encoding="utf-8")
        assert reason in refusal(lambda: load_ds_config(str(path)))
    path.write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    assert load_ds_config(str(path)) == {"zero_optimization": {"stage": 2}}


LANGUAGES = ("de", "en", "ja")


def test_languages_get_the_group_of_the_artifact_in_their_order() -> None:
    model = load_recipe("demo_moe_lgr").model
    groups = {"ja": 1, "de": 0, "en": 0}
    assert groups_of_languages(model, languages=LANGUAGES, groups=groups) == (0, 0, 1)
    token_router = load_recipe("demo_moe").model
    assert groups_of_languages(token_router, languages=LANGUAGES, groups=None) is None


@pytest.mark.parametrize("languages", [LANGUAGES, LANGUAGES[1:]])
def test_a_router_of_ones_own_can_have_groups(
    languages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.model.settings.GROUP_ROUTERS", ("token",))
    model = load_recipe("demo_moe").model
    groups = {"ja": 1, "de": 0, "en": 0}
    found = groups_of_languages(model, languages=languages, groups=groups)
    assert found == tuple(groups[code] for code in languages)
    assert "Name one (--groups" in refusal(
        lambda: groups_of_languages(model, languages=languages, groups=None)
    )


@pytest.mark.parametrize(
    ("recipe", "groups", "reason"),
    [
        ("demo_moe_lgr", None, "Name one (--groups, or"),
        ("demo_moe_lgr", {"de": 0, "en": 1}, "no group for ja"),
        ("demo_moe_lgr", {"de": 0, "en": 0, "ja": 0}, "1 of 1. Run group_languages on this"),
        ("demo_moe_lgr", {"de": 0, "en": 0, "ja": 2}, "2 of 3. Run group_languages on this"),
        ("moe_lgr_opus100", {"de": 0, "en": 0, "ja": 1}, "expects 4 language groups"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(
    recipe: str, groups: dict[str, int] | None, reason: str
) -> None:
    model = load_recipe(recipe).model
    message = refusal(lambda: groups_of_languages(model, languages=LANGUAGES, groups=groups))
    assert reason in message


DEEPSPEED_SECTIONS = {
    "bf16": DeepSpeedBF16Config,
    "comms_logger": CommsLoggerConfig,
    "csv_monitor": CSVConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
}


@pytest.mark.parametrize("section", DEEPSPEED_SECTIONS)
def test_the_keys_of_a_ds_configs_sections_are_deepspeeds(section: str) -> None:
    assert set(SECTIONS[section]) == set(DEEPSPEED_SECTIONS[section].model_fields)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"bf16": {"enable": True}}, "bf16 has an unknown key 'enable'. Did you mean 'enabled'?"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled is "yes". Use true or false'),
        ({"csv_monitor": {"jobname": "x"}}, "Did you mean 'job_name'?"),
        ({"csv_monitor": {"output_path": 5}}, "csv_monitor.output_path is 5. Use a text."),
        ({"wandb": {"team": None}}, "wandb.team is null. Use a text."),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "Did you mean 'grad_accum_dtype'?"),
        ({"zero_optimization": {"stage": True}}, "ZeRO stage true. Use 1 or 2"),
        *(
            (
                {"zero_optimization": {"stage": 1, "reduce_bucket_size": size}},
                "reduce_bucket_size is ",
            )
            for size in (0, -5, 10**20, "big", None, True)
        ),
    ],
)
def test_wrong_keys_and_numbers_of_a_ds_config_are_refused(
    section: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}} | section), encoding="utf-8")
    assert reason in refusal(lambda: load_ds_config(str(path)))


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [("demo_dense", 254), ("dense_iwslt14", 510), ("dense_opus100", 1022), ("bytes_lobef", 2046)],
)
def test_the_longest_sentence_follows_the_model_unless_a_recipe_sets_it(
    recipe: str, limit: int
) -> None:
    """256, 512, 1,024 and 2,048 positions, two of which are a tag's and end-of-sentence's."""
    loaded = load_recipe(recipe)
    assert loaded.max_tokens == limit
    assert loaded.sections(("shards",))["shards"]["max_tokens"] == limit


def test_a_child_with_another_model_has_its_limit_and_an_explicit_one_stays(
    tmp_path: Path,
) -> None:
    parent = 'parent = "demo_dense"\n'
    longer = write(tmp_path, "longer", parent + "[model]\nmax_positions = 512\n")
    assert load_recipe(longer).max_tokens == 510
    small = write(tmp_path, "small", parent + "[batches]\ntokens = 100\n")
    assert load_recipe(small).max_tokens == 98
    explicit = write(tmp_path, "explicit", parent + "[shards]\nmax_tokens = 1000\n")
    assert load_recipe(explicit).max_tokens == 1000


@pytest.mark.parametrize("recipe", recipe_names())
def test_no_recipe_keeps_sentences_that_its_model_refuses(recipe: str) -> None:
    loaded = load_recipe(recipe)
    assert loaded.max_tokens + 2 <= min(loaded.model.max_positions, loaded.batches.tokens)
