"""Cross entropy in the chunks of a CPU and in those of other devices, against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import cross_entropy
from pipeline.kernels.cross_entropy import DEVICE_CHUNKS, rows_at_a_time, summed_cross_entropy


def logits_and_labels(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits_LV = 3 * torch.randn(rows, 50, generator=generator)
    return logits_LV.to(dtype), torch.randint(50, (rows,), generator=generator)


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 100])
def test_any_chunks_give_the_plain_computation(
    rows: int, smoothing: float, dtype: torch.dtype, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = rows_at_a_time(rows, is_cpu=is_cpu)
    monkeypatch.setattr(cross_entropy, "rows_at_a_time", lambda *_, **__: chunk)
    logits_LV, labels_L = logits_and_labels(rows, dtype)
    ours, theirs = (logits_LV.clone().requires_grad_() for _ in range(2))
    smoothed, plain = summed_cross_entropy(ours, labels_L, smoothing=smoothing)
    expected = F.cross_entropy(theirs.float(), labels_L, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(smoothed, expected, rtol=1e-6, atol=0)
    exact = F.cross_entropy(logits_LV.double(), labels_L, reduction="sum")
    assert plain.item() == pytest.approx(exact.item(), rel=1e-6)
    assert not plain.requires_grad
    (2 * smoothed).backward()
    (2 * expected).backward()
    assert ours.grad is not None
    assert ours.grad.dtype == dtype
    assert theirs.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=1e-6)


def test_in_float64_nothing_is_rounded_to_less() -> None:
    logits_LV, labels_L = logits_and_labels(100, torch.float64)
    ours, theirs = (logits_LV.clone().requires_grad_() for _ in range(2))
    smoothed, plain = summed_cross_entropy(ours, labels_L, smoothing=0.1)
    expected = F.cross_entropy(theirs, labels_L, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(smoothed, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        plain, F.cross_entropy(logits_LV, labels_L, reduction="sum"), rtol=1e-13, atol=0
    )
    found, wanted = (
        torch.autograd.grad(*pair)[0] for pair in ((smoothed, ours), (expected, theirs))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 4019, 10**6])
def test_off_the_cpu_there_are_few_chunks_however_many_rows(rows: int) -> None:
    chunk = rows_at_a_time(rows, is_cpu=False)
    assert chunk >= 1
    assert -(-rows // chunk) <= DEVICE_CHUNKS
