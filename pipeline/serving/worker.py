"""The systems of a server, and the one thread that translates the waiting lines of all requests.

Lines join the running search every few steps, as many as fit, and each is answered as soon as it is
found; cancelled lines leave the search. Where lines cannot join
(:class:`~pipeline.decoding.translator.Stream`), the next batch has the first line and lines of
similar length. Requests take turns: the lines of a long request do not delay other requests.

One thread serves all systems: their kernels already use all cores, and they set the number of
threads of the process. While the first line waits for another system, or has phrases and the
running lines do not, nothing joins, so that its turn comes.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import Any, Self

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.decoding.line_filter import BATCH_LINES
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Stream, Translator
from pipeline.errors import ConfigError, no_such
from pipeline.languages import codes_of_setting, language, meant_code, own_name
from pipeline.terminal import listed


@dataclass(frozen=True)
class System:
    """A model that is ready to translate, under the name that requests choose it by."""

    name: str
    translator: Translator

    @classmethod
    def load(
        cls,
        name: str,
        checkpoint: Artifact,
        *,
        decoding: DecodingConfig,
        segmenters: Mapping[str, str] | None = None,
    ) -> Self:
        """Load a model and translate one word with it, which also compiles its kernels.

        Args:
            name: name of the system.
            checkpoint: the model.
            decoding: settings of the search; beam search keeps all its hypotheses, so that a
                request can ask for alternatives without changing the translation, unless the
                translation is chosen among ``n_best`` of them.
            segmenters: segmenters named by the recipe.

        Raises:
            ConfigError: the model cannot do what the settings ask for.
            CheckpointError: the model's scores are not numbers.
        """
        keeps_all = decoding.search == "beam" and decoding.choose == "score"
        kept = decoding.beam_size if keeps_all else decoding.n_best
        served = {"n_best": kept, "word_scores": False, "alignments": False}
        settings = decoding.model_copy(update=served)
        system = cls(name, Translator(checkpoint, settings, segmenters=segmenters))
        system.translator.load_segmenters(system.sources)
        pairs = [(one, two) for two in system.targets for one in system.sources if one != two]
        for pair in pairs[:1]:
            system.with_words.translator.translate([Job(Direction(*pair), 0, "a")])
        return system

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Languages that the model translates from, by its own codes."""
        return self.translator.model.spec.languages_of(self.translator.config.route)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Languages of ``decoding.targets``, or all, that it translates into, by its own codes."""
        written = tuple(code for code in self.sources if self.translator.tokenizer.writes(code))
        asked = self.translator.config.targets
        meant = codes_of_setting(asked, written, setting="decoding.targets", place=self.name)
        return tuple(code for code in written if code in meant.values() or not asked)

    @cached_property
    def with_words(self) -> Self:
        """The same system with word scores and alignments, which need one more pass."""
        return replace(self, translator=self.translator.with_words())

    def direction(self, source: str, target: str) -> Direction:
        """Return a direction in the model's own codes; both languages may be the same.

        Raises:
            ConfigError: the model does not know a language, cannot write the target, or
                ``decoding.targets`` leaves it out.
        """
        direction = Direction(self.translator.code_of(source), self.translator.code_of(target))
        self.translator.language(direction.source)
        self.translator.language(direction.target)
        self.translator.tokenizer.refuse_to_write(direction.target)
        if direction.target not in self.targets:
            raise ConfigError(
                f"{self.name} does not translate into {direction.target}: decoding.targets names "
                f"{listed(self.translator.config.targets)}."
            )
        return direction


class Systems:
    """All systems of a server, in the order of the command line."""

    def __init__(self, systems: Sequence[System]) -> None:
        self._systems = tuple(systems)
        self.names = [system.name for system in systems]
        self.pivots = {system.name: system.translator.pivot for system in systems}
        self.languages = [self._describe(code) for code in self.sources(None)]
        """Languages as LibreTranslate lists them, each also by its own name."""

    def sources(self, name: str | None) -> list[str]:
        """Return the languages that the named system, or any, translates from.

        Raises:
            ConfigError: there is no such system.
        """
        return sorted({code for system in self._named(name) for code in system.sources})

    def choose(self, name: str | None, source: str, target: str) -> tuple[System, Direction]:
        """Return the named system, or the first that has the direction, and the direction.

        Systems that tell the languages apart go first: a model of zh also takes zh_Hant for it.

        Raises:
            ConfigError: there is no such system, or none has the direction.
        """
        wanted, problems = {meant_code(code, self.sources(None)) for code in (source, target)}, []
        systems = sorted(self._named(name), key=lambda one: len(wanted.difference(one.sources)))
        for system in systems:
            try:
                return system, system.direction(source, target)
            except ConfigError as error:
                problems.append(error)
        raise problems[0]

    def _named(self, name: str | None) -> list[System]:
        if name is not None and name not in self.names:
            raise no_such("There is no system", name, self.names)
        return [system for system in self._systems if name in (None, system.name)]

    def _describe(self, code: str) -> dict[str, Any]:
        of_source = [system for system in self._systems if code in system.sources]
        targets = sorted({target for system in of_source for target in system.targets})
        name = code
        with suppress(ConfigError):  # a model of other software may have codes of its own
            name = language(code).name
        return {"code": code, "name": name, "nativeName": own_name(code), "targets": targets}


STEPS = 4
"""Steps of a search before further lines join: lines that join together share their first step."""
TURN_LINES = 64
"""Lines of a request that are translated before other requests have their turn. Requests that are
translated to the end one after the other let their clients ask again earlier."""


@dataclass(eq=False)
class _WaitingLine:
    """A line that waits, or is being translated."""

    system: System
    job: Job
    result: Future[Hypothesis] = field(default_factory=Future)
    length: int | None = None
    """Number of its tokens, once the worker has counted them."""

    def finish(self, found: Hypothesis | Exception) -> None:
        """Give the translation, or why there is none, to whoever waits, unless it is cancelled."""
        if not self.result.set_running_or_notify_cancel():  # from here on, it cannot be
            return
        if isinstance(found, Exception):
            self.result.set_exception(found)
        else:
            self.result.set_result(found)

    def is_like(self, other: "_WaitingLine") -> bool:
        """Return whether the line can be translated together with another."""
        has_phrases, others = bool(self.job.required), bool(other.job.required)
        return self.system is other.system and has_phrases == others


class Worker:
    """The thread that translates; :meth:`submit` may be called from any other.

    Args:
        on_batch: receives the system and the number of lines that are translated from one step on.
    """

    def __init__(self, on_batch: Callable[[System, int], None]) -> None:
        self._on_batch = on_batch
        self._numbers = count()
        self._waiting: list[tuple[int, int, _WaitingLine]] = []
        """A heap of lines by turn, then by number."""
        self._turn = 0
        """Largest turn of a line that was translated."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="translate", daemon=True)
        self._thread.start()

    def submit(
        self,
        system: System,
        direction: Direction,
        text: str,
        *,
        phrases: tuple[str, ...] = (),
        place: int = 0,
    ) -> Future[Hypothesis]:
        """Let a line wait for its translation; once cancelled, it is searched for no longer.

        Args:
            system: the model.
            direction: its direction.
            text: the line.
            phrases: what the translation must contain.
            place: number of the line in its request; a long request takes turns with others.
        """
        with self._changed:
            number = next(self._numbers)
            line = _WaitingLine(system, Job(direction, number, text, required=phrases))
            heappush(self._waiting, (self._turn + 1 + place // TURN_LINES, number, line))
            self._changed.notify()
        return line.result

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the lines that are running; those that still wait are cancelled."""
        with self._changed:
            self._closed = True
            for *_, line in self._waiting:
                line.result.cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while first := self._first():
            self._serve(first)

    def _first(self) -> _WaitingLine | None:
        """Wait for a line; return the first one, None at the end."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0][-1].result.cancelled():
                    heappop(self._waiting)
                if self._waiting or self._closed:
                    return self._waiting[0][-1] if self._waiting else None
                self._changed.wait()

    def _serve(self, first: _WaitingLine) -> None:
        """Translate the first line and those like it that join, until none is left."""
        stream = Stream(first.system.translator)
        running: dict[int, _WaitingLine] = {}
        while True:
            try:
                dropped = {number for number, line in running.items() if line.result.cancelled()}
                stream.drop(dropped)
                for number in dropped:
                    del running[number]
                running |= {line.job.line: line for line in self._join(stream, first)}
                if not running:
                    return
                for _ in range(STEPS):
                    for job, hypothesis in stream.step():
                        running.pop(job.line).finish(hypothesis)
            except Exception:
                break
        del stream  # what a search that fails holds may be most of a GPU's memory
        for line in running.values():
            self._translate_alone(line)

    def _join(self, stream: Stream, first: _WaitingLine) -> list[_WaitingLine]:
        """Let waiting lines join; if they are refused together, translate each alone."""
        lines = self._take(stream, first)
        if not lines:
            return []
        try:
            stream.add([line.job for line in lines])
        except Exception:
            refused, lines = lines, []
        else:
            refused = []
            self._on_batch(first.system, len(lines))
        for line in refused:  # outside of the handler: its error holds the memory of the search
            self._translate_alone(line)
        return lines

    def _take(self, stream: Stream, first: _WaitingLine) -> list[_WaitingLine]:
        """Remove from the waiting lines those that may join now, and return them."""
        with self._changed:
            waiting: list[tuple[int, int, _WaitingLine]] = []
            while self._waiting and len(waiting) < BATCH_LINES:
                if not self._waiting[0][-1].is_like(first):
                    break
                waiting.append(heappop(self._waiting))
        waiting = [entry for entry in waiting if not entry[-1].result.cancelled()]
        lengths = [self._length(line) for *_, line in waiting]
        chosen = stream.choose([line.job for *_, line in waiting], lengths) if waiting else []
        with self._changed:
            for index in {*range(len(waiting))}.difference(chosen):
                heappush(self._waiting, waiting[index])
                if self._closed:
                    waiting[index][-1].result.cancel()
            self._turn = max([self._turn, *(waiting[index][0] for index in chosen)])
        return [waiting[index][-1] for index in chosen]

    def _length(self, line: _WaitingLine) -> int:
        if line.length is None:
            try:
                (line.length,) = line.system.translator.lengths([line.job])
            except Exception:  # the line fails when it is translated by itself
                line.length = 0
        return line.length

    def _translate_alone(self, line: _WaitingLine) -> None:
        if line.result.cancelled():
            return
        try:
            (found,) = line.system.translator.translate([line.job])
        except Exception as error:
            line.finish(error)
            return
        self._on_batch(line.system, 1)
        line.finish(found)
