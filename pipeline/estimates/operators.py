"""Count the operators that a step launches on a GPU, without a GPU.

A training micro-batch or a decoding step runs on PyTorch's meta device, which has shapes but no
values, and every operator is recorded. Our kernels take the same branches there as on CUDA.

A *launch* is one call of an operator, as PyTorch dispatches it below autograd, that has work on the
device: all operators except views and :data:`LAUNCHES_NOTHING`. Operators that CUDA fuses
(attention, dropout, norms, grouped products) count as one launch, even if they run several kernels.
Collectives, and the work of DeepSpeed and the optimizer on gradients, are not counted. With expert
parallelism, the work is that of one rank (:func:`count_training`).
"""

import importlib
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from types import FrameType, ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pipeline.batching.batch import Batch, Packing
from pipeline.config.recipe import Recipe
from pipeline.decoding.beam_search import BeamStep, Search
from pipeline.decoding.grid_search import Grid, grid_shape, suits_grids
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.quantization import weight_dtype
from pipeline.kernels.slot_products import copied_to
from pipeline.model.attention import Attention
from pipeline.model.building import build_model
from pipeline.model.embedding import Embedding
from pipeline.model.extension import extensions
from pipeline.model.feed_forward import FeedForward
from pipeline.model.moe.expert_parallel import ExpertParallel, RankExperts, RowCounts
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.router import LanguageGroupRouter, TokenRouter
from pipeline.model.regularization import Regularization
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import placeholder_spec
from pipeline.model.transformer import Stack, Transformer
from pipeline.training.losses import training_loss

META = torch.device("meta")
SENTENCE_LENGTH = 32
"""Assumed tokens per sentence, tags included: about the mean of OPUS-100."""

LAUNCHES_NOTHING = {
    "empty": "allocates",
    "empty_like": "allocates",
    "empty_strided": "allocates",
    "new_empty": "allocates",
    "new_empty_strided": "allocates",
    "_unsafe_view": "a view of a product, which autograd need not know of",
    "_reshape_alias": "a view",
    "lift_fresh": "marks a tensor as new",
}
"""Operators without work on the device, and why; views are recognized by their schema."""

