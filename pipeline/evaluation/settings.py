"""Settings of evaluation: the section ``[evaluation]`` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import Seed, Settings, whole

ScoreName = Literal[
    "bleu",
    "chrf",
    "comet",
    "language",
    "language_restricted",
    "length_ratio",
    "copies",
    "empty",
    "invalid",
    "loops",
]
"""As the line statistics of a direction are named."""
LANGUAGE_ACCURACIES: tuple[ScoreName, ...] = ("language", "language_restricted")


class EvaluationConfig(Settings):
    """evaluate."""

    scores: tuple[ScoreName, ...] = ("bleu", "chrf", *LANGUAGE_ACCURACIES)
    """What is computed, in the order of the reports."""
    bleu_tokenizer: Literal["per-language", "13a", "flores101", "flores200"] = "per-language"
    language_accuracy: bool = True
    """False: without the language accuracies among the scores."""
    baseline: str = ""
    """The system that the others are held against, direction by direction; empty: the first."""
    language_sets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Languages whose directions are averaged under a name of their own, ``Long = ["my", "ta"]``:
    the language that is not the pivot decides, and it may be in several."""
    word_accuracy: bool = False
    """Whether words are scored by how often they were trained on (in the first 100,000 lines of a
    pair), by their length and, where evaluate is given a tokenizer, by the number of their
    subwords."""
    word_side: Literal["target", "source"] = "target"
    """Which words are grouped: those of references and translations, or the source words that these
    are aligned to (LOBEF, Figures 3 and 4)."""
    resamples: Annotated[int, whole(100, 10**6)] = 1000
    """Resamples of the test lines, for intervals and for the two tests against the baseline.
    Corrected for their number, m tests need 20 m resamples: where these leave a difference open, it
    is tested again with as many."""
    seed: Seed = 1
    """Seed of langdetect and of the resamples."""

    @property
    def computed_scores(self) -> tuple[ScoreName, ...]:
        """The scores, without language accuracies where those are not wanted."""
        if self.language_accuracy:
            return self.scores
        return tuple(name for name in self.scores if name not in LANGUAGE_ACCURACIES)

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [name for name in self.scores if self.scores.count(name) > 1]
        if twice:
            raise ValueError(f"scores names {twice[0]!r} more than once: name it once")
        if not self.computed_scores:
            raise ValueError(
                "scores leaves nothing to compute: name at least one score, and set "
                "language_accuracy to true if it is to be a language accuracy"
            )
        return self
