"""Assemble micro-batches of translation and of labelled text, without padding.

Hidden states are *packed*: a batch of B sentences with N real tokens is a (N, D) matrix. No
linear layer, expert or vocabulary projection ever sees padding. Only attention may need the padded
(B, T, D) form; :class:`Packing` converts between the two.

A labelled sentence is in one language, which layers receive as both its source and its target
language. The tensors of a batch lie in one buffer, so one copy takes them all to a GPU.

Legend: B batch, S source length, T target length, N real tokens, L labels, D model width, M
micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.batching.settings import BatchesConfig
from pipeline.config.settings import EXTRA_TOKENS
from pipeline.kernels.attention import attention_mask
from pipeline.kernels.noise import Noise

ALIGNMENT = 16
"""Bytes to a multiple of which every tensor starts, since kernels load as many at once."""

Record = TypeVar("Record")


def with_each_tensor(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    """Return a dataclass with each of its tensors changed, also within its dataclasses."""
    changed: dict[str, Any] = {}
    for name, value in _parts(record):
        if isinstance(value, Tensor):
            changed[name] = change(value)
        elif is_dataclass(value):
            changed[name] = with_each_tensor(value, change)
    return replace(record, **changed)  # type: ignore[type-var]


def in_one_buffer(record: Record, *, pinned: bool) -> Record:
    """Return the record with its tensors, on the CPU, as views of one new buffer.

    A GPU can copy from a pinned buffer by itself.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in _tensors(record)]
    *starts, end = accumulate(sizes, initial=0)
    buffer, places = torch.empty(end, dtype=torch.uint8, pin_memory=pinned), iter(starts)

    def placed(tensor: Tensor) -> Tensor:
        view = _view(buffer, next(places), like=tensor)
        view.numpy()[...] = tensor.numpy()  # in this thread only, as torch's copy is not
        return view

    return with_each_tensor(record, placed)


def moved(record: Record, device: torch.device) -> Record:
    """Return a record of tensors on the CPU on a device, by one copy.

    From pinned memory the copy runs while the device still works on earlier operators.
    """
    tensors = list(_tensors(record))
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
        record = in_one_buffer(record, pinned=device.type == "cuda")
        tensors = list(_tensors(record))
    whole = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    there = whole.to(device, non_blocking=True)
    return with_each_tensor(
        record,
        lambda part: _view(there, int(part.storage_offset()) * part.element_size(), like=part),
    )


def _parts(record: object) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(record, field.name)) for field in fields(record))  # type: ignore[arg-type]