KINDS = {
    "matrix product": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"),
    "convolution": ("convolution", "convolution_backward"),
    "attention": (
        *("_flash_attention_forward", "_flash_attention_backward"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ),
    "norm or softmax": (
        *("native_layer_norm", "native_layer_norm_backward", "_softmax", "_log_softmax"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "logsumexp"),
    ),
    "dropout": ("native_dropout", "native_dropout_backward", "uniform_"),
    "gather or scatter": (
        *("index_select", "index", "index_put_", "_index_put_impl_", "index_add", "index_add_"),
        *("embedding", "embedding_dense_backward", "gather", "scatter_", "scatter_add_"),
        *("scatter_add", "index_copy", "_embedding_bag", "_embedding_bag_forward_only"),
    ),
    "copy": ("_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd"),
    "fill": (
        *("zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones", "full"),
        *("full_like", "new_full", "fill_", "arange", "scalar_tensor", "eye"),
    ),
    "sum or extreme": ("sum", "mean", "amax", "cumsum", "max"),
    "sort": ("sort", "topk", "argsort", "searchsorted", "repeat_interleave"),
}
"""Kinds of operators; all others are elementwise."""
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators whose indices may be Boolean or on the host."""
READ_BY_INDEX = {"index_select", "index", "embedding", "gather"}
"""Operators that read only as much of their first tensor as they write."""

PARTS: tuple[tuple[type, str], ...] = (
    (Attention, "attention"),
    (FeedForward, "feed-forward"),
    (Experts, "experts"),
    (TokenRouter, "router"),
    (LanguageGroupRouter, "router"),
    (MixtureOfExperts, "dispatch"),
    (Embedding, "embedding"),
    *(part for extension in extensions() for part in extension.operator_parts()),
    (nn.LayerNorm, "norms and residuals"),
    (Stack, "ends"),
    (Transformer, "ends"),
    (BeamStep, "beam search"),
    (Search, "beam search"),
    (Grid, "beam search"),
)
LOSS_MODULE = training_loss.__module__
LOSS = "loss", "loss"


@dataclass(frozen=True)
class Launch:
    """One call of an operator.

    Attributes:
        part: part of the model, loss or search that calls it.
        place: name of the calling module in the model; outside of modules, the part.
        bytes: bytes that it reads and writes.
        multiply_adds: multiply-adds of products and attention; 0 for other operators.
        dtype: dtype in which it multiplies.
    """

    operator: str
    part: str
    place: str
    is_backward: bool
    bytes: int
    multiply_adds: int
    dtype: torch.dtype | None

    @property
    def kind(self) -> str:
        """Return the kind of the operator."""
        return KIND_OF.get(self.operator, "elementwise")


@dataclass(frozen=True)
class HostCopy:
    """A place where the host waits for the device: a copy to the host, or from unpinned memory."""

    operator: str
    part: str


@dataclass(frozen=True)
class Counted:
    """The launches of a step, in order, and its copies to the host."""

    launches: tuple[Launch, ...]
    host_copies: tuple[HostCopy, ...]

    @property
    def parts(self) -> dict[str, list[Launch]]:
        """Return the launches of every part, the part with the most first."""
        sizes = Counter(launch.part for launch in self.launches)
        return {
            part: [launch for launch in self.launches if launch.part == part]
            for part, _ in sizes.most_common()
        }

    @property
    def places(self) -> dict[str, list[Launch]]:
        """Return the launches of every place, in order of first appearance."""
        found: dict[str, list[Launch]] = {}
        for launch in self.launches:
            found.setdefault(launch.place, []).append(launch)
        return found

    @property
    def kinds(self) -> dict[str, int]:
        """Return the number of launches by kind, most frequent first."""
        return dict(Counter(launch.kind for launch in self.launches).most_common())


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep PyTorch's meta kernels from loading its compiler, which takes a second.

    They only ask it to leave them alone (``torch._disable_dynamo``, as of torch 2.13). Any other
    use loads it.
    """
    name = "torch._dynamo"
    stand_in = ModuleType(name)

    def load(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        sys.modules.pop(name, None)
        return getattr(importlib.import_module(name), attribute)

    vars(stand_in).update(disable=lambda function, *_, **__: function, __getattr__=load)
    sys.modules.setdefault(name, stand_in)
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


@_without_compiler()
def count_training(
    recipe: Recipe,
    *,
    vocabulary_size: int,
    num_groups: int,
    num_languages: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Counted:
    """Count the forward pass, loss and backward pass of a full micro-batch.

    Half of the sentences are one token shorter than the others, so that there is padding. If the
    recipe spreads the experts over ranks, the work is that of one of them, which holds its share of
    the experts and gets as many rows as it sends (:class:`_EvenExchange`).
    """
    size, no_group = recipe.training.expert_parallel_size, cast(Any, None)
    model = _model(
        recipe,
        vocabulary_size=vocabulary_size,
        num_groups=num_groups,
        num_languages=num_languages,
        expert_parallel=_EvenExchange(no_group, 0, size) if size > 1 else None,
    )
    model.to(dtype).train()
    batch = micro_batch(recipe.batches.tokens).to(META)
    even = _routes_per_expert(recipe.model, len(batch.target_N))
    with OperatorCounter(host_number=even, model=model) as mode:
        training_loss(model, batch, recipe.loss).objective.backward()
    return mode.counted


EVERY_ROW = 2**62
"""More rows than there are."""


class _EvenExchange(ExpertParallel):
    """Expert parallelism of one rank without the others: every expert gets equally many rows.

    On the meta device, received rows have a shape and no values, so that nothing is sent.
    """

    def exchange_counts(self, count_E: Tensor) -> RowCounts:
        """Wait for the numbers of rows, as every rank does; no row is left out as dropped."""
        return self._even(EVERY_ROW, super().exchange_counts(count_E).count_E)

    def run(self, experts: RankExperts, x_RD: Tensor, counts: RowCounts) -> Tensor:
        """Apply the experts of this rank to as many rows as there are in ``x_RD``."""
        return super().run(experts, x_RD, self._even(len(x_RD), counts.count_E))

    def _even(self, rows: int, count_E: Tensor) -> RowCounts:
        held = len(count_E)
        each, more = divmod(rows, self.size * held)
        even_SE = [
            [each + (rank * held + expert < more) for expert in range(held)]
            for rank in range(self.size)
        ]
        return RowCounts(even_SE, even_SE, count_E)

    def all_to_all(self, out: Tensor, given: Tensor, /, *_splits: list[int] | None) -> None:
        """Leave ``out`` as it is."""


@_without_compiler()
def count_decoding_step(
    recipe: Recipe, *, vocabulary_size: int, num_groups: int, num_languages: int = 1
) -> Counted:
    """Count one step of decoding with beam search, on a grid if the model allows it.

    The batch is full, no sentence ends, and the cache does not grow.
    """
    model = _model(
        recipe,
        vocabulary_size=vocabulary_size,
        num_groups=num_groups,
        num_languages=num_languages,
    ).eval()
    model.to(weight_dtype(recipe.decoding.precision, META))
    beams, prompt = recipe.decoding.beam_size, (0, 0)
    sentences = max(recipe.decoding.tokens // (SENTENCE_LENGTH * beams), 1)
    sources = [
        Source([0] * (SENTENCE_LENGTH - index % 2), prompt, 0, 0) for index in range(sentences)
    ]
    rows = sentences * beams
    even = _routes_per_expert(recipe.model, rows)
    with torch.no_grad():  # inference mode would record composite operators, not their parts
        with OperatorCounter(host_number=even):  # what comes before the step
            search = Search(model, sources, recipe.decoding, eos_id=1)
            search.step()
            step: Callable[[], object] = search.step
            if suits_grids(model, sources):
                shape = grid_shape(sentences, SENTENCE_LENGTH)
                step = Grid(search.extend, search.states, search.beams, shape=shape).step
        with OperatorCounter(host_number=even, model=model) as mode:
            step()
    return mode.counted


def _model(
    recipe: Recipe,
    *,
    vocabulary_size: int,
    num_groups: int,
    num_languages: int,
    expert_parallel: ExpertParallel | None = None,
) -> Transformer:
    return build_model(
        placeholder_spec(
            recipe.model,
            vocabulary_size=vocabulary_size,
            num_groups=num_groups,
            num_languages=num_languages,
            output_size=recipe.tokenizer.output_ids,
        ),
        regularization=Regularization.of(recipe.training),
        expert_parallel=expert_parallel,
        device=META,
    )


def micro_batch(tokens: int) -> Batch:
    """Return a batch that fills the budget with sentences of two lengths, with ids 0."""
    length = min(SENTENCE_LENGTH, tokens)
    packing = Packing.from_lengths(
        [length - index % 2 for index in range(max(tokens // length, 1))]
    )
    id_N = torch.zeros_like(packing.index_N)
    label_rows_L = packing.position_N.nonzero().flatten()  # all tokens but the first of each prompt
    language_B = torch.zeros(packing.batch, dtype=torch.int64)
    return Batch(
        source_N=id_N,
        source=packing,
        target_N=id_N,
        target=packing,
        label_rows_L=label_rows_L,
        labels_L=torch.zeros_like(label_rows_L),
        source_language_B=language_B,
        target_language_B=language_B,
        pair_B=language_B,
        line_B=language_B,
    )


def _routes_per_expert(model: ModelConfig, tokens: int) -> int:
    """Return the routes per expert with even routing."""
    return 0 if model.moe is None else tokens * model.moe.top_k // model.moe.num_experts


class OperatorCounter(TorchDispatchMode):
    """Context that counts the operators that run on the meta device.

    Args:
        host_number: value of every integer that is copied to the host. Other numbers are 0,
            conditions are false, and Boolean indices select all, for which the host waits as well.
        model: model whose module names are the places.
    """

    def __init__(self, *, host_number: int = 0, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host_number = host_number
        self._launches: list[Launch] = []
        self._host_copies: list[HostCopy] = []
        self._node_parts = _PartsOfNodes(model)
        self._fused = _FusedAsOnCuda(self._count_upload)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: PyTorch would load its compiler to keep it away from this class."""
        return False

    @property
    def counted(self) -> Counted:
        """Return the launches and host copies so far."""
        return Counted(tuple(self._launches), tuple(self._host_copies))

    def __enter__(self) -> "OperatorCounter":
        super().__enter__()  # type: ignore[no-untyped-call]
        self._fused.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._fused.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        (part, place), is_backward = self._node_parts.part()
        given = _tensors((args, kwargs))
        answer = self._from_host(name, args, kwargs)
        if answer is not None:
            self._host_copies.append(HostCopy(name, part))
            return answer
        if self._is_upload(name, args, kwargs):
            self._host_copies.append(HostCopy(name, part))
        if name in INDEXED and args[0].is_meta:
            self._host_copies += [HostCopy(name, part)] * _waits_of_indices(*args[1:])
            args = (args[0], [one for index in args[1] for one in _on_device(index)], *args[2:])
        result = _on_meta(func, args, kwargs)
        made = _tensors(result)
        on_device = any(tensor.device == META for tensor in (*given, *made))
        if on_device and not func.is_view and name not in LAUNCHES_NOTHING:
            multiply_adds = _multiply_adds(func, name, args)
            self._launches.append(
                Launch(
                    operator=name,
                    part=part,
                    place=place,
                    is_backward=is_backward,
                    bytes=_bytes(name, given, made),
                    multiply_adds=multiply_adds,
                    dtype=made[0].dtype if multiply_adds else None,
                )
            )
        return result

    def _from_host(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return placeholder values for a copy to the host; None for any other operator."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or first.device != META:
            is_to_host = name == "copy_" and first is not None and args[1].device == META
            return first if is_to_host else None
        match name:
            case "_local_scalar_dense":
                return self._number(first.dtype)
            case "nonzero":
                return first.new_empty(0, first.dim(), dtype=torch.int64)
            case "_to_copy" if torch.device(kwargs.get("device") or META).type == "cpu":
                dtype = kwargs.get("dtype") or first.dtype
                with unset_fake_temporarily():
                    return torch.full(first.shape, self._number(dtype), dtype=dtype)
        return None

    def _is_upload(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator copies from the host, which waits for the end of the copy.

        It does not wait for :func:`copied_to`, which pins the memory. CUDA copies from other memory
        as if the copy were blocking, and nothing can be pinned on a machine without a GPU.
        """
        match name:
            case "_to_copy":
                source, target = args[0], kwargs.get("device")
            case "copy_":
                source, target = args[1], args[0].device
            case _:
                return False
        is_to_device = target is not None and torch.device(target).type == META.type
        if not is_to_device or source.device.type != "cpu":
            return False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not copied_to.__code__:
            frame = frame.f_back
        return frame is None

    def _count_upload(self, name: str, made: Tensor) -> None:
        """Count the values of a list that became a tensor, for which there is no operator."""
        if made.device == META:
            (part, _), _ = self._node_parts.part()
            self._host_copies.append(HostCopy(name, part))

    def _number(self, dtype: torch.dtype) -> bool | int | float:
        if dtype == torch.bool:
            return False
        return 0.0 if dtype.is_floating_point else self._host_number


MADE_OF_VALUES = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""Functions that make a tensor of numbers or lists on the host."""
INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
"""Functions that make a tensor of every list among the indices."""


class _FusedAsOnCuda(TorchFunctionMode):
    """Use CUDA's operators for attention and dropout, which the meta device would decompose.

    Args:
        count_upload: called with the name of a function that makes a tensor of values on the host,
            and with the tensor.
    """

    def __init__(self, count_upload: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._count_upload = count_upload

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if func is F.dropout:
            return _fused_dropout(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in MADE_OF_VALUES and not isinstance(args[-1], Tensor):
            self._count_upload(func.__name__, result)
        if func in INDEXING:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            for _ in filter(lambda index: isinstance(index, list), indices):
                self._count_upload("index", args[0])
        return result


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Call flash attention in half precision without a mask, else memory-efficient attention.

    The latter takes additive masks.
    """
    aten = torch.ops.aten
    if attn_mask is None and query.dtype == torch.bfloat16:
        context, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal
        )
    else:
        bias = attn_mask
        if bias is not None:
            if bias.dtype == torch.bool:
                is_masked = bias.logical_not()
                bias = torch.zeros_like(bias, dtype=query.dtype)
                bias = bias.masked_fill_(is_masked, -torch.inf)
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        keeps = torch.is_grad_enabled()
        context, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal
        )
    result: Tensor = context
    return result


def _fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    assert not inplace, "not used"
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _PartsOfNodes:
    """Find the running part: by the calling module forward, by the autograd node backward.

    Nodes are numbered when they are created, just before their operator runs: the first operator
    after a new number belongs to the part that created the node.
    """

    def __init__(self, model: nn.Module | None) -> None:
        named = model.named_modules() if model is not None else ()
        self._name_of = {module: name for name, module in named}
        self._latest = -1
        self._first_numbers: list[int] = []
        self._parts: list[tuple[str, str]] = []

    def part(self) -> tuple[tuple[str, str], bool]:
        """Return the part and its place, and whether it is in the backward pass."""
        node = torch._C._current_autograd_node()
        if node is not None:
            place = bisect_right(self._first_numbers, node._sequence_nr()) - 1
            return self._parts[place] if place >= 0 else LOSS, True
        part = self._part_of_caller(sys._getframe(2))
        number = torch._C._autograd._get_sequence_nr() - 1
        is_new, self._latest = number > self._latest, max(number, self._latest)
        if is_new and (not self._parts or self._parts[-1] != part):
            self._first_numbers.append(number)
            self._parts.append(part)
        return part, False

    def _part_of_caller(self, frame: FrameType | None) -> tuple[str, str]:
        """Return the part of the innermost running module in :data:`PARTS`, or of the loss."""
        while frame is not None:
            caller = frame.f_locals.get("self")
            kind: Any = type(caller)
            if (part := _part_of_type(kind)) is not None:
                return part, self._name_of.get(caller) or part
            if frame.f_globals.get("__name__") == LOSS_MODULE:
                return LOSS
            frame = frame.f_back
        return LOSS


@cache
def _part_of_type(kind: type) -> str | None:
    """Return the part of the model that a type of :data:`PARTS` is."""
    return next((part for known, part in PARTS if issubclass(kind, known)), None)


_made_on_meta: dict[Any, Any] = {}
"""Results of operators on the meta device, by the :func:`_outline` of their arguments."""


def _on_meta(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator, or return tensors like those that it made from arguments of this form.

    PyTorch's kernels for the meta device are slow Python, and the layers of a model are alike.
    """
    if not _makes_new_tensors(func):
        return func(*args, **kwargs)
    outline = func, _outline(args), _outline([*kwargs.items()])
    if outline in _made_on_meta:
        return _like(_made_on_meta[outline])
    result = func(*args, **kwargs)
    if all(tensor.is_meta for tensor in _tensors((args, kwargs, result))):
        # A copy: autograd takes a gradient over, instead of copying it, if nobody else has it.
        _made_on_meta[outline] = _like(result)
    return result


@cache
def _makes_new_tensors(func: OpOverload) -> bool:
    """Return whether an operator only makes tensors, none of which shares memory with another."""
    schema = func._schema
    every = (*schema.arguments, *schema.returns)
    is_pure = all(value.alias_info is None for value in every)
    return is_pure and all(str(value.type) == "Tensor" for value in schema.returns)


def _outline(value: Any) -> Any:
    """Return what the form of an operator's result depends on."""
    match value:
        case Tensor():
            return value.shape, value.stride(), value.dtype, value.device
        case list() | tuple():
            return tuple(map(_outline, value))
    return type(value), value


def _like(result: Any) -> Any:
    """Return new tensors of the form of a result's."""
    if isinstance(result, tuple | list):
        return tuple(map(_like, result))
    if result is None:  # a gradient that nobody needs
        return None
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=META)


def _tensors(values: Any) -> list[Tensor]:
    match values:
        case Tensor():
            return [values]
        case list() | tuple():
            return [tensor for value in values for tensor in _tensors(value)]
        case dict():
            return _tensors([*values.values()])
    return []


def _is_boolean(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _waits_of_indices(
    given: Sequence[Tensor | None],
    value: Tensor | None = None,
    accumulates: bool = False,
    *_: Any,
) -> int:
    """Return how many indices of an operator of :data:`INDEXED` the host waits for.

    It waits for the number of true values of a Boolean index, and for the copy of an index that it
    has. CUDA fills in a single number of the host by ``masked_fill``, without a wait.
    """
    indices = [index for index in given if index is not None]
    if value is not None and value.numel() == 1 and not value.is_meta and not accumulates:
        match indices:
            case [mask] if _is_boolean(mask) and mask.is_meta:
                return 0
    return sum(_is_boolean(index) or not index.is_meta for index in indices)


def _on_device(index: Tensor | None) -> list[Tensor | None]:
    """Return an index on the device, and for a Boolean one, which selects all, one per dimension.

    The length of its result depends on values.
    """
    if index is None or not _is_boolean(index):
        return [index if index is None else index.to(META)]
    return [torch.zeros(index.numel(), dtype=torch.int64, device=META)] * index.dim()


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; values repeated by a stride of 0 count once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(length for length, stride in pairs if stride)


def _bytes(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes.

    A gather reads as much of a table as it writes; a fill reads nothing. A scatter reads and writes
    as much of the existing tensor as it adds.
    """
    written = sum(map(_size, made))
    if name in READ_BY_INDEX:
        return 2 * written + sum(map(_size, given[1:]))
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        table, index = given[:2]
        return written + _size(index) + index.numel() * table.shape[1] * table.element_size()
    if name in ("scatter_", "scatter_add_", "index_put_", "_index_put_impl_"):
        return sum(map(_size, given[1:])) + 2 * _size(given[-1])
    if KIND_OF.get(name) == "fill" or name == "uniform_":
        return written
    return written + sum(map(_size, given))


def _multiply_adds(func: OpOverload, name: str, args: Sequence[Any]) -> int:
    """Return the multiply-adds of a product or of attention; 0 for any other operator.

    PyTorch's formulas serve plain products; they count a multiply-add as two operations. There is
    no formula for grouped products. Those for attention ignore causal masks and pad packed
    sentences; here a causal mask halves the count, and every query has as many keys as the longest
    sentence.
    """
    kind = KIND_OF.get(name)
    if name == "_grouped_mm":
        rows, weights = args[:2]
        return int(rows.numel() * weights.shape[-1])
    if kind == "matrix product":
        return int(flop_registry[func.overloadpacket](*args) // 2)
    if kind != "attention":
        return 0
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
    products = 5 if name.endswith("_backward") else 2
    length = named["max_k"] if "_flash_attention_" in name else named["key"].shape[-2]
    whole: int = products * named["query"].numel() * length
    return whole // 2 if named.get("is_causal") else whole
