"""fp16 on a CPU that has no instructions for it: PyTorch computes it all the same, slowly."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from deepspeed.accelerator import get_accelerator


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed is told that the CPU takes fp16; all else of it is what a GPU gets."""
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        yield
