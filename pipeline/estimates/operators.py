"""Describe calls of operators: their kinds, the bytes that they move, the products they compute."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

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
    "dropout": ("native_dropout", "native_dropout_backward", "uniform_"),
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
ATTENTION_TILE = 128
"""Queries of a thread block of attention, and keys that it visits at a time."""


@dataclass(frozen=True)
class Launch:
    """One call of an operator or kernel.

    Attributes:
        bytes: bytes that it reads and writes.
        dtype: type of its first result.
        product: rows, columns and inner length of a matrix product; a batch counts as rows.
        blocks: pairs of a tile of queries and a tile of keys that attention computes; number of
            matrices of a grouped product.
    """

    operator: str
    kind: str
    bytes: int
    dtype: torch.dtype = torch.bfloat16
    product: tuple[int, int, int] | None = None
    blocks: int = 0

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
    if "cum_seq_q" in named:  # packed sentences (N, H, K), else (B, H, T, K)
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
