"""The shapes, types and cards that the kernels of experts take, and refusals of others."""

import pytest
import torch
from support.tiny_models import tiny_spec

from pipeline.errors import ConfigError
from pipeline.kernels.expert_products import check_widths
from pipeline.kernels.products import has_grouped_products, may_leave_idle_gradients
from pipeline.model.building import build_model
from pipeline.model.settings import MoEConfig


@pytest.mark.parametrize(("width", "hidden_width"), [(20, 32), (16, 36), (7, 7)])
def test_widths_that_are_no_multiples_of_8_are_refused_on_a_gpu(
    width: int, hidden_width: int
) -> None:
    with pytest.raises(ConfigError, match="multiples of 8"):
        check_widths(width=width, hidden_width=hidden_width, device=torch.device("cuda"))
    check_widths(width=width, hidden_width=hidden_width, device=torch.device("cpu"))
    for device in ("cuda", "cpu", "meta"):
        check_widths(width=16, hidden_width=40, device=torch.device(device))


def test_a_model_of_experts_is_checked_when_it_is_built_and_a_dense_one_is_not() -> None:
    with pytest.raises(ConfigError, match=r"width 12 .* cannot be computed on a GPU"):
        build_model(tiny_spec(moe=MoEConfig(num_experts=4), width=12), device=torch.device("meta"))
    build_model(tiny_spec(width=12), device=torch.device("meta"))


@pytest.mark.parametrize(
    ("dtype", "capability", "is_grouped"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.bfloat16, (10, 3), True),
        (torch.bfloat16, (11, 0), False),  # PyTorch's loop on the host: no graph records it
        (torch.bfloat16, (12, 0), False),
        (torch.bfloat16, (8, 0), False),
        (torch.float32, (9, 0), False),
        (torch.float16, (9, 0), False),
    ],
)
def test_grouped_products_are_for_bfloat16_on_the_cards_that_have_them(
    dtype: torch.dtype, capability: tuple[int, int], is_grouped: bool
) -> None:
    assert has_grouped_products(torch.empty(1, dtype=dtype), capability=capability) == is_grouped


@pytest.mark.parametrize(("capability", "may"), [((9, 0), False), ((10, 0), True), ((10, 3), True)])
def test_gradients_of_experts_without_rows_are_set_to_zero_but_on_hopper(
    capability: tuple[int, int], may: bool
) -> None:
    assert may_leave_idle_gradients(torch.empty(1), capability=capability) == may
    assert may_leave_idle_gradients(torch.empty(1))
    assert not may_leave_idle_gradients(torch.empty(1, device="meta"))
