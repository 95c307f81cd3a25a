"""The estimate of memory beside the peak resident memory of processes that really train.

Every case builds a model of more than 100 M parameters in fresh processes and runs two updates of
two micro-batches under the engine. Measured is the largest resident memory after imports and
process group, less what the process had then: as the C library manages memory by itself, and with
its threshold for returning memory fixed (``MALLOC_MMAP_THRESHOLD_``), which leaves what tensors
take, and is slow: there the estimate goes without the C library's share.

    python tests/bench/memory.py [--quick] [--json FILE]

``--quick`` runs one small case.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from byte_fronts import BODY, FRONTS, byte_tokenizer, examples
from ratios import Row, parse_options, write_rows
from support.tiny_models import random_batch

from pipeline.batching.batch import Batch, collate
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.names import initialize_weights
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import LOOPBACK, World, distributed_world, free_port, leave
from pipeline.estimates.memory import estimate
from pipeline.model.building import build_model
from pipeline.model.regularization import Regularization
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec, make_spec, marks_of_vocabulary
from pipeline.training.engine import Engine, connect, expert_parallel_group
from pipeline.training.optim import make_optimizer
from pipeline.training.settings import TrainingConfig

UPDATES = 2
LENGTH, LENGTH_IN_BYTES = 32, 128
"""Tokens of a sentence, of subwords and of bytes."""
TAGS = 2
LEAST, MOST = 0.95, 1.15
"""Bounds of the estimate by the measurement."""
MEBIBYTE = 2**20
MEASURE = "--measure"
TIMEOUT_SECONDS = 600

MODELS = {
    "dense": ModelConfig(encoder_layers=2, decoder_layers=2),
    "deep": ModelConfig(
        encoder_layers=6, decoder_layers=6, width=768, feed_forward_width=3072, num_heads=12
    ),
    "moe": ModelConfig(
        encoder_layers=2, decoder_layers=2, width=512, feed_forward_width=2048
    ).model_copy(update={"moe": MoEConfig(num_experts=24)}),
    "small": ModelConfig(
        encoder_layers=2, decoder_layers=2, width=64, feed_forward_width=128
    ).model_copy(update={"moe": MoEConfig(num_experts=4)}),
}
OF_BYTES = {
    f"bytes {name}": ModelConfig.model_validate({**BODY, "num_heads": 8, "front": front})
    for name, front in FRONTS.items()
}
"""Byte-level models of 44 M parameters and more."""
MODELS |= OF_BYTES
VOCABULARY = {"dense": 48_000, "deep": 32_000, "moe": 16_000, "small": 500}
"""108 M parameters, 124 M, 123 M of which 101 M are experts', and those of ``--quick``."""
DS_CONFIGS: dict[str, dict[str, Any]] = {
    "fp32 zero1": {},
    "bf16 zero1": {"bf16": {"enabled": True}},
    "fp32 zero2": {},
    "bf16 zero2": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


@dataclass(frozen=True)
class Case:
    """One training run."""

    model: str
    machine: str
    """Key of ``DS_CONFIGS``, whose last digit is the ZeRO stage."""
    tokens: int
    processes: int = 1
    parallel_size: int = 1

    def __str__(self) -> str:
        world = f", {self.processes} ranks" if self.processes > 1 else ""
        spread = f", experts over {self.parallel_size}" if self.parallel_size > 1 else ""
        return f"{self.model} {self.machine}, {self.tokens} tokens{world}{spread}"

    @property
    def length(self) -> int:
        return LENGTH_IN_BYTES if self.model in OF_BYTES else LENGTH

    @property
    def spec(self) -> ModelSpec:
        config = MODELS[self.model]
        if self.model not in OF_BYTES:
            return ModelSpec(
                model=config,
                vocabulary_size=VOCABULARY[self.model],
                pad_id=1,
                languages=("de", "en"),
            )
        tokenizer = byte_tokenizer()
        return make_spec(
            model=config,
            vocabulary_size=tokenizer.size,
            pad_id=tokenizer.pad_id,
            languages=tokenizer.languages,
            **marks_of_vocabulary(config, tokenizer),
        )

    def batch(self, *, seed: int) -> Batch:
        """A full micro-batch of sentences of one length."""
        words, sentences = self.length - TAGS, self.tokens // self.length
        if self.model in OF_BYTES:
            lines = examples(sentences, shortest=words, longest=words)
            return collate(lines, eos_id=byte_tokenizer().eos_id)
        return random_batch(
            self.spec, sentences=sentences, seed=seed, shortest=words, longest=words
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            name="memory",
            model=MODELS[self.model],
            batches=BatchesConfig(tokens=self.tokens, micro_batches=2 * self.processes),
            training=TrainingConfig(expert_parallel_size=self.parallel_size),
        )

    @property
    def ds_config(self) -> dict[str, Any]:
        zero = {"stage": int(self.machine[-1]), "reduce_bucket_size": 50_000_000}
        return {**DS_CONFIGS[self.machine], "zero_optimization": zero}

    def estimated_bytes(self) -> int:
        found = estimate(
            self.recipe,
            vocabulary_size=self.spec.vocabulary_size,
            num_groups=0,
            processes=self.processes,
            ds_config=self.ds_config,
            device="cpu",
            sentence_length=self.length,
        )
        return found.total_bytes


QUICK_CASES = [Case("small", "bf16 zero2", 128)]
CASES = [
    *[Case("dense", kind, n) for kind in ("fp32 zero1", "bf16 zero1") for n in (128, 768)],
    *[Case("deep", "fp32 zero1", n) for n in (512, 2048)],
    *[Case("moe", kind, n) for kind in ("fp32 zero1", "bf16 zero2") for n in (128, 1536)],
    Case("moe", "fp32 zero1", 512, processes=2, parallel_size=2),
    Case("moe", "fp32 zero2", 512, processes=2, parallel_size=1),
    *[Case(model, "fp32 zero1", 1024) for model in OF_BYTES],
    Case("bytes nCF", "bf16 zero1", 1024),
]


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (largest) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def train(case: Case, world: World) -> int:
    """Peak of two updates in this process, above what it has now, in bytes."""
    connect(world)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident_bytes("VmRSS")
    recipe = case.recipe
    parallel = expert_parallel_group(case.parallel_size, world=world)
    model = build_model(
        case.spec, regularization=Regularization.of(recipe.training), expert_parallel=parallel
    )
    initialize_weights(model, seed=1)
    engine = Engine(
        model,
        recipe,
        world=world,
        ds_config=case.ds_config,
        make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
    )
    batch = case.batch(seed=world.rank)
    total_labels = recipe.batches.micro_batches * batch.num_labels
    for _ in range(UPDATES):
        engine.train_step([batch] * 2, seeds=[1, 2], total_labels=total_labels, learning_rate=1e-4)
    return resident_bytes("VmHWM") - before


def measured_bytes(case: Case) -> int:
    """Peak of the rank that takes the most, each rank a fresh process of one thread."""
    port, size = free_port(), case.processes
    command = [sys.executable, __file__, MEASURE, json.dumps(asdict(case))]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **World(rank, size, rank, size, LOOPBACK, port).environment(),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode != 0 for rank in ranks):
        raise SystemExit(f"{case}: a rank failed, see above")
    return max(int(output.splitlines()[-1]) for output in outputs)


def compare(case: Case) -> Row:
    """Estimate beside measurement; ``ratio`` is the former by the latter."""
    ours = case.estimated_bytes() / MEBIBYTE
    peer = measured_bytes(case) / MEBIBYTE
    ratio = ours / peer
    row = Row(
        case=str(case),
        metric="MiB",
        ours=round(ours),
        peer=round(peer),
        ratio=round(ratio, 3),
        target=LEAST,
        holds=LEAST <= ratio <= MOST,
    )
    figures = f"{row.ours:9.0f} {row.peer:9.0f} {row.ratio:6.2f}"
    print(f"{row.case:52} {figures}  {'yes' if row.holds else 'NO'}", flush=True)
    return row


def main() -> None:
    options = parse_options(__doc__ or "")
    print(f"torch {torch.__version__}; MiB per rank above the bare process")
    print(f"{'case':52} {'estimate':>9} {'measured':>9} {'ratio':>6}  {LEAST} to {MOST}")
    write_rows([compare(case) for case in (QUICK_CASES if options.quick else CASES)], options)


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        with distributed_world() as this_world:
            print(train(Case(**json.loads(sys.argv[2])), this_world))
        leave(0)
    else:
        main()
