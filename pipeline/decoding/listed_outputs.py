"""Output projection of a search onto shortlists.

A step for one sentence on CPU takes as long as reading the model's weights, and the output
projection is a large part of them. A shortlist (``artifacts/shortlist.py``) restricts it to the
likely translations of a sentence's pieces (Jean and others, 2015, arXiv 1412.2007), the common
pieces of the target, the sentence's own pieces (names and numbers are copied), and those of its
prefix and phrases.
Log-probabilities are normalized over the list of the sentence, so that a translation does not
depend on its batch: a search projects onto the union of its sentences' lists and masks the rest of
each.

Legend: B unfinished sentences, J beams, R = B · J rows, V vocabulary, U pieces of the union.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.artifacts.shortlist import Pieces
from pipeline.decoding.quantization import QuantizedLinear
from pipeline.kernels.products import linear
from pipeline.model.transformer import Transformer


class ListedOutputs:
    """The output projection of a search onto the union of its sentences' lists.

    Attributes:
        lists: list of every unfinished sentence.
        is_whole: whether logits cover the vocabulary, as forced and banned tokens need it.
    """

    def __init__(self, model: Transformer, lists: Sequence[Pieces], *, is_whole: bool) -> None:
        self.model, self.lists, self.is_whole = model, [*lists], is_whole
        self._made_for = 0
        """Number of sentences when the union was last made."""
        self._pieces: Pieces = np.empty(0, np.int64)
        """The union, ascending."""
        self._piece_U = torch.empty(0, dtype=torch.int64)
        """The union on the model's device."""
        self._other_BU: Tensor | None = None
        """Whether a sentence lacks a piece of the union; None if none does."""
        self._product: Callable[[Tensor], Tensor] = model.project
        self._make()

    def project(self, x_RD: Tensor) -> Tensor:
        """Return logits over the union, (R, U), -inf where a sentence does not list a piece."""
        logits_RU = self._product(x_RD)
        if self._other_BU is not None:
            beams = len(logits_RU) // len(self.lists)
            logits_BJU = logits_RU.view(-1, beams, logits_RU.shape[1])
            logits_BJU.masked_fill_(self._other_BU[:, None], -torch.inf)
        return logits_RU

    def tokens(self, column: Tensor) -> Tensor:
        """Return the pieces of columns of the logits."""
        return self._piece_U[column]

    def column(self, token: int) -> int:
        """Return the column of a piece of every list."""
        return int(np.searchsorted(self._pieces, token))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sentences; rows ascend."""
        if len(rows) == len(self.lists):
            return
        self.lists = [self.lists[row] for row in rows]
        if 2 * len(self.lists) <= self._made_for:
            self._make()
        elif self._other_BU is not None:
            self._other_BU = self._other_BU[list(rows)]

    def join(self, other: "ListedOutputs") -> None:
        """Add the sentences of another search."""
        self.lists = [*self.lists, *other.lists]
        self._make()

    def _make(self) -> None:
        """Take the rows of the union out of the output projection."""
        embedding, device = self.model.embedding, self.model.device
        every = np.arange(embedding.output_size)
        pieces = every if self.is_whole else np.unique(np.concatenate(self.lists))
        is_listed = np.zeros((len(self.lists), len(every)), bool)
        for row, one in enumerate(self.lists):
            is_listed[row, one] = True
        is_other = ~is_listed[:, pieces]
        self._made_for, self._pieces = len(self.lists), pieces
        self._piece_U = torch.from_numpy(pieces).to(device)
        self._other_BU = torch.from_numpy(is_other).to(device) if is_other.any() else None
        projection, table_VD = embedding.projection, embedding.output_table()
        if len(pieces) == len(every):
            self._product = self.model.project
        elif isinstance(projection, QuantizedLinear):
            narrow = projection.outputs(self._piece_U)
            self._product = lambda x_RD: narrow(self.model.decoder.leave(x_RD))
        elif table_VD is not None:
            rows_UD = table_VD[self._piece_U]
            self._product = lambda x_RD: linear(self.model.decoder.leave(x_RD), rows_UD)
        else:
            self._product = lambda x_RD: self.model.project(x_RD)[:, self._piece_U]
