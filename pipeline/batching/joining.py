"""Join micro-batches that share one forward and backward pass.

All layers then see the tokens of all of them at once. Random numbers depend on a token's place in
its own micro-batch (:mod:`~pipeline.kernels.noise`). Values that are not computed per token belong
to each micro-batch: the experts' capacity, the balance loss, and the weights of the z-loss and of
the loss of gates (:class:`~pipeline.batching.batch.Shares`). So loss and gradient equal the sums
over separate passes.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from pipeline.batching.batch import Batch, Packing, Shares
from pipeline.kernels.noise import Noise


def join(batches: Sequence[Batch]) -> Batch:
    """Join micro-batches on one device."""
    labels = [batch.num_labels for batch in batches]
    first_rows = accumulate((len(batch.target_N) for batch in batches), initial=0)
    rows = zip(batches, first_rows, strict=False)
    begins = [batch.source_begins_N for batch in batches if batch.source_begins_N is not None]
    return Batch(
        source_N=torch.cat([batch.source_N for batch in batches]),
        source=join_packings([batch.source for batch in batches], labels=labels),
        target_N=torch.cat([batch.target_N for batch in batches]),
        target=join_packings([batch.target for batch in batches], labels=labels),
        label_rows_L=torch.cat([batch.label_rows_L + first for batch, first in rows]),
        labels_L=torch.cat([batch.labels_L for batch in batches]),
        source_language_B=torch.cat([batch.source_language_B for batch in batches]),
        target_language_B=torch.cat([batch.target_language_B for batch in batches]),
        pair_B=torch.cat([batch.pair_B for batch in batches]),
        line_B=torch.cat([batch.line_B for batch in batches]),
        source_begins_N=torch.cat(begins) if begins else None,
    )


def join_packings(parts: Sequence[Packing], *, labels: Sequence[int]) -> Packing:
    """Put the sentences of several packings one below the other."""
    length = max(part.length for part in parts)
    sentences = list(accumulate((part.batch for part in parts), initial=0))
    rows = list(accumulate((len(part.index_N) for part in parts), initial=0))
    sentence_N = [part.sentence_N + first for part, first in zip(parts, sentences, strict=False)]
    bounds = [part.bound_B[:-1] + first for part, first in zip(parts, rows, strict=False)]
    index_N = torch.cat(sentence_N) * length + torch.cat([part.position_N for part in parts])
    keys = [part.noise for part in parts if part.noise is not None]
    return Packing(
        index_N=index_N,
        bound_B=torch.cat([*bounds, parts[-1].bound_B[-1:] + rows[-2]]),
        batch=sentences[-1],
        length=length,
        is_full=all(part.is_full and part.length == length for part in parts),
        shares=_shares([len(part.index_N) for part in parts], labels, index_N.device),
        noise=Noise(*map(torch.cat, zip(*keys, strict=True))) if keys else None,
    )


def _shares(rows: Sequence[int], labels: Sequence[int], device: torch.device) -> Shares:
    """Fill the tensors on the device: a copy from the host would wait for it."""
    ends = list(accumulate(rows))
    mean_MN = torch.zeros(len(rows), ends[-1], device=device)
    weight_M = torch.zeros(len(rows), device=device)
    for number, (count, end) in enumerate(zip(rows, ends, strict=True)):
        mean_MN[number, end - count : end] = 1 / count
        weight_M[number] = labels[number] / sum(labels)
    return Shares(tuple(rows), mean_MN, weight_M)
