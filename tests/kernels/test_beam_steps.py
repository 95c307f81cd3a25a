"""Tests of pipeline/kernels/beam_steps.py: the loops beside PyTorch's operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import beam_steps
from pipeline.kernels.beam_steps import RowEntries, attend_entries, best_tokens, log_normalizer

LISTED = torch.tensor([[4, 0, 2, 2], [1, 5, 3, 0], [0, 0, 0, 0]])


def attended(query_RD: Tensor, key_PD: Tensor, value_PD: Tensor, listed: list[list[int]]) -> Tensor:
    """Row by row, two heads, in double precision."""
    rows = []
    for query_D, entries in zip(query_RD.double(), listed, strict=True):
        states = query_D[None], key_PD[entries].double(), value_PD[entries].double()
        query, key, value = (x_TD.unflatten(1, (2, -1)).transpose(0, 1) for x_TD in states)
        rows.append(F.scaled_dot_product_attention(query, key, value).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_attend_to_their_entries_and_to_no_others(
    threads: int, is_listed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beam_steps, "WORTH_OTHER_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(1)
    query_RD, key_PD, value_PD = (torch.randn(n, 10).to(dtype) for n in (3, 6, 6))
    start_R, stop_R = torch.tensor([0, 1, 2]), torch.tensor([4, 3, 3])
    spans = [range(*span) for span in zip(start_R.tolist(), stop_R.tolist(), strict=True)]
    listed = [
        LISTED[row, list(span)].tolist() if is_listed else list(span)
        for row, span in enumerate(spans)
    ]
    entries = RowEntries(start_R, stop_R, 4, LISTED if is_listed else None)
    found_RD = attend_entries(query_RD, key_PD, value_PD, entries, num_heads=2)
    expected_RD = attended(query_RD, key_PD, value_PD, listed)
    accuracy = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found_RD.double(), expected_RD, rtol=accuracy, atol=accuracy)


def test_what_is_no_number_is_none_in_the_context_of_its_row_alone() -> None:
    query_RD, key_PD = torch.ones(2, 4), torch.ones(3, 4)
    query_RD[0, 0] = torch.nan
    entries = RowEntries(torch.tensor([0, 0]), torch.tensor([3, 3]), 3)
    found_RD = attend_entries(query_RD, key_PD, key_PD, entries, num_heads=1)
    assert found_RD[0].isnan().all()
    assert torch.equal(found_RD[1], torch.ones(4))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_normaliser_is_the_logarithm_of_the_sum_of_powers(scale: float) -> None:
    torch.manual_seed(2)
    logits_RV = torch.randn(5, 1003) * scale
    found_R, expected_R = log_normalizer(logits_RV), logits_RV.double().logsumexp(1)
    torch.testing.assert_close(found_R.double(), expected_R, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_normaliser_of_what_is_no_number_is_none(value: float) -> None:
    logits_RV = torch.zeros(2, 70)
    logits_RV[0, 69] = value
    assert log_normalizer(logits_RV).isnan().tolist() == [True, False]


@pytest.mark.parametrize("size", [7, 32, 33, 64, 1000])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_the_best_tokens_are_those_of_a_stable_sort(width: int, size: int) -> None:
    torch.manual_seed(size)
    logits_RV = torch.randint(0, 40, (50, size)).float()  # many are equal
    logits_RV[:, ::3] = -torch.inf
    best_RC, token_RC = best_tokens(logits_RV, width)
    sorted_RV, order_RV = logits_RV.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best_RC, sorted_RV[:, :width])
    is_there = best_RC.isfinite()
    assert torch.equal(token_RC[is_there], order_RV[:, :width][is_there])
    assert not token_RC[~is_there].any()
