"""Compare the fused kernels of a GPU with their plain forms: values and time.

Not every GPU has been measured, so ``mmnmt doctor`` runs this on the one at hand.

Legend: N tokens, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.kernels.launching import fused_kernels_off
from pipeline.kernels.logits import summed_cross_entropy
from pipeline.kernels.noise import Dropout
from pipeline.kernels.pointwise import activated_linear, add_and_norm
from pipeline.model.attention import Attention
from pipeline.model.tokens import Tokens, Unbiased

TOLERANCE = 0.02
"""Largest relative distance between both forms in bfloat16, whose rounding is 0.4 %."""
ROUNDS = 5
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the compared computations."""

    sentences: int = 512
    length: int = 32
    width: int = 1024
    heads: int = 8
    vocabulary: int = 64_101


@dataclass(frozen=True)
class Compared:
    """A computation in both forms, forward and backward.

    Attributes:
        distance: largest relative distance of a result or gradient between the forms.
        fused: seconds of the fused form.
        plain: seconds of the plain form.
    """

    name: str
    distance: float
    fused: float
    plain: float

    @property
    def agrees(self) -> bool:
        """Whether both forms have the same values, up to rounding."""
        return self.distance <= TOLERANCE  # not if it is NaN


def compare(device: torch.device, sizes: Sizes, *, dtype: torch.dtype) -> Iterator[Compared]:
    """Yield the comparison of every kind of fused kernel of dense models."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    for name, (run, inputs) in _computations(random, sizes, device, dtype).items():
        fused, seconds = _values_and_time(run, inputs)
        with fused_kernels_off():
            plain, plain_seconds = _values_and_time(run, inputs)
        distances = [_distance(x, y) for x, y in zip(fused, plain, strict=True)]
        yield Compared(name, max(distances), seconds, plain_seconds)


def _computations(
    random: Run, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[Run, list[Tensor]]]:
    lengths = [max(sizes.length - n % 8, 1) for n in range(sizes.sentences)]
    packing = Packing.from_lengths(lengths).keyed(1).to(device)
    assert packing.noise is not None
    tokens, width = sum(lengths), sizes.width
    language_B = torch.zeros(packing.batch, dtype=torch.int64, device=device)
    about = Tokens(
        packing.sentence_N, packing.position_N, language_B, language_B, language_B,
        noise=packing.noise,
    )  # fmt: skip
    norm = nn.LayerNorm(width, device=device, dtype=dtype)
    attention = Attention(width=width, num_heads=sizes.heads, dropout=0.1).to(device, dtype)
    attention.site = 512
    dropout = Dropout(packing.noise, 256, 0.3)
    labels_L = torch.arange(tokens, device=device) % sizes.vocabulary

    def attend(x_ND: Tensor) -> Tensor:
        y = attention(x_ND, packing, about, is_causal=True)
        return y.total if isinstance(y, Unbiased) else y

    x_ND, y_ND = random(tokens, width), random(tokens, width)
    weight_FD, bias_F = random(4 * width, width) / width**0.5, random(4 * width)
    logits_LV = random(tokens, sizes.vocabulary)
    return {
        "residual and norm": (
            lambda x, y: torch.cat(add_and_norm(x, y, norm, dropout=dropout)),
            [x_ND, y_ND],
        ),
        "activation": (
            lambda x, weight, bias: activated_linear(x, weight, bias, "relu"),
            [x_ND, weight_FD, bias_F],
        ),
        "attention": (attend, [x_ND]),
        "loss": (
            lambda logits: summed_cross_entropy(logits, labels_L, smoothing=0.1)[0] / tokens,
            [logits_LV],
        ),
    }


def _values_and_time(run: Run, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
    """Return results and gradients, and the least time of several rounds."""
    given = [x.detach().requires_grad_() for x in inputs]
    times = []
    for _ in range(1 + ROUNDS):  # the first compiles
        _wait(given[0])
        start = perf_counter()
        y = run(*given)
        weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)
        gradients = torch.autograd.grad(y, given, weights if y.dim() else torch.ones_like(y))
        _wait(y)
        times.append(perf_counter() - start)
    return [y.detach(), *gradients], min(times[1:])


def _wait(x: Tensor) -> None:
    """Wait for a tensor, of which the host reads a value."""
    x.detach().flatten()[:1].tolist()


def _distance(x: Tensor, y: Tensor) -> float:
    size = torch.linalg.vector_norm(y, dtype=torch.float32).clamp_min(1e-30)
    # In place, as each copy of the logits in float32 takes 3.7 GB.
    return float(x.to(torch.float32, copy=True).sub_(y).norm() / size)
