"""Decide where fused kernels run, launch them, and record the launches of a step.

The kernels (:mod:`pipeline.kernels.triton_kernels`) are written in Triton and loaded at the first
launch: CPUs do without Triton, and CUDA builds of PyTorch install it. On the meta device, a launch
only counts, so that neither Triton nor a GPU is needed.

A step of decoding launches hundreds of small kernels, and the host takes longer to launch them than
the GPU to run them. A CUDA graph launches all of them at once (:func:`recorded`).
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pipeline.errors import ConfigError
from pipeline.kernels.products import meta_capability

FUSED_CAPABILITY = (8, 0)
"""Lowest CUDA capability for which the kernels are meant: earlier GPUs do not compute bfloat16."""
FUSED_TYPES = (torch.bfloat16, torch.float16, torch.float32)

LaunchCounter = Callable[[str, Sequence[Any], dict[str, Any]], None]
"""Gets the name of a kernel, its arguments and its options."""


SWITCH = "MMNMT_FUSED_KERNELS"
"""Environment variable of a machine: ``off`` lets it use plain forms only. It changes rounding."""


def _is_on() -> bool:
    value = os.environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"The environment variable {SWITCH} is {value!r}. Set it to on or off.")
    return value == "on"


class _Settings:
    """Settings of this process: backward passes of GPUs run in threads without our context."""

    uses_fused_kernels = _is_on()
    interprets = False
    """Whether fused kernels run on CPU, too, in Triton's interpreter."""
    counters: tuple[LaunchCounter, ...] = ()


def is_fused(x: Tensor) -> bool:
    """Return whether operations on tensors like ``x`` run as fused kernels.

    The meta device runs them while it stands for a GPU that does.
    """
    if not _Settings.uses_fused_kernels or x.dtype not in FUSED_TYPES:
        return False
    match x.device.type:
        case "cuda":
            return not isinstance(x, FakeTensor) and _can_launch(x.device)
        case "meta":
            capability = meta_capability()
            return capability is not None and capability >= FUSED_CAPABILITY
        case "cpu":
            return _Settings.interprets
    return False


@cache
def _can_launch(device: torch.device) -> bool:
    has_triton = find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= FUSED_CAPABILITY


def launch(name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel.

    Args:
        name: name of the function in ``pipeline.kernels.triton_kernels`` or ``triton_experts``.
        grid: number of programs by dimension; without any, nothing runs.
        arguments: tensors, None and numbers; the first is a tensor.
        options: constants of the kernel, ``num_warps`` and ``num_stages``.

    Raises:
        ConfigError: Triton has no C compiler, or it fails.
    """
    if 0 in grid:
        return
    if arguments[0].is_meta:
        for count in _Settings.counters:
            count(name, arguments, options)
        return
    try:
        _kernel(name)[grid](*arguments, **options, enable_fp_fusion=True)
    except (RuntimeError, CalledProcessError) as error:
        if isinstance(error, RuntimeError) and "C compiler" not in str(error):
            raise
        raise ConfigError(
            "Triton cannot compile the C code that launches kernels. Install gcc and the headers "
            f"of Python (python3-dev), or set the environment variable {SWITCH} to off."
        ) from error


@cache
def _kernel(name: str) -> Any:
    """Return a kernel; cached, as the import statement is slow in every call."""
    from pipeline.kernels import triton_experts, triton_kernels

    return getattr(triton_kernels, name, None) or getattr(triton_experts, name)


@contextmanager
def launches_counted_by(counter: LaunchCounter) -> Iterator[None]:
    """Call ``counter`` at every launch on the meta device."""
    before = _Settings.counters
    _Settings.counters = (*before, counter)
    try:
        yield
    finally:
        _Settings.counters = before


@contextmanager
def fused_kernels_off() -> Iterator[None]:
    """Compute by plain forms inside the context."""
    before, _Settings.uses_fused_kernels = _Settings.uses_fused_kernels, False
    try:
        yield
    finally:
        _Settings.uses_fused_kernels = before


@contextmanager
def fused_on_cpu() -> Iterator[None]:
    """Run fused kernels on CPU for tests; needs ``TRITON_INTERPRET=1`` before Triton is loaded."""
    _Settings.interprets = True
    try:
        yield
    finally:
        _Settings.interprets = False


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``: sizes of blocks."""
    return 1 << max(number - 1, 0).bit_length()


class HostWaits(Exception):
    """The host waits for a value in a step, which no graph can."""


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that repeats a step: on a CUDA device by a graph, else by calling it.

    The step must read and write tensors that stay where they are. It runs once for libraries to
    initialize, and once to see that no module of one's own reads a value. All graphs share a memory
    pool: their intermediate results do not outlive a step.

    Raises:
        HostWaits: the host waits for a value in the step.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side):
            step()
            _without_waits(step)
    finally:  # the memory of a step that fails is free from here on
        torch.cuda.current_stream(device).wait_stream(side)
    graph, living = torch.cuda.CUDAGraph(), next(iter(_GRAPHS), None)
    # PyTorch refuses the pool of graphs that are gone: a living graph names it.
    pool = None if living is None else living.pool()
    # Other threads, for example of a server, may call CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    _GRAPHS.add(graph)
    replay: Callable[[], None] = graph.replay
    return replay


_GRAPHS: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


def _without_waits(step: Callable[[], None]) -> None:
    """Make a step; HostWaits if the host waits for the device in it."""
    with warnings.catch_warnings(action="ignore"):  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise HostWaits from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


class HostCopy:
    """A copy of values of a device on the host, made as soon as the device has computed them."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda":
            on_host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values = on_host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Sequence[Any]:
        """Wait for the values and return them."""
        if self._event is not None:
            self._event.synchronize()
        values: Sequence[Any] = self._values.tolist()
        return values
