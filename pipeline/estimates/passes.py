"""Count the launches of a training pass and of a decoding step on the meta device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.batching.batch import Batch, Example, collate
from pipeline.config.recipe import Recipe
from pipeline.decoding.beam_search import Search
from pipeline.decoding.grid_search import Grid, grid_shape, suits_grids
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.quantization import weight_dtype
from pipeline.estimates.launches import META, Counted, LaunchCounter, tensor_bytes
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel, RankExperts, RowCounts
from pipeline.model.regularization import Regularization
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import placeholder_spec
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss

SENTENCE_LENGTH = 32
"""Assumed tokens per sentence, tags included: about the mean of OPUS-100."""
PROMPT = 0, 0
"""First ids of a decoder's input."""


def count_training(
    recipe: Recipe, *, per_pass: int = 1, dtype: torch.dtype = torch.bfloat16, **sizes: int
) -> Counted:
    """Count the forward pass, loss and backward pass of full micro-batches that share a pass.

    ``sizes`` are the numbers of ids, groups and languages that the data decides. If the recipe
    spreads the experts over ranks, a rank holds its share of them and gets as many rows as it
    sends. Layers are not recomputed.
    """
    size, no_group = recipe.training.expert_parallel_size, None
    exchange = _EvenExchange(no_group, 0, size) if size > 1 else None  # type: ignore[arg-type]
    model = _model(recipe, sizes, exchange).to(dtype).train()
    batch = micro_batch(per_pass * recipe.batches.tokens)
    if per_pass > 1:
        bounds = [part * batch.num_sentences // per_pass for part in range(per_pass + 1)]
        batch = batch.shared([end - start for start, end in pairwise(bounds)])
    batch = batch.keyed(*range(per_pass)).to(META)
    even = _routes_per_expert(recipe.model, len(batch.target_N))
    with LaunchCounter(host_number=even) as counter:
        training_loss(model, batch, recipe.loss).objective.backward()
    return replace(counter.counted, exchanged=tuple(exchange.sent if exchange else ()))


@dataclass(frozen=True)
class _EvenExchange(ExpertParallel):
    """Expert parallelism of one rank without the others: every expert gets equally many rows."""

    sent: list[int] = field(default_factory=list)
    """Bytes of each all-to-all of rows, including rows that stay on the rank."""

    def exchange_counts(self, count_E: Tensor) -> RowCounts:
        """Wait for the numbers of rows, as every rank does; no row is left out as dropped."""
        more_rows_than_there_are = 2**62
        return self._even(more_rows_than_there_are, super().exchange_counts(count_E).count_E)

    def run(self, experts: RankExperts, x_RD: Tensor, counts: RowCounts) -> Tensor:
        """Apply the experts of this rank to as many rows as there are in ``x_RD``."""
        return super().run(experts, x_RD, self._even(len(x_RD), counts.count_E))

    def _even(self, rows: int, count_E: Tensor) -> RowCounts:
        held = len(count_E)
        each, more = divmod(rows, self.size * held)
        even_SE = [
            [each + (rank * held + expert < more) for expert in range(held)]
            for rank in range(self.size)
        ]
        return RowCounts(even_SE, even_SE, count_E)

    def all_to_all(self, _out: Tensor, given: Tensor, /, *_splits: list[int] | None) -> None:
        """Note the bytes of rows; what arrives has a shape and no values on the meta device."""
        if given.is_floating_point():
            self.sent.append(tensor_bytes(given))


def count_decoding_step(recipe: Recipe, **sizes: int) -> Counted:
    """Count one step of decoding with beam search, on a grid if the model allows it.

    The batch is full, no sentence ends, and the cache does not grow.
    """
    model = _model(recipe, sizes).eval()
    model.to(weight_dtype(recipe.decoding.precision, META))
    beams = recipe.decoding.beam_size
    sentences = max(recipe.decoding.tokens // (SENTENCE_LENGTH * beams), 1)
    both = [Source([0] * (SENTENCE_LENGTH - index), PROMPT, 0, 0) for index in range(2)]
    sources = [both[index % 2] for index in range(sentences)]
    even = _routes_per_expert(recipe.model, sentences * beams)
    with torch.no_grad():  # inference mode would record composite operators, not their parts
        with LaunchCounter(host_number=even):  # what comes before the step
            search = Search(model, sources, recipe.decoding, eos_id=1)
            search.step()
            step: Callable[[], object] = search.step
            if is_graph := suits_grids(model, sources):
                search.states.joint = model.joint_parameters_of_steps()
                shape = grid_shape(sentences, SENTENCE_LENGTH)
                step = Grid(search.extend, search.states, search.beams, shape=shape).step
        with LaunchCounter(host_number=even) as counter:
            step()
    return replace(counter.counted, is_graph=is_graph)


def _model(
    recipe: Recipe, sizes: Mapping[str, int], exchange: ExpertParallel | None = None
) -> Transformer:
    spec = placeholder_spec(recipe.model, **sizes, output_size=recipe.tokenizer.output_ids)
    rates = Regularization.of(recipe.training)
    return build_model(spec, regularization=rates, expert_parallel=exchange, device=META)


def micro_batch(tokens: int) -> Batch:
    """Return a batch that fills the budget with sentences of two lengths, with ids 0.

    Every second one is a token shorter: there is padding, as in training.
    """
    length = min(SENTENCE_LENGTH, tokens)
    lengths = [length - index % 2 for index in range(max(tokens // length, 1))]
    examples = [
        Example(
            [0] * (each - 1), [0] * (each - 2), (), PROMPT, source_language=0, target_language=0
        )
        for each in lengths
    ]
    return collate(examples, eos_id=0)


def _routes_per_expert(model: ModelConfig, tokens: int) -> int:
    """Return the routes per expert with even routing."""
    return 0 if model.moe is None else tokens * model.moe.top_k // model.moe.num_experts
