"""Count the kernel launches and host waits of a computation on the meta device, without a GPU.

:func:`count_training` and :func:`count_decoding_step` count a training pass and a decoding step.

The meta device has shapes but no values, and our kernels take the branches of a GPU there
(:func:`~pipeline.kernels.products.meta_stands_for`). A *launch* is one operator below autograd that
has work on the device: all operators except views and allocations. Operators that CUDA fuses
(attention, norms) count as one launch, even if they run several kernels. A *wait* is a
copy to the host, or a copy from host memory that is not pinned. Collectives are not counted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, prod
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.batching.batch import Batch, Example, collate
from pipeline.config.recipe import Recipe
from pipeline.decoding.beam_search import Search
from pipeline.decoding.grid_search import Grid, grid_shape, suits_grids
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.quantization import weight_dtype
from pipeline.estimates.activations import telling_what_fails
from pipeline.kernels.launching import launches_counted_by
from pipeline.kernels.pointwise import shared_ones
from pipeline.kernels.slot_products import copied_to
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel, RankExperts, RowCounts
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import placeholder_spec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss

META = torch.device("meta")
LAUNCHES_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),  # allocate
    *("_unsafe_view", "_reshape_alias", "lift_fresh"),  # are views, which their schemas do not say
}
KINDS = {
    "product": ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm"),
    "grouped product": ("_grouped_mm",),
    "attention": (
        *("_flash_attention_forward", "_flash_attention_backward"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ),
    "norm": ("native_layer_norm", "native_layer_norm_backward"),
    "softmax": ("_softmax", "_log_softmax", "_softmax_backward_data", "logsumexp", "amax", "mean"),
    "dropout": ("uniform_",),
    "gather or scatter": (
        *("index_select", "index", "index_put", "index_put_", "_index_put_impl_", "index_add"),
        *("index_add_", "embedding", "embedding_dense_backward", "gather", "scatter_"),
        *("scatter_add", "scatter_add_", "index_copy", "index_copy_", "_embedding_bag"),
        "_embedding_bag_forward_only",
    ),
    "copy": ("_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd"),
    "fill": (
        *("zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones", "full"),
        *("full_like", "new_full", "fill_", "arange", "scalar_tensor", "eye"),
    ),
    "sum": ("sum", "cumsum", "max"),
}
"""Kind → operators; all others are elementwise."""
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
READ_BY_INDEX = {"index_select", "index", "embedding", "gather"}
"""Operators that read only as much of their first tensor as they write."""
ADDED_TO = {"scatter_", "scatter_add_", "index_put_", "_index_put_impl_"}
"""Operators that read and write as much of an existing tensor as they add."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators with indices that may be Boolean or on the host."""
ATTENTION_TILE = 128
"""Queries of a thread block of attention, and keys that it visits at a time."""


