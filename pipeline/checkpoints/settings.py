"""Settings of upcycling: the section ``[upcycling]`` of a recipe."""

from typing import Annotated, Literal

from pipeline.config.settings import MAX_EXPERTS, DropRate, Seed, Settings, number, whole


class UpcyclingConfig(Settings):
    """Settings of upcycling, which turns dense feed-forwards into experts (MMNMT, §4.2)."""

    method: Literal["elementwise", "per_neuron", "noise"] = "elementwise"
    mask_ratio: DropRate = 0.1
    """Share of each expert's parameters (or hidden neurons) set to zero; 0 copies."""
    noise_std: Annotated[float, number(least=0, most=1000)] = 0.01
    """Standard deviation of method ``noise``, relative to the tensor's own."""
    token_routers: Literal["copy", "fresh"] = "copy"
    """Whether routers of a source are copied or start fresh; missing ones start fresh."""
    graft_group_routers: Literal["copy", "fresh"] = "copy"
    """Group routers over a token router: copies of it leave the function unchanged."""
    kept_experts: tuple[Annotated[int, whole(0, MAX_EXPERTS)], ...] = ()
    """Ids of the experts to keep, in this order, if a source has more experts than the model."""
    seed: Seed = 1
