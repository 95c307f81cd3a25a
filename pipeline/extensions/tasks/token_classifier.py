"""XLM-R with a task head, its artifact, and the kinds of task with their files.

The encoder is RoBERTa's (Conneau et al. 2020, §3): post-norm layers with GELU, learned positions
from ``POSITION_OFFSET`` on, and a norm after the embeddings. The embedding of its only token type
is added to the positions on import (``xlmr``). The layers come from the translation model, with
low-rank modules if asked for; the language of a sentence is both its source and its target.

The artifact has ``task.json`` (shape and settings), ``sentencepiece.bpe.model``, ``weights/`` and
``metrics.jsonl``.

Legend: B windows, T window length, N real tokens, L labels, V tags, D model width.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.manifest import entries_below
from pipeline.artifacts.raw_input import iterate_blocks, refuse_no_file
from pipeline.batching.batch import Labelled, LabelledBatch, Packing, collate_spans, collate_tags
from pipeline.batching.global_step import evaluation_batches
from pipeline.checkpoints.checkpoint import load_weights, refuse_beyond
from pipeline.checkpoints.weights import tensor_headers
from pipeline.config.settings import Route, Settings, describe_validation
from pipeline.errors import ArtifactError, CheckpointError, ConfigError
from pipeline.extensions.tasks import TasksConfig
from pipeline.extensions.tasks.xlmr import PIECES_FILE, Pieces
from pipeline.kernels.noise import dropout_in, number_sites
from pipeline.kernels.pointwise import dropped
from pipeline.kernels.products import Linear
from pipeline.languages import meant_code, parse_tag
from pipeline.model.building import allocate, dense_feed_forward
from pipeline.model.extension import extensions
from pipeline.model.parameters import named_slices
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization, Residual, run_layer
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import EncoderLayer, Output, Stack, Trained

HeadKind = Literal["tagger", "reader"]
HEAD_STD = 0.02
"""Standard deviation of a head's initial weights: Hugging Face's ``initializer_range``."""
TASK_FILE = "task.json"
MAX_BATCH_TOKENS = 4096
"""Most tokens of a batch of predictions, padding included."""


class Head(Linear):
    """Linear layer from token states to logits."""

    def initial_value(self, name: str, shape: torch.Size, *, generator: torch.Generator) -> Tensor:
        """Return N(0, 0.02²) for weights, 0 for biases."""
        if name == "bias":
            return torch.zeros(shape)
        return torch.empty(shape).normal_(0, HEAD_STD, generator=generator)


class TokenClassifier(Trained):
    """Encoder and task head.

    ``spec`` defines the encoder; its ``decoder_layers`` are ignored. A ``tagger`` has one logit per
    tag; a ``reader`` has one for the first and one for the last token of an answer.
    """

    expert_parallel_size = 1

    def __init__(
        self,
        spec: ModelSpec,
        *,
        head: HeadKind,
        num_tags: int = 2,
        regularization: Regularization | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kind = head
        rates = regularization or Regularization()
        model = spec.model
        self.dropout = rates.dropout
        self.site = 0
        self.embedding = nn.Embedding(spec.vocabulary_size, model.width)
        layers = [
            EncoderLayer(model, rates, dense_feed_forward(model))
            for _ in range(model.encoder_layers)
        ]
        self.encoder = Stack(model, layers, dropout=rates.dropout)
        for extension in extensions():
            extension.change_side(spec, self.encoder, side="encoder")
        self.head = Head(model.width, 2 if head == "reader" else num_tags)
        number_sites(self)

    def forward(
        self, batch: LabelledBatch, *, route: Route = "specific", progress: float = 0.0
    ) -> Output:
        """Return logits for every label: (L, V) of a tagger; (2B, T) of a reader.

        The first B rows of a reader are for the first tokens of answers, the others for the last.
        """
        # Both routes of fuse distillation draw different numbers.
        salt = 0 if route == "specific" else 1
        packing = batch.packing.noisy(salt) if self.training else batch.packing
        batch = replace(batch, packing=packing)
        x_ND = self.encode(batch, route=route, progress=progress)
        if self.kind == "tagger":
            # As in Hugging Face's models, dropout precedes a tagger's head but not a reader's.
            rate = self.dropout
            x_ND = dropped(x_ND, dropout_in(self, packing.noise, site=self.site, rate=rate))
            return Output(self.head(x_ND.index_select(0, batch.label_rows_L)), ())
        return Output(spans(self.head(x_ND), packing), ())

    def encode(self, batch: LabelledBatch, *, route: Route, progress: float) -> Tensor:
        """Return the states of all real tokens, (N, D)."""
        packing = batch.packing
        tokens = Tokens(
            sentence_N=packing.sentence_N,
            position_N=packing.position_N,
            source_language_B=batch.language_B,
            target_language_B=batch.language_B,
            group_of_language_L=batch.language_B.new_zeros(len(self.spec.languages)),
            route=route,
            progress=progress,
            noise=packing.noise,
        )
        embedded_ND = self.embedding(batch.ids_N)
        nothing_TD = embedded_ND.new_empty(0)  # positions are learned
        x_ND = self.encoder.enter(embedded_ND, tokens, nothing_TD)
        x = Residual(x_ND, tokens)
        recomputes = self.recomputes and self.training and torch.is_grad_enabled()
        for layer in self.encoder.layers:
            x = run_layer(layer, x, packing, recomputes=recomputes)._replace(gates=())
        states: Tensor = self.encoder.leave(x.sum())
        return states


def spans(logits_N2: Tensor, packing: Packing) -> Tensor:
    """Return logits of first and last tokens over the windows, (2B, T); very low at padding."""
    logits_BT2 = packing.unpack(logits_N2)
    if not packing.is_full:
        least = torch.finfo(logits_BT2.dtype).min / 2  # halved: log-softmax stays finite
        logits_BT2 = logits_BT2.masked_fill(~packing.mask_BT[:, :, None], least)
    return logits_BT2.permute(2, 0, 1).reshape(2 * packing.batch, packing.length)


class TaskSpec(Settings):
    """Shape and settings of a task model."""

    head: HeadKind
    encoder: ModelSpec
    tags: tuple[str, ...] = ()
    """Tags of a tagger, by index."""
    tasks: TasksConfig

    @property
    def routes(self) -> tuple[Route, ...]:
        """Return the routes through the model."""
        return ("specific", "shared") if self.encoder.model.has_shared_route else ("specific",)

    def has_modules_of(self, language: str) -> bool:
        """Return whether the specific route serves a language; any does without modules."""
        modules = self.encoder.model.language_modules
        if modules is None:
            return True
        return language in (modules.languages or self.encoder.languages)

    def build(
        self, *, regularization: Regularization | None = None, device: torch.device | None = None
    ) -> TokenClassifier:
        """Build a model; its parameters are allocated but not set."""
        with torch.device("meta"):
            model = TokenClassifier(
                self.encoder, head=self.head, num_tags=len(self.tags), regularization=regularization
            )
        allocate(model, device or torch.device("cpu"))
        return model

    @classmethod
    def read(cls, artifact: Artifact) -> "TaskSpec":
        """Read shape and settings; raise CheckpointError if the artifact has none."""
        try:
            return cls.model_validate(artifact.read_json(TASK_FILE))
        except ValidationError as error:
            raise CheckpointError(
                f"{artifact.file(TASK_FILE)} does not describe a task model: "
                f"{describe_validation(error, cls)}. Run its stage again."
            ) from error


@dataclass(frozen=True)
class TaskModel:
    """A trained tagger or reader with its shape and vocabulary."""

    spec: TaskSpec
    model: TokenClassifier
    pieces: Pieces

    @classmethod
    def load(cls, artifact: Artifact, *, device: torch.device) -> "TaskModel":
        """Load a model in evaluation mode; raise CheckpointError if its files do not fit."""
        spec = TaskSpec.read(artifact)
        model = spec.build(device=device)
        found = (header.name for header in tensor_headers(artifact, "weights/"))
        refuse_beyond(artifact, found, (entry.name for entry in named_slices(model)))
        load_weights(model, artifact)
        pieces = Pieces(artifact.file(PIECES_FILE).read_bytes(), origin=artifact.directory)
        return cls(spec, model.eval(), pieces)

    @torch.no_grad()
    def logits(
        self, examples: Sequence[Labelled], *, language: str, route: Route
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Run the model; yield indices of examples and their logits, by batch.

        Text in a language without modules takes the shared route.
        """
        lengths = np.array([len(example.ids) for example in examples], dtype=np.int64)
        collate = collate_tags if self.spec.head == "tagger" else collate_spans
        languages = self.spec.encoder.languages
        index = languages.index(language) if language in languages else 0
        if not self.spec.has_modules_of(language):
            assert "shared" in self.spec.routes
            route = "shared"
        device = self.model.embedding.weight.device
        for lines in evaluation_batches(lengths, lengths, budget=MAX_BATCH_TOKENS):
            batch = collate([examples[line] for line in lines], [index] * len(lines))
            yield lines.tolist(), self.model(batch.to(device), route=route).logits_LV


