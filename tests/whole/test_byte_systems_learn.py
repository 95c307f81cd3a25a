"""Byte systems that can learn do: to copy, to reverse words, to find the second letter of each.

One model of each system is trained on the three tasks at once, told apart by the target language's
tag. The last task needs to know where words begin.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from support.tiny_models import source_of

from pipeline.artifacts.tokenizer import Tokenizer, TokenizerDescription, TokenizerFiles, tags
from pipeline.batching.batch import Batch, Example, collate
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec, marks_of_vocabulary
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.optim import learning_rate, make_optimizer
from pipeline.training.settings import LossConfig, OptimizerConfig

pytestmark = pytest.mark.slow

SYSTEMS: dict[str, dict[str, Any]] = {
    "MSC": {"kind": "msc", "kernels": (0, 3, 5, 7)},
    "Ada-MSHA": {"kind": "ada_msha", "language_vector": True},
    "nCF": {"kind": "ncf"},
    "WSF": {"kind": "wsf", "layers": 1},
}
TEXT = "en"
TASKS = ("copy", "reverse", "second")
CODES = {"copy": "de", "reverse": "fr", "second": "ru"}
UPDATES, LOOK_EVERY = 1000, 50
"""Within so many updates; how often it is looked."""
LINES, HELD_OUT, ENOUGH = 32, 300, 0.8
OPTIMIZER = OptimizerConfig(
    learning_rate=8e-3, final_learning_rate=2e-4, warmup_updates=40, clip_norm=1.0
)


@dataclass(frozen=True)
class Line:
    words: tuple[str, ...]
    task: str

    @property
    def answer(self) -> str:
        match self.task:
            case "copy":
                return " ".join(self.words)
            case "reverse":
                return " ".join(reversed(self.words))
        return "".join(word[1] for word in self.words)


def lines(generator: random.Random, count: int) -> Iterator[Line]:
    """One to three words of two or three letters, each task in turn."""
    for number in range(count):
        words = tuple(
            "".join(generator.choices("abcd", k=generator.randint(2, 3)))
            for _ in range(generator.randint(1, 3))
        )
        yield Line(words, TASKS[number % len(TASKS)])


@cache
def byte_tokenizer() -> Tokenizer:
    description = TokenizerDescription(
        kind="bytes",
        languages=tuple(sorted([TEXT, *CODES.values()])),
        language_token_scheme="underscores",
    )
    return TokenizerFiles(description).build()


def example(line: Line) -> Example:
    tokenizer, code = byte_tokenizer(), CODES[line.task]
    found = tags(tokenizer, "src-tgt", source=TEXT, target=code)
    return Example(
        source=tokenizer.encode(" ".join(line.words)),
        target=tokenizer.encode(line.answer),
        source_prefix=found.source_prefix,
        decoder_prompt=found.decoder_prompt,
        source_language=tokenizer.languages.index(TEXT),
        target_language=tokenizer.languages.index(code),
    )


@cache
def training_batch(update: int) -> Batch:
    """Return the lines of an update, which all systems are trained on."""
    examples = [example(line) for line in lines(random.Random(update), LINES)]
    return collate(examples, eos_id=byte_tokenizer().eos_id)


def small_model(front: dict[str, Any]) -> Transformer:
    tokenizer = byte_tokenizer()
    sizes = {"width": 32, "feed_forward_width": 64, "num_heads": 4, "max_positions": 32}
    layers = {"encoder_layers": 2, "decoder_layers": 1}
    model = ModelConfig.model_validate({**sizes, **layers, "front": front})
    spec = make_spec(
        model=model,
        vocabulary_size=tokenizer.size,
        pad_id=tokenizer.pad_id,
        languages=tokenizer.languages,
        **marks_of_vocabulary(model, tokenizer),
    )
    made = build_model(spec)
    initialize_weights(made, seed=1)
    return made


def shares_exact(model: Transformer, held_out: list[Line]) -> dict[str, float]:
    """Return the share of lines that are translated letter by letter, greedily, of every task."""
    tokenizer, examples = byte_tokenizer(), [example(line) for line in held_out]
    sources = [source_of(one, eos_id=tokenizer.eos_id) for one in examples]
    greedy = DecodingConfig(beam_size=1, max_extra_length=15)
    found = beam_search(model.eval(), sources, greedy, eos_id=tokenizer.eos_id)
    exact: dict[str, list[bool]] = {task: [] for task in TASKS}
    for one, line in zip(found, held_out, strict=True):
        exact[line.task].append(tokenizer.decode(one.tokens) == line.answer)
    return {task: sum(answers) / len(answers) for task, answers in exact.items()}


def updates_until_learnt(front: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Updates that were made, and the share of exact lines of every task."""
    model, held_out = small_model(front), list(lines(random.Random(0), HELD_OUT))
    optimizer = make_optimizer(list(model.parameters()), OPTIMIZER)
    shares: dict[str, float] = {}
    for update in range(1, UPDATES + 1):
        batch = training_batch(update)
        loss = training_loss(model.train(), batch, LossConfig()).objective / batch.num_labels
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, update, total_updates=UPDATES)
        optimizer.step()
        if update % LOOK_EVERY == 0:
            shares = shares_exact(model, held_out)
            if min(shares.values()) >= ENOUGH:
                return update, shares
    return UPDATES, shares


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_byte_system_learns_to_copy_to_reverse_words_and_their_second_letters(
    system: str,
) -> None:
    updates, shares = updates_until_learnt(SYSTEMS[system])
    assert min(shares.values()) >= ENOUGH, f"{shares} after {updates} updates"