@dataclass(frozen=True)
class Launch:
    """One call of an operator or kernel."""

    operator: str
    kind: str
    bytes: int  # that it reads and writes
    dtype: torch.dtype = torch.bfloat16  # of its first result
    product: tuple[int, int, int] | None = None
    """Rows, columns and inner length of a matrix product; a batch counts as rows."""
    blocks: int = 0
    """Pairs of a tile of queries and a tile of keys that attention computes; number of matrices of
    a grouped product."""

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of a matrix product; 0 for any other operator."""
        return prod(self.product) if self.product else 0


@dataclass(frozen=True)
class Counted:
    """Launches in order, operators that the host waits for, and bytes of each all-to-all."""

    launches: tuple[Launch, ...]
    host_waits: tuple[str, ...] = ()
    exchanged: tuple[int, ...] = ()
    is_graph: bool = False
    """Whether the host launches all of them at once, as a CUDA graph."""

    @property
    def kinds(self) -> dict[str, int]:
        """Return the number of launches by kind, most frequent first."""
        return dict(Counter(launch.kind for launch in self.launches).most_common())


def launch_of(
    func: OpOverload,
    name: str,
    args: Sequence[Any],
    given: Sequence[Tensor],
    made: Sequence[Tensor],
) -> Launch:
    """Return the launch of an operator, from its arguments, and tensors given and made."""
    kind = KIND_OF.get(name, "elementwise")
    product, blocks = None, 0
    if "product" in kind:
        x, y = args[1:3] if "add" in name else args[:2]  # after a bias
        product = x.numel() // x.shape[-1], y.shape[-1], x.shape[-1]
        if kind == "grouped product":
            blocks = next((len(one) for one in (x, y, *made) if one.dim() == 3), 0)
    elif kind == "attention":
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
        blocks = _attention_blocks(named)
    dtype = made[0].dtype if made else torch.bfloat16
    return Launch(name, kind, _bytes(name, kind, given, made), dtype, product, blocks)


def _attention_blocks(named: dict[str, Any]) -> int:
    query = named["query"]
    pairs, lengths = prod(query.shape[:2]), (query.shape[-2], named["key"].shape[-2])
    if named.get("cum_seq_q") is not None:  # packed sentences (N, H, K), else (B, H, T, K)
        pairs = (len(named["cum_seq_q"]) - 1) * query.shape[1]
        lengths = named["max_q"], named["max_k"]
    return int(pairs * prod(ceil(length / ATTENTION_TILE) for length in lengths))


def _bytes(name: str, kind: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    written = sum(map(tensor_bytes, made))
    if name in READ_BY_INDEX:
        return 2 * written + sum(map(tensor_bytes, given[1:]))
    if name.startswith("_embedding_bag"):
        table, index = given[:2]
        rows = index.numel() * table.shape[1] * table.element_size()
        return written + tensor_bytes(index) + rows
    if name in ADDED_TO:
        return sum(map(tensor_bytes, given[1:])) + 2 * tensor_bytes(given[-1])
    if kind == "fill" or name == "uniform_":
        return written
    return written + sum(map(tensor_bytes, given))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; values repeated by a stride of 0 count once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(length for length, stride in pairs if stride)


class LaunchCounter(TorchDispatchMode):
    """Context that counts launches and host waits on the meta device.

    Args:
        host_number: value of every integer that is copied to the host. Other numbers are 0,
            conditions are false, and Boolean indices select all.
    """

    def __init__(self, *, host_number: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host_number = host_number
        self._launches: list[Launch] = []
        self._host_waits: list[str] = []
        self._functions = _AsOnCuda(self._host_waits.append)
        self._fused = launches_counted_by(self.launched)

    @property
    def counted(self) -> Counted:
        """Return the launches and waits so far."""
        return Counted(tuple(self._launches), tuple(self._host_waits))

    def launched(self, name: str, arguments: Sequence[Any], _options: dict[str, Any]) -> None:
        """Count the launch of a fused kernel of ours, which moves each of its tensors once."""
        size = sum(tensor_bytes(one) for one in arguments if isinstance(one, Tensor))
        self._launches.append(Launch(name, "fused kernel", size))

    def __enter__(self) -> "LaunchCounter":
        shared_ones.cache_clear()  # counts do not depend on earlier passes
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        self._fused.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._fused.__exit__(*error)
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        answer = self._from_host(name, args, kwargs)
        if answer is not None or _is_upload(name, args, kwargs):
            self._host_waits.append(name)
        if answer is not None:
            return answer
        if name in INDEXED and args[0].is_meta:
            self._host_waits += [name] * _waits_of_indices(*args[1:])
            args = (args[0], [one for index in args[1] for one in _on_device(index)], *args[2:])
        result = func(*args, **kwargs)
        given, made = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in ((args, kwargs), result)
        )
        on_device = any(tensor.is_meta for tensor in (*given, *made))
        if on_device and not func.is_view and name not in LAUNCHES_NOTHING:
            self._launches.append(launch_of(func, name, args, given, made))
        return result

    def _from_host(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return placeholder values for a copy to the host; None for any other operator."""
        if not args or not isinstance(first := args[0], Tensor):
            return None
        if not first.is_meta:
            return first if name == "copy_" and args[1].is_meta else None
        if name == "_local_scalar_dense":
            return self._number(first.dtype)
        if name == "nonzero":
            return first.new_empty(0, first.dim(), dtype=torch.int64)
        if name == "_to_copy" and torch.device(kwargs.get("device") or META).type == "cpu":
            dtype = kwargs.get("dtype") or first.dtype
            return torch.full(first.shape, self._number(dtype), dtype=dtype)
        return None

    def _number(self, dtype: torch.dtype) -> bool | int | float:
        if dtype == torch.bool:
            return False
        return 0.0 if dtype.is_floating_point else self._host_number


