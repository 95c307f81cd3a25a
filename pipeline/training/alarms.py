"""Notice that a training run goes wrong: a loss that jumps, dropped routes, experts without tokens.

An alarm is one sentence where it begins and one where it ends. It follows from the lines of
``metrics.jsonl`` only: a resumed run raises the alarms of an uninterrupted one.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

LINES = 10
"""Training lines with which the loss of the next one is compared."""
SPIKE_NATS, SPIKE_RATIO = 0.5, 1.2
"""Distance and ratio to the median of these lines above which, both, a loss is a spike."""
DROPPED = 0.2
"""Share of a layer's routes beyond the capacity of its experts above which it is said."""
IDLE_LINES = 3
"""Training lines in a row without any route to an expert after which it counts as dead."""


class Alarms:
    """Compares each training line with the lines before; begins anew with each run."""

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=LINES)
        self._is_spike = False
        self._dropping: set[str] = set()
        self._idle: dict[str, int] = {}
        """Expert → its lines without routes, up to the present one."""

    def add(self, line: Mapping[str, Any]) -> list[str]:
        """Take the next training line; return the sentences that begin or end an alarm."""
        routing = line.get("routing")
        layers: Mapping[str, Any] = routing if isinstance(routing, dict) else {}
        return [*self._loss(line.get("loss")), *self._dropped(layers), *self._dead(layers)]

    def _loss(self, loss: object) -> Iterator[str]:
        if not isinstance(loss, float) or not math.isfinite(loss):  # the file has null for it
            return
        usual = median(self._losses) if len(self._losses) == LINES else loss
        was_spike, self._is_spike = (
            self._is_spike,
            loss > max(usual + SPIKE_NATS, SPIKE_RATIO * usual),
        )
        if self._is_spike:  # it stays out of the lines that later ones are compared with
            if not was_spike:
                yield (
                    f"the loss is {loss:.3f}, and the median of {LINES} lines before was "
                    f"{usual:.3f}. If it stays, lower optimizer.learning_rate."
                )
            return
        self._losses.append(loss)
        if was_spike:
            yield f"the loss is {loss:.3f} again."

    def _dropped(self, layers: Mapping[str, Any]) -> Iterator[str]:
        shares = {layer: counts["dropped"] for layer, counts in layers.items()}
        dropping = {layer for layer, share in shares.items() if share > DROPPED}
        begun, ended = dropping - self._dropping, self._dropping - dropping
        self._dropping = dropping
        if begun:
            named = ", ".join(f"{one} ({shares[one]:.0%})" for one in shares if one in begun)
            yield (
                f"more than {DROPPED:.0%} of the routes are dropped in {named}. Raise "
                'model.moe.capacity_factor, or set model.moe.dispatch to "dropless".'
            )
        if ended:
            named = ", ".join(one for one in shares if one in ended)
            yield f"at most {DROPPED:.0%} of the routes are dropped again in {named}."

    def _dead(self, layers: Mapping[str, Any]) -> Iterator[str]:
        idle = [
            f"{layer}:{expert}" for layer, counts in layers.items() for expert in counts["idle"]
        ]
        before, self._idle = self._idle, {one: self._idle.get(one, 0) + 1 for one in idle}
        begun = [one for one, lines in self._idle.items() if lines == IDLE_LINES]
        ended = [one for one, lines in before.items() if lines >= IDLE_LINES and one not in idle]
        if begun:
            yield (
                f"no token chose these experts in {IDLE_LINES} lines of metrics: "
                f"{', '.join(begun)}. Raise loss.balance_weight, or prune them in the end."
            )
        if ended:
            yield f"tokens choose these experts again: {', '.join(ended)}."
