"""The open questions of docs/how-to/gpu.md, answered on one GPU in at most 25 minutes.

Every question runs in a process of its own with a time limit, so that one that fails or hangs does
not stop the others. The result says for each what was predicted and measured, or why it was not
run.

    python tests/bench/gpu.py [--only NAME] [--quick] [--demo DIR] [--json FILE] [--list]

``--json`` also writes the table as Markdown beside FILE. ``--quick`` runs small models for one
round in this process, without a GPU too: only whether the questions run. ``--list`` prints the
table of questions for the page.
"""

import argparse
import gzip
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import QUICK_ROUNDS, Options, environment, interleaved
from support.tiny_models import random_batch, tiny_model, tiny_spec

from pipeline.batching.batch import Batch
from pipeline.batching.joining import join
from pipeline.config.ds_config import ds_config_path
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.decoding.grid_search import Grids, begin_search
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.quantization import weight_dtype
from pipeline.decoding.settings import DecodingConfig
from pipeline.estimates.activations import FLOAT32, MicroBatchShape, activation_bytes
from pipeline.estimates.operators import (
    SENTENCE_LENGTH,
    Counted,
    count_decoding_step,
    count_training,
    micro_batch,
)
from pipeline.estimates.simulation import EFFICIENCY
from pipeline.estimates.step_time import DEVICES, Device, _data_sheet_of, least_time
from pipeline.kernels.logits import rows_at_a_time
from pipeline.kernels.products import meta_stands_for, padded_product
from pipeline.model.building import build_model
from pipeline.model.regularization import Regularization
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec, placeholder_spec
from pipeline.model.sublayer import compile_regions
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 25
"""Time for all questions together; their limits add up to no more."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
PAPER, SMALL = ("dense_opus100", "moe_opus100"), ("demo_dense", "demo_moe")
"""Recipes that are measured, and those of ``--quick``."""
VOCABULARY, SMALL_VOCABULARY = 64_101, 300
NOT_BY_LAUNCH = ("Memcpy", "Memset")
SYNCHRONIZED = "called a synchronizing CUDA operation"
"""Words of the warning that PyTorch gives where the host waits."""
FASTEST, SLOWEST = 1.0, 2.5
"""Measured time per least time of `mmnmt estimate`: `mmnmt simulate` assumes 1 / 0.42."""


@dataclass(frozen=True)
class Row:
    """One prediction beside its measurement; ``ratio`` is the measurement by the prediction."""

    case: str
    unit: str
    predicted: float
    measured: float
    ratio: float | None
    expected: str
    holds: bool


def row(
    case: str, unit: str, predicted: float, measured: float, *, least: float = 0.0, most: float
) -> Row:
    """Compare a measurement with ``least`` to ``most`` times its prediction."""
    return Row(
        case=case,
        unit=unit,
        predicted=float(f"{predicted:.4g}"),
        measured=float(f"{measured:.4g}"),
        ratio=round(measured / predicted, 3) if predicted else None,
        expected=f"{least:g} to {most:g}" if predicted else "0",
        holds=least * predicted <= measured <= most * predicted,
    )


@dataclass(frozen=True)
class Asked:
    """Settings of a run of questions."""

    quick: bool
    demo: Path

    @property
    def rounds(self) -> int:
        return QUICK_ROUNDS if self.quick else 10

    @property
    def recipes(self) -> list[Recipe]:
        return [load_recipe(name) for name in (SMALL if self.quick else PAPER)]

    @property
    def vocabulary_size(self) -> int:
        return SMALL_VOCABULARY if self.quick else VOCABULARY


# Models and what they do


def sheet() -> Device:
    """Return the data sheet of this GPU; without one, that of an H100."""
    found = _data_sheet_of(torch.cuda.get_device_name()) if DEVICE.type == "cuda" else None
    return found or DEVICES["h100"]


def count(step: Callable[..., Counted], recipe: Recipe, asked: Asked) -> Counted:
    """Count the operators of a step on this GPU."""
    with meta_stands_for(sheet().capability):
        return step(recipe, vocabulary_size=asked.vocabulary_size, num_groups=0)


def random_model(recipe: Recipe, asked: Asked, *, dtype: torch.dtype) -> Transformer:
    """Return a model in training, with random values that are drawn on its device."""
    spec = placeholder_spec(recipe.model, vocabulary_size=asked.vocabulary_size, num_groups=0)
    rates = Regularization.of(recipe.training)
    model = build_model(spec, regularization=rates, device=DEVICE).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def full_batch(recipe: Recipe, asked: Asked, *, seed: int = 1) -> Batch:
    """Return the micro-batch that estimates count, with random pieces."""
    generator = torch.Generator().manual_seed(seed)
    batch = micro_batch(recipe.batches.tokens)
    source_N, target_N = (
        torch.randint(4, asked.vocabulary_size, ids.shape, generator=generator)
        for ids in (batch.source_N, batch.target_N)
    )
    labels_L = target_N[batch.label_rows_L]
    return replace(batch, source_N=source_N, target_N=target_N, labels_L=labels_L).to(DEVICE)


def forward_backward(model: Transformer, batch: Batch, loss: LossConfig) -> Tensor:
    """Compute fresh gradients; return the objective."""
    model.zero_grad(set_to_none=True)
    objective = training_loss(model, batch, loss).objective
    objective.backward()
    return objective.detach()


def finish() -> None:
    """Wait until the device has done its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(asked: Asked, **contestants: Callable[[], object]) -> dict[str, float]:
    """Return the median time of each contestant until the device is done."""

    def until_done(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            work()
            finish()

        return run

    timed = {name: until_done(work) for name, work in contestants.items()}
    seconds = interleaved(timed, rounds=asked.rounds, warm_up=3)
    return {name: 1000 * statistics.median(times) for name, times in seconds.items()}


def kernels(work: Callable[[], object]) -> int:
    """Return the number of kernels that the device runs, copies and fills aside."""
    on_gpu = [ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as recorded:
        work()
        finish()
    return sum(
        event.device_type == DeviceType.CUDA and not event.name.startswith(NOT_BY_LAUNCH)
        for event in recorded.events() or ()
    )


def host_waits(work: Callable[[], object]) -> int:
    """Return how often the host waits for the device."""
    with warnings.catch_warnings(record=True) as caught, synchronizations_warned():
        warnings.simplefilter("always")
        work()
    return sum(SYNCHRONIZED in str(one.message) for one in caught)


@contextmanager
def synchronizations_warned() -> Iterator[None]:
    """Have PyTorch warn at each operator for which the host waits."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Questions to the model: they need no DeepSpeed


LOW_RANK = {"kind": "low_rank", "rank": 16, "within": "both"}
KINDS: dict[str, tuple[MoEConfig | None, int, dict[str, object] | None]] = {
    "dense": (None, 0, None),
    "experts": (MoEConfig(num_experts=4, every=1), 0, None),
    "experts with capacity": (MoEConfig(num_experts=4, every=1, dispatch="capacity"), 0, None),
    "experts by language group": (MoEConfig(num_experts=4, every=1), 2, None),
    "low-rank language modules": (None, 0, LOW_RANK),
    "CLSR": (None, 0, {"kind": "clsr"}),
    "language experts": (None, 0, {"kind": "language_experts"}),
}
"""Kind of model → experts, language groups, language modules."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDING = {"float32": 1e-3}
"""Largest relative distance of a gradient; in bfloat16, 1.5 times that of the CPU's."""


def kinds(asked: Asked) -> Iterator[Row]:
    """Compare gradients with those that the CPU computes in float32."""
    for name, (moe, groups, modules) in KINDS.items():
        spec = tiny_spec(
            moe=moe,
            groups=groups,
            vocabulary=400,
            width=64 if asked.quick else 256,
            feed_forward_width=128 if asked.quick else 1024,
            model={"language_modules": modules},
        )
        sentences = 16 if asked.quick else 128
        exact = gradient(spec, sentences=sentences, dtype=torch.float32, device=CPU)
        for word, dtype in DTYPES.items():
            on_cpu = gradient(spec, sentences=sentences, dtype=dtype, device=CPU)
            on_device = gradient(spec, sentences=sentences, dtype=dtype, device=DEVICE)
            predicted = ROUNDING.get(word) or distance(on_cpu, exact)
            most = 1.0 if word in ROUNDING else 1.5
            found = distance(on_device, exact)
            yield row(f"{name}, {word}", "relative distance", predicted, found, most=most)


def gradient(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sentences: int = 128,
    compiles: bool = False,
) -> Tensor:
    """Return the gradient of a micro-batch's loss in one piece, on the CPU."""
    model = tiny_model(spec).to(torch.bfloat16)  # weights that both types have
    model = model.to(device, dtype).train()
    if compiles:
        compile_regions(model)
    batch = random_batch(spec, sentences=sentences, seed=1, longest=30).to(device)
    forward_backward(model, batch, LossConfig(label_smoothing=0.1))
    found = [p.grad.flatten().cpu().double() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the relative distance; infinite for values that are no numbers."""
    relative = float((found - exact).norm() / exact.norm())
    return relative if relative == relative else float("inf")


def on_one_rank(recipe: Recipe) -> Recipe:
    """Return a recipe whose experts are not spread, as in the models that are measured here."""
    training = recipe.training.model_copy(update={"expert_parallel_size": 1})
    return recipe.model_copy(update={"training": training})


def launches(asked: Asked) -> Iterator[Row]:
    """Count kernels and waits of a micro-batch, beside the operators of the estimate."""
    for recipe in asked.recipes:
        model, batch = random_model(recipe, asked, dtype=torch.bfloat16), full_batch(recipe, asked)
        counted = count(count_training, on_one_rank(recipe), asked)

        def work(model: Transformer = model, batch: Batch = batch, recipe: Recipe = recipe) -> None:
            forward_backward(model, batch, recipe.loss)

        work()  # what is made once is no part of a step
        predicted = len(counted.launches)
        yield row(f"{recipe.name}, kernels", "number", predicted, kernels(work), least=0.8, most=2)
        waits = host_waits(work)
        yield row(f"{recipe.name}, host waits", "number", len(counted.host_copies), waits, most=1)


def duration(asked: Asked) -> Iterator[Row]:
    """Time the forward and backward pass beside the least time of the estimate."""
    for recipe in asked.recipes:
        model, batch = random_model(recipe, asked, dtype=torch.bfloat16), full_batch(recipe, asked)
        counted = count(count_training, on_one_rank(recipe), asked)
        least = 1000 * least_time(counted, sheet()).seconds
        loss = recipe.loss
        found = milliseconds(asked, ours=lambda: forward_backward(model, batch, loss))  # noqa: B023
        yield row(recipe.name, "milliseconds", least, found["ours"], least=FASTEST, most=SLOWEST)


def decoding(asked: Asked) -> Iterator[Row]:
    """Compare translations with the CPU's, and a step of a search with its least time."""
    model = tiny_model(tiny_spec(vocabulary=400, width=64, feed_forward_width=128)).eval()
    sources = random_sources(32, vocabulary=400)
    length = 4 if asked.quick else 20
    config = DecodingConfig(
        beam_size=4, max_length_ratio=0, max_extra_length=length, stopping="huggingface"
    )

    grids = Grids()

    @torch.inference_mode()
    def search() -> list[tuple[int, ...]]:
        # Padding is never generated, so that no sentence ends before its limit.
        begun = begin_search(model, sources, config, eos_id=model.spec.pad_id, grids=grids)
        return [found[0].tokens for found in begun.run()]

    expected = search()
    model.to(DEVICE)
    same = sum(one == other for one, other in zip(search(), expected, strict=True))
    yield row("translations as on the CPU", "number", len(expected), same, least=0.95, most=1)

    recipe = asked.recipes[0]
    dtype = weight_dtype(recipe.decoding.precision, DEVICE)
    model, grids = random_model(recipe, asked, dtype=dtype).eval(), Grids()
    sentences = max(recipe.decoding.tokens // (SENTENCE_LENGTH * recipe.decoding.beam_size), 1)
    sources = random_sources(sentences, vocabulary=asked.vocabulary_size)
    limits = {"max_length_ratio": 0.0, "max_extra_length": length, "stopping": "huggingface"}
    config = recipe.decoding.model_copy(update=limits)
    least = 1000 * least_time(count(count_decoding_step, recipe, asked), sheet()).seconds
    step = milliseconds(asked, ours=search)["ours"] / length
    case = f"{recipe.name}, step of a search"
    yield row(case, "milliseconds", least, step, least=FASTEST, most=SLOWEST)


def random_sources(sentences: int, *, vocabulary: int) -> list[Source]:
    """Return sentences of the length that estimates assume."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, (sentences, SENTENCE_LENGTH), generator=generator)
    return [Source(tokens, (2, 2), 0, 0) for tokens in ids.tolist()]


def activations(asked: Asked) -> Iterator[Row]:
    """Compare what a forward pass keeps, with logits and their gradient, with the estimate."""
    for recipe in asked.recipes:
        model, batch = random_model(recipe, asked, dtype=torch.bfloat16), full_batch(recipe, asked)
        forward_backward(model, batch, recipe.loss)  # what is made once
        model.zero_grad(set_to_none=True)
        shape = MicroBatchShape(
            tokens=len(batch.target_N),
            length=SENTENCE_LENGTH,
            value=2,
            device="cuda",
            regularization=Regularization.of(recipe.training),
        )
        vocabulary, labels = asked.vocabulary_size, batch.num_labels
        logits = shape.value * labels * vocabulary
        chunk = 3 * FLOAT32 * rows_at_a_time(labels, is_cpu=False) * vocabulary
        matrix = shape.value * vocabulary * recipe.model.width  # of padded outputs
        kept = sum(activation_bytes(model, shape).values()) + matrix + logits  # their gradient
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        terms = training_loss(model, batch, recipe.loss)
        peak = torch.cuda.max_memory_allocated() - before
        after = torch.cuda.memory_allocated() - before
        del terms
        mib = 2**20
        case = f"{recipe.name}, kept for gradients"
        yield row(case, "MiB", kept / mib, after / mib, least=0.85, most=1.1)
        case = f"{recipe.name}, largest"
        yield row(case, "MiB", (kept + logits + chunk) / mib, peak / mib, least=0.85, most=1.1)


def passes(asked: Asked) -> Iterator[Row]:
    """Time four micro-batches that share a pass beside four passes."""
    for recipe in asked.recipes:
        model = random_model(recipe, asked, dtype=torch.bfloat16)
        batches = [full_batch(recipe, asked, seed=seed) for seed in range(4)]
        joined, loss = join(batches), recipe.loss
        found = milliseconds(
            asked,
            apart=lambda: [forward_backward(model, one, loss) for one in batches],  # noqa: B023
            joined=lambda: forward_backward(model, joined, loss),  # noqa: B023
        )
        yield row(recipe.name, "milliseconds", found["apart"], found["joined"], most=1)


def vocabulary(asked: Asked) -> Iterator[Row]:
    """Time logits with a vocabulary that is padded in compute beside the plain product."""
    tokens, width = (64, 32) if asked.quick else (4096, 1024)
    shape = asked.vocabulary_size + 1, width
    weight = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    found = milliseconds(
        asked,
        plain=lambda: torch.nn.functional.linear(x, weight).sum().backward(),
        padded=lambda: padded_product(x, weight).sum().backward(),
    )
    yield row("logits and gradients", "milliseconds", found["plain"], found["padded"], most=1)


def compiled(asked: Asked) -> Iterator[Row]:
    """Compare a model with compiled regions with itself without them."""
    spec = tiny_spec(vocabulary=400, width=256, feed_forward_width=1024)
    exact = gradient(spec, dtype=torch.float32, device=CPU)
    of_plain, of_fused = (
        distance(gradient(spec, dtype=torch.bfloat16, device=DEVICE, compiles=compiles), exact)
        for compiles in (False, True)
    )
    yield row("gradients, bfloat16", "relative distance", of_plain, of_fused, most=1.2)

    recipe = asked.recipes[0]
    batch, loss = full_batch(recipe, asked), recipe.loss
    models = [random_model(recipe, asked, dtype=torch.bfloat16) for _ in range(2)]
    compile_regions(models[1])

    def plain() -> Tensor:
        return forward_backward(models[0], batch, loss)

    def fused() -> Tensor:
        return forward_backward(models[1], batch, loss)

    fused()  # compiles
    yield row("kernels", "number", kernels(plain), kernels(fused), most=0.95)
    found = milliseconds(asked, plain=plain, fused=fused)
    yield row("forward and backward", "milliseconds", found["plain"], found["fused"], most=1)


# Questions to a training stage: they need DeepSpeed and the result of `make demo`


DS_CONFIGS = ("zero1_bf16", "zero2_bf16", "zero2_fp32", "zero2_fp16")
UPDATES, FEW_UPDATES = 20, 4
PROFILED = "2:3"


def losses(asked: Asked) -> Iterator[Row]:
    """Compare losses of training under each ds_config with those of the CPU."""
    ds_configs = DS_CONFIGS if DEVICE.type == "cuda" else ("cpu_bf16",)
    with ThreadPoolExecutor() as stages:  # all at once, since nothing is timed
        on_cpu = stages.submit(pretrained, asked, "cpu_fp32", on_cpu=True)
        trained = {name: stages.submit(pretrained, asked, name) for name in ds_configs}
    predicted = mean_loss(on_cpu.result())
    for name, training in trained.items():
        found = mean_loss(training.result())
        yield row(name, "mean loss", predicted, found, least=0.98, most=1.02)


def stage(asked: Asked) -> Iterator[Row]:
    """Compare a profiled training stage with what is known about it before."""
    ds_config = "zero1_bf16" if DEVICE.type == "cuda" else "cpu_bf16"
    metrics = pretrained(asked, ds_config, "--profile", PROFILED)
    command = [*MMNMT, "memory", "--recipe", "demo_moe", "--processes", "1", "--json"]
    estimated = printed([*command, "--ds-config", ds_config, "--device", DEVICE.type])
    peak = metrics[-1]["peak_memory_gib"]
    yield row("peak memory", "GiB", estimated["device_bytes"] / 2**30, peak, least=0.7, most=1.15)
    yield update_row(metrics, number=1)
    trace = gzip.decompress(next(Path().glob("*.profile/*.json.gz")).read_bytes()).decode()
    pageable = len(re.findall(r'"name": *"Memcpy HtoD \(Pageable', trace))
    yield row("copies from memory that is not pinned", "number", 0, pageable, most=1)
    utilization = metrics[-1].get("mfu", 0.0)
    yield row("mfu, at most 1", "share", 1, utilization, least=1e-4, most=1)


def large(asked: Asked) -> Iterator[Row]:
    """Compare the share of the GPU's peak that training of MMNMT's dense model uses."""
    recipe = (SMALL if asked.quick else PAPER)[0]
    for per_pass in (1, 8):
        ds_config = json.loads(ds_config_path("zero1_bf16").read_text(encoding="utf-8"))
        path = Path(f"{per_pass}_per_pass.json")
        path.write_text(json.dumps({**ds_config, "micro_batches_per_pass": per_pass}))
        metrics = pretrained(asked, str(path), recipe=recipe, updates=5)
        found = statistics.median(entry["mfu"] for entry in metrics[1:])
        case = f"{recipe}, {per_pass} micro-batches per pass, mfu"
        yield row(case, "share", EFFICIENCY, found, least=0.8, most=2)


def ranks(asked: Asked) -> Iterator[Row]:
    """Compare two ranks that share experts with one, and with the simulation."""
    alone = mean_loss(pretrained(asked, "zero2_bf16"))
    metrics = pretrained(asked, "zero2_bf16", "--processes", "2")
    yield row("losses", "mean loss", alone, mean_loss(metrics), least=0.98, most=1.02)
    yield update_row(metrics, number=2)
    slowest = metrics[-1]["slowest_to_median"]
    yield row("slowest rank", "times the median", 1, slowest, least=1, most=1.2)


def slurm(asked: Asked) -> Iterator[Row]:
    """Compare two tasks, each of which is shown one GPU, with one process."""
    alone = mean_loss(pretrained(asked, "zero2_bf16"))
    launcher = ["srun", "--ntasks=2", "--gpus-per-task=1"]
    found = mean_loss(pretrained(asked, "zero2_bf16", launcher=launcher))
    yield row("losses", "mean loss", alone, found, least=0.98, most=1.02)


MMNMT = (sys.executable, "-m", "pipeline")


def printed(command: Sequence[str]) -> Any:
    """Return the JSON that a command prints."""
    return json.loads(subprocess.check_output(command, cwd=ROOT))


def update_row(metrics: Sequence[dict[str, Any]], *, number: int) -> Row:
    """Compare the median time of an update with its simulation on a number of GPUs."""
    name = next(known for known, device in DEVICES.items() if device == sheet())
    given = ["--nodes", "1", "--devices-per-node", str(number), "--device", name, "--json"]
    simulated = printed([*MMNMT, "simulate", "demo", "--only", "moe", *given])
    choices = simulated["stages"][0]["choices"]
    predicted = 1000 * next(one["seconds"] for one in choices if one["ranks"] == number)
    times = (entry["target_tokens"] / entry["tokens_per_second"] for entry in metrics)
    found = 1000 * statistics.median(times)
    return row("update", "milliseconds", predicted, found, least=0.5, most=2)


def pretrained(
    asked: Asked,
    ds_config: str,
    *options: str,
    recipe: str = "demo_moe",
    updates: int | None = None,
    launcher: Sequence[str] = (),
    on_cpu: bool = False,
) -> list[dict[str, Any]]:
    """Train on the demo's data without dropout; return the metrics of every update."""
    out = Path("-".join(["run", recipe, ds_config, *launcher, *options]).replace(":", "-"))
    program = ["-m", "pipeline.stages.pretrain"] if launcher else ["-m", "pipeline", "pretrain"]
    arguments = [*stage_options(asked, recipe, ds_config, updates), *options, "--out", str(out)]
    # DeepSpeed trains on a GPU that it sees, whatever the ds_config is called.
    # This process has told DeepSpeed, by the environment, that there is one.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if on_cpu else {}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": paths, **hidden}
    subprocess.run([*launcher, sys.executable, *program, *arguments], check=True, env=environ)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == "train"]


def stage_options(
    asked: Asked, recipe: str, ds_config: str, updates: int | None = None
) -> list[str]:
    """Return the options of a short training stage."""
    updates = updates or (FEW_UPDATES if asked.quick else UPDATES)
    lengths = ("training.updates", "training.validate_every", "training.checkpoint_every")
    settings = {**dict.fromkeys(lengths, updates), "logging.every": 1}
    settings |= {"training.dropout": 0, "optimizer.warmup_updates": 1}
    options = ["--recipe", recipe, "--ds-config", ds_config]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    for name in ("shards", "mixture"):
        options += [f"--{name}", str(asked.demo / name)]
    return options


def mean_loss(metrics: Sequence[dict[str, Any]]) -> float:
    """Return the mean of the updates' losses."""
    return statistics.fmean(entry["loss"] for entry in metrics)


# All of them


GPU, TWO_GPUS = "a GPU", "two GPUs"
DEEPSPEED, DEMO, SLURM = "DeepSpeed", "the demo's data", "SLURM"
STAGE = (GPU, DEEPSPEED, DEMO)
STAGE_OF_TWO = (TWO_GPUS, DEEPSPEED, DEMO)


@dataclass(frozen=True)
class Question:
    """An open question and how to answer it.

    Attributes:
        measure: yields its rows; its name is that of the question.
        needs: what the machine has to have, beside PyTorch, numpy, numba and pydantic.
        seconds: time limit.
        text: the question.
        prediction: what its figures are compared with.
        runs_on_cpu: whether ``--quick`` runs it without a GPU.
    """

    measure: Callable[[Asked], Iterator[Row]]
    needs: tuple[str, ...]
    seconds: int
    text: str
    prediction: str
    runs_on_cpu: bool = True

    @property
    def name(self) -> str:
        return self.measure.__name__

    @property
    def command(self) -> str:
        return f"python tests/bench/gpu.py --only {self.name}"

    def cells(self) -> list[str]:
        """Return its row in the page."""
        return [self.text, self.prediction, ", ".join(self.needs), f"`{self.command}`"]

    def missing(self, asked: Asked) -> str:
        """Return what this machine lacks; empty if nothing."""
        gpus = torch.cuda.device_count()
        has = {
            GPU: gpus > 0 or (asked.quick and self.runs_on_cpu),
            TWO_GPUS: gpus > 1,
            DEEPSPEED: importlib.util.find_spec("deepspeed") is not None,
            DEMO: (asked.demo / "shards").is_dir(),
            SLURM: shutil.which("srun") is not None,
        }
        return ", ".join(need for need in self.needs if not has[need])


QUESTIONS = (
    Question(
        *(kinds, (GPU,), 100),
        text="Are the gradients of every kind of model right, in float32 and bfloat16: experts, "
        "capacity, language groups, language modules?",
        prediction="those of the CPU, within rounding",
    ),
    Question(
        *(launches, (GPU,), 120),
        text="How many kernels does a micro-batch start, and does the host wait?",
        prediction="launches and copies of `mmnmt estimate`",
    ),
    Question(
        *(duration, (GPU,), 90),
        text="How long does a micro-batch take?",
        prediction="1 to 2.5 times the least time of `mmnmt estimate`",
    ),
    Question(
        *(decoding, (GPU,), 90),
        text="Are translations right, and how long does a step of a search take?",
        prediction="those of the CPU; 1 to 2.5 times the least time of `mmnmt estimate`",
    ),
    Question(
        *(activations, (GPU,), 90),
        text="How much memory does a forward pass take, the loss's chunks included?",
        prediction="the terms of `mmnmt memory`",
        runs_on_cpu=False,
    ),
    Question(
        *(passes, (GPU,), 90),
        text="How much faster are micro-batches that share a pass?",
        prediction="four passes of one micro-batch",
    ),
    Question(
        *(vocabulary, (GPU,), 60),
        text="Is a vocabulary that is padded in compute faster?",
        prediction="the product without padding",
    ),
    Question(
        *(compiled, (GPU,), 140),
        text="Do compiled regions train, and what do they save?",
        prediction="the model without them",
        runs_on_cpu=False,
    ),
    Question(
        *(losses, STAGE, 270),
        text="Are the losses of training right with `zero1_bf16`, `zero2_bf16`, `zero2_fp32` and "
        "`zero2_fp16`?",
        prediction="those of `cpu_fp32` on the CPU",
    ),
    Question(
        *(stage, STAGE, 120),
        text="Are memory, time and `mfu` of a stage plausible, and are all batches pinned?",
        prediction="`mmnmt memory`, `mmnmt simulate`; no copy from memory that is not pinned",
    ),
    Question(
        *(large, STAGE, 100),
        text="Which share of the GPU's peak does training of a dense model of width 1024 with "
        "12 + 12 layers use (`mfu`)?",
        prediction="what `mmnmt simulate` assumes",
        runs_on_cpu=False,
    ),
    Question(
        *(ranks, STAGE_OF_TWO, 100),
        text="Does expert parallelism work over NCCL, and how long does an update take?",
        prediction="the losses of one rank; `mmnmt simulate`",
    ),
    Question(
        *(slurm, (*STAGE_OF_TWO, SLURM), 120),
        text="Does every rank of a SLURM job use its own GPU?",
        prediction="the losses of one rank",
    ),
)
HEAD = ("question", "compared with", "needs", "command")


@dataclass
class Answer:
    """The rows of a question, and how its process ended."""

    command: str
    status: str
    rows: list[Row]


def rows_of(question: Question, asked: Asked) -> Iterator[Row]:
    """Answer a question in this process, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        yield from question.measure(asked)


def answer(command: Sequence[str], *, seconds: float) -> tuple[str, list[Row]]:
    """Run a process for at most ``seconds``; return how it ended, and the rows it printed.

    Its own children end with it.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            code = process.wait(seconds)
            status = "measured" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:g} seconds"
        finally:  # also if this process is asked to end
            end_with_children(process)
        out.seek(0)
        errors.seek(0)
        if status != "measured":
            said = errors.read().strip()
            print(said, file=sys.stderr)
            status += f": {said.rpartition(chr(10))[2]}"
        marked = [line.removeprefix(MARK) for line in out if line.startswith(MARK)]
    return status, [Row(**json.loads(line)) for line in marked]


def end_questions_on_request() -> None:
    """Let SIGTERM end this process by an exception, so that :func:`answer` ends its question."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and of those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


MARK = "row: "
"""First word of a line that is a row; stages print more."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def figures(answers: Sequence[Answer]) -> str:
    """Return the answers as a Markdown table."""
    head = ["question", "case", "unit", "predicted", "measured", "ratio", "expected", "holds"]
    lines = []
    for one in answers:
        for found in one.rows:
            ratio = "" if found.ratio is None else f"{found.ratio:g}"
            numbers = [f"{found.predicted:g}", f"{found.measured:g}", ratio, found.expected]
            holds = "yes" if found.holds else "**no**"
            lines.append([f"`{one.command}`", found.case, found.unit, *numbers, holds])
        if one.status != "measured":
            lines.append([f"`{one.command}`", one.status.replace("|", "/"), *[""] * 6])
    return table(head, lines)


def parsed() -> argparse.Namespace:
    names = [question.name for question in QUESTIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=names, help="one question")
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    parser.add_argument("--demo", type=Path, default=ROOT / "runs" / "demo", help="demo's result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="result file")
    parser.add_argument("--list", action="store_true", help="print the questions")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Answer the questions; return 1 if one that could run did not come to its end."""
    options = parsed()
    asked = Asked(quick=options.quick, demo=options.demo.resolve())
    if options.list:
        print(table(HEAD, [question.cells() for question in QUESTIONS]), end="")
        return 0
    chosen = [one for one in QUESTIONS if options.only in (None, one.name)]
    if options.here:
        for found in rows_of(chosen[0], asked):
            print(MARK + json.dumps(asdict(found)), flush=True)
        return 0
    end_questions_on_request()
    answers = []
    for question in chosen:
        rows: list[Row] = []
        status = "measured"
        if missing := question.missing(asked):
            status = f"not run: needs {missing}"
        elif asked.quick:
            rows += rows_of(question, asked)
        else:
            command = [sys.executable, str(Path(__file__).resolve()), "--here"]
            command += ["--only", question.name, "--demo", str(asked.demo)]
            status, rows = answer(command, seconds=question.seconds)
        answers.append(Answer(question.command, status, rows))
        print(figures(answers[-1:]), flush=True)
        if options.json is not None:  # each time, so that nothing is lost if the whole is stopped
            write(answers, asked, options.json)
    return int(any(one.status.startswith(("failed", "stopped")) for one in answers))


def write(answers: Sequence[Answer], asked: Asked, path: Path) -> None:
    """Write the result file, and its table beside it."""
    measured = Options(asked.quick, asked.rounds, torch.get_num_threads(), path)
    machine = environment(measured)
    rows = [{"command": one.command, **asdict(found)} for one in answers for found in one.rows]
    found = {**machine, "status": {one.command: one.status for one in answers}, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    path.with_suffix(".md").write_text(f"{about}\n\n{figures(answers)}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
