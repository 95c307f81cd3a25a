"""The estimate of memory against tensors that are really kept, and against closed forms."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fp16_on_cpu import fp16_on_cpu
from support.fronted_models import FRONTS, fronted_spec
from support.passes import passes_of
from support.process_pool import ProcessPool
from support.tiny_models import EVERYWHERE, random_batch, tiny_spec
from support.tiny_training import Inputs, make_inputs
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from pipeline.batching.batch import Batch
from pipeline.batching.settings import BatchesConfig
from pipeline.config.ds_config import ds_config_names, load_ds_config
from pipeline.config.recipe import Recipe, load_recipe, parse_overrides
from pipeline.distributed.world import World
from pipeline.errors import ConfigError
from pipeline.estimates.activations import Device, MicroBatchShape, activation_bytes
from pipeline.estimates.launches import META, LaunchCounter
from pipeline.estimates.memory import (
    MemoryEstimate,
    ZeroSettings,
    estimate,
    worst_micro_batch,
)
from pipeline.extensions.language_modules.clsr import ConditionalRouting
from pipeline.kernels.logits import summed_cross_entropy
from pipeline.kernels.noise import dropout_in
from pipeline.kernels.pointwise import dropped
from pipeline.kernels.products import Activation
from pipeline.model.building import build_model, shape_of_model
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.routing import RoutingRecord
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import FeedForward, Regularization
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Output, Transformer
from pipeline.training.engine import Engine, connect, expert_parallel_group
from pipeline.training.optim import make_optimizer
from pipeline.training.settings import LossConfig, TrainingConfig

LENGTH = 16
SENTENCES = 16
TOKENS = LENGTH * SENTENCES
TAGS = 2
VOCABULARY = 4000
DROPOUT = Regularization(dropout=0.3, attention_dropout=0.1)
NO_DROPOUT = Regularization()
MOE = MoEConfig(num_experts=8, every=2)
MOMENTS = ("exp_avg", "exp_avg_sq")
FP32 = {"zero_optimization": {"stage": 1}}
BF16 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
FP16 = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 4}}


MODULES: dict[str, dict[str, object]] = {
    "low rank": {"kind": "low_rank", "rank": 8, "within": EVERYWHERE},
    "low rank, language-wise": {"kind": "low_rank", "rank": 12, "synthesis": "language_wise"},
    "CLSR": {"kind": "clsr", "gate_width": 16},
    "CLSR*, nothing shared": {
        **{"kind": "clsr", "tables": "per_sublayer", "shared_projection": "none"}
    },
    "language experts": {"kind": "language_experts"},
}


def wide_spec(**settings: Any) -> ModelSpec:
    return tiny_spec(width=64, feed_forward_width=256, num_heads=4, **settings)


def full_batch(spec: ModelSpec, *, length: int = LENGTH, sentences: int = SENTENCES) -> Batch:
    """Sentences of one length on both sides, so that nothing is padded."""
    words = length - TAGS
    return random_batch(spec, sentences=sentences, seed=1, shortest=words, longest=words)


def kept_bytes(model: Transformer, batch: Batch) -> int:
    """Memory behind everything autograd saves in a forward pass, each storage once."""
    own = [StorageWeakRef(value.untyped_storage()) for value in model.state_dict().values()]
    kept: dict[StorageWeakRef, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in own:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(batch)
    assert output.logits_LV.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def assert_is_kept(
    spec: ModelSpec,
    batch: Batch,
    dtype: torch.dtype,
    *,
    rates: Regularization = NO_DROPOUT,
    device: Device = "cpu",
) -> MicroBatchShape:
    """Check that a forward pass keeps what the closed forms say; return its shape.

    As on a GPU, it is traced on the meta device, which has no values.
    """
    model = build_model(spec, regularization=rates, device=META if device == "cuda" else None)
    if device == "cpu":
        initialize_weights(model, seed=1)
    model.to(dtype).train()
    shape = MicroBatchShape(
        tokens=len(batch.source_N),
        length=batch.source.length,
        value=dtype.itemsize,
        device=device,
        regularization=rates,
    )
    with LaunchCounter() if device == "cuda" else nullcontext():
        kept = kept_bytes(model, batch)
    found = activation_bytes(shape_of_model(spec), shape)
    assert sum(found.values()) == pytest.approx(kept, rel=0.1)
    return shape


@pytest.mark.parametrize(
    ("dtype", "rates"),
    [(torch.float32, DROPOUT), (torch.bfloat16, DROPOUT), (torch.bfloat16, NO_DROPOUT)],
    ids=["fp32", "bf16", "bf16, no dropout"],
)
@pytest.mark.parametrize(
    "spec",
    [
        wide_spec(),
        wide_spec(activation="gelu", model={"norm": "post"}),
        wide_spec(moe=MOE),
        wide_spec(moe=MOE, groups=2),
        wide_spec(moe=MOE.model_copy(update={"dispatch": "capacity", "capacity_factor": 0.5})),
        *(wide_spec(model={"language_modules": each}) for each in MODULES.values()),
        wide_spec(activation="gelu", model={"language_modules": MODULES["language experts"]}),
    ],
    ids=[
        *("dense", "gelu post-norm", "moe", "moe_lgr", "capacity"),
        *MODULES,
        "language experts with gelu",
    ],
)
def test_a_forward_pass_keeps_what_the_closed_forms_say(
    spec: ModelSpec, rates: Regularization, dtype: torch.dtype
) -> None:
    assert_is_kept(spec, full_batch(spec), dtype, rates=rates)


class WithSharedExpert(MixtureOfExperts):
    """Experts, and a feed-forward for all tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shared = FeedForward(width=64, hidden_width=256, activation="relu")

    def forward(self, x_ND: Tensor, tokens: Tokens) -> tuple[Tensor, RoutingRecord]:
        y_ND, record = super().forward(x_ND, tokens)
        shared = self.shared(x_ND, tokens)
        assert isinstance(shared, Tensor)
        return y_ND + shared, record


