"""Shards, memory-mapped token ids of each side of a pair, and mixtures, how often a pair is drawn.

``{split}/{pair}/{language}.tokens`` holds the ids of all sentences in a row, as little-endian
uint16, or uint32 if the vocabulary needs it. ``{language}.offsets.npy`` (int64, sentences + 1)
holds where each sentence begins. Specials and tags are not stored: batches add them. A
language with a segmenter (``segmenters.py``) also has ``{language}.begins``, one byte per token: 1
where a word begins. The folder ``tokenizer/`` is a copy of the tokenizer's files.

``mixture.json`` has ``pairs``: pair → ``train_lines``, ``probability`` and, where directions are
drawn by their own sizes, ``forward``: the share of its draws that go from its first language to its
second. Later phases stand under ``phases``, each as ``{"from_update": n, "pairs": …}``.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Split, is_synthetic, languages, line_counts
from pipeline.artifacts.manifest import Manifest

TOKENIZER_FOLDER = "tokenizer"

_HEADER_BYTES = 128
_HEADER_START = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': ("
"""Beginning of a ``.npy`` file with one dimension of int64: format 1.0, 118 bytes of text."""

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Flags = npt.NDArray[np.uint8]


def shard_names(split: Split, pair: str, language: str) -> tuple[str, str]:
    """Return the names of the tokens and offsets of one side of a pair in the artifact."""
    stem = f"{split}/{pair}/{language}"
    return f"{stem}.tokens", f"{stem}.offsets.npy"


def begins_name(split: Split, pair: str, language: str) -> str:
    """Return the name of the word beginnings of one side of a pair in the artifact."""
    return f"{split}/{pair}/{language}.begins"


def token_type(vocabulary_size: int) -> np.dtype[Any]:
    """Return the smaller of the two stored types that holds every id."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


