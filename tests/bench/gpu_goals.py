"""Goals of a GPU: the cases that ``gpu.py`` measures, and the rows of its result file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GOALS = {
    "passes": {
        "dense, bare pass of 4,096 tokens": ("ms", "<= 25"),
        "dense, bare pass of 16,384 tokens": ("ms", "<= 90"),
        "dense, MFU, forward + backward, 16k tokens a pass": ("share", ""),
        "dense, kernels per pass, by the profiler": ("number", "<= 850"),
        "dense, kernels / those counted by mmnmt estimate": ("ratio", "0.97 to 1.03"),
        "dense, time of the kernels / mmnmt estimate": ("ratio", "0.9 to 1.1"),
        "experts, bare pass of 4,096 tokens": ("ms", ""),
        "experts, bare pass of 16,384 tokens": ("ms", ""),
        "experts, MFU, forward + backward, 16k tokens a pass": ("share", ">= 0.35"),
        "experts, kernels per pass, by the profiler": ("number", "<= 1150"),
        "experts, kernels / those counted by mmnmt estimate": ("ratio", "0.97 to 1.03"),
        "experts, time of the kernels / mmnmt estimate": ("ratio", "0.9 to 1.1"),
    },
    "training": {
        "dense, MFU, training, optimizer included": ("share", ">= 0.45"),
        "4 experts held (a rank of EP 8), MFU, training": ("share", ">= 0.35"),
        "d 512, 6 + 6 layers, tokens/s against a plain loop": ("ratio", ">= 1.2"),
    },
    "search": {
        "search step, 25 sentences x beam 5, bfloat16": ("ms", "<= 0.8"),
        "search step / mmnmt estimate": ("ratio", "0.9 to 1.1"),
    },
    "kernels": {  # times of kernels, without the host
        "loss, error / the plain form's": ("ratio", "<= 2"),
        "loss, time of the plain form / ours": ("ratio", ">= 1"),
        "attention, error / the plain form's": ("ratio", "<= 2"),
        "attention, time of the plain form / ours": ("ratio", ">= 1"),
        "feed-forward, error / the plain form's": ("ratio", "<= 2"),
        "feed-forward, time of the plain form / ours": ("ratio", ">= 1"),
        "residual and norm, error / the plain form's": ("ratio", "<= 2"),
        "residual and norm, time of the plain form / ours": ("ratio", ">= 1"),
    },
    "resumed": {"tensors of a resumed training equal to an uninterrupted one's": ("share", ">= 1")},
    "ctranslate2": {"1,000 sentences, beam 5, against CTranslate2 float16": ("ratio", ">= 1")},
    "moe": {
        "MoE layer, 16k tokens, against torchtitan's form": ("ratio", ">= 1"),
        "MoE layer, 16k tokens, against transformers' NLLB-MoE": ("ratio", ">= 1"),
    },
    "m2m100": {
        "training step, 16k tokens, dropout, against M2M100 sdpa": ("ratio", ">= 1.15"),
        "training step, 16k tokens, dropout, against compiled M2M100": ("ratio", ">= 1.15"),
    },
    "ranks": {"two ranks over NCCL, losses / one rank's": ("ratio", "0.98 to 1.02")},
    "slurm": {"one GPU per SLURM rank, losses / one rank's": ("ratio", "0.98 to 1.02")},
}
"""Section → case → unit and goal. A case without a goal helps to explain the others.

Ratios to a peer are the peer's time by ours."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """A case of ``GOALS``, and what was measured at which commit, or why it was not."""

    case: str
    unit: str
    measured: float | str
    goal: str
    holds: bool | str
    commit: str = ""


def rows_of(section: str, found: Mapping[str, Any], *, commit: str = "") -> list[Row]:
    """Return the rows of a section.

    ``found`` has measurements and rows measured before; ``found[section]`` says why cases of the
    section are missing.
    """
    rows = []
    for case, (unit, goal) in GOALS[section].items():
        measured = found.get(case, found.get(section, NOT_MEASURED))
        is_before = isinstance(measured, Row)
        rows.append(measured if is_before else row(case, unit, goal, measured, commit))
    return rows


def row(case: str, unit: str, goal: str, measured: float | str, commit: str = "") -> Row:
    """Hold a measurement against its goal; NaN holds against none."""
    if isinstance(measured, str):
        return Row(case, unit, measured, goal, NOT_MEASURED)
    match goal.split():
        case ["<=", most]:
            holds = measured <= float(most)
        case [">=", least]:
            holds = measured >= float(least)
        case [least, "to", most]:
            holds = float(least) <= measured <= float(most)
        case _:
            holds = True
    return Row(case, unit, float(f"{measured:.4g}"), goal, holds, commit)
