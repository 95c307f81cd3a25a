"""Low-rank products by groups, as on a GPU, against those run by run; and their launches."""

import pytest
import torch

from pipeline.config.recipe import load_recipe
from pipeline.estimates.operators import count_training
from pipeline.kernels import low_rank_products
from pipeline.kernels.low_rank_products import SentenceSlots, add_low_rank


def test_by_groups_it_is_the_same_as_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    slots = SentenceSlots(
        torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1, 0, 1]), torch.tensor([2, 2, 0])
    )
    y_NO, x_NI = torch.randn(6, 16).bfloat16(), torch.randn(6, 24).bfloat16()
    vertical, flat = torch.randn(3, 16, 8).bfloat16(), torch.randn(3, 8, 24).bfloat16()
    by_runs = add_low_rank(y_NO.clone(), x_NI, vertical, flat, slots)
    monkeypatch.setattr(low_rank_products, "_is_grouped", lambda *_: True)
    by_groups = add_low_rank(y_NO.clone(), x_NI, vertical, flat, slots)
    scale = float(by_runs.abs().max())
    torch.testing.assert_close(by_groups, by_runs, rtol=0, atol=2e-2 * scale)


def test_a_wrapped_layer_launches_at_most_six_operators_and_copies_nothing_to_the_host() -> None:
    def launched(recipe: str) -> int:
        counted = count_training(
            load_recipe(recipe), vocabulary_size=100, num_groups=0, num_languages=5
        )
        assert not counted.host_copies
        return sum(not launch.is_backward for launch in counted.launches)

    model = load_recipe("demo_dense").model
    wrapped = 2 * (model.encoder_layers + model.decoder_layers)
    once_per_side = 2 * 3
    added = launched("demo_dense+lms") - launched("demo_dense")
    assert added <= (6 - 1) * wrapped + once_per_side
