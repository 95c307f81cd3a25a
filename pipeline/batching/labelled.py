"""Assemble micro-batches of labelled text: sentences to tag, or passages to find a span in.

Tokens are packed as in translation (:mod:`pipeline.batching.batch`). A sentence is in one language,
which layers receive as both its source and its target language.

Legend: B sentences or windows, N real tokens, L labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.batching.batch import Batch, Packing
from pipeline.batching.one_buffer import moved

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """One sentence or window, with its specials.

    Attributes:
        ids: of all tokens.
        rows: positions, from 0, of the tokens that a tagger labels; empty for a reader.
        labels: a tag for each of ``rows``; for a reader the first and the last token of the answer.
    """

    ids: Integers
    rows: Integers
    labels: Integers


@dataclass(frozen=True)
class LabelledBatch:
    """One micro-batch.

    Attributes:
        ids_N: packed ids.
        packing: of these.
        language_B: indices into the model's languages.
        label_rows_L: rows of ``ids_N`` that are tagged; empty for a reader.
        labels_L: their tags; for a reader the first tokens of all answers, then the last ones.
    """

    ids_N: Tensor
    packing: Packing
    language_B: Tensor
    label_rows_L: Tensor
    labels_L: Tensor

    @property
    def num_labels(self) -> int:
        """Labels: the divisor of cross entropy."""
        return len(self.labels_L)

    @property
    def num_source_tokens(self) -> int:
        """Real tokens, specials included."""
        return len(self.ids_N)

    def keyed(self, *seeds: int) -> "LabelledBatch":
        """Return the batch with keys of random numbers, from a seed for each micro-batch."""
        return replace(self, packing=self.packing.keyed(*seeds))

    def to(self, device: torch.device) -> "LabelledBatch":
        """Return the batch on a device; a no-op if it is there already."""
        return self if self.ids_N.device == device else moved(self, device)


AnyBatch: TypeAlias = Batch | LabelledBatch
"""A batch of translation or of a labelling task, as the engine takes it."""


def collate_tags(examples: Sequence[Labelled], languages: Sequence[int]) -> LabelledBatch:
    """Assemble sentences to tag; ``languages`` are the indices of their languages."""
    lengths = [len(one.ids) for one in examples]
    starts = np.cumsum([0, *lengths[:-1]])
    rows_L = np.concatenate([one.rows + s for one, s in zip(examples, starts, strict=True)])
    return _collated(examples, languages, rows_L, np.concatenate([one.labels for one in examples]))


def collate_spans(examples: Sequence[Labelled], languages: Sequence[int]) -> LabelledBatch:
    """Assemble windows to find an answer in; ``languages`` are the indices of theirs."""
    labels_B2 = np.stack([one.labels for one in examples])
    return _collated(examples, languages, np.zeros(0, dtype=np.int64), labels_B2.T.ravel())


def _collated(
    examples: Sequence[Labelled], languages: Sequence[int], rows_L: Integers, labels_L: Integers
) -> LabelledBatch:
    return LabelledBatch(
        ids_N=torch.from_numpy(np.concatenate([one.ids for one in examples])),
        packing=Packing.from_lengths([len(one.ids) for one in examples]),
        language_B=torch.tensor(languages, dtype=torch.int64),
        label_rows_L=torch.from_numpy(rows_L),
        labels_L=torch.from_numpy(np.ascontiguousarray(labels_L)),
    )
