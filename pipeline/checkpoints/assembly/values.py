"""The values of an assembly's tensors, each from its source by its rule.

Experts that differ from the dense feed-forward they come from, and from each other (paper §4.2).

What is random comes from a counter-based generator (Philox; Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") keyed by the seed, the name of the dense tensor and the GLOBAL expert
id: it depends neither on topology, nor on order, nor on how many processes draw.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pipeline.checkpoints.assembly.rules import (
    Assignment,
    Experts,
    Part,
    diversified,
    experts_of,
    plan_assembly,
)
from pipeline.checkpoints.assembly.vocabulary import RowPlan
from pipeline.checkpoints.names import NamedSlice, initial_value, named_slices
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.sources import Tensors
from pipeline.model.building import shape_of_model
from pipeline.model.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Blueprint:
    """All that decides an assembly: the shape of the result, the sources of its parts, the rules.

    Planned as soon as it is asked for its plan; it can be sent to another process.
    """

    spec: ModelSpec
    sources: Mapping[Part, Tensors | None]
    config: UpcyclingConfig
    rows: RowPlan | None = None
    precision: str = "float32"
    _last: tuple[tuple[str, str, bool], Tensor] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors written."""
        return DTYPES[self.precision]

    @cached_property
    def plan(self) -> list[Assignment]:
        """One rule for every tensor (:func:`~.plan.plan_assembly`)."""
        return plan_assembly(self.spec, self.sources, self.config, rows=self.rows)

    @cached_property
    def targets(self) -> dict[str, NamedSlice]:
        """The tensors of the result, without values."""
        return {target.name: target for target in named_slices(shape_of_model(self.spec))}

    @cached_property
    def experts(self) -> dict[Part, Experts | None]:
        """How the experts of each part's source become those of the model."""
        return {
            part: experts_of(self.spec, tensors, self.config)
            for part, tensors in self.sources.items()
            if tensors is not None
        }

    def shape(self, entry: Assignment) -> tuple[int, ...]:
        """Of one tensor of the result."""
        return tuple(self.targets[entry.target].value.shape)

    def value(self, entry: Assignment) -> Tensor:
        """One tensor of the result, contiguous, in the type that is written."""
        found = self._made(entry).to(self.dtype)
        return found.expand(self.shape(entry)).contiguous()

    def difference(self, entry: Assignment, value: Tensor) -> Tensor | None:
        """What diversity changed of a tensor; None where it changes nothing."""
        if entry.rule not in ("expert of dense", "expert of expert"):
            return None
        return value - self._read(entry)

    def _made(self, entry: Assignment) -> Tensor:
        match entry.rule:
            case "fresh":
                return self._fresh(entry)
            case "copied" | "language of dense":
                return self._read(entry)
            case "expert of dense" | "expert of expert":
                exact = self.config.method == "noise"  # masks keep or drop what is written
                return diversified(self._read(entry, exact=exact), entry.target, self.config)
            case "rows of kept experts" | "rows of more experts" | "group router of token router":
                return self._rows_of_experts(entry)
            case "rows by piece":
                assert self.rows is not None
                return self.rows.applied(self._read(entry, exact=True), self._fresh(entry))

    def _rows_of_experts(self, entry: Assignment) -> Tensor:
        """A router's rows, (E, D) or (G, E, D), for the experts of the result."""
        value = self._read(entry)
        experts = self.experts[entry.part]
        if experts is None or experts.unchanged:
            return value
        return value.index_select(-2, torch.tensor(experts.sources))

    def _fresh(self, entry: Assignment) -> Tensor:
        return initial_value(self.targets[entry.target], self.spec, seed=self.config.seed)

    def _read(self, entry: Assignment, *, exact: bool = False) -> Tensor:
        """The source tensor, in the type that is written or, if ``exact``, as it is stored.

        The one last read is kept, which all experts of a layer share.
        """
        tensors = self.sources[entry.part]
        assert tensors is not None
        assert entry.source is not None
        key = (entry.part, entry.source, exact)
        if self._last is None or self._last[0] != key:
            value = tensors.read(entry.source)
            self._last = (key, value if exact else value.to(self.dtype))
        return self._last[1]

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        for name in ("plan", "targets", "experts"):
            state.pop(name, None)
        return {**state, "_last": None}
