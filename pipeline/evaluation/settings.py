"""Settings of evaluation: the section ``[evaluation]`` of a recipe."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import Settings, whole

ScoreName = Literal[
    "bleu",
    "spbleu",
    "chrf",
    "plain_chrf",
    "comet",
    "language",
    "language_restricted",
    "language_lid176",
]
"""Name of a score, which is also its key in the line statistics of a direction."""
LANGUAGE_ACCURACIES: tuple[ScoreName, ...] = ("language", "language_restricted", "language_lid176")


class EvaluationConfig(Settings):
    """Settings of the stage evaluate."""

    removed: ClassVar = {"seed": (1,), "word_lines": (100_000,)}
    seed: ClassVar[int] = 1
    """Seed of langdetect and of the resamples."""
    scores: tuple[ScoreName, ...] = ("bleu", "chrf", *LANGUAGE_ACCURACIES)
    """Scores to compute, in the order of the reports."""
    bleu_tokenizer: Literal["per-language", "13a", "flores101", "flores200"] = "per-language"
    """Tokenizer of BLEU: sacreBLEU's per target language, for example ``zh``, or one for all."""
    language_accuracy: bool = True
    """Whether to compute the language accuracies among ``scores``."""
    baseline: str = ""
    """System that others are compared with, for example ``dense, longer``; empty: the first."""
    nearest_neighbor: bool = False
    """Whether to add a baseline, "nearest neighbor", that answers each test line with the
    translation of the most similar training line of the pair; a line unlike all of them, or of a
    pair without any, with the line itself."""
    language_sets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Named sets of languages to average over, for example ``Long = ["my", "ta"]``. A direction
    belongs to the sets of its language that is not the pivot."""
    word_accuracy: Literal["no", "target", "source"] = "no"
    """Words to score by their frequency in training (first 100,000 lines of a pair), by their
    length and, if evaluate has a tokenizer, by their number of subwords: words of references and
    translations (``target``), or the source words aligned to them (LOBEF, Figures 3 and 4)."""
    resamples: Annotated[int, whole(100, 10**6)] = 1000
    """Resamples of the test lines, for confidence intervals and tests against the baseline."""

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read true and false, and the side that ``word_side`` named."""
        if isinstance(asked := values.get("word_accuracy"), bool):
            side = values.pop("word_side", "target")
            values["word_accuracy"] = side if asked else "no"
        return values

    @property
    def computed_scores(self) -> tuple[ScoreName, ...]:
        """Return the scores to compute; without language accuracies if these are off."""
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
