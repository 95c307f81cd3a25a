"""The estimate of memory beside the peak resident memory of processes that really train.

Every case builds a model of 44 M to 141 M parameters in fresh processes and runs two updates of two
micro-batches per rank under the engine. Measured is the largest resident memory of a rank, less
what the process had after imports and the set-up of the process group.

    python tests/bench/memory.py [--quick] [--only FAMILY] [--json FILE]

``--quick`` runs one small case; ``--only`` the cases of one family of models.
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
from support.passes import passes_of
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

CASES = {
    r"(dense|deep|moe|bytes (plain|MSC|Ada-MSHA|nCF|WSF)|moe (with capacity|by group)|"
    r"modules (LMS|CLSR|language experts)|small) (fp32|bf16) zero[12], \d+ tokens"
    r"(, 2 ranks(, experts over 2)?)?": "MiB",
}
UPDATES = 2
LENGTH, LENGTH_IN_BYTES = 32, 128
"""Tokens of a sentence, of subwords and of bytes."""
TAGS = 2
LEAST, MOST = 0.95, 1.15
"""Bounds of the estimate by the measurement."""
MEBIBYTE = 2**20
MEASURE = "--measure"
TIMEOUT_SECONDS = 600

BODY_OF_EXPERTS: dict[str, Any] = {**BODY, "encoder_layers": 2, "decoder_layers": 2}
MODELS = {
    "dense": ModelConfig(encoder_layers=2, decoder_layers=2),
    "deep": ModelConfig(
        encoder_layers=6, decoder_layers=6, width=768, feed_forward_width=3072, num_heads=12
    ),
    "moe": ModelConfig.model_validate({**BODY_OF_EXPERTS, "moe": {"num_experts": 24}}),
    "small": ModelConfig(
        encoder_layers=2, decoder_layers=2, width=64, feed_forward_width=128
    ).model_copy(update={"moe": MoEConfig(num_experts=4)}),
}
OF_BYTES = {
    f"bytes {name}": ModelConfig.model_validate({**BODY, "num_heads": 8, "front": front})
    for name, front in FRONTS.items()
}
"""Byte-level models of 44 M parameters and more."""
BY_GROUP = "moe by group"
EXPERTS: dict[str, dict[str, Any]] = {
    "moe with capacity": {"dispatch": "capacity", "capacity_factor": 0.5},
    BY_GROUP: {"decoder_router": "language_group"},
}
OF_EXPERTS = {
    name: ModelConfig.model_validate({**BODY_OF_EXPERTS, "moe": {"num_experts": 24, **settings}})
    for name, settings in EXPERTS.items()
}
LANGUAGE_MODULES: dict[str, dict[str, Any]] = {
    "modules LMS": {"kind": "low_rank", "rank": 32, "within": "both"},
    "modules CLSR": {"kind": "clsr"},
    "modules language experts": {"kind": "language_experts", "every": 2},
}
OF_LANGUAGES = {
    name: ModelConfig.model_validate({**BODY, "num_heads": 8, "language_modules": settings})
    for name, settings in LANGUAGE_MODULES.items()
}
MODELS |= OF_BYTES | OF_EXPERTS | OF_LANGUAGES
FAMILIES = ("dense", "deep", "moe", "bytes", "modules")
"""First words of the models' names."""
VOCABULARY = {"dense": 48_000, "deep": 32_000, "small": 500}
"""108 M parameters, 124 M, and those of ``--quick``."""
OTHER_VOCABULARY = 16_000
LANGUAGES = ("de", "en", "fr", "ru", "ja", "el", "cs", "da")
NUM_GROUPS = 4
"""Of the languages, in models whose decoder routes by group."""
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
            groups = tuple(index % NUM_GROUPS for index in range(len(LANGUAGES)))
            return ModelSpec(
                model=config,
                vocabulary_size=VOCABULARY.get(self.model, OTHER_VOCABULARY),
                pad_id=1,
                languages=LANGUAGES,
                language_groups=groups if self.model == BY_GROUP else None,
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
            num_groups=NUM_GROUPS if self.spec.language_groups else 0,
            num_languages=len(self.spec.languages),
            processes=self.processes,
            ds_config=self.ds_config,
            device="cpu",
            sentence_length=self.length,
        )
        return found.device_bytes + found.host_bytes


QUICK_RUNS = [Case("small", "bf16 zero2", 128)]
RUNS = [
    *[Case("dense", kind, n) for kind in ("fp32 zero1", "bf16 zero1") for n in (128, 768)],
    *[Case("deep", "fp32 zero1", n) for n in (512, 2048)],
    *[Case("moe", kind, n) for kind in ("fp32 zero1", "bf16 zero2") for n in (128, 1536)],
    Case("moe", "fp32 zero1", 512, processes=2, parallel_size=2),
    Case("moe", "fp32 zero2", 512, processes=2, parallel_size=1),
    *[Case(model, "fp32 zero1", 1024) for model in OF_BYTES],
    Case("bytes nCF", "bf16 zero1", 1024),
    *[Case(model, "fp32 zero1", 1024) for model in (*OF_EXPERTS, *OF_LANGUAGES)],
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
        engine.train_step(passes_of([batch] * 2), total_labels=total_labels, learning_rate=1e-4)
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
    options = parse_options(__doc__ or "", peers=FAMILIES)
    print(f"torch {torch.__version__}; MiB per rank above the bare process")
    print(f"{'case':52} {'estimate':>9} {'measured':>9} {'ratio':>6}  {LEAST} to {MOST}")
    chosen = [
        case
        for case in (QUICK_RUNS if options.quick else RUNS)
        if options.quick or options.only in (None, case.model.partition(" ")[0])
    ]
    write_rows([compare(case) for case in chosen], options, shapes="in the names of the cases")


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        with distributed_world() as this_world:
            print(train(Case(**json.loads(sys.argv[2])), this_world))
        leave(0)
    else:
        main()