def _is_upload(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator copies from host memory that is not pinned.

    Nothing can be pinned without a GPU. Copies by :func:`copied_to`, which pins, are known by their
    caller.
    """
    if name not in ("_to_copy", "copy_"):
        return False
    source, target = args[name == "copy_"], kwargs.get("device")
    if name == "copy_":
        target = args[0].device
    if target is None or torch.device(target) != META or source.device.type != "cpu":
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not copied_to.__code__:
        frame = frame.f_back
    return frame is None


class _AsOnCuda(TorchFunctionMode):
    """Use CUDA's attention, and count uploads of lists, which are no operators."""

    def __init__(self, count_wait: Callable[[str], None]) -> None:
        super().__init__()
        self._count_wait = count_wait

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            if result.is_meta and not isinstance(args[-1], Tensor):
                self._count_wait(func.__name__)
        elif func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            for _ in filter(lambda index: isinstance(index, list), indices):
                self._count_wait("index")
        return result


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Any:
    """Call flash attention in half precision without a mask, else memory-efficient attention."""
    aten: Any = torch.ops.aten
    if attn_mask is None and query.dtype == torch.bfloat16:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal)[0]
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal)[0]


def _waits_of_indices(
    given: Sequence[Tensor | None], value: Tensor | None = None, accumulates: bool = False, *_: Any
) -> int:
    """Return how many indices of an operator of :data:`INDEXED` the host waits for.

    CUDA fills in a single number of the host by ``masked_fill``, without a wait.
    """
    indices = [index for index in given if index is not None]
    fills = value is not None and value.numel() == 1 and not value.is_meta and not accumulates
    if fills and len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].is_meta:
        return 0
    return sum(index.dtype == torch.bool or not index.is_meta for index in indices)


def _on_device(index: Tensor | None) -> list[Tensor | None]:
    """Return an index on the device; a Boolean one, which selects all, as one per dimension."""
    if index is None or index.dtype != torch.bool:
        return [index if index is None else index.to(META)]
    return [torch.zeros(index.numel(), dtype=torch.int64, device=META)] * index.dim()


SENTENCE_LENGTH = 32
"""Assumed tokens per sentence, tags included: about the mean of OPUS-100."""
PROMPT = 0, 0
"""First ids of a decoder's input."""


