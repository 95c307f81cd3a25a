"""Compile the fused kernels for an H100, which needs Triton and no GPU.

Each kernel is compiled as the package launches it on the meta device, in bfloat16 and at the sizes
of ``dense_opus100`` (D 1,024, F 4,096) with a vocabulary of 64,101 in 64,128 columns and heads of
128 and 64 values, and of ``moe_opus100`` (32 experts). The program prints a JSON object: resources
by kernel and constants.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.batching.batch import Shares
from pipeline.kernels import launching
from pipeline.kernels.attention import Spans, attend_packed, attend_step, list_seen, sliced
from pipeline.kernels.expert_products import ExpertWeights, grouped_products
from pipeline.kernels.logits import fused_best_tokens, summed_cross_entropy
from pipeline.kernels.noise import Dropout, Noise
from pipeline.kernels.placement import Limits, RouteNumbers, combine, gather, place_by_kernels
from pipeline.kernels.pointwise import (
    activated_linear,
    add_and_norm,
    add_dropped,
    dropped,
    layer_norm,
    norm_of_sum,
)
from pipeline.kernels.routing import choose_by_kernels, kept_softmax

META, BFLOAT16 = torch.device("meta"), torch.bfloat16
H100 = GPUTarget("cuda", 90, 32)
TYPES = {
    **{torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*i1"},
    **{torch.int32: "*i32", torch.int64: "*i64"},
}
ROWS, WIDTH, HIDDEN, VOCABULARY, COLUMNS = 4096, 1024, 4096, 64_101, 64_128
EXPERTS = 32
"""Rows: a multiple of 16, so that strides and sizes are specialized as in training."""


def states(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=BFLOAT16, device=META, requires_grad=True)


def backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def run_everything() -> None:
    """Launch every kernel forward and backward on the meta device."""
    numbers = torch.empty(ROWS, dtype=torch.int32, device=META)
    dropout = Dropout(Noise(numbers, numbers), 256, 0.1)
    norm = nn.LayerNorm(WIDTH, device=META, dtype=BFLOAT16)
    x_ND, y_ND, bias_D = states(ROWS, WIDTH), states(ROWS, WIDTH), states(WIDTH)
    options: dict[str, Any] = {"y_bias_D": bias_D, "dropout": dropout}
    backward(*add_and_norm(x_ND, y_ND, norm, **options))
    backward(norm_of_sum(x_ND, y_ND, norm, **options))
    backward(layer_norm(x_ND, norm))
    backward(add_dropped(x_ND, y_ND, **options))
    backward(dropped(x_ND, dropout))
    for activation in (None, "relu", "gelu"):
        weight_FD, bias_F = states(HIDDEN, WIDTH), states(HIDDEN)
        backward(activated_linear(x_ND, weight_FD, bias_F, activation))
    logits_LV = states(ROWS, COLUMNS)
    labels_L = torch.empty(ROWS, dtype=torch.int64, device=META)
    loss, _ = summed_cross_entropy(logits_LV, labels_L, smoothing=0.1, vocabulary=VOCABULARY)
    loss.backward()
    spans = Spans(torch.empty(129, dtype=torch.int32, device=META), 64, numbers)
    attentions = ((8, True, dropout), (8, False, None), (16, False, dropout))
    for heads, is_causal, drop in attentions:
        joined = (x.unflatten(1, (heads, -1)) for x in sliced(states(ROWS, 3 * WIDTH), 3))
        kind: dict[str, Any] = {"is_causal": is_causal, "dropout": drop}
        backward(attend_packed(*joined, queries=spans, keys=spans, **kind))
    fused_best_tokens(logits_LV.detach(), 10, excluded=1)
    seen_BJS = torch.empty(32, 5, 80, dtype=torch.bool, device=META)
    for heads in (8, 16):
        cache_BHSK = states(32, heads, 80, WIDTH // heads).detach()
        query, *new = states(160, 3 * WIDTH).detach().chunk(3, 1)
        seen = list_seen(seen_BJS, torch.empty((), dtype=torch.int64, device=META))
        attend_step(query, cache_BHSK, cache_BHSK, seen, (new[0], new[1]))
        attend_step(query, cache_BHSK, cache_BHSK, seen.number_B)
    run_experts(None)
    numbers_M = torch.empty(8, dtype=torch.int64, device=META)
    run_experts(Shares((ROWS // 8,) * 8, numbers_M, torch.empty(8, device=META)))


def run_experts(shares: Shares | None) -> None:
    """Route tokens, with limits and by probability, and serve them by experts."""
    logits_NE = torch.empty(ROWS, EXPERTS, device=META, requires_grad=True)
    capacity_M = torch.empty(8 if shares else 1, dtype=torch.int64, device=META)
    numbers = RouteNumbers(ROWS, 2, EXPERTS, META, Limits(capacity_M, shares))
    x_ND = states(ROWS, WIDTH)
    weights = ExpertWeights(
        states(EXPERTS, HIDDEN, WIDTH),
        states(EXPERTS, HIDDEN),
        states(EXPERTS, WIDTH, HIDDEN),
        states(EXPERTS, WIDTH),
    )
    for is_renormalized in (True, False):
        choice = choose_by_kernels(
            logits_NE, top_k=2, is_renormalized=is_renormalized, shares=shares
        )
        for claim_N, keeps in product((choice.claim_N, None), (False, True)):
            placement = place_by_kernels(
                choice.expert_NC, numbers, claim_N=claim_N, keeps_dropped=keeps
            )
        assert placement.slices is not None
        assert placement.is_dropped_NC is not None
        weight_NC = choice.made_weight_NC
        if weight_NC is None:
            assert choice.chosen_logits_NC is not None
            weight_NC = kept_softmax(choice.chosen_logits_NC, placement.is_dropped_NC)
        y_RD = grouped_products(gather(x_ND, placement), weights, placement.slices, "relu")
        backward(combine(y_RD, weight_NC, placement), choice.balance_loss)


def type_of(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compiled(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, int]:
    """Compile a kernel as Triton does at a launch, and return its resources."""
    kernel = launching._kernel(name)
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    constants = {n: v for n, v in options.items() if n in kernel.arg_names}
    launched = {n: v for n, v in options.items() if n not in constants}
    constants |= {n: v for n, v in given.items() if v is None}
    values = {n: v for n, v in given.items() if v is not None}
    place = {n: kernel.arg_names.index(n) for n in (*given, *constants)}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= {n: type_of(v) for n, v in values.items()}
    specialized = {p.name for p in kernel.params if not p.do_not_specialize}
    aligned = {
        (place[n],): [["tt.divisibility", 16]]
        for n, v in values.items()
        if isinstance(v, Tensor) or (isinstance(v, int) and n in specialized and v % 16 == 0)
    }
    source = ASTSource(kernel, signature, {(place[n],): v for n, v in constants.items()}, aligned)
    built = triton.compile(source, target=H100, options=launched | {"enable_fp_fusion": True})
    assembly = built.asm["ptx"]
    return usage(built.asm["cubin"]) | {
        "shared": built.metadata.shared,
        "tensor_core_products": assembly.count("wgmma.mma_async"),
        "wide_accesses": len(re.findall(r"(?:ld|st)\.global[^;]*\.v4", assembly)),
    }


def usage(cubin: bytes) -> dict[str, int]:
    """Return the registers and the bytes of stack, to which registers spill, per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", text)
    return {name.lower(): int(value) for name, value in found}


def main() -> None:
    """Print the resources of every kernel that is launched."""
    found: dict[str, dict[str, int]] = {}

    def compile_once(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        is_given = "".join("01"[value is not None] for value in arguments)
        key = f"{name} {is_given} {options}"
        if key not in found:
            found[key] = compiled(name, arguments, options)

    with launching.launches_counted_by(compile_once):
        run_everything()
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
