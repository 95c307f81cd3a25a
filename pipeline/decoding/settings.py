"""Settings of decoding: the section ``[decoding]`` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import BatchTokens, Route, Seed, Settings, Temperature, number, whole


class DecodingConfig(Settings):
    """How translations are found: beam search, or sampling."""

    search: Literal["beam", "sampling"] = "beam"
    beam_size: Annotated[int, whole(1, 1000)] = 5
    """Of beam search."""
    n_best: Annotated[int, whole(1, 1000)] = 1
    """Hypotheses that are kept of a sentence: of beam search the best, at most beam_size; of
    sampling as many independent samples, the first of which is the translation."""
    length_penalty: Annotated[float, number(least=-10, most=10)] = 1.0
    """Scores are divided by length to this power: more than 0 favours long hypotheses."""
    max_length_ratio: Annotated[float, number(least=0, most=1000)] = 2.0
    max_extra_length: Annotated[int, whole(0, 2**20)] = 10
    """A hypothesis has at most max_length_ratio · source tokens + max_extra_length tokens."""
    tokens: BatchTokens = 4096
    """Source tokens × hypotheses at work (beam_size, or samples) of a batch stay within this."""
    stopping: Literal["fairseq", "huggingface"] = "fairseq"
    """Whose rule ends a sentence and normalises scores; see ``decoding/hypotheses.py``."""
    precision: Literal["float32", "bfloat16", "int8"] = "float32"
    """int8, on CPU: linear layers in 8 bits, the rest in float32; see
    ``decoding/quantization.py``."""
    route: Route = "specific"
    """Of a model with language modules and a shared one: through which it translates."""
    sampling_temperature: Temperature = 1.0
    """Tokens are sampled in proportion to p^(1/T): towards 0 the likeliest, with inf uniformly."""
    top_k: Annotated[int, whole(0, 10**9)] = 0
    """Sampling draws from this many likeliest tokens; 0: from all."""
    top_p: Annotated[float, number(above=0, most=1)] = 1.0
    """Sampling draws from the fewest likeliest tokens that together have this probability."""
    seed: Seed = 1
    """Of sampling. A sentence's samples depend on it and on the sentence alone: equal lines have
    equal samples, whatever stands beside them."""
    banned: tuple[str, ...] = ()
    """Phrases that no translation has, as the vocabulary spells them."""
    required: tuple[str, ...] = ()
    """Phrases that every translation has, as the vocabulary spells them; of beam search."""
    targets: tuple[str, ...] = ()
    """Test lines are translated into these languages alone; empty: into all."""
    word_scores: bool = False
    """The log-probability of every word, by one pass over the finished translation."""
    router_language: str = ""
    """The language whose vector an Ada-MSHA router with ``language_vector`` sees, whatever language
    the source is in: MoCE's experiment with wrong ones (appendix I). Empty: the source's."""
    alignments: bool = False
    """Which source word each word looks at most, by the mean of the heads of a layer."""
    alignment_layer: Annotated[int, whole(0, 999)] | None = None
    """Decoder layer whose attention to the source aligns, counted from 0; None: the last."""

    @property
    def rows(self) -> int:
        """Hypotheses of a sentence that are at work at once."""
        return self.beam_size if self.search == "beam" else self.n_best

    @property
    def wants_details(self) -> bool:
        """Whether more than one hypothesis as text is asked for."""
        return self.n_best > 1 or self.word_scores or self.alignments

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_length_ratio == 0 and self.max_extra_length == 0:
            raise ValueError(
                "max_length_ratio and max_extra_length are both 0, so that no hypothesis could "
                "have a token: raise one of them"
            )
        if self.required and self.search != "beam":
            raise ValueError(
                'required phrases are found by beam search alone: set search = "beam", or leave '
                "them out"
            )
        if self.n_best > self.rows:
            raise ValueError(
                f"n_best {self.n_best} exceeds beam_size {self.beam_size}, and beam search keeps "
                "no more: lower it, or raise beam_size"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        asked = {"sampling_temperature", "top_k", "top_p", "seed"}
        fields = type(self).model_fields
        changed = [one for one in sorted(asked) if getattr(self, one) != fields[one].default]
        if self.search == "beam" and changed:
            raise ValueError(
                f'{changed[0]} is of sampling, and search is "beam": leave it out, or set search '
                'to "sampling"'
            )
        return self