Split = Literal["train", "dev", "test"]
Example = TypeVar("Example")
_ENTITIES = re.compile(
    r"(?P<language>[^./][^/]*)/(?:[^/]*[-_.])?(?P<split>train|dev|test)(?:\.[A-Za-z0-9]+)?(?:\.gz)?"
)
_QUESTIONS = re.compile(
    r"(?:.*[./])?(?P<language>[^./]+)\.(?P<split>train|dev|test)\.json(?:\.gz)?"
)


class TaskFiles:
    """Files by language and split."""

    def __init__(self, folder: Path, pattern: re.Pattern[str], names: str) -> None:
        """Find the files that match a pattern.

        Raises:
            ConfigError: No file matches, one is of no language, or two are of the same split.
        """
        self._paths: dict[tuple[str, Split], Path] = {}
        self._folder = folder
        for path in sorted(entries_below(folder)):
            match = pattern.fullmatch(path.relative_to(folder).as_posix())
            if match is None:
                continue
            refuse_no_file(path)
            key = _code(path, match["language"]), cast("Split", match["split"])
            other = self._paths.setdefault(key, path)
            if other != path:
                raise ConfigError(f"{other} and {path} are both {key[1]} of {key[0]}. Remove one.")
        if not self._paths:
            raise ConfigError(
                f"{folder} has no files {names}, plain or .gz. Name a folder of them."
            )

    @classmethod
    def entities(cls, folder: Path) -> "TaskFiles":
        """Find files in a folder per language: ``de/train.tsv``, ``de/dev.iob2.gz``."""
        return cls(folder, _ENTITIES, "LANGUAGE/train, dev or test")

    @classmethod
    def questions(cls, folder: Path) -> "TaskFiles":
        """Find files by their names, for example ``xquad.de.train.json``."""
        return cls(folder, _QUESTIONS, "NAME.LANGUAGE.SPLIT.json")

    def path(self, language: str, split: Split) -> Path:
        """Return the file of a split in a language."""
        return self._paths[language, split]

    def languages(self, split: Split) -> list[str]:
        """Return the languages that have a split, sorted."""
        return sorted(code for code, own in self._paths if own == split)

    def trained_languages(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the languages to train on, sorted: ``wanted``, or all that have training text.

        Raises:
            ConfigError: a wanted language, or every language, has no training text.
        """
        present = self.languages("train")
        wanted = tuple(dict.fromkeys(meant_code(code, present) for code in wanted))
        missing = [code for code in wanted if code not in present]
        if missing or not present:
            raise ConfigError(
                f"The data has no training file for {', '.join(missing) or 'any language'}; it has "
                f"some for {', '.join(present) or 'none'}. Change tasks.languages, or add the file."
            )
        return tuple(sorted(wanted or present))

    def read(
        self, split: Split, read: Callable[[Path, str], list[Example]], languages: Iterable[str]
    ) -> Mapping[str, list[Example]]:
        """Return language → examples, for each language that has the split."""
        codes = [code for code in languages if (code, split) in self._paths]
        return {code: read(self._paths[code, split], code) for code in codes}

    def read_tests(self, read: Callable[[Path, str], list[Example]]) -> Mapping[str, list[Example]]:
        """Return language → test examples; raise ConfigError if there are no test files."""
        if not (languages := self.languages("test")):
            raise ConfigError(f"{self._folder} has no test file of any language. Add one.")
        return self.read("test", read, languages)


def _code(path: Path, spelling: str) -> str:
    """Return the code of a file's language as pairs can be named by it: ``pt_BR`` for ``pt-BR``."""
    try:
        parse_tag(spelling)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error} If it is no data, move it away.") from error
    language, *others = re.split("[-_]", spelling.strip())
    return "_".join([language.lower(), *others])


def read_text(path: Path) -> str:
    """Read a whole file, plain or packed, as UTF-8; UserError if that is not possible."""
    content = b"".join(iterate_blocks(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ArtifactError(f"Line {line} of {path} is not UTF-8. Convert the file.") from error


Scores: TypeAlias = Mapping[str, float]
"""Name of a score → percent."""
Predictions: TypeAlias = list[dict[str, object]]


@dataclass(frozen=True)
class TaskKind:
    """A kind of task; its examples are sentences with entities, or questions."""

    head: HeadKind
    title: str  # of reports
    unit: str  # of examples, in words
    training_unit: str  # of inputs that the examples are cut into, in words
    titles: dict[str, str]  # score that reports show → its title
    find: Callable[[Path], TaskFiles]
    read: Callable[[Path, str], list[Any]]
    """Returns the examples of a file in a language."""
    inputs: Callable[[Sequence[Any], TaskSpec, Pieces], list[Labelled]]
    collate: Callable[[Sequence[Labelled], Sequence[int]], LabelledBatch]
    predict: Callable[
        [TaskModel, Sequence[Any], str, Route], tuple[Scores, list[dict[str, object]]]
    ]
    """Returns scores and predictions of a model for examples of a language by a route."""
