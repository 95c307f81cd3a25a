"""Steps of models of the papers' sizes, and how their time, kernels and values are measured.

Each entry point of mmnmt that ``gpu.py`` measures is called in one function here.
"""

import gc
import json
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from gpu_goals import NOT_MEASURED
from ratios import DEVICE, finish, interleaved
from support.passes import passes_of
from support.tiny_models import EOS_ID, random_examples
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pipeline.batching.batch import Batch, Example, collate
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.distributed.world import World, distributed_world
from pipeline.estimates.devices import peak_operations
from pipeline.model.building import build_model
from pipeline.model.parameters import OPERATIONS_PER_PARAMETER, count_multiplied
from pipeline.model.spec import placeholder_spec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer

ROOT = Path(__file__).resolve().parents[2]
BFLOAT16 = torch.bfloat16
TOKENS_OF_25 = f"decoding.tokens={25 * 5 * 32}"
"""The setting for 25 sentences of 32 tokens with 5 beams in a batch."""


@dataclass(frozen=True)
class Asked:
    """Sizes of a run: those of the papers, or tiny ones."""

    quick: bool
    demo: Path

    @property
    def dense(self) -> Recipe:
        return load_recipe("demo_dense" if self.quick else "dense_opus100")

    @property
    def experts(self) -> Recipe:
        recipe = load_recipe("demo_moe" if self.quick else "moe_opus100")
        return changed(recipe, "training", expert_parallel_size=1)

    @property
    def vocabulary(self) -> int:
        return 300 if self.quick else 64_101

    @property
    def pairs(self) -> int:
        """Sentence pairs of a micro-batch of 4,096 tokens."""
        return 4 if self.quick else 128