@DTYPES
def test_a_layer_of_ones_own_keeps_what_it_adds_to_experts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.model.moe.layer.MixtureOfExperts", WithSharedExpert)
    spec = wide_spec(moe=MoEConfig(num_experts=8, every=1))
    assert_is_kept(spec, full_batch(spec), dtype)


@pytest.mark.parametrize("shared", ["per_sublayer", "none"])
def test_a_module_after_a_sublayer_is_measured_if_it_does_not_say_what_it_keeps(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ConditionalRouting, "kept_bytes")
    modules = {"kind": "clsr", "tables": "per_sublayer", "shared_projection": shared}
    spec = wide_spec(model={"language_modules": modules})
    assert_is_kept(spec, full_batch(spec), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.float32, "relu"), (torch.bfloat16, "relu"), (torch.bfloat16, "gelu")],
)
@pytest.mark.parametrize("modules", [None, *MODULES])
def test_a_forward_pass_on_a_gpu_keeps_what_the_estimate_says_for_any_mixture_of_languages(
    modules: str | None, activation: Activation, dtype: torch.dtype
) -> None:
    """With CUDA's attention and dropout."""
    spec = wide_spec(
        activation=activation, model={"language_modules": modules and MODULES[modules]}
    )
    batch = full_batch(spec, sentences=16 * SENTENCES).to(META)
    assert_is_kept(spec, batch, dtype, rates=DROPOUT, device="cuda")


@DTYPES
@pytest.mark.parametrize("front", FRONTS)
def test_a_forward_pass_keeps_what_the_front_is_said_to_add(front: str, dtype: torch.dtype) -> None:
    spec = fronted_spec(FRONTS[front], width=64, feed_forward_width=256)
    assert_is_kept(spec, full_batch(spec), dtype)


@DTYPES
def test_scores_are_kept_where_attention_is_not_fused(dtype: torch.dtype) -> None:
    """Four heads and 96 tokens: about as much as all the rest."""
    spec = wide_spec(max_positions=96)
    shape = assert_is_kept(spec, full_batch(spec, length=96, sentences=2), dtype)
    assert (shape.score_bytes() > 0) == (dtype == torch.bfloat16)


def make_recipe(
    model: ModelConfig | None = None,
    *,
    parallel_size: int = 1,
    tokens: int = TOKENS,
    micro_batches: int = 8,
) -> Recipe:
    return Recipe(
        name="test",
        model=model or ModelConfig(),
        batches=BatchesConfig(tokens=tokens, micro_batches=micro_batches),
        training=TrainingConfig(expert_parallel_size=parallel_size),
    )


