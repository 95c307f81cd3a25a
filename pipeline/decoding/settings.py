"""Settings of decoding: the section ``[decoding]`` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import BatchTokens, Route, Seed, Settings, Temperature, number, whole


class DecodingConfig(Settings):
    """Search for translations: beam search or sampling."""

    search: Literal["beam", "sampling"] = "beam"
    beam_size: Annotated[int, whole(1, 1000)] = 5
    """Hypotheses that beam search extends at once per sentence."""
    n_best: Annotated[int, whole(1, 1000)] = 1
    """Hypotheses kept per sentence: the best ones of beam search (at most beam_size), or
    independent samples, of which the first is the translation."""
    length_penalty: Annotated[float, number(least=-10, most=10)] = 1.0
    """Power of the length that divides scores: more than 0 favors long hypotheses."""
    max_length_ratio: Annotated[float, number(least=0, most=1000)] = 2.0
    max_extra_length: Annotated[int, whole(0, 2**20)] = 10
    """A hypothesis has at most max_length_ratio · source tokens + max_extra_length tokens."""
    tokens: BatchTokens = 4096
    """Most source tokens × hypotheses (beam_size, or samples) of a batch."""
    stopping: Literal["fairseq", "huggingface"] = "fairseq"
    """Software whose rule ends a sentence and normalizes scores; see
    ``decoding/hypotheses.py``."""
    precision: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of the weights. int8 (on CPU) has linear layers in 8 bits and the rest in float32;
    see ``decoding/quantization.py``."""
    route: Route = "specific"
    """Language modules that translate, if a model also has a shared one."""
    sampling_temperature: Temperature = 1.0
    """T of sampling in proportion to p^(1/T): towards 0 the likeliest token, with inf any."""
    top_k: Annotated[int, whole(0, 10**9)] = 0
    """Number of likeliest tokens that sampling draws from; 0: all."""
    top_p: Annotated[float, number(above=0, most=1)] = 1.0
    """Total probability of the likeliest tokens that sampling draws from, as few as possible."""
    seed: Seed = 1
    """Seed of sampling. A sentence's samples depend on the seed and the sentence alone: equal lines
    have equal samples, in any batch."""
    banned: tuple[str, ...] = ()
    """Phrases that no translation may contain, as the vocabulary spells them."""
    required: tuple[str, ...] = ()
    """Phrases that every translation must contain, as the vocabulary spells them (beam search)."""
    targets: tuple[str, ...] = ()
    """Languages that test lines are translated into; empty: all."""
    word_scores: bool = False
    """Whether to record the log-probability of every word (one more pass per translation)."""
    router_language: str = ""
    """Language whose vector an Ada-MSHA router with ``language_vector`` sees for every source, as
    in MoCE's experiment with wrong vectors (appendix I). Empty: the source's own language."""
    alignments: bool = False
    """Whether to record the source word that each word attends to most (mean over heads)."""
    alignment_layer: Annotated[int, whole(0, 999)] | None = None
    """Decoder layer whose attention gives the alignments, counted from 0; None: the last."""

    @property
    def rows(self) -> int:
        """Hypotheses of a sentence that are extended at once."""
        return self.beam_size if self.search == "beam" else self.n_best

    @property
    def wants_details(self) -> bool:
        """Whether the recipe asks for more than the text of one hypothesis."""
        return self.n_best > 1 or self.word_scores or self.alignments

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_length_ratio == 0 and self.max_extra_length == 0:
            raise ValueError(
                "max_length_ratio and max_extra_length are both 0, which leaves no hypothesis a "
                "token. Raise one of them"
            )
        if self.required and self.search != "beam":
            raise ValueError(
                'only beam search can require phrases. Set search = "beam", or leave them out'
            )
        if self.n_best > self.rows:
            raise ValueError(
                f"n_best {self.n_best} exceeds beam_size {self.beam_size}, the most that beam "
                "search keeps. Lower n_best, or raise beam_size"
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
