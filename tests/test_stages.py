"""The table of stages: what each reads of a recipe, and which of it decides the result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.process_pool import ProcessPool, RankFailed
from support.readable_artifacts import RECIPE, stage_call

from pipeline.artifacts.artifact import InputRecord
from pipeline.cli.parser import named_paths
from pipeline.config.ds_config import ds_config_names, load_ds_config
from pipeline.config.recipe import DECIDE_NOTHING, DECIDE_WHICH_WEIGHTS, Recipe
from pipeline.config.settings import Settings
from pipeline.distributed.world import World
from pipeline.registry import STAGES
from pipeline.stage import named_path, stage_config

MODEL = """
activation converter_layers decoder_layers embedding embedding_norm encoder_layers feed_forward
feed_forward_width front initialization language_modules max_positions moe norm num_heads positions
scale_embedding width
"""
TRAINING = {
    "model": MODEL,
    "batches": "evaluation_tokens micro_batches one_direction tag_is_label tag_scheme tokens "
    "window_steps",
    "optimizer": "betas clip_norm epsilon final_learning_rate learning_rate schedule "
    "warmup_updates weight_decay",
    "loss": "balance_weight distillation label_smoothing objective router_z_weight",
    "training": "attention_dropout average_last best_by best_by_route dropout "
    "expert_output_masking moe_dropout patience router_jitter seed updates updates_of "
    "validate_every",
}
# How many lines are translated at once (tokens) decides, too: where evaluation_capacity_factor is
# set, which tokens an expert drops depends on it.
DECODING = """
alignment_layer alignments banned beam_size choose comet length_penalty max_extra_length
max_length_ratio n_best pivot precision required route router_language sampling_temperature search
seed stopping targets top_k top_p word_scores
"""
DECIDING = {
    stage: {section: {*names.split()} for section, names in sections.items()}
    for stage, sections in {
        "import_corpus": {
            "corpus": "cldr columns directions files languages max_test_lines max_train_lines "
            "max_valid_lines pivot regions source swapped_sides untested"
        },
        "import_tests": {"tests": "directions languages", "corpus": "pivot regions"},
        "add_translations": {"synthetic": "min_round_trip min_score use"},
        "clean": {
            "clean": "drop_held_out_overlap identify_languages joined_pairs "
            "max_bytes max_characters max_length_ratio",
            "corpus": "pivot",
        },
        "train_tokenizer": {
            "tokenizer": "byte_fallback character_coverage kind memory_bytes model_type "
            "normalization sample_lines sampling_temperature segmenters target_languages "
            "target_vocabulary_size vocabulary_size"
        },
        "make_shards": {"shards": "max_tokens"},
        "mix": {
            "mixture": "max_upsampling phases sampling_over sampling_temperature sampling_unit "
            "synthetic_share targets"
        },
        "group_languages": {
            "groups": "extend max_group_share method",
            "corpus": "pivot",
            "languages": "family",
        },
        "pretrain": TRAINING,
        "upcycle": {
            "model": MODEL,
            "upcycling": "graft_group_routers mask_ratio method noise_std seed",
        },
        "finetune": TRAINING,
        "translate_text": {"text": "field source", "decoding": DECODING},
        "translate": {"decoding": DECODING},
        "analyze_scales": {},
        "analyze_vectors": {
            "analysis": "directions router_languages",
            "decoding": DECODING,
            "evaluation": "bleu_tokenizer",
        },
        "analyze_languages": {},
        "analyze_lengths": {},
        "evaluate": {
            "evaluation": "baseline bleu_tokenizer language_accuracy language_sets "
            "nearest_neighbor resamples scores word_accuracy",
            "training": "resource_thresholds",
        },
        "finetune_task": {
            **TRAINING,
            "model": "language_modules",
            "mixture": "sampling_temperature",
            "tasks": "languages max_tokens",
        },
        "evaluate_task": {},
    }.items()
}
"""Stage → section → settings on which its result depends."""
BESIDE: dict[str, dict[str, set[str]]] = {
    stage: {
        "training": {
            *("checkpoint_every", "expert_parallel_size", "keep_last", "recompute_layers"),
            *("resource_thresholds", "skip_nonfinite_after"),
        }
    }
    for stage in ("pretrain", "finetune", "finetune_task")
} | {
    stage: {"decoding": {"tokens"}} for stage in ("translate", "translate_text", "analyze_vectors")
}
"""Stage → section → settings that stand in its manifest, and decide nothing."""


DS_CONFIG_DECIDING = {
    *("bf16.enabled", "communication_data_type", "data_types.grad_accum_dtype"),
    "zero_force_ds_cpu_optimizer",
    *("fp16.enabled", "fp16.hysteresis", "fp16.initial_scale_power", "fp16.loss_scale"),
    *("fp16.loss_scale_window", "fp16.min_loss_scale"),
    *("zero_optimization.offload_optimizer.device", "zero_optimization.stage"),
}
DS_CONFIG_BESIDE = {
    *("csv_monitor.enabled", "tensorboard.enabled"),
    *("zero_optimization.allgather_bucket_size", "zero_optimization.contiguous_gradients"),
    *("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.overlap_comm"),
    "zero_optimization.reduce_bucket_size",
}
"""Keys of the ds_configs that ship, by whether a model's training depends on them."""


