"""Keyed noise equals a reference in Python's integers, and depends on nothing but its keys."""

import math
from contextlib import nullcontext

import pytest
import torch
from scipy import stats
from torch import nn

from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.noise import (
    Dropout,
    Noise,
    dropout,
    keep,
    normal,
    number_sites,
    uniform,
    weight_dropout,
)

WORD = 2**32


def mixed(word: int) -> int:
    word ^= word >> 16
    word = word * 0x7FEB352D % WORD
    word ^= word >> 15
    word = word * 0x846CA68B % WORD
    return word ^ word >> 16


def bits(seed: int, site: int, row: int, column: int) -> int:
    key = mixed(mixed((seed + site * 0x1B873593) % WORD) ^ row * 0x85EBCA6B % WORD)
    return mixed(key ^ column * 0xC2B2AE35 % WORD)


def noise(*, tokens: int, seed: int = 7) -> Noise:
    return Noise(torch.full((tokens,), seed).int(), torch.arange(tokens).int())


@pytest.mark.parametrize("site", [256 * 70_001, 2**31 - 256])
@pytest.mark.parametrize("has_loops", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999])
def test_a_value_is_kept_as_python_integers_say(has_loops: bool, rate: float, site: int) -> None:
    seeds = [0, 1, -1, 2**31 - 1, -(2**31)]
    keys = Noise(torch.tensor(seeds, dtype=torch.int32), torch.tensor([0, 1, 2, 90_000, 3]).int())
    expected = [
        [bits(seed % WORD, site, row, column) >= int(rate * WORD) for column in range(9)]
        for seed, row in zip(seeds, keys.row_N.tolist(), strict=True)
    ]
    with nullcontext() if has_loops else sparing_loops():
        assert keep(keys, site, 9, rate).tolist() == expected


def test_the_rate_is_kept_in_rows_and_columns_and_neighbors_are_independent() -> None:
    kept = keep(noise(tokens=2000), 512, 500, 0.3).double()
    for axis, count in ((0, 2000), (1, 500)):
        z = (kept.mean(axis) - 0.7) * math.sqrt(count / 0.21)
        assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    site = keep(noise(tokens=2000), 768, 500, 0.3).double()
    seed = keep(noise(tokens=2000, seed=8), 512, 500, 0.3).double()
    neighbors = (kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1])
    for one, other in (*neighbors, (kept, site), (kept, seed)):
        correlation = ((one - 0.7) * (other - 0.7)).mean() / 0.21
        assert abs(correlation) < 5 / math.sqrt(one.numel())


def test_numbers_have_their_distributions() -> None:
    drawn = uniform(noise(tokens=500), 256, columns=200).flatten()
    assert 0 < drawn.min() < 1e-3
    assert 1 - 1e-3 < drawn.max() < 1
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-3
    gaussian = normal(noise(tokens=500), 256, columns=200).flatten()
    assert gaussian.isfinite().all()
    assert stats.kstest(gaussian.numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_what_it_keeps_and_so_does_its_gradient(dtype: torch.dtype) -> None:
    keys = noise(tokens=50)
    x = torch.randn(50, 33, dtype=dtype).requires_grad_()
    y = dropout(x, Dropout(keys, 256, 0.25))
    kept = keep(keys, 256, 33, 0.25)
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0).to(dtype))
    dy = torch.randn_like(y)
    y.backward(dy)
    torch.testing.assert_close(x.grad, torch.where(kept, dy / 0.75, 0).to(dtype))
    assert not dropout(x, Dropout(keys, 256, 1.0)).any()


def test_weights_are_keyed_by_query_head_and_key() -> None:
    keys = Noise(
        torch.tensor([[3] * 4, [-9] * 4]).int(), torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0]])
    )
    found = weight_dropout(torch.ones(2, 3, 4, 5), Dropout(keys, 1024, 0.4))

    def is_kept(b: int, h: int, t: int, s: int) -> bool:
        seed, row = int(keys.seed_N[b, t]) % WORD, int(keys.row_N[b, t])
        return bits(seed, 1024 + h, row, s) >= int(0.4 * WORD)

    for place in torch.cartesian_prod(*map(torch.arange, (2, 3, 4, 5))).tolist():
        assert (found[tuple(place)] != 0) == is_kept(*place), place


def test_every_module_has_its_own_site() -> None:
    class Drawing(nn.Module):
        site = 0

    model = nn.Sequential(Drawing(), nn.Linear(2, 2), nn.Sequential(Drawing(), Drawing()))
    number_sites(model)
    assert [m.site for m in model.modules() if isinstance(m, Drawing)] == [256, 512, 768]
