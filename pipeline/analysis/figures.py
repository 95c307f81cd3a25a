"""Pictures of analyses, from what stands in their JSON."""

from collections.abc import Mapping
from typing import Any

from pipeline.evaluation.charts import Bar, Series, bar_chart, line_chart
from pipeline.evaluation.pictures import picture

JsonObject = Mapping[str, Any]


def scale_series(document: JsonObject, pair: str) -> list[Series]:
    """The shares of δ in both directions of a pair, and their means."""
    first, second = pair.split("-")
    names = [f"{first}-{second}", f"{second}-{first}"]
    return [
        Series(
            name=name.replace("-", " → "),
            points=tuple((float(x), 100.0 * y) for x, y in enumerate(found["share"])),
            place=place,
            upright=found["mean"],
        )
        for place, name in enumerate(names)
        for found in [document["directions"][name]]
    ]


def scale_chart(document: JsonObject, pair: str) -> str:
    """MoCE's Figure 4, for one pair."""
    return line_chart(
        scale_series(document, pair),
        title=f"Scales chosen, {pair}",
        x_label="δ",
        y_label="share of choices, %",
    )


def scale_picture(document: JsonObject, pair: str) -> str:
    """As a file of its own."""
    return picture(scale_chart(document, pair), scale_series(document, pair))


def lengths_chart(document: JsonObject) -> str:
    """MoCE's Figure 3: languages from the longest to the most concise."""
    lengths, label = document["mean_bytes"], "mean bytes per line"
    if not lengths:
        lengths, label = document["ratio_to_pivot"], f"bytes by those of {document['pivot']}"
    bars = [Bar(code, lengths[code]) for code in document["order"]]
    return bar_chart(bars, title="Length of languages in bytes", x_label=label)


def lengths_picture(document: JsonObject) -> str:
    """As a file of its own."""
    return picture(lengths_chart(document))


def vectors_chart(document: JsonObject, direction: str) -> str:
    """MoCE's Figure 7, for one direction: chrF++ by the language that the router is shown."""
    found = document["directions"][direction]
    bars = [Bar("right", found["right"]["chrf"], 2)]
    if found["without"] is not None:
        bars.append(Bar("none", found["without"]["chrf"], 1))
    bars += [Bar(code, one["chrf"]) for code, one in found["wrong"].items()]
    values = [bar.value for bar in bars]
    low = max(2 * min(values) - max(values), 0.0)  # the smallest bar is half of the largest
    return bar_chart(bars, title=f"Wrong language vectors, {direction}", x_label="chrF++", low=low)


def vectors_picture(document: JsonObject, direction: str) -> str:
    """As a file of its own."""
    return picture(vectors_chart(document, direction))