def estimated(
    recipe: Recipe | None = None,
    *,
    processes: int = 1,
    ds_config: dict[str, Any] = FP32,
    vocabulary_size: int = 40,
    device: Device = "cpu",
) -> MemoryEstimate:
    sizes: dict[str, Any] = {"vocabulary_size": vocabulary_size, "processes": processes}
    return estimate(
        recipe or make_recipe(), num_groups=0, ds_config=ds_config, device=device, **sizes
    )


def held_by_engine(
    world: World, spec: ModelSpec, parallel_size: int, ds_config: dict[str, Any]
) -> dict[str, int]:
    """Bytes of DeepSpeed's own tensors after an update."""
    connect(world)
    model = build_model(spec, expert_parallel=expert_parallel_group(parallel_size, world=world))
    initialize_weights(model, seed=1)
    recipe = make_recipe(spec.model, parallel_size=parallel_size, micro_batches=world.size)
    with fp16_on_cpu():
        engine = Engine(
            model,
            recipe,
            world=world,
            ds_config=ds_config,
            make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
        )
    batch = full_batch(spec)
    engine.train_step(
        passes_of([batch]), total_labels=world.size * batch.num_labels, learning_rate=0.1
    )
    zero = engine._zero
    masters = list(zero.single_partition_of_fp32_groups)
    moments = [zero.optimizer.state[flat][name] for flat in masters for name in MOMENTS]
    return {
        "parameters": sum(flat.nbytes for flat in zero.bit16_groups_flat),
        "master weights": sum(flat.nbytes for flat in masters),
        "moments": sum(moment.nbytes for moment in moments),
    }


@pytest.mark.parametrize("ds_config", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("world_size", "parallel_size"), [(1, 1), (2, 1), (2, 2)])
def test_parameters_and_optimizer_state_are_as_large_as_deepspeeds(
    request: pytest.FixtureRequest, world_size: int, parallel_size: int, ds_config: dict[str, Any]
) -> None:
    spec = wide_spec(moe=MOE)
    pool: ProcessPool = request.getfixturevalue(f"pool{world_size}")
    found = pool.run(held_by_engine, spec, parallel_size, ds_config)
    recipe = make_recipe(spec.model, parallel_size=parallel_size)
    step = estimated(recipe, processes=world_size, ds_config=ds_config).phases["step"]
    for held in found:
        assert held == {name: step[name] for name in held}


def test_the_papers_dense_model_has_418_million_parameters_of_2_bytes() -> None:
    found = estimated(
        load_recipe("dense_opus100"), ds_config=load_ds_config("zero2_bf16"), vocabulary_size=64000
    )
    assert found.phases["step"]["parameters"] == 2 * (352_718_848 + 1024 * 64000)
    read = json.loads(json.dumps(found.to_json()))
    assert read["device_bytes"] == sum(read["phases"][read["peak_phase"]].values())


@pytest.mark.parametrize("stage", [1, 2])
def test_optimizer_state_is_shared_by_all_ranks(stage: int) -> None:
    ds_config = {"zero_optimization": {"stage": stage}}
    alone, shared = (
        estimated(ds_config=ds_config, processes=ranks).phases["step"] for ranks in (1, 8)
    )
    assert shared["parameters"] == pytest.approx(alone["parameters"], rel=1e-6)
    for name in ("master weights", "moments"):
        assert shared[name] == pytest.approx(alone[name] / 8, rel=1e-6)


def test_zero_2_holds_fewer_gradients_between_micro_batches_than_zero_1() -> None:
    first, second = (
        estimated(ds_config={"zero_optimization": {"stage": stage}}, processes=4).phases
        for stage in (1, 2)
    )
    assert second["backward"]["gradients"] < 0.5 * first["backward"]["gradients"]


def test_expert_parallelism_divides_experts_and_nothing_else() -> None:
    model = ModelConfig(encoder_layers=2, decoder_layers=2, moe=MOE)
    whole, spread = (
        estimated(make_recipe(model, parallel_size=size), processes=4).phases["step"]
        for size in (1, 4)
    )
    four, two = (estimated(make_recipe(model, parallel_size=n), processes=2) for n in (4, 2))
    assert four == two, "a common divisor with the ranks"
    experts = 2 * MOE.num_experts * (2 * 1024 * 4096 + 1024 + 4096)
    assert whole["parameters"] - spread["parameters"] == 4 * experts * 3 // 4
    assert spread["moments"] == pytest.approx(whole["moments"], rel=1e-6)