def _tensors(record: object) -> Iterator[Tensor]:
    for _, value in _parts(record):
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def _view(buffer: Tensor, start: int, *, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


Ids = Sequence[int] | npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

SOURCE_EXTRA = EXTRA_TOKENS
"""Tokens added to a source: one tag and end-of-sentence."""
TARGET_EXTRA = EXTRA_TOKENS
"""Tokens added to a decoder input: the longest prompt."""


def extra_labels(config: BatchesConfig) -> int:
    """Return a sentence's labels besides its tokens: end-of-sentence, and the tag if it counts."""
    return 1 + config.tag_is_label


@dataclass(frozen=True)
class Shares:
    """The tokens and labels of the M micro-batches that share a pass.

    What is not computed per token stays each micro-batch's own: the experts' capacity, the balance
    loss, and the weights of the z-loss and of the loss of gates.

    Attributes:
        rows: tokens of each micro-batch, which follow each other.
        rows_M: the same on the device.
        weight_M: each micro-batch's share of the labels, which weighs losses that are not sums over
            tokens.
    """

    rows: tuple[int, ...]
    rows_M: Tensor
    weight_M: Tensor

    @classmethod
    def of(cls, rows: Integers, labels: Integers) -> Self:
        """Share a pass among micro-batches with so many tokens and labels each."""
        weight_M = (labels / labels.sum()).astype(np.float32)
        return cls(tuple(rows.tolist()), torch.from_numpy(rows), torch.from_numpy(weight_M))

    @cached_property
    def micro_batch_N(self) -> Tensor:
        """Return the micro-batch of each token."""
        number_M = torch.arange(len(self.rows), device=self.rows_M.device)
        return number_M.repeat_interleave(self.rows_M, output_size=sum(self.rows))

    @cached_property
    def mean_MN(self) -> Tensor:
        """Return a matrix that multiplied by values of tokens gives each micro-batch's mean.

        It is small compared with the activations. On a GPU, sums by index would take atomic
        additions.
        """
        number_M = torch.arange(len(self.rows), device=self.rows_M.device)
        return (self.micro_batch_N == number_M[:, None]) / self.rows_M[:, None]


@dataclass(frozen=True)
class Packing:
    """Positions of the N real tokens in a right-padded (batch, length) grid.

    ``index_N`` has the flat position of every real token, ascending. ``bound_B``, (B + 1,) int32,
    has the row where each sentence starts, and where the last one ends. ``is_full`` tells the host
    that nothing is padded: packing is then a view. ``shares`` tells apart the micro-batches that
    share a pass; None for a single one. ``noise`` has the keys of the tokens' random numbers in
    training.
    """

    index_N: Tensor
    bound_B: Tensor
    batch: int
    length: int
    is_full: bool
    shares: Shares | None = None
    noise: Noise | None = None

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Integers) -> Self:
        """Pack right-padded sentences of the given lengths (tokens, all ≥ 1)."""
        length_B = np.asarray(lengths, dtype=np.int64)
        length = int(length_B.max(initial=1))
        bound_B = np.zeros(len(length_B) + 1, dtype=np.int32)
        np.cumsum(length_B, out=bound_B[1:])
        shift_B = np.arange(len(length_B)) * length - bound_B[:-1]
        index_N = shift_B.repeat(length_B)
        index_N += np.arange(len(index_N))
        return cls(
            index_N=torch.from_numpy(index_N),
            bound_B=torch.from_numpy(bound_B),
            batch=len(lengths),
            length=length,
            is_full=len(index_N) == len(lengths) * length,
        )

    def keyed(self, *seeds: int) -> "Packing":
        """Return the packing with keys of random numbers, from a seed for each micro-batch."""
        rows = (len(self.index_N),) if self.shares is None else self.shares.rows
        # The last 32 bits of a seed, as a signed number.
        words = [(seed + 2**31) % 2**32 - 2**31 for seed in seeds]
        seed_N = np.repeat(np.array(words, dtype=np.int32), rows)
        row_N = np.concatenate([np.arange(count, dtype=np.int32) for count in rows])
        keys = (torch.from_numpy(keys_N).to(self.index_N.device) for keys_N in (seed_N, row_N))
        return replace(self, noise=Noise(*keys))

    def noisy(self, salt: int = 0) -> "Packing":
        """Return the packing with the keys of a pass; ``salt`` tells passes of one batch apart.

        If it has none, as outside the engine, their seed comes from PyTorch's generator.
        """
        keyed = self
        if self.noise is None:
            micro_batches = 1 if self.shares is None else len(self.shares.rows)
            keyed = self.keyed(*torch.randint(2**31, (micro_batches,)).tolist())
        assert keyed.noise is not None
        return replace(keyed, noise=keyed.noise.salted(salt)) if salt else keyed

    @cached_property
    def span_N(self) -> Tensor:
        """Span between two of ``bound_B`` to which each real token belongs, int32."""
        row_N = torch.arange(len(self.index_N), dtype=torch.int32, device=self.index_N.device)
        return torch.bucketize(row_N, self.bound_B[1:], out_int32=True, right=True)

    @cached_property
    def noise_BT(self) -> Noise:
        """Keys of random numbers of every position, (B, T) each; 0 at padding."""
        assert self.noise is not None, "training with dropout needs keys of random numbers"
        padded = (torch.cat([keys_N, keys_N.new_zeros(1)])[self.row_BT] for keys_N in self.noise)
        return Noise(*padded)

    @cached_property
    def sentence_N(self) -> Tensor:
        """Row of the batch of each real token."""
        return self.index_N // self.length

    @cached_property
    def position_N(self) -> Tensor:
        """Position of each real token in its sentence, from 0."""
        return self.index_N % self.length

    @cached_property
    def mask_BT(self) -> Tensor:
        """True at real tokens."""
        mask = torch.zeros(self.batch * self.length, dtype=torch.bool, device=self.index_N.device)
        # The host would wait to send a single True to an index.
        return mask.index_fill_(0, self.index_N, True).view(self.batch, self.length)

    @cached_property
    def _bias_of_type(self) -> dict[torch.dtype, Tensor]:
        return {}

    def key_mask(self, *, beside: Tensor) -> Tensor | None:
        """Return the mask of real keys, in the form that attention prefers next to ``beside``.

        (B, 1, 1, T); None if nothing is padded. All layers share it.
        """
        if self.is_full:
            return None
        if beside.dtype not in self._bias_of_type:
            mask = attention_mask(self.mask_BT[:, None, None, :], beside=beside)
            self._bias_of_type[beside.dtype] = mask
        return self._bias_of_type[beside.dtype]

    @cached_property
    def row_BT(self) -> Tensor:
        """The packed row of every position; N at padding."""
        num_tokens = len(self.index_N)
        rows = self.index_N.new_full((self.batch * self.length,), num_tokens)
        rows[self.index_N] = torch.arange(num_tokens, device=rows.device)
        return rows.view(self.batch, self.length)

    def pack(self, x_BTD: Tensor) -> Tensor:
        """Pack (B, T, D) into (N, D)."""
        flat = x_BTD.reshape(self.batch * self.length, x_BTD.shape[-1])
        if self.is_full:
            return flat
        packed: Tensor = _Pack.apply(flat, self)  # type: ignore[no-untyped-call]
        return packed

    def unpack(self, x_ND: Tensor) -> Tensor:
        """Unpack (N, D) into (B, T, D), zero at padding."""
        if not self.is_full:
            x_ND = _Unpack.apply(x_ND, self)  # type: ignore[no-untyped-call]
        return x_ND.view(self.batch, self.length, x_ND.shape[-1])

    def to(self, device: torch.device, *, non_blocking: bool = True) -> "Packing":
        """Return the packing on a device."""
        return replace(
            self,
            index_N=self.index_N.to(device, non_blocking=non_blocking),
            bound_B=self.bound_B.to(device, non_blocking=non_blocking),
            noise=self.noise and with_each_tensor(self.noise, lambda keys_N: keys_N.to(device)),
        )

    def shared(self, ends_M: Integers, labels_M: Integers) -> "Packing":
        """Share the packing, on the CPU, among micro-batches between ``ends_M`` of sentences."""
        rows_M = np.diff(self.bound_B.numpy()[ends_M]).astype(np.int64)
        return replace(self, shares=Shares.of(rows_M, labels_M))


