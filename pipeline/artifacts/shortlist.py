"""Shortlists: the target pieces that the pieces of a sentence are likely translated by.

``shortlist.json`` has the fingerprint of the tokenizer and the number K of pieces in a row.
``SOURCE-TARGET.pieces`` has rows of a source piece and K target pieces that are listed for it, as
little-endian int32. Rows that begin with COMMON have pieces listed for every sentence, and NO_PIECE
fills up rows.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.errors import ArtifactError, ConfigError

SHORTLIST_NAME = "shortlist.json"
"""File that names the tokenizer."""
COMMON = -1
"""Source piece of the rows that list common pieces."""
NO_PIECE = -1
"""Entry of a row with fewer pieces."""
MAX_LISTED = 10**4
"""Most target pieces of a row."""
MAX_PIECES = 2**24
"""More pieces than a vocabulary has."""

Pieces = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


def direction_name(direction: Direction) -> str:
    """Return the file of a direction in the artifact."""
    return f"{direction}.pieces"


class Shortlist:
    """The lists of every direction, read when a sentence needs them."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        """Open the lists.

        Raises:
            ArtifactError: the folder is no shortlist, or is damaged.
            ConfigError: it was made with another vocabulary.
        """
        self._artifact = open_artifact(directory, kind="shortlist")
        document = self._artifact.read_json(SHORTLIST_NAME)
        found = document if isinstance(document, dict) else {}
        translations = found.get("translations")
        if not isinstance(translations, int) or not 1 <= translations <= MAX_LISTED:
            _refuse(self._artifact, SHORTLIST_NAME, "does not say how many pieces a row has")
        if found.get("tokenizer") != tokenizer.fingerprint:
            raise ConfigError(
                f"decoding.shortlist names {directory}, which was made with another vocabulary "
                "than the model's. Make it from the shards that the model was trained on."
            )
        self._width = 1 + translations
        self._always = (tokenizer.eos_id, tokenizer.pad_id)
        self._size = tokenizer.output_size or tokenizer.size
        self._of_direction = cache(self._read)

    def pieces(self, direction: Direction, tokens: Sequence[int], given: Iterable[int]) -> Pieces:
        """Return the pieces that a translation may have, ascending; all for an unlisted direction.

        End-of-sentence and padding are among them: padding, which no hypothesis has, counts in the
        normalization as it does without a shortlist.

        Args:
            direction: direction of the sentence.
            tokens: its pieces.
            given: pieces that its translation must have.
        """
        found = self._of_direction(direction)
        if found is None:
            return np.arange(self._size)
        common, row_of, rows = found
        own = np.array(tokens, np.int64)
        known = own[own < len(row_of)]
        listed = rows[row_of[known]].ravel()
        must = np.array([*self._always, *given], np.int64)
        every = np.unique(np.concatenate([common, listed, own, must]))
        pieces: Pieces = every[(every >= 0) & (every < self._size)]
        return pieces

    def _read(self, direction: Direction) -> tuple[Pieces, Pieces, Rows] | None:
        """Return common pieces, the row of every source piece, and rows; the last has no pieces."""
        name = direction_name(direction)
        if not self._artifact.has(name):
            return None
        content = self._artifact.file(name).read_bytes()
        if len(content) % (4 * self._width):
            _refuse(self._artifact, name, "does not hold whole rows")
        stored = np.frombuffer(content, dtype="<i4").reshape(-1, self._width)
        if stored.min(initial=0) < NO_PIECE or stored.max(initial=0) >= MAX_PIECES:
            _refuse(self._artifact, name, "holds numbers that are no pieces")
        source, rows = stored[:, 0], stored[:, 1:]
        row_of = np.full(int(source.max(initial=0)) + 1, len(rows), np.int64)
        is_piece = source != COMMON
        row_of[source[is_piece]] = np.flatnonzero(is_piece)
        without = np.full((1, rows.shape[1]), NO_PIECE, np.int32)
        return rows[~is_piece].ravel().astype(np.int64), row_of, np.concatenate([rows, without])


def _refuse(artifact: Artifact, name: str, problem: str) -> NoReturn:
    raise ArtifactError(f"{artifact.file(name)} {problem}. Run stage 'shortlist' again.")
