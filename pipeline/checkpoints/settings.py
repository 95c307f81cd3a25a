"""Settings of upcycling: the section ``[upcycling]`` of a recipe."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import DropRate, Seed, Settings, number


class UpcyclingConfig(Settings):
    """Upcycling: dense feed-forwards become experts (MMNMT, §4.2)."""

    removed: ClassVar = {
        "kept_experts": ([], ()),
        "token_routers": ("copy",),
    }
    method: Literal["elementwise", "per_neuron", "noise"] = "elementwise"
    """Difference between the experts and their source. ``elementwise``: some parameters are zero;
    ``per_neuron``: some hidden neurons are zero; ``noise``: noise is added."""
    mask_ratio: DropRate = 0.1
    """Share of each expert's parameters or hidden neurons that is set to zero; 0 copies."""
    noise_std: Annotated[float, number(least=0, most=1000)] = 0.01
    """Standard deviation of the noise of method ``noise``, relative to the tensor's own."""
    graft_group_routers: Literal["copy", "fresh"] = "copy"
    """Group routers over a token router: copies of the token router leave the function
    unchanged."""
    seed: Seed = 1
    """Seed of masks, noise and fresh routers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        idle = "mask_ratio" if self.method == "noise" else "noise_std"
        if self.differs(idle):
            raise ValueError(
                f"{idle} is {getattr(self, idle)}, and method is {self.method!r}, which does not "
                "read it: leave it out, or choose another method"
            )
        return self

    def differs(self, name: str) -> bool:
        """Return whether a setting is not at its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)