def changed(recipe: Recipe, section: str, **values: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def random_model(recipe: Recipe, asked: Asked, *, dtype: torch.dtype = BFLOAT16) -> Transformer:
    """Return a model in training, with random values that are drawn on its device."""
    sizes = {"vocabulary_size": asked.vocabulary, "num_groups": 0, "num_languages": 4}
    rates = Regularization.of(recipe.training)
    spec = placeholder_spec(recipe.model, **sizes)
    model = build_model(spec, regularization=rates, device=DEVICE).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def examples_of(model: Transformer, pairs: int, *, seed: int = 1) -> list[Example]:
    """Return sentence pairs of 31 or 32 tokens."""
    return random_examples(model.spec, sentences=pairs, seed=seed, shortest=29, longest=30)


def full_batches(model: Transformer, asked: Asked, number: int) -> list[Batch]:
    """Return full micro-batches of random sentences."""
    each = (examples_of(model, asked.pairs, seed=seed) for seed in range(number))
    return [collate(examples, eos_id=EOS_ID).to(DEVICE) for examples in each]


def repeated(work: Callable[[], object], times: int) -> None:
    """Do a work some times without waiting for the device."""
    for _ in range(times):
        work()


def operations(model: Transformer, batches: Sequence[Batch]) -> float:
    """Return the floating-point operations of training on the real tokens of batches."""
    met = count_multiplied(model.spec)
    return OPERATIONS_PER_PARAMETER * sum(
        met.source * batch.num_source_tokens + met.target * batch.num_labels for batch in batches
    )


def utilization(model: Transformer, batches: Sequence[Batch], took: float) -> float | str:
    """Return the share of the card's peak that training on batches needs, or why it is unknown."""
    if (most := peak()) is None:
        return f"{NOT_MEASURED}: the peak of {card_name()} is not known"
    return operations(model, batches) / took / most


def peak() -> float | None:
    """Return the card's floating-point operations per second in bfloat16; None if not known."""
    return peak_operations(load_ds_config("zero1_bf16"))


def updates(model: Transformer, recipe: Recipe, batches: Sequence[Batch]) -> Callable[[], object]:
    """Return an update by mmnmt's engine, 32k tokens a pass."""
    from pipeline.training.engine import Engine, connect
    from pipeline.training.optim import make_optimizer

    world = opened_world()
    connect(world)
    ds_config = load_ds_config("zero1_bf16" if DEVICE.type == "cuda" else "cpu_bf16")
    engine = Engine(
        model,
        changed(recipe, "batches", micro_batches=len(batches)),
        world=world,
        ds_config={**ds_config, "micro_batches_per_pass": 8},
        make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
    )
    return partial(
        engine.train_step,
        passes_of(batches, per_pass=engine.per_pass),
        total_labels=sum(batch.num_labels for batch in batches),
        learning_rate=1e-4,
    )


@cache
def estimates(recipe: str, vocabulary: int) -> dict[str, tuple[float, float]]:
    """Return launches, and milliseconds of the kernels, of a training pass and a decoding step."""
    card = card_name().lower()
    device = next((name for name in ("a100", "h200") if name in card), "h100")
    sets = ("training.expert_parallel_size=1", "decoding.precision=bfloat16", TOKENS_OF_25)
    command = [sys.executable, "-m", "pipeline", "estimate", "--json", "--device", device]
    command += [recipe, "--vocabulary", str(vocabulary)]
    command += [word for one in sets for word in ("--set", one)]
    found = json.loads(subprocess.check_output(command, cwd=ROOT))
    names = {"pass": "training micro-batch", "step": "decoding step"}
    return {
        short: (found[name]["launches"], 1000 * found[name]["kernel_seconds"])
        for short, name in names.items()
    }


WORLD = ExitStack()


@cache
def opened_world() -> World:
    """Return the world of one rank, which is opened once in a process."""
    return WORLD.enter_context(distributed_world())


def card_name() -> str:
    """Return the name of the GPU; without one, the processor's architecture."""
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine()


def seconds(asked: Asked, *, rounds: int = 8, **works: Callable[[], object]) -> list[float]:
    """Return the median time of each work until the device is done, in interleaved rounds."""
    gc.collect()
    gc.freeze()  # as in training
    found = interleaved(works, rounds=1 if asked.quick else rounds, warm_up=3)
    return [statistics.median(times) for times in found.values()]


def ratio(asked: Asked, *, rounds: int = 8, **works: Callable[[], object]) -> float:
    """Return the second work's time by the first's."""
    ours, peer = seconds(asked, rounds=rounds, **works)
    return peer / ours


def kernels_by_name(work: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Return milliseconds and number of the kernels of a work, the longest first."""
    on_gpu = [ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as recorded:
        work()
        finish()
    times, numbers = Counter[str](), Counter[str]()
    for event in recorded.events() or ():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            times[event.name] += event.self_device_time_total / 1000
            numbers[event.name] += 1
    return {name: (time, numbers[name]) for name, time in times.most_common()}


def listed(kernels: Mapping[str, tuple[float, int]]) -> dict[str, str]:
    """Return the longest kernels in words; names of CUTLASS differ behind their 100th letter."""
    longest = enumerate(list(kernels.items())[:25], 1)
    return {
        f"{place}. {name[:100]}": f"{time:.3f} ms, {number} launches"
        for place, (name, (time, number)) in longest
    }


def time_of_kernels(work: Callable[[], object], *, rounds: int = 3) -> float:
    """Return the milliseconds of a work's kernels, the median of some rounds."""
    works = [kernels_by_name(work).values() for _ in range(1 + rounds)]  # the first compiles
    return statistics.median(sum(time for time, _ in of_one) for of_one in works[1:]) or 1.0


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative distance; infinite for values that are no numbers."""
    pairs = zip(found, exact, strict=True)
    each = [float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs]
    return max(one if one == one else float("inf") for one in each)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """Return a work that computes a function and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        result = function(*leaves)
    slope = torch.ones_like(result)  # of a loss, as in training
    if result.dim():
        slope = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(result)

    def run() -> list[Tensor]:
        result = function(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, slope)]

    return run
