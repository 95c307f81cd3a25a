"""Beam search that a GPU repeats without the host: tensors keep their shapes and addresses.

The host launches a step of decoding more slowly than a GPU computes it. Here, a step with its
search is one CUDA graph (:mod:`~pipeline.kernels.launching`), and the host reads only after every
eighth step which sentences are done. The graphs need fixed shapes: a :class:`Grid` has a multiple
of 8 sentences and positions for 16 · 2^k tokens. A sentence that is done stays in the grid until a
quarter is done; then the others move to a smaller grid. Places without a sentence repeat another
sentence, so that no value is computed that is not a number.

On other devices, where the tests run it, the same step is called without a graph.

Legend: B sentences of a grid, J beams, R = B · J rows.
"""

from collections.abc import Container, Sequence

import torch

from pipeline.decoding.beam_search import Beams, BeamStep, Search
from pipeline.decoding.cached_keys import DecoderStates, capacity
from pipeline.decoding.hypotheses import Source, Translation
from pipeline.decoding.settings import DecodingConfig
from pipeline.distributed import process
from pipeline.kernels.launching import HostCopy, HostWaits, recorded
from pipeline.kernels.pointwise import JointParameters
from pipeline.kernels.products import has_grouped_products
from pipeline.model.transformer import Transformer

SENTENCES = 8
"""The number of sentences of a grid is a multiple of this."""
STEPS = 8
"""Number of steps after which the host reads which sentences are done."""
AHEAD = 2
"""Number of steps that a GPU has left to compute when the host reads, so that it never idles."""
MOST_GRIDS = 12
"""Number of unused grids that are kept."""


class Grid:
    """Beams, caches and the step of a search of fixed shape."""

    def __init__(
        self, extend: BeamStep, like: DecoderStates, beams: Beams, *, shape: tuple[int, int]
    ) -> None:
        """Make an empty grid for ``shape`` sentences and positions.

        ``like`` and ``beams`` are of a search with the same model.
        """
        self.extend, self.shape = extend, shape
        self.sentences, self.positions = shape
        roomy = beams.with_room(self.positions)
        self.beams = Beams(*(part.new_zeros(self.sentences, *part.shape[1:]) for part in roomy))
        self.states = like.blank(self.sentences, positions=self.positions)
        self.step = recorded(self._step, like.device)

    def load(self, beams: Beams, states: DecoderStates, rows: Sequence[int]) -> None:
        """Copy the sentences of these rows; those that are added to fill the grid are done."""
        filled = [*rows, *[rows[0]] * (self.sentences - len(rows))]
        index_B = torch.tensor(filled, device=states.device)
        mine, theirs = [*self.beams, *self.states.tensors()], [*beams, *states.tensors()]
        for own, other in zip(mine, theirs, strict=True):
            if not own.dim():
                own.copy_(other)
                continue
            # A weight of 0, which a mask gives old entries, does not hide what is no number.
            own.zero_()
            own[:, *map(slice, other.shape[1:])] = other.index_select(0, index_B)
        self.beams.done_B[len(rows) :] = True

    def _step(self) -> None:
        tokens = self.beams.last_tokens(self.extend.prompt_length)
        x_RD = self.states.step_in_place(*tokens)
        extended, beam_BJ = self.extend(self.beams, self.states.model.project(x_RD))
        self.states.reorder(beam_BJ)
        # A graph reads and writes the same addresses at every replay.
        pairs = zip(self.beams, extended, strict=True)
        changed = [(own, new) for own, new in pairs if new is not own]
        for dtype in dict.fromkeys(own.dtype for own, _ in changed):  # one kernel for each
            kept, made = zip(*(pair for pair in changed if pair[0].dtype == dtype), strict=True)
            torch._foreach_copy_(kept, made)


class Grids:
    """The grids of a model and its settings that no search uses, for searches to come."""

    def __init__(self) -> None:
        self.waits = False
        """Whether the host waits for values in the steps of the model: there are no grids then."""
        self._free: list[Grid] = []
        self._joint: list[JointParameters | None] = []

    def joint_parameters(self, model: Transformer) -> JointParameters | None:
        """Return copies of the model's parameters that the steps of all grids read."""
        if not self._joint:
            self._joint.append(model.joint_parameters_of_steps())
        return self._joint[0]

    def take(
        self, extend: BeamStep, states: DecoderStates, beams: Beams, *, shape: tuple[int, int]
    ) -> Grid:
        """Return a grid of this shape for a search; see :class:`Grid`."""
        for place, grid in enumerate(self._free):
            # The length of the prompt is a constant of the recorded step.
            if grid.shape == shape and grid.extend.prompt_length == extend.prompt_length:
                return self._free.pop(place)
        return Grid(extend, states, beams, shape=shape)

    def let_go(self) -> None:
        """Free the memory of the grids that no search uses."""
        self._free.clear()

    def give(self, grid: Grid) -> None:
        """Take back a grid; only the grids that were used last are kept."""
        self._free = [*self._free, grid][-MOST_GRIDS:]


