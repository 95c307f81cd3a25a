"""Settings of upcycling: the section ``[upcycling]`` of a recipe."""

from typing import Annotated, Literal

from pipeline.config.settings import MAX_EXPERTS, DropRate, Seed, Settings, number, whole


class UpcyclingConfig(Settings):
    """upcycle: dense feed-forwards become experts (MMNMT, §4.2)."""

    method: Literal["elementwise", "per_neuron", "noise"] = "elementwise"
    mask_ratio: DropRate = 0.1
    """Share of each expert's parameters (or hidden neurons) set to zero; 0 copies."""
    noise_std: Annotated[float, number(least=0, most=1000)] = 0.01
    """Standard deviation of method ``noise``, relative to the tensor's own."""
    token_routers: Literal["copy", "fresh"] = "copy"
    """What becomes of routers that a source has; where it has none they start fresh."""
    graft_group_routers: Literal["copy", "fresh"] = "copy"
    """Group routers over a token router: copies of it leave the function unchanged."""
    kept_experts: tuple[Annotated[int, whole(0, MAX_EXPERTS)], ...] = ()
    """Of sources that have more experts than the model: which of them stay, in this order."""
    seed: Seed = 1
