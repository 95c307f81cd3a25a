"""The models of a server, their languages, and the choice of one for a request."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError, no_such
from pipeline.languages import language, own_name


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
        known = []
        for code in self.translator.tokenizer.languages:
            with suppress(ConfigError):  # it has no module for the language
                self.translator.language(code)
                known.append(code)
        return tuple(known)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Languages that the model translates into, by its own codes."""
        return tuple(code for code in self.sources if self.translator.tokenizer.writes(code))

    @cached_property
    def with_words(self) -> Self:
        """The same system with word scores and alignments, which need one more pass."""
        return replace(self, translator=self.translator.with_words())

    def direction(self, source: str, target: str) -> Direction:
        """Return a direction in the model's own codes; both languages may be the same.

        Raises:
            ConfigError: the model does not know a language or cannot write the target.
        """
        direction = Direction(self.translator.code_of(source), self.translator.code_of(target))
        self.translator.language(direction.source)
        self.translator.language(direction.target)
        self.translator.tokenizer.refuse_to_write(direction.target)
        return direction


class Systems:
    """All systems of a server, in the order of the command line."""

    def __init__(self, systems: Sequence[System]) -> None:
        self._systems = tuple(systems)
        self.names = [system.name for system in systems]
        codes = sorted({code for system in systems for code in system.sources})
        self.languages = [self._describe(code) for code in codes]
        """Languages as LibreTranslate lists them, each also by its own name."""

    def choose(self, name: str | None, source: str, target: str) -> tuple[System, Direction]:
        """Return the named system, or the first that has the direction, and the direction.

        Raises:
            ConfigError: there is no such system, or none has the direction.
        """
        if name is not None and name not in self.names:
            raise no_such("There is no system", name, self.names)
        problems = []
        for system in self._systems:
            if name in (None, system.name):
                try:
                    return system, system.direction(source, target)
                except ConfigError as error:
                    problems.append(error)
        raise problems[0]

    def _describe(self, code: str) -> dict[str, Any]:
        of_source = [system for system in self._systems if code in system.sources]
        targets = sorted({target for system in of_source for target in system.targets})
        name = code
        with suppress(ConfigError):  # a model of other software may have codes of its own
            name = language(code).name
        return {"code": code, "name": name, "nativeName": own_name(code), "targets": targets}