def names_of(tree: dict[str, Any]) -> dict[str, set[str]]:
    return {section: set(settings) for section, settings in tree.items() if section != "ds_config"}


def config_of(name: str) -> dict[str, Any]:
    return stage_config(STAGES[name], recipe=Recipe(name="defaults"), ds_config="cpu_fp32")


@pytest.mark.parametrize("name", STAGES)
def test_every_setting_of_a_stage_is_named_as_deciding_its_result_or_not(name: str) -> None:
    config = config_of(name)
    assert names_of(STAGES[name].deciding(config)) == DECIDING[name]
    beside = BESIDE.get(name, {})
    assert names_of(config) == {
        section: DECIDING[name].get(section, set()) | beside.get(section, set())
        for section in {*DECIDING[name], *beside}
    }
    assert ("ds_config" in STAGES[name].deciding(config)) == STAGES[name].trains


def leaves_of(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        below = isinstance(value, dict)
        found |= leaves_of(value, f"{prefix}{name}.") if below else {prefix + name}
    return found


def deciding_keys(ds_config: dict[str, Any]) -> set[str]:
    found: dict[str, Any] = STAGES["pretrain"].deciding({"ds_config": ds_config})["ds_config"]
    return leaves_of(found)


def test_every_key_of_a_ds_config_is_named_as_deciding_a_model_or_not() -> None:
    configs = [load_ds_config(name) for name in ds_config_names()]
    assert set().union(*map(leaves_of, configs)) == DS_CONFIG_DECIDING | DS_CONFIG_BESIDE
    assert set().union(*map(deciding_keys, configs)) == DS_CONFIG_DECIDING


@pytest.mark.parametrize(
    ("section", "decides"),
    [
        ({"comms_logger": {"enabled": True, "verbose": True}}, False),
        ({"wandb": {"enabled": True, "project": "one"}}, False),
        ({"wall_clock_breakdown": True}, False),
        ({"micro_batches_per_pass": 4}, False),
        ({"zero_allow_untested_optimizer": True}, False),
        ({"communication_data_type": "fp32"}, True),
        ({"bf16": {"immediate_grad_update": True}}, True),
        ({"zero_optimization": {"round_robin_gradients": True}}, True),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, True),
        ({"not_yet_known": 1}, True),
        ({"not_yet_known": {"overlap_comm": True}}, True),
        ({"overlap_comm": True}, True),
    ],
    ids=lambda value: value if isinstance(value, bool) else json.dumps(value),
)
def test_a_key_of_a_ds_config_that_is_not_known_to_decide_nothing_decides(
    section: dict[str, Any], decides: bool
) -> None:
    assert deciding_keys(section) == (leaves_of(section) if decides else set())


@pytest.mark.parametrize("entry", [*DECIDE_NOTHING, *DECIDE_WHICH_WEIGHTS])
def test_the_settings_said_to_decide_little_are_settings(entry: str) -> None:
    section, _, setting = entry.partition(".")
    table = getattr(Recipe(name="defaults"), section)
    assert isinstance(table, Settings)
    assert setting in type(table).model_fields


@pytest.mark.parametrize("name", ["dense", "LMS, d=64", "E=4=k", "="])
@pytest.mark.parametrize("path", ["runs/dense", "/data/lr=1/x", "a\\=b"])
def test_a_plan_hands_a_name_with_an_equals_sign_to_its_stage(name: str, path: str) -> None:
    assert named_paths([named_path(name, path)], "--systems") == {name: Path(path)}


def open_on_one_rank_of_two(
    world: World, stage: str, section: str, settings: dict[str, Any], digest: str
) -> None:
    """Open the inputs of a call that has other settings, or another input, on rank 1."""
    recipe = RECIPE
    if world.rank == 1 and settings:
        part = getattr(recipe, section).model_copy(update=settings)
        recipe = recipe.model_copy(update={section: part})
    call = stage_call(stage, Path("out"), {}, recipe=recipe)
    record = InputRecord(kind="shards", path="shards", digest=digest if world.rank else "a")
    replace(call, records={"shards": record}).open_inputs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "section", "settings", "digest", "change"),
    [
        ("pretrain", "optimizer", {"learning_rate": 0.5}, "a", "optimizer.learning_rate: "),
        ("translate", "decoding", {"beam_size": 9}, "a", "decoding.beam_size: 5 → 9"),
        ("finetune", "", {}, "b", "inputs.shards: a → b"),
    ],
)
def test_a_rank_with_another_recipe_or_input_is_named_on_all_ranks(
    stage: str,
    section: str,
    settings: dict[str, Any],
    digest: str,
    change: str,
    pool2: ProcessPool,
) -> None:
    with pytest.raises(RankFailed, match=rf"Rank 1 was given other .*{change}") as caught:
        pool2.run(open_on_one_rank_of_two, stage, section, settings, digest)
    assert caught.value.by_all
    pool2.run(open_on_one_rank_of_two, stage, section, {}, "a")
