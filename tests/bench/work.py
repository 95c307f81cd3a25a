"""Training steps and searches that benchmarks time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from support.tiny_models import EOS_ID, source_of
from torch import Tensor

from pipeline.batching.batch import Batch, Example
from pipeline.decoding.grid_search import Grids, begin_search
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

PLAIN_LOSS = LossConfig()

Sequences = list[tuple[int, ...]]


def training_step(
    model: Transformer, batches: Iterator[Batch], loss: LossConfig = PLAIN_LOSS
) -> Callable[[], Tensor]:
    """Return a step with fresh gradients on the next batch; it returns the summed loss."""

    def step() -> Tensor:
        batch = next(batches)
        model.zero_grad(set_to_none=True)
        objective = training_loss(model, batch, loss).objective
        objective.backward()
        return objective.detach()

    return step


def beam_search(
    model: Transformer,
    examples: Sequence[Example],
    *,
    new_tokens: int,
    beams: int = 5,
    at_once: int | None = None,
    eos_id: int = EOS_ID,
) -> Callable[[], Sequences]:
    """Return a search in which every sentence gets ``new_tokens`` tokens, which it returns.

    Padding, which is never generated, is named as the token that ends a sentence. ``at_once``
    sentences are searched at a time, by default all.
    """
    sources = [source_of(one, eos_id=eos_id) for one in examples]
    config = DecodingConfig(
        beam_size=beams, max_length_ratio=0, max_extra_length=new_tokens, stopping="huggingface"
    )
    size, grids, end_id = at_once or len(sources), Grids(), model.spec.pad_id

    @torch.inference_mode()
    def search() -> Sequences:
        batches = [sources[start : start + size] for start in range(0, len(sources), size)]
        searches = (
            begin_search(model.eval(), batch, config, eos_id=end_id, grids=grids)
            for batch in batches
        )
        found = [of_source[0].tokens for one in searches for of_source in one.run()]
        assert {len(tokens) for tokens in found} == {new_tokens}
        return found

    return search