def test_experts_that_do_not_divide_and_unknown_types_are_refused() -> None:
    model = ModelConfig(encoder_layers=2, decoder_layers=2, moe=MoEConfig(num_experts=9))
    with pytest.raises(ConfigError, match="9 experts cannot be spread over 2 ranks"):
        estimated(make_recipe(model, parallel_size=2), processes=2)
    with pytest.raises(ConfigError, match=r'grad_accum_dtype is "fp8"\. Use fp32 or bf16'):
        estimated(ds_config={**FP32, "data_types": {"grad_accum_dtype": "fp8"}})


def test_offload_moves_the_optimizer_to_the_host() -> None:
    kept, moved = (
        estimated(processes=2, ds_config=load_ds_config(name), device="cuda")
        for name in ("zero2_bf16", "zero2_bf16_offload")
    )
    assert not kept.host
    for name in ("master weights", "moments"):
        assert moved.host[name] == kept.phases["step"][name] > 0
        assert moved.phases["step"][name] == 0
    assert moved.device_bytes < kept.device_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ds_config_names())
def test_memory_grows_with_tokens_until_activations_are_all_that_counts(
    name: str, device: Device
) -> None:
    model = ModelConfig(encoder_layers=2, decoder_layers=2, moe=MOE)
    recipes = (make_recipe(model, tokens=tokens) for tokens in (256, 2048, 65536, 131072))
    given: dict[str, Any] = {"ds_config": load_ds_config(name), "device": device}
    sizes = [estimated(recipe, **given).device_bytes for recipe in recipes]
    assert sizes == sorted(sizes)
    assert 1.5 < sizes[3] / sizes[2] < 2.0


def allocated_at_peak(run: Callable[[], object]) -> int:
    """Most bytes that tensors on CPU had at one time, as torch's profiler saw it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in events]
    return max(accumulate(sizes))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ds_config", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_loss_takes_per_logit_what_torch_allocates(
    smoothing: float, ds_config: dict[str, Any]
) -> None:
    labels_L = torch.randint(VOCABULARY, (TOKENS,))
    dtype = torch.bfloat16 if "bf16" in ds_config else torch.float32
    x_LD = torch.ones(TOKENS, 4, dtype=dtype, requires_grad=True)
    weight_VD = torch.ones(VOCABULARY, 4, dtype=dtype, requires_grad=True)

    def loss() -> Tensor:
        output = Output(F.linear(x_LD, weight_VD), ())  # keeps the logits as the model's does
        return summed_cross_entropy(
            output.logits_LV, labels_L, smoothing=smoothing, overwrites=True
        )[0]

    recipe = make_recipe(tiny_spec().model)
    recipe = recipe.model_copy(update={"loss": LossConfig(label_smoothing=smoothing)})
    found = estimated(recipe, ds_config=ds_config, vocabulary_size=VOCABULARY)
    expected = allocated_at_peak(lambda: loss().backward())
    assert found.phases["backward"]["working"] == pytest.approx(expected, rel=0.02)


def worst_shape(
    recipe: Recipe, *, device: Device = "cpu", ds_config: dict[str, Any] = FP32
) -> MicroBatchShape:
    zero = ZeroSettings.of(recipe, ds_config, processes=1)
    return worst_micro_batch(recipe, zero, device=device, processes=1)


def kept_at(shape: MicroBatchShape, length: int) -> int:
    """Bytes of the activations of sentences of one length, on a model of the shape's width."""
    spec = tiny_spec(width=512, num_heads=8, feed_forward_width=1024)
    return sum(activation_bytes(shape_of_model(spec), replace(shape, length=length)).values())


def test_long_sentences_in_16_bits_cost_scores_on_cpu_only() -> None:
    recipe = make_recipe(ModelConfig(width=512, num_heads=8), tokens=4096)
    shape = worst_shape(recipe, ds_config=BF16)
    assert shape.length == recipe.max_tokens + TAGS, "the longest that shards keep"
    assert kept_at(shape, 1024) > kept_at(shape, 32)
    shape = replace(shape, device="cuda")
    assert kept_at(shape, 1024) == kept_at(shape, 32)
    without = TrainingConfig(attention_dropout=0)
    shape = worst_shape(recipe.model_copy(update={"training": without}))
    assert kept_at(shape, 1024) == kept_at(shape, 32), "attention is fused in float32"


