"""How the hypotheses of a batch are found, as a recipe says."""

from collections.abc import Sequence

from pipeline.decoding.beam_search import beam_search_n_best
from pipeline.decoding.hypotheses import Source, Translation
from pipeline.decoding.sampling import sample
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.transformer import Transformer


def search(
    model: Transformer, sources: Sequence[Source], config: DecodingConfig, *, eos_id: int
) -> list[list[Translation]]:
    """Up to ``n_best`` hypotheses of every source, the translation first.

    The prompts must have one length.

    Raises:
        ConfigError: a prefix or banned sequence that cannot be kept.
        CheckpointError: the model's scores are not numbers.
    """
    match config.search:
        case "beam":
            return beam_search_n_best(model, sources, config, eos_id=eos_id)
        case "sampling":
            return sample(model, sources, config, eos_id=eos_id)