class _Pack(torch.autograd.Function):
    """Pack (B · T, D) into (N, D).

    No row is taken twice: the gradient is copied, not added up.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return flat.index_select(0, packing.index_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _with_padding(gradients[0], ctx.packing), None


class _Unpack(torch.autograd.Function):
    """(N, D) → (B · T, D), zero at padding."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return _with_padding(x_ND, packing)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.packing.index_N), None


def _with_padding(x_ND: Tensor, packing: Packing) -> Tensor:
    """Gather from the rows and a row of zeros, which is faster than copying into zeros."""
    padding = x_ND.new_zeros(1, x_ND.shape[1])
    return torch.cat([x_ND, padding]).index_select(0, packing.row_BT.flatten())


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or several that share a pass (:meth:`shared`).

    Attributes:
        source_N: packed source ids, tags and end-of-sentence included.
        source: packing of the source.
        target_N: packed decoder input ids: prompt, then the target.
        target: packing of the decoder input.
        label_rows_L: rows of ``target_N`` that predict the next token; the forced prompt
            is not, unless its tag is a label.
        labels_L: the tokens to predict, end-of-sentence included.
        source_language_B, target_language_B: indices into the tokenizer's languages.
        pair_B, line_B: which sentence pair each row is.
        source_begins_N: True where a token begins a word that a segmenter found; None where no
            language has one.
    """

    source_N: Tensor
    source: Packing
    target_N: Tensor
    target: Packing
    label_rows_L: Tensor
    labels_L: Tensor
    source_language_B: Tensor
    target_language_B: Tensor
    pair_B: Tensor
    line_B: Tensor
    source_begins_N: Tensor | None = None

    @property
    def num_sentences(self) -> int:
        """Number of sentences."""
        return self.source.batch

    @property
    def num_labels(self) -> int:
        """Real target tokens and tags that are labels: the divisor of cross entropy."""
        return len(self.labels_L)

    @property
    def num_source_tokens(self) -> int:
        """Real source tokens, tags and end-of-sentence included."""
        return len(self.source_N)

    def keyed(self, *seeds: int) -> "Batch":
        """Return the batch with keys of random numbers, from a seed for each micro-batch."""
        return replace(self, source=self.source.keyed(*seeds), target=self.target.keyed(*seeds))

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; a no-op if it is there already."""
        here = self.source_N.device
        is_here = here.type == device.type and device.index in (None, here.index)
        return self if is_here else moved(self, device)

    def shared(self, sentences: Sequence[int]) -> "Batch":
        """Share the batch, on the CPU, among micro-batches of so many sentences each.

        Its loss and gradient are then the sums over the micro-batches.
        """
        ends_M = np.cumsum([0, *sentences])
        row_M, label_row_L = self.target.bound_B.numpy()[ends_M], self.label_rows_L.numpy()
        labels_M = np.diff(label_row_L.searchsorted(row_M))
        return replace(
            self,
            source=self.source.shared(ends_M, labels_M),
            target=self.target.shared(ends_M, labels_M),
        )


