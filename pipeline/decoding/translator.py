"""Translate lines of text between any two languages of a checkpoint.

A line that is longer than the model's positions is split at sentence ends, translated part by part
and joined again (``sentences.py``); its hypothesis records the number of parts.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Self, TypeVar

import torch

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Alternative, Details, Direction, Hypothesis, Word
from pipeline.artifacts.segmenters import Segmenters
from pipeline.artifacts.spelling import is_blank
from pipeline.artifacts.tokenizer import Tags, Tokenizer, tags
from pipeline.checkpoints.checkpoint import (
    load_model,
    read_spec,
    read_tokenizer,
    refuse_other_tokenizer,
)
from pipeline.config.settings import Route
from pipeline.decoding.beam_search import Search
from pipeline.decoding.constraints import BannedTexts
from pipeline.decoding.grid_search import Grids, GridSearch, begin_search
from pipeline.decoding.hypotheses import (
    ForcedPass,
    Source,
    Translation,
    forced_pass,
    length_limit,
)
from pipeline.decoding.minimum_bayes_risk import Candidates, CometChoice, choose
from pipeline.decoding.quantization import quantize, weight_dtype
from pipeline.decoding.sampling import sample
from pipeline.decoding.sentences import align, join_sentences, split_to_fit, texts_of, word_spans
from pipeline.decoding.settings import BYTES_LENGTH_RATIO, DecodingConfig
from pipeline.errors import ConfigError
from pipeline.kernels.cpu import can_loop
from pipeline.languages import meant_code, unknown_language
from pipeline.model.front_end import SeesLanguage
from pipeline.model.spec import ModelSpec, refuse_languages_without_modules
from pipeline.model.transformer import Transformer
from pipeline.terminal import counted

T = TypeVar("T")

TAG_TOKENS = 2
"""Positions that a source needs in addition to its text: language tag and end-of-sentence."""


@dataclass(frozen=True)
class Job:
    """One line to translate."""

    direction: Direction
    line: int
    text: str
    prefix: str = ""
    """Beginning of the translation; of its first part, if the line is split."""
    required: tuple[str, ...] = ()
    """Phrases that the translation must contain besides the recipe's; its first part, if the line
    is split."""


@dataclass(frozen=True)
class _Part:
    """A line, or a part of one that is too long."""

    job: int
    """Index of its job."""
    direction: Direction
    text: str
    tokens: list[int]
    truncated: bool
    prefix: tuple[int, ...] = ()
    required: tuple[tuple[int, ...], ...] = ()
    begins: tuple[bool, ...] = ()
    """Whether each token begins a word of the segmenter; empty if the language has no segmenter."""
    is_free: bool = False
    """Whether no phrase is required or banned: it is translated into the pivot, to go on from."""


@dataclass(frozen=True)
class _Found:
    """Hypotheses of a part, best first, and the forced pass over the best."""

    part: _Part
    hypotheses: list[Translation]
    forced: ForcedPass | None = None
    limit: int = 0
    """Most tokens that the best may have, end-of-sentence included."""

    @property
    def best(self) -> Translation:
        return self.hypotheses[0]

    def hypothesis(self, rank: int) -> Translation:
        """Return the hypothesis of a rank, or the last if there are fewer."""
        return self.hypotheses[min(rank, len(self.hypotheses) - 1)]


class Translator:
    """A checkpoint ready to translate, on this rank's device."""

    def __init__(
        self,
        checkpoint: Artifact,
        config: DecodingConfig,
        *,
        segmenters: Mapping[str, str] | None = None,
    ) -> None:
        """Load the model onto this rank's device.

        ``segmenters`` are named by the recipe; they say where functions of files are found.

        Raises:
            ConfigError: the model cannot do what the settings ask for.
        """
        self.tokenizer: Tokenizer = read_tokenizer(checkpoint)
        if self.tokenizer.has_bytes and "max_length_ratio" not in config.model_fields_set:
            config = config.model_copy(update={"max_length_ratio": BYTES_LENGTH_RATIO})
        self.config = config
        refuse_other_tokenizer(checkpoint, self.tokenizer)
        spec = read_spec(checkpoint)
        self.scheme = spec.tag_scheme
        refuse_route(checkpoint, spec, config.route)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the current one
        dtype = weight_dtype(config.precision, device)
        self.model: Transformer = load_model(checkpoint, device=device, dtype=dtype)
        if config.precision == "int8":
            quantize(self.model, for_single_rows=config.rows == 1)
        self.max_tokens = self.model.spec.model.max_positions - TAG_TOKENS
        """Most tokens of text that the model takes at once."""
        parts_words = spec.model.front.parts_words
        self._segmenters = Segmenters(self.tokenizer, segmenters or {}) if parts_words else None
        self._language = {code: i for i, code in enumerate(self.tokenizer.languages)}
        self.pivot = self.code_of(config.pivot) if config.pivot else ""
        if self.pivot:
            self.language(self.pivot)
            self.tokenizer.refuse_to_write(self.pivot)
        self._banned = self._banned_texts()
        self._required = tuple(self._phrase(phrase, "required") for phrase in config.required)
        for phrase, tokens in zip(config.required, self._required, strict=True):
            if self._is_banned(tokens):
                raise ConfigError(
                    f"The required phrase {phrase!r} has a banned one in it. Change one of them."
                )
        self._alignment_layer = self._layer_of_alignments()
        self._comet = (
            CometChoice(config.comet, against_others=config.choose == "mbr")
            if config.asks_comet
            else None
        )
        self._grids = Grids()
        if config.router_language:
            self.show_router(config.router_language)

    def with_words(self) -> Self:
        """Return a translator with the same model that also gives word scores and alignments."""
        other = copy(self)
        other.config = self.config.model_copy(update={"word_scores": True, "alignments": True})
        other._alignment_layer = other._layer_of_alignments()
        return other

    def load_segmenters(self, languages: Iterable[str]) -> None:
        """Load the segmenters of these source languages, to fail before anything is translated.

        Raises:
            ConfigError: a segmenter is not available.
        """
        if self._segmenters is not None:
            self._segmenters.load({*languages, *filter(None, [self.pivot])})

    def lengths(self, jobs: Sequence[Job]) -> list[int]:
        """Return the number of tokens of every text."""
        return [len(self._source_tokens(job)) for job in jobs]

    def cut(self, jobs: Sequence[Job], lengths: Sequence[int] | None = None) -> list[list[Job]]:
        """Group jobs into batches of similar length, longest first, within the token budget.

        ``lengths`` are their :meth:`lengths`, if known.
        """
        if lengths is None:
            lengths = self.lengths(jobs)
        return [[jobs[index] for index in batch] for batch in self._batches(lengths)]

    def translate(self, jobs: Sequence[Job]) -> list[Hypothesis]:
        """Translate lines, through the pivot if there is one; return their hypotheses in order.

        An empty line gives its prefix, with a score of 0; a line that is too long is split.

        Raises:
            ConfigError: the model was not trained on a language, or no translation can have the
                prefix or the phrases of a line.
        """
        pivot = self.pivot
        # Both searches in one call: a stage keeps finished lines, and never half of one.
        into = {
            index: Job(Direction(job.direction.source, pivot), job.line, job.text)
            for index, job in enumerate(jobs)
            if pivot and pivot not in (job.direction.source, job.direction.target)
        }
        texts = self._translate_directly([*into.values()], is_free=True)
        halfway = dict(zip(into, texts, strict=True))
        onward = [*jobs]
        for index, first in halfway.items():
            direction = Direction(pivot, jobs[index].direction.target)
            onward[index] = replace(jobs[index], direction=direction, text=first.text)
        found = self._translate_directly(onward)
        for index, first in halfway.items():
            last = found[index]
            found[index] = replace(
                last,
                truncated=first.truncated or last.truncated,
                split=max(first.split, last.split),
                invalid=first.invalid + last.invalid,
                unknown=first.unknown,
                at_limit=first.at_limit or last.at_limit,
            )
        return found

    def _translate_directly(
        self, jobs: Sequence[Job], *, is_free: bool = False
    ) -> list[Hypothesis]:
        every = (part for index, job in enumerate(jobs) for part in self._parts(index, job))
        parts = [replace(part, required=(), is_free=True) if is_free else part for part in every]
        found: list[list[_Found]] = [[] for _ in jobs]
        for one in self._translate_parts(parts):
            found[one.part.job].append(one)
        return [self._joined(job, of_job) for job, of_job in zip(jobs, found, strict=True)]

    def sources(self, jobs: Sequence[Job]) -> list[Source]:
        """Return the encoder's inputs in order: none for an empty line, parts for a long one."""
        parts = [part for index, job in enumerate(jobs) for part in self._parts(index, job)]
        return [self._source(part) for part in parts]

    def prefix_problem(self, prefix: str) -> str:
        """Return why no translation can have a prefix, as "has a prefix ..."; "" if one can."""
        tokens = tuple(self._target_tokens(prefix))
        room = self.max_tokens - 1  # and end-of-sentence
        if self.tokenizer.unk_id in tokens:
            return "has a prefix with characters that the vocabulary does not have"
        if len(tokens) > room:
            return f"has a prefix of {len(tokens):,} tokens, of which the model takes {room:,}"
        if self._is_banned(tokens):
            return "has a prefix with a banned phrase in it"
        return ""

    def phrases_problem(self, phrases: Sequence[str], *, prefix: str = "") -> str:
        """Return why no translation can have these and the recipe's phrases; "" if one can."""
        if phrases and self.config.search != "beam":
            return "must have phrases, which only beam search finds"
        wanted = {tuple(self._target_tokens(phrase)) for phrase in phrases}
        tokens = [token for phrase in wanted for token in phrase]
        if not all(wanted) or self.tokenizer.unk_id in tokens:
            return "has a phrase with characters that the vocabulary does not have"
        if any(map(self._is_banned, wanted)):
            return "has a phrase with a banned one in it"
        count = sum(map(len, wanted | {*self._required})) + len(self._target_tokens(prefix))
        if (phrases or prefix) and count > self.max_tokens - 1:
            return (
                f"must have {count:,} tokens in its translation, of which the model takes "
                f"{self.max_tokens - 1:,}"
            )
        return ""

    def language(self, code: str) -> int:
        """Return the index of a language by the model's own code.

        Raises:
            ConfigError: the model does not know the language, or has no module for it and the route
                needs one.
        """
        if code not in self._language:
            refusal = f"This model does not know the language {code!r}."
            raise unknown_language(code, [*self._language], refusal)
        if self.config.route == "specific":
            refuse_languages_without_modules(self.model.spec, [code])
        return self._language[code]

    def show_router(self, language: str | None) -> None:
        """Show an Ada-MSHA router the vector of this language for every source.

        Args:
            language: any usual spelling; None restores the source's own language.

        Raises:
            ConfigError: the model does not know the language, or its router sees no language.
        """
        front = self.model.front
        if not isinstance(front, SeesLanguage) or not front.sees_language:
            raise ConfigError(
                "The router of this model sees no language. Set router languages only for a model "
                'with [model.front] kind = "ada_msha" and language_vector = true.'
            )
        front.show_as(None if language is None else self.language(self.code_of(language)))

    def code_of(self, spelling: str) -> str:
        """Return the model's code for any usual spelling of one of its languages.

        Raises:
            ConfigError: the model does not know the language; suggests the nearest of its codes.
        """
        code = meant_code(spelling, self._language)
        self.language(code)  # raises: the model does not know the language
        return code

    def _phrase(self, phrase: str, kind: Literal["banned", "required"]) -> tuple[int, ...]:
        tokens = tuple(self._target_tokens(phrase))
        if self.tokenizer.unk_id in tokens or not self.tokenizer.decode(tokens):
            raise ConfigError(
                f"No translation can have the {kind} phrase {phrase!r}: it is empty or has "
                "characters that the model's vocabulary does not have. Leave it out."
            )
        return tokens

    def _banned_texts(self) -> BannedTexts | None:
        """Return the banned phrases as the vocabulary spells them; None without any."""
        tokenizer = self.tokenizer
        texts = [tokenizer.decode(self._phrase(phrase, "banned")) for phrase in self.config.banned]
        ids = range(tokenizer.output_size or tokenizer.size)
        return BannedTexts(texts, [*map(tokenizer.utf8, ids)]) if texts else None

    def _is_banned(self, tokens: Sequence[int]) -> bool:
        return self._banned is not None and self._banned.found_in(self.tokenizer.decode(tokens))

    def _layer_of_alignments(self) -> int | None:
        if not self.config.alignments:
            return None
        layers = self.model.spec.model.decoder_layers
        asked = self.config.alignment_layer
        if asked is not None and asked >= layers:
            raise ConfigError(
                f"decoding.alignment_layer is {asked}, and the model has "
                f"{counted(layers, 'decoder layer')}, counted from 0. Choose one up to "
                f"{layers - 1}."
            )
        return layers - 1 if asked is None else asked

    def _source_tokens(self, job: Job) -> list[int]:
        return self._encode(job.text.strip(), job.direction.source)  # as in training

    def _target_tokens(self, text: str) -> list[int]:
        # All target languages share one vocabulary.
        return self._encode(text, next(iter(self.tokenizer.target_languages), None))

    def _encode(self, text: str, language: str | None) -> list[int]:
        return self.tokenizer.encode(text, language=language) if not is_blank(text) else []

    def _begins(self, text: str, language: str, *, tokens: int) -> tuple[bool, ...]:
        """Return whether each of the first tokens begins a word of the segmenter."""
        if self._segmenters is None or language not in self._segmenters:
            return ()
        (begins_N,) = self._segmenters.begins(language, [text])
        return tuple(begins_N[:tokens].tolist())

    def _parts(self, index: int, job: Job) -> list[_Part]:
        tokens = self._source_tokens(job)
        if not tokens:
            return []
        problem = self.prefix_problem(job.prefix) or self.phrases_problem(
            job.required, prefix=job.prefix
        )
        if problem:
            raise ConfigError(f"Line {job.line + 1} {problem}. Change it.")
        prefix = tuple(self._target_tokens(job.prefix))
        of_line = (tuple(self._target_tokens(phrase)) for phrase in job.required)
        required = (*self._required, *of_line)
        language = job.direction.source
        parts = [(job.text.strip(), tokens)]
        if len(tokens) > self.max_tokens:
            texts = split_to_fit(
                job.text, fits=lambda text: len(self._encode(text, language)) <= self.max_tokens
            )
            parts = [(text, tokens) for text in texts if (tokens := self._encode(text, language))]
        return [
            _Part(
                index,
                job.direction,
                text,
                tokens[: self.max_tokens],
                truncated=len(tokens) > self.max_tokens,
                prefix=() if number else prefix,
                required=() if number else required,
                begins=self._begins(text, language, tokens=self.max_tokens),
            )
            for number, (text, tokens) in enumerate(parts)
        ]

    def _translate_parts(self, parts: Sequence[_Part]) -> list[_Found]:
        """Search for all parts in batches within the token budget; return results in order."""
        found: dict[int, _Found] = {}
        for batch in self._batches([len(part.tokens) for part in parts]):
            of_batch = [parts[index] for index in batch]
            sources = [self._source(part) for part in of_batch]
            hypotheses = self.search(sources)
            found |= zip(batch, self._chosen(of_batch, sources, hypotheses), strict=True)
        return [found[index] for index in range(len(parts))]

    @torch.inference_mode()
    def search(self, sources: Sequence[Source]) -> list[list[Translation]]:
        """Find up to ``n_best`` hypotheses of every source, the translation first.

        Raises:
            ConfigError: a constraint that no hypothesis can keep, or a GPU has too little memory.
            CheckpointError: the model's scores are not numbers.
        """
        return self._in_memory(partial(self._search, sources), sentences=len(sources))

    def _in_memory(self, act: Callable[[], T], *, sentences: int) -> T:
        """Return ``act()``, for which a GPU may have too little memory: then ConfigError."""
        with suppress(torch.OutOfMemoryError):
            return act()
        self._grids.let_go()  # grids of earlier batches may hold most of the memory
        try:
            return act()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"A GPU has too little memory for {counted(sentences, 'sentence')} at a time. "
                "Set decoding.tokens to less."
            ) from error

    def _search(self, sources: Sequence[Source]) -> list[list[Translation]]:
        if self.config.search == "sampling":
            return sample(self.model, sources, self.config, eos_id=self.tokenizer.eos_id)
        return self.begin_search(sources).run()

    def begin_search(self, sources: Sequence[Source]) -> Search | GridSearch:
        """Return a beam search for these sources, of which no step is made."""
        eos_id, grids = self.tokenizer.eos_id, self._grids
        return begin_search(self.model, sources, self._search_settings, eos_id=eos_id, grids=grids)

    @property
    def _search_settings(self) -> DecodingConfig:
        """Return the settings of a search that keeps enough hypotheses to drop repeated texts."""
        kept = self.config.beam_size if self.config.n_best > 1 else 1
        return self.config.model_copy(update={"n_best": kept})

    def _distinct(self, hypotheses: list[Translation]) -> list[Translation]:
        """Return the n best hypotheses of a beam search, of each text the best."""
        if self.config.search != "beam" or self.config.n_best == 1:  # samples may be equal
            return hypotheses
        texts = [" ".join(text.split()) for text in self._texts(hypotheses)]
        best: dict[str, Translation] = {}
        for text, hypothesis in zip(texts, hypotheses, strict=True):
            best.setdefault(text, hypothesis)
        return [*best.values()][: self.config.n_best]

    def _chosen(
        self,
        parts: Sequence[_Part],
        sources: Sequence[Source],
        hypotheses: Sequence[list[Translation]],
    ) -> list[_Found]:
        """Choose among the hypotheses of parts, and run the forced pass over the chosen ones."""
        sentences, hypotheses = len(sources), [*map(self._distinct, hypotheses)]
        if self._comet is not None:
            candidates = [
                Candidates(part.text, of, self._texts(of))
                for part, of in zip(parts, hypotheses, strict=True)
            ]
            choice = partial(self._comet.choose, candidates)
            hypotheses = [[one] for one in self._in_memory(choice, sentences=sentences)]
        elif self.config.choose == "mbr":
            hypotheses = [[choose(of, self._texts(of))] for of in hypotheses]
        best = [of_source[0] for of_source in hypotheses]
        passes = partial(self._forced_passes, sources, best)
        forced = self._in_memory(passes, sentences=sentences)
        positions = self.model.spec.model.max_positions
        limits = [
            length_limit(source, self.config, positions=positions - len(source.prompt))
            for source in sources
        ]
        return [_Found(*one) for one in zip(parts, hypotheses, forced, limits, strict=True)]

    def _forced_passes(
        self, sources: Sequence[Source], best: Sequence[Translation]
    ) -> Sequence[ForcedPass | None]:
        """Run one more pass over the translations if word scores or alignments are asked for."""
        if not (self.config.word_scores or self.config.alignments):
            return [None] * len(sources)
        return forced_pass(
            self.model,
            sources,
            best,
            eos_id=self.tokenizer.eos_id,
            attention_of=self._alignment_layer,
            route=self.config.route,
        )

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group indices, longest first, so that padded tokens times rows fit the budget."""
        batches: list[list[int]] = []
        longest = 0
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            full = batches and (len(batches[-1]) + 1) * longest * self.config.rows
            if not full or full > self.config.tokens:
                batches.append([])
                longest = lengths[index] + TAG_TOKENS
            batches[-1].append(index)
        return batches

    def _joined(self, job: Job, found: Sequence[_Found]) -> Hypothesis:
        asks = self.config.wants_details
        if not found:  # the translation of an empty line is its prefix
            prefix = self.tokenizer.decode(self._target_tokens(job.prefix))
            return Hypothesis(prefix, details=Details() if asks else None)
        best = self._alternative(job, found, 0)
        return Hypothesis(
            best.text,
            score=best.score,
            truncated=any(one.part.truncated for one in found),
            split=0 if len(found) == 1 else len(found),
            invalid=sum(self.tokenizer.decode_counted(one.best.tokens).dropped for one in found),
            # A run of unknown characters is one token, so this is no number of characters.
            unknown=sum(one.part.tokens.count(self.tokenizer.unk_id) for one in found),
            at_limit=any(len(one.best.tokens) >= one.limit - 1 for one in found),
            details=self._details(job, found) if asks else None,
        )

    def _alternative(self, job: Job, found: Sequence[_Found], rank: int) -> Alternative:
        """Join the hypotheses of one rank of all parts; a part with fewer gives its last."""
        chosen = [one.hypothesis(rank) for one in found]
        texts = self._texts(chosen)
        text = join_sentences(texts, language=job.direction.target) if texts[1:] else texts[0]
        return Alternative(text, round(_mean_score(chosen), 4))

    def _texts(self, translations: Sequence[Translation]) -> list[str]:
        return [self.tokenizer.decode(one.tokens) for one in translations]

    def _details(self, job: Job, found: Sequence[_Found]) -> Details:
        kept = max(len(one.hypotheses) for one in found) if self.config.lists_hypotheses else 0
        words: list[Word] = []
        source_words: list[str] = []
        alignment: list[tuple[int, int]] = []
        for one in found:
            told = self._words(one)
            shift = len(source_words), len(words)
            alignment += [(first + shift[0], second + shift[1]) for first, second in told.alignment]
            words += told.words
            source_words += told.source_words
        return Details(
            n_best=tuple(self._alternative(job, found, rank) for rank in range(kept)),
            words=tuple(words),
            source_words=tuple(source_words),
            alignment=tuple(alignment),
        )

    def _words(self, found: _Found) -> Details:
        """Return the words of a part, with scores and alignments if asked for."""
        forced, tokens, part = found.forced, found.best.tokens, found.part
        if forced is None:
            return Details()
        spans = word_spans(tokens, self.tokenizer, language=part.direction.target)
        if is_blank(self.tokenizer.decode(tokens)):  # spaces, or bytes that are not UTF-8
            spans = []
        texts = texts_of(tokens, spans, self.tokenizer)
        scores = [round(sum(forced.log_p[index] for index in span), 4) for span in spans]
        words = tuple(Word(text, score) for text, score in zip(texts, scores, strict=True))
        if forced.attention_TS is None:
            return Details(words=words)
        source = word_spans(part.tokens, self.tokenizer, language=part.direction.source)
        first = len(self._tags(part.direction).source_prefix)
        attention_TS = forced.attention_TS[:, first : first + len(part.tokens)]
        return Details(
            words=words,
            source_words=tuple(texts_of(part.tokens, source, self.tokenizer)),
            alignment=tuple(align(attention_TS, source=source, target=spans)),
        )

    def _tags(self, direction: Direction) -> Tags:
        self.tokenizer.refuse_to_write(direction.target)
        return tags(self.tokenizer, self.scheme, source=direction.source, target=direction.target)

    def _source(self, part: _Part) -> Source:
        direction = part.direction
        languages = self.language(direction.source), self.language(direction.target)
        tag = self._tags(direction)
        before, behind = tag.source_prefix, (self.tokenizer.eos_id, *tag.source_suffix)
        return Source(
            tokens=[*before, *part.tokens, *behind],
            # No word of the segmenter begins at the tags.
            begins=(*[False] * len(before), *part.begins, *[False] * len(behind))
            if part.begins
            else (),
            prompt=tag.decoder_prompt,
            source_language=languages[0],
            target_language=languages[1],
            prefix=part.prefix,
            banned=None if part.is_free else self._banned,
            required=part.required,
        )


@dataclass
class _Line:
    """A line of a stream, and its parts that are found, by number."""

    job: Job
    parts: int = 0
    found: dict[int, _Found] = field(default_factory=dict)


@dataclass(frozen=True)
class _Searched:
    """A part that a stream searches for: the ``number``-th of its line."""

    part: _Part
    source: Source
    line: _Line
    number: int


class Stream:
    """A search that lines join and leave while it runs; each is returned as soon as it is found.

    It translates as :meth:`Translator.translate` does. Lines join between two steps of a beam
    search on CPU. On other devices, and with forced or banned tokens, lines are searched for in
    batches of similar length, one after the other, and a step may be up to 8 tokens. :meth:`add`
    translates at once what is sampled, goes through a pivot or does not fit into one search.
    """

    def __init__(self, translator: Translator) -> None:
        config = translator.config
        self._translator = translator
        self._is_joined = (
            config.search == "beam"
            and not (config.banned or config.required or config.pivot)
            and can_loop(translator.model.positions_TD)
        )
        self._search: Search | GridSearch | None = None
        self._searched: dict[int, _Searched] = {}
        """Sentence of the search → the part that it is."""
        self._ready: list[tuple[Job, Hypothesis]] = []
        """Lines that are found, and not yet returned."""

    @property
    def is_busy(self) -> bool:
        """Whether lines were added that :meth:`step` has not returned."""
        return bool(self._searched or self._ready)

    def choose(self, jobs: Sequence[Job], lengths: Sequence[int]) -> list[int]:
        """Return indices of the waiting lines to add now, with the first if any can be added."""
        if not self._joins(jobs):
            batches = [] if self.is_busy else self._translator._batches(lengths)
            return next((batch for batch in batches if 0 in batch), [])
        taken = sum(len(one.source.tokens) for one in self._searched.values())
        chosen: list[int] = []
        for index, length in enumerate(lengths):
            taken += length + TAG_TOKENS
            if self._is_too_much(taken) and (chosen or self.is_busy):
                break
            chosen.append(index)
        return chosen

    @torch.inference_mode()
    def add(self, jobs: Sequence[Job]) -> None:
        """Add lines that were chosen; nothing changes if one of them is refused.

        Raises:
            ConfigError: see :meth:`Translator.translate`.
        """
        translator = self._translator
        searched, empty = [], []
        for job in jobs:
            line = _Line(job)
            for part in translator._parts(0, job):
                searched.append(_Searched(part, translator._source(part), line, line.parts))
                line.parts += 1
            if not line.parts:
                empty.append(job)
        if not self._is_one_search(jobs, searched):
            self._ready += zip(jobs, translator.translate(jobs), strict=True)
            return
        if searched:
            self._begin(searched)
        self._ready += [(job, translator._joined(job, [])) for job in empty]

    @torch.inference_mode()
    def step(self) -> list[tuple[Job, Hypothesis]]:
        """Make a step of the search unless lines are ready; return those, in no particular order.

        Raises:
            CheckpointError: the model's scores are not numbers.
        """
        if not self._ready and self._search is not None and self._searched:
            self._collect(self._search.step(), self._searched)
        ready, self._ready = self._ready, []
        return ready

    @torch.inference_mode()
    def drop(self, lines: Container[int]) -> None:
        """Forget the lines of these numbers, found or not; their rows leave the search."""
        self._ready = [entry for entry in self._ready if entry[0].line not in lines]
        dropped = [index for index, one in self._searched.items() if one.line.job.line in lines]
        if self._search is not None and dropped:
            self._search.drop(dropped)
        for index in dropped:
            del self._searched[index]

    def _is_one_search(self, jobs: Sequence[Job], searched: Sequence[_Searched]) -> bool:
        """Return whether chosen lines are found by one search, within the token budget."""
        config = self._translator.config
        if config.pivot:  # its second search can only begin after the first
            return False
        if self._joins(jobs):
            tokens = sum(len(one.source.tokens) for one in searched)
            return len(jobs) > 1 or not self._is_too_much(tokens)
        batches = self._translator._batches([len(one.part.tokens) for one in searched])
        return config.search == "beam" and not self._searched and len(batches) <= 1

    def _is_too_much(self, source_tokens: int) -> bool:
        config = self._translator.config
        return source_tokens * config.rows > config.tokens

    def _joins(self, jobs: Sequence[Job]) -> bool:
        """Return whether lines can join what is searched for now."""
        is_free = self._is_joined and not any(job.prefix or job.required for job in jobs)
        search = self._search if self._searched else None
        return is_free and (search is None or search.can_be_joined)

    def _begin(self, parts: Sequence[_Searched]) -> None:
        """Search for parts: make their first step, then let them join."""
        begun = self._translator.begin_search([one.source for one in parts])
        searched = dict(enumerate(parts))
        self._collect(begun.step(), searched)
        if not begun.active:
            return
        shift = 0
        if isinstance(self._search, Search) and isinstance(begun, Search) and self._search.active:
            shift = self._search.join(begun)
        else:
            self._search = begun
        self._searched |= {shift + index: one for index, one in searched.items()}

    def _collect(
        self, found: Mapping[int, list[Translation]], searched: dict[int, _Searched]
    ) -> None:
        """Move what is found from ``searched`` to its lines, and complete lines to the ready."""
        if not found:
            return
        done = [searched.pop(index) for index in found]
        parts, sources = [one.part for one in done], [one.source for one in done]
        chosen = self._translator._chosen(parts, sources, list(found.values()))
        for one, result in zip(done, chosen, strict=True):
            line = one.line
            line.found[one.number] = result
            if len(line.found) == line.parts:
                in_order = [line.found[number] for number in range(line.parts)]
                self._ready.append((line.job, self._translator._joined(line.job, in_order)))


def refuse_route(checkpoint: Artifact, spec: ModelSpec, route: Route) -> None:
    """Raise ConfigError if the model does not have the route."""
    if route == "shared" and not spec.model.has_shared_route:
        raise ConfigError(
            f'{checkpoint.directory} has one route: decoding.route is "shared", and the model has '
            "no module that all languages share. Leave the route out, or name a model of fuse "
            "distillation."
        )


def _mean_score(translations: Sequence[Translation]) -> float:
    """Average over parts, weighted by their tokens with end-of-sentence."""
    weights = [len(translation.tokens) + 1 for translation in translations]
    scored = zip(translations, weights, strict=True)
    return sum(one.score * weight for one, weight in scored) / sum(weights)
