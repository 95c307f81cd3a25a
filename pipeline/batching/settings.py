"""Settings of the global step: the section ``[batches]`` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import BatchTokens, Settings, whole

TagScheme = Literal["src-tgt", "tgt", "src-suffix-tgt"]


class BatchesConfig(Settings):
    """The global step: an ordered list of micro-batches that depends on (seed, step) only."""

    micro_batches: Annotated[int, whole(1, 10**6)] = 32
    """Micro-batches per update over all ranks; there can be no more ranks than that."""
    tokens: BatchTokens = 4096
    """Token budget of a micro-batch: the larger of its padded source and target tokens stays within
    it. 4,096 hold, for example, 40 sentences of 100 tokens."""
    window_steps: Annotated[int, whole(1, 10**6)] = 32
    """Approximate number of updates that are drawn at once and sorted by length."""
    one_direction: bool = False
    """Keep every micro-batch to one translation direction."""
    tag_scheme: TagScheme = "src-tgt"
    """Position of the language tags (``artifacts/tokenizer.py``): src-tgt for M2M-100, mRASP2 and
    NLLB, src-suffix-tgt for NLLB with ``legacy_behaviour`` in transformers."""
    tag_is_label: bool = False
    """Learn and count the target language's tag, which decoding forces, as the first label of a
    sentence, as fairseq does. Losses and perplexities compare with the paper (its Figures 1 and 5)
    only with it."""
    evaluation_tokens: BatchTokens = 4096
    """Token budget of a validation micro-batch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tag_is_label and self.tag_scheme == "tgt":
            raise ValueError(
                f"tag_is_label is true with tag_scheme {self.tag_scheme!r}, which forces no tag on "
                'the decoder. Set it to false, or tag_scheme to "src-tgt"'
            )
        return self
