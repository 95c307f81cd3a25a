"""Fused kernels: their results in Triton's interpreter, their resources, and their launches."""

import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.kernels import attention, launching
from pipeline.kernels.attention import Spans, attend_packed
from pipeline.kernels.launching import is_fused, launches_counted_by
from pipeline.kernels.logits import summed_cross_entropy
from pipeline.kernels.products import meta_stands_for

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have on an H100."""
STACK = 16
"""Bytes of registers per thread that a kernel may spill: four, outside of its loops."""

OF_NARROW_ROWS = {
    *("order_claims", "count_routes", "sum_before", "place_routes", "kept_softmax", "list_seen")
}
"""Kernels that read and write few numbers per token."""


def run_with_triton(*arguments: object, interprets: bool) -> str:
    """Run a Python program, in which Triton may interpret kernels, and return its output."""
    if find_spec("triton") is None:
        message = "fused kernels are not tested without Triton: pip install 'mmnmt[gpu-tests]'"
        assert not os.environ.get("CI"), message
        pytest.skip(message)
    environment = os.environ | {"TRITON_INTERPRET": str(int(interprets)), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_fused_kernels_equal_pytorch_in_the_interpreter() -> None:
    folder = ROOT / "tests/kernels"
    cases = [folder / f"{name}_kernel_cases.py" for name in ("fused", "expert")]
    run_with_triton("-m", "pytest", "-q", "-p", "no:cacheprovider", *cases, interprets=True)


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h100_without_spilling_registers() -> None:
    output = run_with_triton(ROOT / "tests/kernels/compiled_kernels.py", interprets=False)
    used = json.loads(output)
    kernels = {name.split()[0] for name in used}
    assert kernels == {
        *("residual_forward", "residual_backward", "add_sums", "activation_backward"),
        *(
            "cross_entropy",
            "scale_rows",
            "best_of_parts",
            "best_of_rows",
            "list_seen",
            "attend_step",
        ),
        *("attention_forward", "attention_backward_queries", "attention_backward_keys"),
        *("choose_experts", "choose_experts_backward", "average_balance"),
        *("add_expert_biases", "expert_bias_gradients", "combine_rows", "combine_rows_backward"),
        *OF_NARROW_ROWS,
    }
    for name, resources in used.items():
        assert resources["shared"] <= SHARED_MEMORY, name
        assert resources["stack"] <= STACK, name
        assert resources["wide_accesses"] or name.split()[0] in OF_NARROW_ROWS, name
        assert bool(resources["tensor_core_products"]) == name.startswith("attention"), name


def test_the_meta_device_takes_the_branches_of_the_gpu_it_stands_for() -> None:
    x = torch.empty(1, device="meta")
    assert is_fused(x)
    for capability, fuses in (((8, 0), True), ((7, 5), False), (None, False)):
        with meta_stands_for(capability):
            assert is_fused(x) == fuses
    assert not is_fused(torch.empty(1))


def test_launches_on_the_meta_device_are_counted_without_triton() -> None:
    counted: Counter[str] = Counter()
    numbers = torch.empty(64, dtype=torch.int32, device="meta")
    logits_LV = torch.empty(64, 128, device="meta", requires_grad=True)
    states = torch.empty(64, 2, 16, device="meta", requires_grad=True)
    spans = Spans(numbers[:9], 8, numbers)
    with launches_counted_by(lambda name, *_: counted.update([name])):
        summed_cross_entropy(logits_LV, numbers.long())[0].backward()
        attend_packed(states, states, states, queries=spans, keys=spans).sum().backward()
    assert counted == {
        "cross_entropy": 1,
        "scale_rows": 1,
        "attention_forward": 1,
        "attention_backward_queries": 1,
        "attention_backward_keys": 1,
    }


def test_long_sentences_use_flash_attention_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[str] = []
    numbers = torch.empty(600, dtype=torch.int32, device="meta")
    states = torch.empty(600, 2, 16, device="meta", dtype=torch.bfloat16)

    def flash(*_: object) -> list[Tensor]:
        counted.append("flash")
        return [states]

    monkeypatch.setattr(attention, "_flash_attention", flash)
    with launches_counted_by(lambda name, *_: counted.append(name)):
        for sentences in (4, 5):
            spans = Spans(numbers[: sentences + 1], 500, numbers)
            with torch.no_grad():
                attend_packed(states, states, states, queries=spans, keys=spans)
        spans = Spans(numbers[:3], 500, numbers)
        attend_packed(states, states, states, queries=spans, keys=spans)
    assert counted == ["flash", "attention_forward", "attention_forward"]


def test_a_machine_can_turn_fused_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, device="meta")
    for value, is_on in (("off", False), ("on", True)):
        monkeypatch.setenv(launching.SWITCH, value)
        # A fresh copy, as the variable is read when the module is loaded.
        assert runpy.run_path(launching.__file__)["is_fused"](x) == is_on
    monkeypatch.setenv(launching.SWITCH, "0")
    with pytest.raises(ConfigError, match="MMNMT_FUSED_KERNELS is '0'"):
        launching._is_on()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"]),
    ],
)
def test_a_machine_that_cannot_compile_what_triton_needs_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: dict[Any, Any] = {}

    class Kernel:
        def __getitem__(self, _: object) -> Any:
            def run(*_: object, **__: object) -> None:
                raise failing["error"]

            return run

    monkeypatch.setattr(launching, "_kernel", lambda _: Kernel())
    failing["error"] = error
    with pytest.raises(ConfigError, match=r"Install gcc and .*_KERNELS to off"):
        launching.launch("scale_rows", (1,), torch.zeros(1))
    failing["error"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        launching.launch("scale_rows", (1,), torch.zeros(1))
