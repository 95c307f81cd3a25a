"""Settings of decoding: the sections ``[decoding]`` and ``[text]`` of a recipe."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import BatchTokens, Route, Seed, Settings, Temperature, number, whole

LENGTH_LIMITS = "decoding.max_length_ratio, decoding.max_extra_length and the model's positions"
"""Limits that end a hypothesis, as remarks name them."""
BYTES_LENGTH_RATIO = 6.0
"""``max_length_ratio`` of vocabularies of bytes, where it is not set."""


class DecodingConfig(Settings):
    """Decoding by beam search or sampling."""

    removed: ClassVar = {
        "shortlist": ("",),
        "utility": ("chrf", "comet"),
    }

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse the setting that named the measure of "mbr" where ``comet`` names another one."""
        if "utility" in values:
            is_comet, has_model = values["utility"] == "comet", bool(values.get("comet"))
            if is_comet != has_model and (is_comet or values.get("choose") == "mbr"):
                raise ValueError(
                    "'utility' is no setting any more: choose = \"mbr\" compares by the model that "
                    "comet names, else by chrF++. Set or leave out comet, and leave out utility"
                )
        return values

    search: Literal["beam", "sampling"] = "beam"
    """Search algorithm."""
    beam_size: Annotated[int, whole(1, 1000)] = 5
    """Hypotheses per sentence in beam search."""
    n_best: Annotated[int, whole(1, 1000)] = 1
    """Hypotheses kept per sentence: the best texts of beam search, at most beam_size, or as many
    independent samples, the first of which is the translation. With choose = "mbr" or "rerank",
    hypotheses to choose the translation from."""
    choose: Literal["score", "mbr", "rerank"] = "score"
    """Choice of the translation among n_best hypotheses: the first; by minimum Bayes risk the one
    that agrees most with the others (``decoding/minimum_bayes_risk.py``), by chrF++ or ``comet``;
    ``rerank``: the one that the COMET model ``comet``, without references, scores highest."""
    comet: str = ""
    """Directory of the COMET model that choose = "rerank" needs and choose = "mbr" may have, as
    ``mmnmt evaluate --comet`` takes it. A model that changes belongs into another directory."""
    length_penalty: Annotated[float, number(least=-10, most=10)] = 1.0
    """Exponent of the length by which scores are divided: values above 0 favor long hypotheses."""
    max_length_ratio: Annotated[float, number(least=0, most=1000)] = 2.0
    """Tokens of a hypothesis per source token, see max_extra_length. Not set, with a vocabulary of
    bytes: 6.0, since an English letter has one byte and letters of other scripts two or three."""
    max_extra_length: Annotated[int, whole(0, 2**20)] = 10
    """A hypothesis has at most max_length_ratio · source tokens + max_extra_length tokens."""
    tokens: BatchTokens = 4096
    """Largest product of source tokens and active hypotheses (beam_size or samples) of a batch."""
    stopping: Literal["fairseq", "huggingface"] = "fairseq"
    """Rule that ends a sentence and normalizes scores; see ``decoding/hypotheses.py``."""
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Arithmetic of the model. auto: bfloat16 on GPUs that compute in it, else float32. int8, on
    CPU only: linear layers and experts in 8 bits, the rest in float32; see
    ``decoding/quantization.py``."""
    route: Route = "specific"
    """Route through a model with language modules and a shared module."""
    sampling_temperature: Temperature = 1.0
    """Temperature T of sampling: tokens are drawn in proportion to p^(1/T). Towards 0 the likeliest
    token is drawn, with inf all are equally likely."""
    top_k: Annotated[int, whole(0, 10**9)] = 0
    """Number of likeliest tokens that sampling draws from; 0: all."""
    top_p: Annotated[float, number(above=0, most=1)] = 1.0
    """Probability of the smallest set of likeliest tokens that sampling draws from."""
    seed: Seed = 1
    """Seed of sampling. A sentence's samples depend only on the seed and the sentence: equal lines
    have equal samples, whatever else is in the batch."""
    banned: tuple[str, ...] = ()
    """Phrases that no translation contains, even in words: ``art``, for example, bans ``party``."""
    required: tuple[str, ...] = ()
    """Phrases that every translation must contain, as the vocabulary spells them; beam search
    only."""
    targets: tuple[str, ...] = ()
    """Languages that lines are translated into; empty: all."""
    pivot: str = ""
    """Language through which lines between two other languages are translated, for example ``en``:
    two searches per line, the second of which gives scores, lists and alignments. Empty: directly.
    """
    word_scores: bool = False
    """Compute the log-probability of every word, in one pass over the finished translation."""
    router_language: str = ""
    """Language whose vector an Ada-MSHA router with ``language_vector`` sees, regardless of the
    source language, for example ``fi`` for Romanian: MoCE's experiment with wrong vectors (appendix
    I). Empty: the source language."""
    alignments: bool = False
    """Align each word with the source word of the highest attention, averaged over the heads of a
    layer."""
    alignment_layer: Annotated[int, whole(0, 999)] | None = None
    """Decoder layer whose attention gives the alignment, counted from 0; not set: the last."""

    @property
    def rows(self) -> int:
        """Active hypotheses per sentence."""
        return self.beam_size if self.search == "beam" else self.n_best

    @property
    def asks_comet(self) -> bool:
        """Whether a COMET model chooses the translation."""
        return self.comet != ""

    @property
    def lists_hypotheses(self) -> bool:
        """Whether all n_best hypotheses are requested."""
        return self.n_best > 1 and self.choose == "score"

    @property
    def wants_details(self) -> bool:
        """Whether more than the text of one hypothesis is requested."""
        return self.lists_hypotheses or self.word_scores or self.alignments

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_length_ratio == 0 and self.max_extra_length == 0:
            raise ValueError(
                "max_length_ratio and max_extra_length are both 0, so that no hypothesis could "
                "have a token. Raise one of them"
            )
        if self.required and self.search != "beam":
            raise ValueError(
                'required phrases are found by beam search only. Set search = "beam", or leave '
                "them out"
            )
        if self.n_best > self.rows:
            raise ValueError(
                f"n_best {self.n_best} exceeds beam_size {self.beam_size}, and beam search keeps "
                "no more. Lower it, or raise beam_size"
            )
        if self.choose != "score" and self.n_best == 1:
            raise ValueError(
                f'choose is "{self.choose}", which compares n_best hypotheses, and n_best is 1. '
                "Raise it, or leave choose out"
            )
        if (self.choose == "rerank" and not self.comet) or (self.choose == "score" and self.comet):
            raise ValueError(
                'comet names the model of choose = "rerank" or "mbr". Set both, or leave both out'
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        asked = {"sampling_temperature", "top_k", "top_p", "seed"}
        fields = type(self).model_fields
        changed = [one for one in sorted(asked) if getattr(self, one) != fields[one].default]
        if self.search == "beam" and changed:
            raise ValueError(
                f'{changed[0]} is a setting of sampling, and search is "beam". Leave it out, or '
                'set search to "sampling"'
            )
        return self


class TextConfig(Settings):
    """Text to translate into the languages of ``decoding.targets``."""

    source: str = ""
    """Language of the text."""
    field: str = "text"
    """Field that holds the text in the records of ``.jsonl`` files and the rows of tables."""
