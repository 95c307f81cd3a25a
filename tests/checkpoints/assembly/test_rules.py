"""Experts that differ: their masks and noise."""

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.assembly.rules import diversified
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.errors import ConfigError

LAYER = "encoder.layers.1.feed_forward"
TENSORS = {"up.weight": (128, 64), "up.bias": (128,), "down.weight": (64, 128), "down.bias": (64,)}


def dense_layer() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in TENSORS.items()}


def experts(config: UpcyclingConfig, ids: list[int]) -> dict[int, dict[str, Tensor]]:
    return {
        index: {
            name: diversified(value, f"{LAYER}.experts.{index}.{name}", config)
            for name, value in dense_layer().items()
        }
        for index in ids
    }


def masks(config: UpcyclingConfig, ids: list[int], name: str) -> dict[int, Tensor]:
    return {index: tensors[name] == 0 for index, tensors in experts(config, ids).items()}


@pytest.mark.parametrize("method", ["elementwise", "per_neuron"])
@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.weight"])
def test_the_masks_of_32_experts_all_differ(method: str, name: str) -> None:
    config = UpcyclingConfig.model_validate({"method": method, "mask_ratio": 0.1})
    found = masks(config, list(range(32)), name)
    assert len({mask.numpy().tobytes() for mask in found.values()}) == 32


@pytest.mark.parametrize("ratio", [0.1, 0.4])
def test_the_asked_share_of_every_tensor_is_zero_and_the_rest_is_not_rescaled(ratio: float) -> None:
    made = experts(UpcyclingConfig(mask_ratio=ratio), list(range(32)))
    for name, whole in dense_layer().items():
        values = torch.stack([tensors[name] for tensors in made.values()])
        is_kept = values != 0
        deviation = (ratio * (1 - ratio) / values.numel()) ** 0.5
        assert abs(1 - is_kept.float().mean().item() - ratio) < 4 * deviation, name
        assert torch.equal(values[is_kept], whole.expand_as(values)[is_kept])


@pytest.mark.parametrize("method", ["elementwise", "per_neuron", "noise"])
def test_an_expert_depends_neither_on_the_order_nor_on_the_number_of_experts(method: str) -> None:
    config = UpcyclingConfig.model_validate({"method": method})
    forwards = experts(config, list(range(8)))
    backwards = experts(config, list(range(31, -1, -1)))
    for index, tensors in forwards.items():
        for name, value in tensors.items():
            assert torch.equal(backwards[index][name], value)


def test_another_seed_or_layer_has_other_masks() -> None:
    whole = torch.ones(128, 64)
    target = f"{LAYER}.experts.0.up.weight"
    made = diversified(whole, target, UpcyclingConfig())
    other_seed = diversified(whole, target, UpcyclingConfig(seed=2))
    other_layer = diversified(whole, target.replace("1", "3", 1), UpcyclingConfig())
    assert not torch.equal(made, other_seed)
    assert not torch.equal(made, other_layer)


def test_per_neuron_removes_the_same_hidden_neurons_from_all_tensors_of_an_expert() -> None:
    config = UpcyclingConfig(method="per_neuron", mask_ratio=0.25)
    shares = []
    for tensors in experts(config, list(range(32))).values():
        gone = tensors["up.bias"] == 0
        shares.append(gone.float().mean())
        assert torch.equal((tensors["up.weight"] == 0).all(1), gone)
        assert torch.equal((tensors["up.weight"] == 0).any(1), gone)
        assert torch.equal((tensors["down.weight"] == 0).all(0), gone)
        assert torch.equal((tensors["down.weight"] == 0).any(0), gone)
        assert (tensors["down.bias"] != 0).all()
    assert torch.stack(shares).mean().item() == pytest.approx(0.25, abs=0.03)


def test_noise_is_gaussian_and_relative_to_each_tensors_own_deviation() -> None:
    config = UpcyclingConfig(method="noise", noise_std=0.05)
    generator = torch.Generator().manual_seed(1)
    whole = 3.0 * torch.randn(128, 256, generator=generator) + 1.0
    target = f"{LAYER}.experts.0.up.weight"
    noise = (diversified(whole, target, config) - whole) / whole.std()
    assert noise.mean().item() == pytest.approx(0.0, abs=0.002)
    assert noise.std().item() == pytest.approx(0.05, rel=0.02)
    assert (noise.abs() > 3 * 0.05).float().mean().item() == pytest.approx(0.0027, abs=0.001)
    other = diversified(whole, target.replace(".0.", ".1."), config)
    assert not torch.equal(other - whole, noise * whole.std())


@pytest.mark.parametrize("method", ["permuted", "Noise"])
def test_a_method_without_a_case_is_not_taken_for_another(method: str) -> None:
    config = UpcyclingConfig().model_copy(update={"method": method})
    with pytest.raises(ConfigError, match=f"diversified has no case for '{method}'"):
        diversified(torch.ones(4, 4), f"{LAYER}.experts.0.up.weight", config)