@dataclass(frozen=True)
class Example:
    """One sentence pair with its tags resolved."""

    source: Ids
    target: Ids
    source_prefix: tuple[int, ...]
    decoder_prompt: tuple[int, ...]
    source_language: int
    target_language: int
    pair: int = 0
    line: int = 0
    source_suffix: tuple[int, ...] = ()
    """Ids after the source's end-of-sentence."""


class Ragged(NamedTuple):
    """Ids of all sentences, one sentence after the other, and each sentence's number of ids."""

    ids_N: Integers
    length_B: Integers

    @classmethod
    def of(cls, parts: Sequence[Ids]) -> "Ragged":
        """Concatenate the ids of the sentences."""
        length_B = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        nothing = np.zeros(0, dtype=np.int64)
        return cls(np.concatenate([nothing, *parts]).astype(np.int64), length_B)

    def without_first(self) -> "Ragged":
        """Remove the first id of every sentence."""
        is_kept_N = np.ones(len(self.ids_N), dtype=bool)
        is_kept_N[np.cumsum(self.length_B) - self.length_B] = False
        return Ragged(self.ids_N[is_kept_N], self.length_B - 1)

    @classmethod
    def same(cls, ids: Sequence[int], *, sentences: int) -> "Ragged":
        """Repeat the same ids for every sentence."""
        length_B = np.full(sentences, len(ids), dtype=np.int64)
        return cls(np.tile(np.asarray(ids, dtype=np.int64), sentences), length_B)


@dataclass(frozen=True)
class Sentences:
    """The parts of a batch, sentence by sentence; see :class:`Example`.

    ``source_ending``: the source's end-of-sentence and its suffix. ``source_begins``: 1 where a
    token of ``source`` begins a word that a segmenter found; None if no language has a segmenter.
    """

    source: Ragged
    target: Ragged
    source_prefix: Ragged
    source_ending: Ragged
    decoder_prompt: Ragged
    source_language_B: Integers
    target_language_B: Integers
    pair_B: Integers
    line_B: Integers
    source_begins: Ragged | None = None


def collate(examples: Sequence[Example], *, eos_id: int, tag_is_label: bool = False) -> Batch:
    """Assemble a micro-batch from examples."""
    sentences = Sentences(
        source=Ragged.of([e.source for e in examples]),
        target=Ragged.of([e.target for e in examples]),
        source_prefix=Ragged.of([e.source_prefix for e in examples]),
        source_ending=Ragged.of([(eos_id, *e.source_suffix) for e in examples]),
        decoder_prompt=Ragged.of([e.decoder_prompt for e in examples]),
        source_language_B=np.array([e.source_language for e in examples]),
        target_language_B=np.array([e.target_language for e in examples]),
        pair_B=np.array([e.pair for e in examples]),
        line_B=np.array([e.line for e in examples]),
    )
    return assemble(sentences, eos_id=eos_id, tag_is_label=tag_is_label)