class GridSearch:
    """The search of :class:`~pipeline.decoding.beam_search.Search` on grids.

    Attributes:
        active: number of each sentence that is neither done nor dropped.
    """

    can_be_joined = False

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Source],
        config: DecodingConfig,
        *,
        eos_id: int,
        grids: Grids,
    ) -> None:
        self.grids = grids
        self.grid: Grid | None = None
        self.rows: list[int | None] = []
        """Sentence of each row of the grid; None where it is done or dropped."""
        # The first step has other shapes: a prompt of several tokens, and one beam per sentence.
        self.first = Search(model, sources, config, eos_id=eos_id)
        """Search that makes the first step."""
        self.first.extend.reads = False
        self.first.states.joint = grids.joint_parameters(model)
        self.active, self.longest = self.first.active, 1
        self.most_tokens = int(self.first.beams.limit_B.max())
        self.fewest_positions = max(len(source.tokens) for source in sources)

    def run(self) -> list[list[Translation]]:
        """Search until all sentences are done; return the best hypotheses of each."""
        found: dict[int, list[Translation]] = {}
        while self.active:
            found |= self.step()
        return [found[index] for index in range(self.first.sentences)]

    def step(self) -> dict[int, list[Translation]]:
        """Extend the beams by up to 8 tokens; return the hypotheses of sentences that are done."""
        process.advance()
        if self.grid is None:
            found = self.first.step()
            self.rows = [*self.first.active]
            if self.rows and not self.grids.waits:
                rows = [*range(len(self.rows))]
                try:
                    self._move(self.first.extend, self.first.beams, self.first.states, rows)
                except HostWaits:
                    self.grids.waits = True
        else:
            found = self._steps(self.grid)
        self._leave_done()
        return found

    def _steps(self, grid: Grid) -> dict[int, list[Translation]]:
        """Make steps on the grid, which has room for them."""
        steps = min(STEPS, self.most_tokens - self.longest)
        self.longest += steps
        ahead = AHEAD if self.longest < self.most_tokens else 0
        for left in reversed(range(steps)):
            grid.step()
            if left == ahead:  # the device has steps left while the host waits for the copy
                is_done = HostCopy(grid.beams.done_B)
        done = [
            row
            for row, (index, ends) in enumerate(zip(self.rows, is_done.read(), strict=False))
            if ends and index is not None
        ]
        best = grid.extend.best(grid.beams, done)
        found = {self.rows[row]: of_row for row, of_row in zip(done, best, strict=True)}
        self.rows = [None if index in found else index for index in self.rows]
        return {index: of_row for index, of_row in found.items() if index is not None}

    def drop(self, indices: Container[int]) -> None:
        """End the search for these sentences without a result; the search must have made a step."""
        if self.grids.waits:
            self.first.drop(indices)
        self.rows = [None if index in indices else index for index in self.rows]
        self._leave_done()

    def _leave_done(self) -> None:
        """Move the unfinished sentences to a grid that fits them better, if there is any."""
        rows = [row for row, index in enumerate(self.rows) if index is not None]
        self.active = [index for index in self.rows if index is not None]
        grid = self.grid
        if grid is None:
            return
        fitting = grid_shape(len(rows), self._positions())
        # Moving copies all caches, so it has to save a quarter of the work of the steps to come.
        is_sparse = fitting[0] < grid.sentences and 4 * len(rows) <= 3 * len(self.rows)
        if not rows:
            self.grids.give(grid)
            self.grid = None
        elif is_sparse or fitting[1] > grid.positions:
            self.rows = self.active.copy()
            self._move(grid.extend, grid.beams, grid.states, rows)
            self.grids.give(grid)

    def _positions(self) -> int:
        """Return the positions that the next steps need."""
        tokens = min(self.longest + STEPS, self.most_tokens)
        return max(self.first.prompt_length + tokens, self.fewest_positions)

    def _move(
        self, extend: BeamStep, beams: Beams, states: DecoderStates, rows: Sequence[int]
    ) -> None:
        shape = grid_shape(len(rows), self._positions())
        self.grid = self.grids.take(extend, states, beams, shape=shape)
        self.grid.load(beams, states, rows)


def grid_shape(sentences: int, positions: int) -> tuple[int, int]:
    """Return the shape of the smallest grid with room for these numbers."""
    return -(-sentences // SENTENCES) * SENTENCES, capacity(positions)


def begin_search(
    model: Transformer,
    sources: Sequence[Source],
    config: DecodingConfig,
    *,
    eos_id: int,
    grids: Grids,
) -> Search | GridSearch:
    """Return the search of the model's device for these sources, of which no step is made."""
    model.eval()
    if suits_grids(model, sources):
        return GridSearch(model, sources, config, eos_id=eos_id, grids=grids)
    return Search(model, sources, config, eos_id=eos_id)


def suits_grids(model: Transformer, sources: Sequence[Source]) -> bool:
    """Return whether these sources can be searched for by recorded steps.

    The steps of some models wait for the host: experts without grouped products, and language
    modules. With a limited capacity, sentences that are done would take the places of others.
    """
    moe = model.spec.model.moe
    waits = moe is not None and (
        moe.evaluation_capacity_factor is not None
        or not has_grouped_products(next(model.parameters()))
    )
    is_free = not any(source.prefix or source.banned or source.required for source in sources)
    has_modules = model.spec.model.language_modules is not None
    return model.device.type != "cpu" and is_free and not waits and not has_modules
