"""Validation during training: its losses, which weights are best so far, and patience."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from pipeline.artifacts.corpus import Direction
from pipeline.batching.global_step import MicroBatch
from pipeline.checkpoints.resharding import Position
from pipeline.config.recipe import Recipe
from pipeline.config.settings import Route
from pipeline.distributed.collectives import all_sum
from pipeline.distributed.world import World
from pipeline.model.moe.routing_statistics import RoutingCounter, RoutingStatistics
from pipeline.training.engine import Engine
from pipeline.training.settings import TrainingConfig
from pipeline.training.task import Summary, Task


@dataclass(frozen=True)
class ValidationResult:
    """The result of one validation, equal on all ranks.

    Attributes:
        by_route: a summary for each trained route; a model without two routes has ``specific``.
        deciding_route: the route whose perplexity decides which weights are kept.
        perplexity: the perplexity that decides, of the deciding route.
        routing: expert statistics over all validation tokens.
    """

    by_route: Mapping[Route, Summary]
    deciding_route: Route
    perplexity: float
    routing: RoutingStatistics

    def record(self) -> dict[str, object]:
        """Return the fields of this validation's line in the metrics."""
        record = asdict(self.by_route[self.deciding_route])
        if self.routing.layers:
            record["routing"] = self.routing.summary()
        if len(self.by_route) > 1:
            record["routes"] = {route: asdict(one) for route, one in self.by_route.items()}
        return record


class Validation:
    """Computes the losses of the current weights on the validation sentences.

    The ranks share the batches and sum their losses: every rank gets the same result and
    takes the same decisions from it.

    Invariant: all ranks evaluate the same number of batches. Under expert parallelism an
    evaluation needs every rank, so a rank that has no batch left evaluates the last one again and
    discards the result.
    """

    def __init__(self, engine: Engine, task: Task, recipe: Recipe, *, world: World) -> None:
        self._engine, self._task, self._recipe, self._world = engine, task, recipe, world

    def is_due(self, position: Position) -> bool:
        """Return whether the weights at ``position`` are to be validated and were not yet."""
        update, training = position.update, self._recipe.training
        is_turn = update % training.validate_every == 0 or update == training.updates
        return update > 0 and is_turn and position.validated < update

    def run(self, *, before_batch: Callable[[], None] = lambda: None) -> ValidationResult:
        """Validate the current weights; all ranks call this together.

        Args:
            before_batch: called on every rank before each batch; the loop stops here if asked to.
        """
        losses, routing = self._losses(before_batch)
        by_route = {route: self._task.summarize(found) for route, found in losses.items()}
        deciding = self._recipe.training.best_by_route if len(by_route) > 1 else "specific"
        return ValidationResult(by_route, deciding, self._task.kept_by(by_route[deciding]), routing)

    def _losses(
        self, before_batch: Callable[[], None]
    ) -> tuple[dict[Route, dict[Direction, tuple[float, int]]], RoutingStatistics]:
        """Return route → direction → (summed cross entropy in nats, labels), over all ranks."""
        data, spec = self._task.data, self._engine.model.spec
        plan = data.validation(budget=self._recipe.batches.evaluation_tokens)
        directions = sorted({direction for direction, _ in plan})
        # columns: labels, cross entropy of the specific route, cross entropy of the shared route
        sums = torch.zeros(len(directions), 3, dtype=torch.float64)
        counter = RoutingCounter(spec)
        for batch_plan, row in self._share(plan, directions):
            before_batch()
            terms = self._engine.evaluate(data.valid.batch(batch_plan))
            if row is None:
                continue
            counter.add(terms.routing, language=spec.languages.index(directions[row].target))
            shared = terms.shared_cross_entropy
            sums[row] += torch.tensor(
                [
                    float(batch_plan.num_labels),
                    float(terms.cross_entropy),
                    0.0 if shared is None else float(shared),
                ],
                dtype=torch.float64,
            )
        all_sum(sums)
        all_sum(counter.sums)
        trains_both = self._recipe.loss.objective == "fuse_distillation"
        routes: tuple[Route, ...] = ("specific", "shared") if trains_both else ("specific",)
        losses: dict[Route, dict[Direction, tuple[float, int]]] = {
            route: {
                direction: (float(sums[row, column]), int(sums[row, 0]))
                for row, direction in enumerate(directions)
            }
            for column, route in enumerate(routes, start=1)
        }
        return losses, counter.result()

    def _share(
        self, plan: list[tuple[Direction, MicroBatch]], directions: list[Direction]
    ) -> Iterator[tuple[MicroBatch, int | None]]:
        """Yield this rank's batches with their direction's row; None marks one not to count."""
        for turn in range(math.ceil(len(plan) / self._world.size)):
            index = turn * self._world.size + self._world.rank
            direction, batch_plan = plan[min(index, len(plan) - 1)]
            yield batch_plan, directions.index(direction) if index < len(plan) else None


def judge(position: Position, perplexity: float) -> tuple[Position, bool]:
    """Return the position after a validation, and whether its weights are the best so far.

    The best weights have a lower perplexity than the weights of every earlier validation; an equal
    one is not enough.

    An attempt that ended before it saved a state may already have kept weights of this update or
    of a later one. The validation then counts as it did in that attempt: not against patience.
    """
    position = replace(position, validated=position.update)
    best, best_update = position.best_perplexity, position.best_update
    if best is None or best_update is None or perplexity < best:
        improved = replace(
            position,
            best_perplexity=perplexity,
            best_update=position.update,
            validations_since_best=0,
        )
        return improved, True
    since = position.validations_since_best + 1 if best_update < position.update else 0
    return replace(position, validations_since_best=since), False


def is_out_of_patience(training: TrainingConfig, position: Position) -> bool:
    """Return whether ``training.patience`` validations in a row found no lower perplexity.

    All ranks agree: the count follows from sums over all ranks and is part of training states.
    """
    return 0 < training.patience <= position.validations_since_best