def assemble(sentences: Sentences, *, eos_id: int, tag_is_label: bool) -> Batch:
    """Lay out a micro-batch: source = prefix, tokens, ending; decoder input = prompt, tokens.

    Labels are the target's tokens and eos; with ``tag_is_label`` the prompt's tag comes first.
    """
    num_sentences = len(sentences.pair_B)
    nothing = Ragged.same((), sentences=num_sentences)
    eos = Ragged.same((eos_id,), sentences=num_sentences)
    source = _joined(sentences.source_prefix, sentences.source, sentences.source_ending)
    target = _joined(sentences.decoder_prompt, sentences.target, nothing)
    tag = sentences.decoder_prompt.without_first() if tag_is_label else nothing
    labels = _joined(tag, sentences.target, eos)
    return Batch(
        source_N=torch.from_numpy(source.ids_N),
        source=Packing.from_lengths(source.length_B),
        target_N=torch.from_numpy(target.ids_N),
        target=Packing.from_lengths(target.length_B),
        label_rows_L=torch.from_numpy(_last_rows(target.length_B, labels.length_B)),
        labels_L=torch.from_numpy(labels.ids_N),
        source_language_B=torch.from_numpy(sentences.source_language_B),
        target_language_B=torch.from_numpy(sentences.target_language_B),
        pair_B=torch.from_numpy(sentences.pair_B),
        line_B=torch.from_numpy(sentences.line_B),
        source_begins_N=_source_begins(sentences),
    )


def _source_begins(sentences: Sentences) -> Tensor | None:
    """Mark the beginnings of words in whole sources.

    Tags and end-of-sentence begin no word that a segmenter found.
    """
    if sentences.source_begins is None:
        return None
    before, behind = (
        Ragged(np.zeros_like(part.ids_N), part.length_B)
        for part in (sentences.source_prefix, sentences.source_ending)
    )
    return torch.from_numpy(_joined(before, sentences.source_begins, behind).ids_N != 0)


def _joined(*parts: Ragged) -> Ragged:
    """Concatenate three parts of every sentence."""
    from pipeline.kernels.compiled_loops import join

    length_B = parts[0].length_B + parts[1].length_B + parts[2].length_B
    ids_N = np.empty(int(length_B.sum()), dtype=np.int64)
    join(*parts[0], *parts[1], *parts[2], ids_N)
    return Ragged(ids_N, length_B)


def _last_rows(length_B: Integers, count_B: Integers) -> Integers:
    """Return the last ``count_B`` rows of every sentence, one sentence after the other."""
    skipped_B = np.cumsum(length_B) - np.cumsum(count_B)
    rows: Integers = np.arange(int(count_B.sum())) + np.repeat(skipped_B, count_B)
    return rows


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
        labels_L: their tags; for a reader the first tokens of all answers, then the last tokens.
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
    lengths = [len(example.ids) for example in examples]
    starts = np.cumsum([0, *lengths[:-1]])
    rows_L = np.concatenate([example.rows + s for example, s in zip(examples, starts, strict=True)])
    return _collated(
        examples, languages, rows_L, np.concatenate([example.labels for example in examples])
    )


def collate_spans(examples: Sequence[Labelled], languages: Sequence[int]) -> LabelledBatch:
    """Assemble windows to find an answer in; ``languages`` are the indices of theirs."""
    labels_B2 = np.stack([example.labels for example in examples])
    return _collated(examples, languages, np.zeros(0, dtype=np.int64), labels_B2.T.ravel())


def _collated(
    examples: Sequence[Labelled], languages: Sequence[int], rows_L: Integers, labels_L: Integers
) -> LabelledBatch:
    return LabelledBatch(
        ids_N=torch.from_numpy(np.concatenate([example.ids for example in examples])),
        packing=Packing.from_lengths([len(example.ids) for example in examples]),
        language_B=torch.tensor(languages, dtype=torch.int64),
        label_rows_L=torch.from_numpy(rows_L),
        labels_L=torch.from_numpy(np.ascontiguousarray(labels_L)),
    )


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a rank.

    Attributes:
        batch: some micro-batches of the update, or a stand-in, with keys of random numbers.
        micro_batches: their indices in the update; none of a stand-in, which counts nothing.
    """

    batch: AnyBatch
    micro_batches: tuple[int, ...]

    @property
    def counts(self) -> bool:
        """Whether the pass adds to loss and gradient."""
        return bool(self.micro_batches)
