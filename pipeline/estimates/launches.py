"""Count the kernel launches and host waits of a computation on the meta device, without a GPU.

The meta device has shapes but no values, and our kernels take the branches of a GPU there
(:func:`~pipeline.kernels.products.meta_stands_for`). A *launch* is one operator below autograd that
has work on the device: all operators except views and allocations. Operators that CUDA fuses
(attention, dropout, norms) count as one launch, even if they run several kernels. A *wait* is a
copy to the host, or a copy from host memory that is not pinned. Collectives are not counted.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.estimates.operators import (
    LAUNCHES_NOTHING,
    Counted,
    Launch,
    launch_of,
    tensor_bytes,
)
from pipeline.kernels.activations import ones_for_sums
from pipeline.kernels.launching import launches_counted_by
from pipeline.kernels.slot_products import copied_to

META = torch.device("meta")
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators with indices that may be Boolean or on the host."""


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
        ones_for_sums.cache_clear()  # counts do not depend on earlier passes
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
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.is_meta:
            return first if first is not None and name == "copy_" and args[1].is_meta else None
        match name:
            case "_local_scalar_dense":
                return self._number(first.dtype)
            case "nonzero":
                return first.new_empty(0, first.dim(), dtype=torch.int64)
            case "_to_copy" if torch.device(kwargs.get("device") or META).type == "cpu":
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
    match name:
        case "_to_copy":
            source, target = args[0], kwargs.get("device")
        case "copy_":
            source, target = args[1], args[0].device
        case _:
            return False
    if target is None or torch.device(target) != META or source.device.type != "cpu":
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not copied_to.__code__:
        frame = frame.f_back
    return frame is None


class _AsOnCuda(TorchFunctionMode):
    """Use CUDA's attention and dropout, and count uploads of lists, which are no operators."""

    def __init__(self, count_wait: Callable[[str], None]) -> None:
        super().__init__()
        self._count_wait = count_wait

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if func is F.dropout:
            rate = kwargs["p"] * kwargs["training"]
            return torch.native_dropout(args[0], rate, True)[0] if rate else args[0]
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
    if value is not None and value.numel() == 1 and not value.is_meta and not accumulates:
        match indices:
            case [mask] if mask.dtype == torch.bool and mask.is_meta:
                return 0
    return sum(index.dtype == torch.bool or not index.is_meta for index in indices)


def _on_device(index: Tensor | None) -> list[Tensor | None]:
    """Return an index on the device; a Boolean one, which selects all, as one per dimension."""
    if index is None or index.dtype != torch.bool:
        return [index if index is None else index.to(META)]
    return [torch.zeros(index.numel(), dtype=torch.int64, device=META)] * index.dim()
