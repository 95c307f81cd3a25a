"""Shards: the token ids of each side of a pair, memory-mapped.

``{split}/{pair}/{language}.tokens`` holds the ids of all sentences one after the other, in
little-endian uint16, or uint32 where the vocabulary needs it; ``{language}.offsets.npy`` beside it
(int64, sentences + 1) says where each begins. Specials and tags are not stored: batches add them.
Of a language with a segmenter (``segmenters.py``) there is ``{language}.begins``, too, a byte for
each token: 1 where a word begins.
The artifact's ``tokenizer/`` is a copy of the tokenizer's files.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.manifest import Manifest
from pipeline.errors import ArtifactError

TOKENIZER_FOLDER = "tokenizer"

_HEADER_BYTES = 128
_HEADER_START = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': ("
"""How numpy begins a file of one dimension of whole numbers: format 1.0, 118 bytes of text."""

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Flags = npt.NDArray[np.uint8]


def shard_names(split: Split, pair: str, language: str) -> tuple[str, str]:
    """Names, within the artifact, of the tokens and of the offsets of one side of a pair."""
    stem = f"{split}/{pair}/{language}"
    return f"{stem}.tokens", f"{stem}.offsets.npy"


def begins_name(split: Split, pair: str, language: str) -> str:
    """Name, within the artifact, of the beginnings of words of one side of a pair."""
    return f"{split}/{pair}/{language}.begins"


def token_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest of the two stored types that holds every id."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


class Shard:
    """The sentences of one side of a pair, in the order of the other side's.

    ``shard[i]`` is a read-only array of the stored type; ``lengths`` counts tokens (int32).
    ``tokens`` and ``offsets`` are the two files, for those who go over many sentences at once, and
    ``begins`` the third; None of a language without a segmenter.
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
        return np.diff(self.offsets).astype(np.int32)


def open_shard(
    artifact: Artifact, split: Split, pair: str, language: str, *, has_begins: bool = False
) -> Shard:
    """Map one side of a pair into memory; its digests are checked first, unless they are known.

    ``has_begins``: the language has a segmenter.

    Raises:
        ArtifactError: no such side, or its files do not fit together.
    """
    tokens_name, offsets_name = shard_names(split, pair, language)
    tokens_path, offsets_path = artifact.file(tokens_name), artifact.file(offsets_name)
    try:
        offsets = _map_offsets(offsets_path)
        num_bytes = tokens_path.stat().st_size
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{offsets_path} or {tokens_path.name} beside it cannot be read ({error}): run stage "
            f"{artifact.manifest.stage!r} again."
        ) from error
    tokens = _map_tokens(tokens_path, num_bytes, num_tokens=int(offsets[-1]))
    if not has_begins:
        return Shard(tokens, offsets)
    begins_path = artifact.file(begins_name(split, pair, language))
    return Shard(tokens, offsets, _map_begins(begins_path, num_tokens=len(tokens)))


def with_equal_limit(manifest: Manifest, directory: Path, *, max_tokens: int) -> Manifest:
    """Return the manifest of shards, as of another ``shards.max_tokens`` if that keeps the same.

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
    """Return the tokens of the longest sentence; more than ``most`` if a file cannot be read."""
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
    """Where sentences begin; ValueError unless they are whole numbers that ascend from 0.

    The header is not parsed by numpy, which would take what it says of types and sizes for granted.
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


def _map_tokens(path: Path, num_bytes: int, *, num_tokens: int) -> Tokens:
    """The stored type follows from the two sizes; an empty file cannot be mapped."""
    for stored_type in (np.dtype("<u2"), np.dtype("<u4")):
        if num_bytes == num_tokens * stored_type.itemsize:
            if num_tokens == 0:
                return np.empty(0, stored_type)
            return np.asarray(np.memmap(path, dtype=stored_type, mode="r"))
    raise ArtifactError(
        f"{path} has {num_bytes} bytes, which does not fit the {num_tokens} tokens of its "
        "offsets: restore both files from a copy or run the stage again."
    )


def _map_begins(path: Path, *, num_tokens: int) -> Flags:
    if path.stat().st_size != num_tokens:
        raise ArtifactError(
            f"{path} has {path.stat().st_size} bytes for {num_tokens} tokens: restore both files "
            "from a copy or run the stage again."
        )
    if num_tokens == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


class ShardWriter:
    """Writes one side of a pair, batch by batch; nothing of what is written stays in memory."""

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
        """``size`` is the number of ids of the tokenizer; ``has_begins``: the language has a
        segmenter.
        """
        tokens_name, offsets_name = shard_names(split, pair, language)
        self._type = token_type(size)
        self._sentences, self._end = 0, 0
        (directory / tokens_name).parent.mkdir(parents=True, exist_ok=True)
        self._stream = (directory / tokens_name).open("wb")
        self._offsets = (directory / offsets_name).open("wb")
        self._offsets.write(_offsets_header(0))
        self._offsets.write(np.zeros(1, "<i8").data)
        path = directory / begins_name(split, pair, language)
        self._begins = path.open("wb") if has_begins else None

    def append(self, sentences: Sequence[Sequence[int]]) -> Tokens:
        """Write sentences; returns their tokens one after the other, for counting."""
        lengths = np.fromiter(map(len, sentences), dtype="<i8", count=len(sentences))
        flat = chain.from_iterable(sentences)
        tokens = np.fromiter(flat, dtype=self._type, count=int(lengths.sum()))
        self._stream.write(tokens.data)
        self._offsets.write((np.cumsum(lengths) + self._end).data)
        self._sentences, self._end = self._sentences + len(lengths), self._end + len(tokens)
        return tokens

    def append_begins(self, begins: Sequence[npt.NDArray[np.bool_]]) -> int:
        """Write where words of the sentences just appended begin; returns how many do."""
        assert self._begins is not None
        begins_N = np.concatenate([np.zeros(0, dtype=bool), *begins])
        self._begins.write(begins_N.astype(np.uint8).data)
        return int(begins_N.sum())

    def close(self) -> None:
        """Finish the files."""
        self._stream.close()
        if self._begins is not None:
            self._begins.close()
        with self._offsets:
            self._offsets.seek(0)
            self._offsets.write(_offsets_header(self._sentences + 1))


def _offsets_header(number: int) -> bytes:
    """What numpy.save writes before so many offsets, which is as long for any number of them."""
    content = _HEADER_START + b"%d,), }" % number
    return content.ljust(_HEADER_BYTES - 1) + b"\n"
