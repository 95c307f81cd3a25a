"""One GPU per rank, whatever the launcher shows to whom."""

from unittest import mock

import pytest
import torch

from pipeline.distributed.world import device_index, refuse_shared, take_device
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 0, None), (3, 0, None), (0, 1, 0), (3, 1, 0), (3, 8, 3), (5, 4, 1)],
)
def test_a_rank_takes_its_gpu_or_the_only_one_it_is_shown(
    local_rank: int, visible: int, expected: int | None
) -> None:
    assert device_index(local_rank, visible=visible) == expected


def test_ranks_with_a_gpu_each_pass_whatever_number_it_has_for_them() -> None:
    refuse_shared([("a", "GPU-1", "cuda"), ("a", "GPU-2", "cuda"), ("b", "GPU-1", "cuda")])
    refuse_shared([("a", "the CPU", "cpu")] * 4)


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"2 processes on a would share one GPU \(GPU-2\)"):
        refuse_shared([("a", "GPU-1", "cuda"), ("a", "GPU-2", "cuda"), ("a", "GPU-2", "cuda")])


def test_ranks_with_and_without_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 processes see a GPU and 2 see none"):
        refuse_shared([("a", "GPU-1", "cuda"), ("b", "the CPU", "cpu"), ("b", "the CPU", "cpu")])


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (0, "The NVIDIA driver on your system is too old (found version 12040)"),
        (1, "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_one_sentence(
    rank: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch counts GPUs by the driver's library, which a CUDA that is too new does not disturb.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fails = mock.Mock(side_effect=RuntimeError(f"{error}.\nCompile with TORCH_USE_CUDA_DSA."))
    monkeypatch.setattr(torch.cuda, "set_device", fails)
    with pytest.raises(ConfigError) as caught:
        take_device(rank)
    assert str(caught.value) == (
        f"GPU {rank} cannot be used ({error}). Update its driver, install a torch that suits it, "
        "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on CPU."
    )