def count_training(
    recipe: Recipe, *, per_pass: int = 1, dtype: torch.dtype = torch.bfloat16, **sizes: int
) -> Counted:
    """Count the forward pass, loss and backward pass of full micro-batches that share a pass.

    ``sizes`` are the numbers of ids, groups and languages that the data decides. If the recipe
    spreads the experts over ranks, a rank holds its share of them and gets as many rows as it
    sends. Layers are not recomputed.
    """
    size, no_group = recipe.training.expert_parallel_size, None
    exchange = _EvenExchange(no_group, 0, size) if size > 1 else None  # type: ignore[arg-type]
    model = _model(recipe, sizes, exchange).to(dtype).train()
    batch = micro_batch(per_pass * recipe.batches.tokens)
    if per_pass > 1:
        bounds = [part * batch.num_sentences // per_pass for part in range(per_pass + 1)]
        batch = batch.shared([end - start for start, end in pairwise(bounds)])
    batch = batch.keyed(*range(per_pass)).to(META)
    even = _routes_per_expert(recipe.model, len(batch.target_N))
    with telling_what_fails("A pass of training"), LaunchCounter(host_number=even) as counter:
        training_loss(model, batch, recipe.loss).objective.backward()
    return replace(counter.counted, exchanged=tuple(exchange.sent if exchange else ()))


@dataclass(frozen=True)
class _EvenExchange(ExpertParallel):
    """Expert parallelism of one rank without the others: every expert gets equally many rows."""

    sent: list[int] = field(default_factory=list)
    """Bytes of each all-to-all of rows, including rows that stay on the rank."""

    def exchange_counts(self, count_E: Tensor) -> RowCounts:
        """Wait for the numbers of rows, as every rank does; no row is left out as dropped."""
        more_rows_than_there_are = 2**62
        return self._even(more_rows_than_there_are, super().exchange_counts(count_E).count_E)

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

    def all_to_all(self, _out: Tensor, given: Tensor, /, *_splits: list[int] | None) -> None:
        """Note the bytes of rows; what arrives has a shape and no values on the meta device."""
        if given.is_floating_point():
            self.sent.append(tensor_bytes(given))


def count_decoding_step(recipe: Recipe, **sizes: int) -> Counted:
    """Count one step of decoding with beam search, on a grid if the model allows it.

    The batch is full, no sentence ends, and the cache does not grow.
    """
    model = _model(recipe, sizes).eval()
    model.to(weight_dtype(recipe.decoding.precision, META))
    beams = recipe.decoding.beam_size
    sentences = max(recipe.decoding.tokens // (SENTENCE_LENGTH * beams), 1)
    both = [Source([0] * (SENTENCE_LENGTH - index), PROMPT, 0, 0) for index in range(2)]
    sources = [both[index % 2] for index in range(sentences)]
    even = _routes_per_expert(recipe.model, sentences * beams)
    # Inference mode would record composite operators, not their parts.
    with telling_what_fails("A step of decoding"), torch.no_grad():
        with LaunchCounter(host_number=even):  # what comes before the step
            search = Search(model, sources, recipe.decoding, eos_id=1)
            search.step()
            step: Callable[[], object] = search.step
            if is_graph := suits_grids(model, sources):
                search.states.joint = model.joint_parameters_of_steps()
                shape = grid_shape(sentences, SENTENCE_LENGTH)
                step = Grid(search.extend, search.states, search.beams, shape=shape).step
        with LaunchCounter(host_number=even) as counter:
            step()
    return replace(counter.counted, is_graph=is_graph)


def _model(
    recipe: Recipe, sizes: Mapping[str, int], exchange: ExpertParallel | None = None
) -> Transformer:
    spec = placeholder_spec(recipe.model, **sizes, output_size=recipe.tokenizer.output_ids)
    rates = Regularization.of(recipe.training)
    return build_model(spec, regularization=rates, expert_parallel=exchange, device=META)


def micro_batch(tokens: int) -> Batch:
    """Return a batch that fills the budget with sentences of two lengths, with ids 0.

    Every second one is a token shorter: there is padding, as in training.
    """
    length = min(SENTENCE_LENGTH, tokens)
    lengths = [length - index % 2 for index in range(max(tokens // length, 1))]
    examples = [
        Example(
            [0] * (each - 1), [0] * (each - 2), (), PROMPT, source_language=0, target_language=0
        )
        for each in lengths
    ]
    return collate(examples, eos_id=0)


def _routes_per_expert(model: ModelConfig, tokens: int) -> int:
    """Return the routes per expert with even routing."""
    return 0 if model.moe is None else tokens * model.moe.top_k // model.moe.num_experts