@pytest.mark.parametrize("processes", [1, 4])
def test_gradients_of_earlier_micro_batches_are_there_during_the_last_one(processes: int) -> None:
    ds_config = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    recipes = (make_recipe(micro_batches=count * processes) for count in (1, 2))
    once, twice = (
        estimated(recipe, processes=processes, ds_config=ds_config).phases["backward"]
        for recipe in recipes
    )
    assert twice["gradients"] - once["gradients"] == twice["parameters"]


@pytest.mark.parametrize("ds_config", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_flat_gradients_stay_in_float32_and_a_pass_adds_its_own(ds_config: dict[str, Any]) -> None:
    phases = estimated(ds_config=ds_config, processes=4).phases
    values = phases["step"]["master weights"]  # float32, of a quarter of the values
    for phase in ("backward", "step"):
        assert phases[phase]["gradients"] == 4 * values
    assert phases["reduce"]["gradients"] == 4 * values + phases["step"]["parameters"]
    assert phases["reduce"]["buckets"] == 0


@pytest.mark.parametrize(
    ("processes", "spread", "precision", "joined"), [(1, 1, BF16, 2), (8, 4, FP16, 1)]
)
def test_gradients_of_experts_exist_a_layer_at_a_time_on_a_gpu(
    processes: int, spread: int, precision: dict[str, Any], joined: int
) -> None:
    """They are added to float32 sums at once; several passes join the others before they do."""
    model = ModelConfig(encoder_layers=2, decoder_layers=2, moe=MOE)
    recipe = make_recipe(model, parallel_size=spread)
    given: dict[str, Any] = {"processes": processes, "ds_config": precision}
    kept = estimated(recipe, **given, device="cuda").phases
    layer = MOE.num_experts * (2 * 1024 * 4096 + 1024 + 4096) // spread
    values = kept["step"]["parameters"] // 2
    reduced = kept["reduce"]
    assert reduced["gradients"] == 4 * values + 2 * joined * (values - 2 * layer)
    assert reduced["working"] == 2 * layer
    assert kept["backward"]["working"] > 2 * layer, "of the last one, with all activations"
    plain = estimated(recipe, processes=processes, device="cuda").phases["reduce"]
    assert plain["gradients"] == 8 * values, "in float32 all gradients exist at once"


def test_micro_batches_that_share_a_pass_are_kept_together() -> None:
    def activations(per_pass: int, *, processes: int) -> int:
        found = estimated(
            processes=processes, ds_config={**FP32, "micro_batches_per_pass": per_pass}
        )
        return found.phases["backward"]["activations"]

    one = activations(1, processes=1)
    assert activations(3, processes=1) == pytest.approx(3 * one, rel=0.01)
    assert activations(9, processes=4) == pytest.approx(2 * one, rel=0.01), "a rank has but two"


def test_layers_that_are_computed_again_keep_their_inputs_and_the_largest_of_them() -> None:
    spec = wide_spec(moe=MOE)
    shape = MicroBatchShape(
        tokens=TOKENS, length=LENGTH, value=4, device="cpu", regularization=NO_DROPOUT
    )
    whole = activation_bytes(shape_of_model(spec), shape)
    less = activation_bytes(shape_of_model(spec), replace(shape, recomputes=True))
    layers = spec.model.encoder_layers + spec.model.decoder_layers
    assert less["inputs of layers"] == layers * TOKENS * spec.model.width * 4
    assert less["experts"] == whole["experts"] // 2, "one layer of each side has experts"
    assert less["feed-forward"] == 0, "the largest layer has experts instead"
    assert less["ends"] == whole["ends"]
    assert sum(less.values()) < sum(whole.values())


def test_what_glibc_keeps_of_freed_activations_counts_until_the_update_ends() -> None:
    few, many = (estimated(make_recipe(wide_spec().model, tokens=n)).phases for n in (64, 640))
    added = {
        part: many["backward"][part] - few["backward"][part] for part in ("activations", "working")
    }
    assert sum(added.values()) > 0
    for phase in ("reduce", "step"):
        kept = many[phase]["allocator"] - few[phase]["allocator"]
        assert kept >= sum(added.values()), phase


TINY = """
name = "tiny"
[model]
encoder_layers = 1
decoder_layers = 1
width = 16
feed_forward_width = 32
num_heads = 2
[batches]
tokens = 200
micro_batches = 1
[shards]
max_tokens = 60
[training]
updates = 300
attention_dropout = 0.1
[optimizer]
warmup_updates = 1
[logging]
every = 100
"""
WIDER = [
    *("model.encoder_layers=3", "model.decoder_layers=3", "model.width=128", "model.num_heads=4"),
    *("model.feed_forward_width=512", "batches.tokens=1500", "training.updates=12"),
]
WARM = 200
"""Updates after which memory is flat."""


@pytest.fixture(scope="module")
def many_lines(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"), lengths=(1, 60), times=100)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the largest resident memory")
@pytest.mark.parametrize(
    ("ds_config", "changes"),
    [
        ("cpu_fp32", []),
        ("cpu_bf16", []),
        ("cpu_fp32", WIDER),
        ("cpu_fp32", ["batches.tokens=64000", "training.updates=3"]),
    ],
    ids=["300 updates", "kernels of many shapes", "activations", "large blocks of logits"],
)
def test_training_on_a_cpu_takes_the_memory_that_is_estimated_and_is_soon_flat(
    many_lines: Inputs, ds_config: str, changes: list[str], tmp_path: Path
) -> None:
    """Batches of nearly as many shapes as updates, in a process of their own."""
    (tmp_path / "tiny.toml").write_text(TINY)
    command = f"{sys.executable} -m pipeline pretrain --recipe tiny.toml --out model".split()
    command += [f"--{name}={getattr(many_lines, name).directory}" for name in ("shards", "mixture")]
    command += [f"--ds-config={ds_config}", *(f"--set={change}" for change in changes)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (tmp_path / "model" / "metrics.jsonl").read_text().splitlines())
    peaks = {one["update"]: one["peak_memory_gib"] for one in lines if one["kind"] == "train"}
    recipe = load_recipe(str(tmp_path / "tiny.toml"), parse_overrides(changes))
    found = estimated(recipe, ds_config=load_ds_config(ds_config), vocabulary_size=264)
    assert found.device_bytes / 2**30 == pytest.approx(max(peaks.values()), rel=0.15)
    if WARM in peaks:
        assert max(peaks.values()) - peaks[WARM] < 0.009


@pytest.mark.parametrize("passes", [2, 3])
def test_a_loss_of_ones_own_keeps_the_activations_of_all_its_passes(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tiny_spec().model)

    def activations() -> int:
        return estimate(
            recipe, processes=1, ds_config=FP32, vocabulary_size=VOCABULARY, num_groups=0
        ).phases["backward"]["activations"]

    once = activations()
    monkeypatch.setattr("pipeline.estimates.memory.passes_of", lambda _: passes)
    assert activations() == passes * once


class OwnFeedForward(nn.Module):
    """A feed-forward with noise of its own, which keeps twice its hidden states."""

    def __init__(self, width: int, *, reads: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.site, self.reads = 0, reads
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Tensor:
        dropout = dropout_in(self, tokens.noise, site=self.site, rate=0.1)
        self.reads(hidden_NF := dropped(self.up(x_ND), dropout))
        found: Tensor = self.down(hidden_NF)
        return found


def bytes_of_own(device: Device, reads: Callable[[Tensor], object]) -> int:
    spec = wide_spec()
    model = shape_of_model(spec)
    model.encoder.layers[0].feed_forward = OwnFeedForward(64, reads=reads).to(META)
    shape = MicroBatchShape(TOKENS, LENGTH, 4, device, NO_DROPOUT)
    return activation_bytes(model, shape)["feed-forward"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_feed_forward_with_noise_of_its_own_is_estimated(device: Device) -> None:
    plain = activation_bytes(
        shape_of_model(wide_spec()), MicroBatchShape(TOKENS, LENGTH, 4, device, NO_DROPOUT)
    )
    assert bytes_of_own(device, reads=len) >= plain["feed-forward"]


@pytest.mark.parametrize(
    "read", [Tensor.nonzero, Tensor.tolist, Tensor.sum, lambda x: x.sum().item()]
)
def test_a_feed_forward_that_reads_values_is_told_what_to_do(
    read: Callable[[Tensor], object],
) -> None:
    if read is Tensor.sum:
        assert bytes_of_own("cpu", reads=read) > 0
        return
    with pytest.raises(ConfigError, match=r"^OwnFeedForward cannot.*micro_batches_per_pass"):
        bytes_of_own("cpu", reads=read)
