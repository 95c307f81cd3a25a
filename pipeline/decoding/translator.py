"""Text in, text out: a checkpoint that translates between any two of its languages.

A line longer than the model's positions is taken apart at sentence ends, translated part by part
and joined again (``sentences.py``); its hypothesis says so.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.artifacts.tokenizer import Tokenizer, tags
from pipeline.checkpoints.checkpoint import (
    load_model,
    read_spec,
    read_tokenizer,
    refuse_other_tokenizer,
)
from pipeline.config import DecodingConfig
from pipeline.decoding.beam_search import Source, Translation, beam_search
from pipeline.decoding.sentences import join_sentences, split_to_fit
from pipeline.errors import ConfigError
from pipeline.languages import canonical, find_code, nearest_codes
from pipeline.model.transformer import Transformer

TAG_TOKENS = 2
"""Positions that a source needs beside its text: language tag and end-of-sentence."""


@dataclass(frozen=True)
class Job:
    """One line to translate."""

    direction: Direction
    line: int
    text: str


@dataclass(frozen=True)
class _Part:
    """What is translated at once: a whole line, or a part of one that is too long."""

    job: int
    direction: Direction
    tokens: list[int]
    truncated: bool


class Translator:
    """A checkpoint ready to translate, on this rank's device."""

    def __init__(self, checkpoint: Artifact, config: DecodingConfig) -> None:
        self.config = config
        self.tokenizer: Tokenizer = read_tokenizer(checkpoint)
        refuse_other_tokenizer(checkpoint, self.tokenizer)
        self.scheme = read_spec(checkpoint).tag_scheme
        dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the current one
        self.model: Transformer = load_model(checkpoint, device=device, dtype=dtype)
        self.max_tokens = self.model.spec.model.max_positions - TAG_TOKENS
        """Tokens of text that the model takes at once."""
        self._language = {code: i for i, code in enumerate(self.tokenizer.languages)}

    def cut(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Batches of similar length, longest first, within the budget of tokens times beams."""
        lengths = [len(self._encode(job.text)) for job in jobs]
        return [[jobs[index] for index in batch] for batch in self._batches(lengths)]

    def translate(self, jobs: Sequence[Job]) -> list[Hypothesis]:
        """Hypotheses in order; an empty line gives an empty one, a too long one is split.

        Raises:
            ConfigError: a language the model was not trained on.
        """
        parts = [part for index, job in enumerate(jobs) for part in self._parts(index, job)]
        found: list[list[tuple[_Part, Translation]]] = [[] for _ in jobs]
        translations = self._translate_parts(parts)
        for part, translation in zip(parts, translations, strict=True):
            found[part.job].append((part, translation))
        return [self._joined(job, of_job) for job, of_job in zip(jobs, found, strict=True)]

    def language(self, code: str) -> int:
        """Index of a language of this model, by the code the model has for it."""
        if code not in self._language:
            near = nearest_codes(code, self._language)
            raise ConfigError(
                f"This model does not know the language {code!r}: it knows "
                f"{', '.join(self._language)}" + (f"; nearest is {near[0]!r}." if near else ".")
            )
        return self._language[code]

    def code_of(self, spelling: str) -> str:
        """The model's code for any usual spelling of one of its languages.

        Raises:
            ConfigError: the model does not know it; names the nearest of its codes.
        """
        if spelling in self._language:
            return spelling
        with suppress(ConfigError):  # a spelling of no language: said of this model's below
            if code := find_code(spelling, self._language):
                return code
        self.language(spelling)  # says that there is no such language
        return spelling

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) if text.strip() else []

    def _fits(self, text: str) -> bool:
        return len(self._encode(text)) <= self.max_tokens

    def _parts(self, index: int, job: Job) -> list[_Part]:
        tokens = self._encode(job.text)
        if not tokens:
            return []
        if len(tokens) <= self.max_tokens:
            return [_Part(index, job.direction, tokens, truncated=False)]
        encoded = [self._encode(text) for text in split_to_fit(job.text, fits=self._fits)]
        return [
            _Part(
                index,
                job.direction,
                tokens[: self.max_tokens],
                truncated=len(tokens) > self.max_tokens,
            )
            for tokens in encoded
            if tokens
        ]

    def _translate_parts(self, parts: Sequence[_Part]) -> list[Translation]:
        """Their translations in order; computed in batches within the budget."""
        found: dict[int, Translation] = {}
        for batch in self._batches([len(part.tokens) for part in parts]):
            sources = [self._source(parts[index]) for index in batch]
            translations = beam_search(
                self.model, sources, self.config, eos_id=self.tokenizer.eos_id
            )
            found.update(zip(batch, translations, strict=True))
        return [found[index] for index in range(len(parts))]

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices in batches, longest first, whose padded tokens times beams fit the budget."""
        batches: list[list[int]] = []
        longest = 0
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            full = batches and (len(batches[-1]) + 1) * longest * self.config.beam_size
            if not full or full > self.config.tokens:
                batches.append([])
                longest = lengths[index] + TAG_TOKENS
            batches[-1].append(index)
        return batches

    def _joined(self, job: Job, found: Sequence[tuple[_Part, Translation]]) -> Hypothesis:
        if not found:
            return Hypothesis("")
        texts = [self.tokenizer.decode(translation.tokens) for _, translation in found]
        language = _canonical(job.direction.target)
        is_whole = len(texts) == 1
        return Hypothesis(
            texts[0] if is_whole else join_sentences(texts, language=language),
            score=round(_mean_score([translation for _, translation in found]), 4),
            truncated=any(part.truncated for part, _ in found),
            split=0 if is_whole else len(texts),
        )

    def _source(self, part: _Part) -> Source:
        direction = part.direction
        languages = self.language(direction.source), self.language(direction.target)
        tag = tags(self.tokenizer, self.scheme, source=direction.source, target=direction.target)
        return Source(
            tokens=[*tag.source_prefix, *part.tokens, self.tokenizer.eos_id, *tag.source_suffix],
            prompt=tag.decoder_prompt,
            source_language=languages[0],
            target_language=languages[1],
        )


def _mean_score(translations: Sequence[Translation]) -> float:
    """The mean over parts, weighted by their tokens with end-of-sentence."""
    weights = [len(translation.tokens) + 1 for translation in translations]
    scored = zip(translations, weights, strict=True)
    return sum(one.score * weight for one, weight in scored) / sum(weights)


def _canonical(spelling: str) -> str:
    """The registry's code; the spelling itself where the registry has none."""
    try:
        return canonical(spelling)
    except ConfigError:
        return spelling
