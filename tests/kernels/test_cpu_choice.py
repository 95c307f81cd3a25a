"""Which kernels a process takes on its CPU."""

from dataclasses import replace

import pytest
import torch

from pipeline.kernels import cpu_choice
from pipeline.kernels.cpu_choice import (
    CpuKernels,
    by_processor,
    cpu_kernels,
    use_cpu_kernels,
    using_cpu_kernels,
)


def test_a_process_takes_what_it_is_told_and_else_its_processors_kernels() -> None:
    assert cpu_kernels() == by_processor()
    told = replace(by_processor(), float32_products="blas", fused_attention_from=7)
    with using_cpu_kernels(told):
        assert cpu_kernels() == told
    assert cpu_kernels() == by_processor()


@pytest.mark.parametrize(
    ("capability", "has_bfloat16", "expected"),
    [
        ("AVX2", False, ("blas", "float32")),
        ("AVX512", False, ("onednn", "float32")),
        ("AVX512", True, ("onednn", "bfloat16")),
    ],
)
def test_the_table_goes_by_the_instructions_that_a_processor_has(
    capability: str,
    has_bfloat16: bool,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(cpu_choice, "has_bfloat16_products", lambda: has_bfloat16)
    for library in ("mkl", "mkldnn"):
        monkeypatch.setattr(getattr(torch.backends, library), "is_available", lambda: True)
    found = by_processor.__wrapped__()
    assert (found.float32_products, found.bfloat16_products) == expected


def test_a_build_without_onednn_has_a_substitute_for_what_others_told_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    try:
        use_cpu_kernels(CpuKernels("onednn", "float32", fused_attention_from=1))
        assert cpu_kernels().float32_products == "blas"
    finally:
        use_cpu_kernels(None)


def test_attention_is_fused_in_float32_for_many_queries_of_wide_heads() -> None:
    kernels = CpuKernels("blas", "float32", fused_attention_from=2000)
    assert kernels.fuses_attention(torch.float32, queries=64, width=32)
    assert not kernels.fuses_attention(torch.float32, queries=60, width=32)
    assert not kernels.fuses_attention(torch.bfloat16, queries=64, width=64)
    assert not kernels.fuses_attention(torch.float32, queries=16, width=512)
