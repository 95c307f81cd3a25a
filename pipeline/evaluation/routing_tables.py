"""Sections of a report about the experts of its systems, from routing statistics of checkpoints.

Routing statistics count the tokens of the validation text per layer, target language and expert,
before and after capacity. Legend: L layers, G target languages, E experts.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.charts import heat_map
from pipeline.evaluation.tables import Cell, Figure, ReportSection, Row, Table, headings, row
from pipeline.model.moe.routing_statistics import RoutingStatistics

DEAD, OVERLOADED = 0.1, 2.0
"""Load of an expert, relative to an even one, below which it is dead and above it overloaded."""

Floats = npt.NDArray[np.float64]


def loads_section(routing: Mapping[str, RoutingStatistics]) -> ReportSection:
    """Return the dead and overloaded experts of every layer of every run.

    Args:
        routing: run → its statistics.
    """
    rows = [line for run, statistics in routing.items() for line in _load_rows(run, statistics)]
    titles = ("Run", "layer", "experts", "dead", "overloaded", "largest load", "dropped", "entropy")
    return ReportSection(
        "Load of experts",
        "Counted on the validation text of the last training. The load of an expert is its number "
        f"of tokens relative to an even distribution: dead experts have less than {DEAD:g}, "
        f"overloaded ones more than {OVERLOADED:g}. Dropped is the share of routes beyond the "
        "capacity of an expert; entropy is that of the router's probabilities, in nats.",
        tables=(Table("", headings(*titles, words=["layer"]), tuple(rows)),) if rows else (),
    )


def _load_rows(run: str, statistics: RoutingStatistics) -> Iterator[Row]:
    summary = statistics.summary()
    for layer, routed_GE in zip(statistics.layers, statistics.routed_LGE, strict=True):
        routed_E = routed_GE.sum(0)
        if not routed_E.any():
            continue
        load_E = routed_E / routed_E.mean()
        yield row(
            run,
            layer,
            len(load_E),
            int((load_E < DEAD).sum()),
            int((load_E > OVERLOADED).sum()),
            Cell(summary[layer]["max_load"], ".2f"),
            Cell(summary[layer]["dropped"], ".1%"),
            Cell(summary[layer]["entropy"], ".2f"),
        )


def languages_section(routing: Mapping[str, RoutingStatistics]) -> ReportSection:
    """Return which experts the target languages use, and how much they share, as heat maps."""
    figures = [
        figure for run, statistics in routing.items() for figure in _figures(run, statistics)
    ]
    return ReportSection(
        "Languages and experts",
        "Share of the routes of a target language that each expert receives, for the first run of "
        "each system. The similarity of two languages is the share of their routes that goes to "
        "the same experts, averaged over layers: 1 if they are routed alike, 0 if they share no "
        "expert.",
        figures=tuple(figures),
    )


def _figures(run: str, statistics: RoutingStatistics) -> Iterator[Figure]:
    """Yield a heat map per layer, and one of the similarities."""
    used_G = statistics.routed_LGE.sum(2).all(0)
    languages = [code for code, used in zip(statistics.languages, used_G, strict=True) if used]
    if not languages:
        return
    routed_LGE = statistics.routed_LGE[:, used_G]
    shares_LGE = routed_LGE / routed_LGE.sum(2, keepdims=True)
    experts = [str(number) for number in range(shares_LGE.shape[2])]
    for layer, shares_GE in zip(statistics.layers, shares_LGE, strict=True):
        yield _figure(f"{run}, {layer}", shares_GE, languages, experts, "expert", low=0.0)
    if len(languages) > 1:
        similarity_GG = similarity(shares_LGE)
        yield _figure(
            f"{run}, similarity of languages",
            similarity_GG,
            languages,
            languages,
            "target language",
            low=float(similarity_GG.min()),
        )


def similarity(shares_LGE: Floats) -> Floats:
    """Return the overlap of the routes of every two languages, averaged over layers: (G, G)."""
    return np.stack(
        [
            np.minimum(shares_LGE, shares_LGE[:, [place]]).sum(2).mean(0)
            for place in range(shares_LGE.shape[1])
        ]
    )


def _figure(
    title: str, values: Floats, rows: list[str], columns: list[str], x_label: str, *, low: float
) -> Figure:
    high, named = float(values.max()), dict(zip(rows, values.tolist(), strict=True))
    chart = heat_map(named, columns, title=title, x_label=x_label, low=low, high=high)
    return Figure(chart, title=title, note=f"Colors from {low:.2f} (background) to {high:.2f}.")
