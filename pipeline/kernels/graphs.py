"""CUDA graphs of steps of fixed shapes, and copies for which the host need not wait.

A step of decoding launches hundreds of small kernels, and the host takes longer to launch them than
the GPU to run them. A graph launches all of them at once.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that repeats a step: on a CUDA device by a graph, else by calling it.

    The step runs once, for libraries to initialize, and is then recorded. It must read and write
    tensors that stay where they are, and wait for no value. All graphs share a memory pool: their
    intermediate results do not outlive a step.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
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