class Shard:
    """Sentences of one side of a pair, in the same order as on the other side.

    ``shard[i]`` is a read-only array of the stored type.

    Attributes:
        tokens: Ids of all sentences in a row.
        offsets: Start of each sentence, and the end of the last (int64).
        begins: 1 where a word begins; None for a language without a segmenter.
    """

    def __init__(
        self, tokens: Tokens, offsets: npt.NDArray[np.int64], begins: Flags | None = None
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.begins = begins

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the number of tokens of each sentence (int32)."""
        return np.diff(self.offsets).astype(np.int32)


def open_shard(
    artifact: Artifact, split: Split, pair: str, language: str, *, has_begins: bool = False
) -> Shard:
    """Map one side of a pair into memory, after checking its digests.

    Raises:
        ArtifactError: The side is missing, or its files do not fit together.
    """
    tokens_name, offsets_name = shard_names(split, pair, language)
    tokens_path, offsets_path = artifact.file(tokens_name), artifact.file(offsets_name)
    try:
        offsets = _map_offsets(offsets_path)
        number = int(offsets[-1])
        tokens: Tokens = _map(tokens_path, number, types=("<u2", "<u4"))
        if not has_begins:
            return Shard(tokens, offsets)
        begins_path = artifact.file(begins_name(split, pair, language))
        return Shard(tokens, offsets, _map(begins_path, number, types=("u1",)))
    except (OSError, ValueError) as error:
        what = f"{offsets_path} and the files next to it do not fit together ({error})"
        raise artifact.refusal(what) from error


def with_equal_limit(manifest: Manifest, directory: Path, *, max_tokens: int) -> Manifest:
    """Return the manifest as if made with this ``shards.max_tokens``, if that changes nothing.

    A higher limit does if none of the sentences was too long; a lower one if none of those kept is.
    """
    noted = manifest.config.get("shards")
    if not isinstance(noted, dict) or not isinstance(old := noted.get("max_tokens"), int):
        return manifest
    left_out = manifest.statistics.get("too_long")
    if max_tokens >= old:
        is_same = isinstance(left_out, dict) and not any(left_out.values())
    else:
        is_same = _longest(manifest, directory, most=max_tokens) <= max_tokens
    if not is_same:
        return manifest
    shards = {**noted, "max_tokens": max_tokens}
    return manifest.model_copy(update={"config": {**manifest.config, "shards": shards}})


def _longest(manifest: Manifest, directory: Path, *, most: int) -> int:
    """Return the tokens of the longest sentence; more than ``most`` if a file is unreadable."""
    names = [name for name in manifest.files if name.endswith(".offsets.npy")]
    longest = 0 if names else most + 1
    for name in names:
        try:
            lengths = np.diff(_map_offsets(directory / name))
        except (OSError, ValueError):
            return most + 1
        longest = max(longest, int(lengths.max(initial=0)))
        if longest > most:
            break
    return longest


def _map_offsets(path: Path) -> npt.NDArray[np.int64]:
    """Map the starts of the sentences into memory; ValueError if they do not ascend from 0.

    The header is compared, not parsed: numpy would trust its types and sizes.
    """
    with path.open("rb") as stream:
        header = stream.read(_HEADER_BYTES)
    size = path.stat().st_size - len(header)
    if not header.startswith(_HEADER_START) or size < 8 or size % 8:
        raise ValueError("the offsets are not as make_shards writes them")
    offsets = np.asarray(np.memmap(path, dtype="<i8", mode="r", offset=len(header)))
    if header[len(_HEADER_START) :].split(b",")[0] != b"%d" % len(offsets):
        raise ValueError("the offsets are cut off")
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("the offsets do not ascend from 0")
    return offsets


def _map(path: Path, number: int, *, types: Sequence[str]) -> npt.NDArray[Any]:
    """Map a file of one value per token into memory; ValueError if no type fits its size."""
    size = path.stat().st_size
    fitting = [kind for kind in map(np.dtype, types) if size == number * kind.itemsize]
    if not fitting:
        raise ValueError(f"{path.name} has {size} bytes for {number} tokens")
    if not size:  # an empty file cannot be mapped
        return np.empty(0, fitting[0])
    return np.asarray(np.memmap(path, dtype=fitting[0], mode="r"))


class ShardWriter:
    """Writer of one side of a pair, batch by batch, which keeps nothing in memory.

    ``names`` are its files in the artifact, ``size`` the number of ids of the tokenizer.
    """

    def __init__(
        self,
        directory: Path,
        *,
        split: Split,
        pair: str,
        language: str,
        size: int,
        has_begins: bool = False,
    ):
        tokens_name, offsets_name = shard_names(split, pair, language)
        self._type = token_type(size)
        self._sentences, self._end = 0, 0
        self.names = [tokens_name, offsets_name]
        tokens_path = directory / tokens_name
        if not tokens_path.parent.is_dir():
            tokens_path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = tokens_path.open("wb")
        self._offsets = (directory / offsets_name).open("wb")
        self._offsets.write(_offsets_header(0))
        self._offsets.write(np.zeros(1, "<i8").data)
        self._begins: BinaryIO | None = None
        if has_begins:
            self.names.append(begins_name(split, pair, language))
            self._begins = (directory / self.names[-1]).open("wb")

    def append(self, sentences: Sequence[Sequence[int]]) -> Tokens:
        """Write sentences and return their tokens in a row."""
        lengths = np.fromiter(map(len, sentences), dtype="<i8", count=len(sentences))
        flat = chain.from_iterable(sentences)
        tokens = np.fromiter(flat, dtype=self._type, count=int(lengths.sum()))
        self._stream.write(tokens.data)
        self._offsets.write((np.cumsum(lengths) + self._end).data)
        self._sentences, self._end = self._sentences + len(lengths), self._end + len(tokens)
        return tokens

    def append_begins(self, begins: Sequence[npt.NDArray[np.bool_]]) -> int:
        """Write the word beginnings of the sentences just appended; return their number."""
        assert self._begins is not None
        begins_N = np.concatenate([np.zeros(0, dtype=bool), *begins])
        self._begins.write(begins_N.astype(np.uint8).data)
        return int(begins_N.sum())

    def close(self) -> None:
        """Finish the files, which are then on disk."""
        self._offsets.seek(0)
        self._offsets.write(_offsets_header(self._sentences + 1))
        for stream in filter(None, (self._stream, self._offsets, self._begins)):
            with stream:
                stream.flush()
                os.fsync(stream.fileno())


def _offsets_header(number: int) -> bytes:
    """Return the header that numpy.save writes before this many offsets, of constant length."""
    content = _HEADER_START + b"%d,), }" % number
    return content.ljust(_HEADER_BYTES - 1) + b"\n"


# ---------------------------------------------------------------- mixtures

MIXTURE_NAME = "mixture.json"
SUM_TOLERANCE = 1e-6
"""Deviation from 1 allowed for a sum of probabilities, which are written with all their digits."""


@dataclass(frozen=True)
class Phase:
    """Probabilities that hold from an update on.

    Attributes:
        from_update: The first update of the phase, counted from 1.
        probabilities: Pair → probability that a sentence pair drawn is of this pair.
        forward: Pair → share of its draws from its first language to its second; a pair that is not
            in it is drawn in both directions equally often, epoch by epoch in turn.
    """

    from_update: int
    probabilities: Mapping[str, float]
    forward: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixture:
    """Phases of a training, ascending; the first begins at update 1, and all have all pairs."""

    phases: tuple[Phase, ...]
    train_lines: Mapping[str, int | None] = field(default_factory=dict)  # None: not known

    @classmethod
    def constant(cls, probabilities: Mapping[str, float]) -> "Mixture":
        """Return a mixture of one phase that draws both directions of every pair equally often."""
        return cls((Phase(1, probabilities),))

    def draws(self, direction: Direction) -> bool:
        """Return whether any phase draws this direction; True for a pair without training text."""
        pair = direction.pair
        unwanted = 0.0 if pair.startswith(f"{direction.source}-") else 1.0
        return any(
            phase.probabilities.get(pair, 1.0) > 0 and phase.forward.get(pair) != unwanted
            for phase in self.phases
        )


def lines_per_language(artifact: Artifact) -> dict[str, int]:
    """Return the training lines of every language of a corpus or shards, over all pairs.

    A line counts once in each of its pairs, so lines of a pivot count several times. Lines that a
    machine wrote do not count.
    """
    totals = dict.fromkeys(languages(artifact), 0)
    for pair, count in line_counts(artifact, "train").items():
        for code in pair.split("-"):
            if not is_synthetic(code):
                totals[code] += count
    return totals


Share = Annotated[float, Field(ge=0, le=1, strict=True)]


class _PairRecord(BaseModel):
    train_lines: Annotated[int, Field(strict=True)] | None = None
    probability: Share
    forward: Share | None = None


class _PhaseRecord(BaseModel):
    from_update: Annotated[int, Field(ge=1, strict=True)] = 1
    pairs: dict[str, _PairRecord]

    def phase(self) -> Phase:
        pairs = dict(sorted(self.pairs.items()))
        forward = {name: pair.forward for name, pair in pairs.items() if pair.forward is not None}
        probabilities = {name: pair.probability for name, pair in pairs.items()}
        return Phase(self.from_update, probabilities, forward)


class _MixtureRecord(_PhaseRecord):
    phases: list[_PhaseRecord] = []


def read_mixture(artifact: Artifact) -> Mixture:
    """Return the phases of a mixture, and the lines of its pairs."""
    try:
        first = _MixtureRecord.model_validate(artifact.read_json(MIXTURE_NAME))
        phases = tuple(record.phase() for record in (first, *first.phases))
        begins = [phase.from_update for phase in phases]
        totals = [math.fsum(phase.probabilities.values()) for phase in phases]
        have_all_pairs = len({tuple(phase.probabilities) for phase in phases}) == 1
        sum_to_one = all(math.isclose(total, 1, abs_tol=SUM_TOLERANCE) for total in totals)
        if begins != sorted({*begins}) or not have_all_pairs or not sum_to_one:
            raise ValueError(f"phases from {begins} have probabilities that sum to {totals}")
    except ValueError as error:
        what = f"{artifact.file(MIXTURE_NAME)} is not as mix writes it"
        raise artifact.refusal(what) from error
    return Mixture(phases, {pair: record.train_lines for pair, record in first.pairs.items()})
