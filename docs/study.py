"""Keep the scores of the study of a hundred languages in one file, and make its page of that file.

The first command reads evaluations, the stages ``block_1`` or ``evaluation`` of the plan
``hundred``, or folders that it wrote on other machines. It writes ``hundred.json`` and, per size,
the translations as ``hundred-SIZE.tar.xz``; both keep what they have of other runs.
``docs/generate.py`` makes the page and its pictures::

    python docs/study.py card=runs/hundred/block_1 --out docs/results
    python docs/generate.py
"""

import argparse
import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from pipeline.evaluation.charts import Series, line_chart, picture
from pipeline.evaluation.statistics import LEVEL, t_quantile

Run = dict[str, Any]
Study = dict[str, Any]
FILE = "hundred.json"
SCORES = {"bleu": "bleu", "chrf": "chrf++", "language": "langdetect", "language_lid176": "lid.176"}
"""Name of a score in an evaluation → its name in the file."""
PARTS = ("*/manifest.json", "clean/*.json*", "clean/test/*/*", "translate_*/hypotheses/*")
"""Files of a run folder from which all scores can be computed anew."""
SIZES = {"card": "110 languages, on one GPU", "two_cores": "30 languages, on two CPU cores"}
COMPARED = (
    ("MoE", "dense"),
    ("MoE-LGR", "dense"),
    ("MoE-LGR", "MoE"),
    ("(12) Enc(1)-Dec(5)", "(10) Enc(1)-Dec(1)"),
    ("(7) Enc(1)-Dec(fresh)", "dense, longer"),
    ("(10) Enc(1)-Dec(1)", "dense, longer"),
    ("(12) Enc(1)-Dec(5)", "dense, longer"),
    ("ours", "dense, same extras"),
)
"""Systems of the protocol's claims, each with the system that it is compared with."""
GROUPS = {
    "into English": ("chrf++", "into_pivot", None),
    "out of English": ("chrf++", "out_of_pivot", None),
    "low-resource, both ways": ("chrf++", "", "low"),
    "zero-shot": ("chrf++", "zero_shot", None),
    "zero-shot, % right by langdetect": ("langdetect", "zero_shot", None),
    "zero-shot, % right by lid.176": ("lid.176", "zero_shot", None),
    "BLEU into English": ("bleu", "into_pivot", None),
    "BLEU out of English": ("bleu", "out_of_pivot", None),
    "validation loss": ("loss", "", None),
    "loss into English": ("loss", "into_pivot", None),
    "loss out of English": ("loss", "out_of_pivot", None),
}
"""Column of the page → score, family of directions (empty: any), resource tier (None: any)."""
TITLES = ("Validation loss against FLOP", "Languages by training pairs and gain of experts")
"""Titles of the two charts."""


# ---------------------------------------------------------------- keeping


@contextmanager
def read(place: Path, fix: str) -> Iterator[None]:
    """End with one sentence where files of a place are missing or damaged."""
    try:
        yield
    except (
        *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError),
        *(tarfile.TarError, lzma.LZMAError),
    ) as problem:
        raise SystemExit(f"{place} {fix}") from problem


def read_study(path: Path) -> dict[str, Study]:
    """Return the studies of a file by size; none without the file."""
    with read(path, "is damaged. Restore it from a copy, or remove it to begin anew."):
        studies = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {size: joined(None, study) for size, study in studies.items()}


def evaluated(evaluation: Path) -> Study:
    """Return the directions of an evaluation and its runs, from its scores and its history."""
    scores, history = (
        json.loads((evaluation / name).read_text(encoding="utf-8"))
        for name in ("scores.json", "history.json")
    )
    directions = {
        "{source}-{target}".format(**one["direction"]): {
            key: one[key] for key in ("family", "resource", "training_lines", "test_lines")
        }
        for one in scores["directions"]
    }
    trainings, curves = (
        {one["system"]: one for one in history[key]} for key in ("trainings", "curves")
    )
    scored = chain.from_iterable(system["runs"] or [system] for system in scores["systems"])
    runs = [_run(one, trainings[one["name"]], curves.get(one["name"])) for one in scored]
    return {"directions": directions, "runs": runs}


def _run(scored: Mapping[str, Any], training: Mapping[str, Any], curve: Any) -> Run:
    system, _, seed = scored["name"].rpartition("@")
    if not system:
        raise SystemExit(f"{scored['name']!r} names no seed. Name the system NAME@SEED.")
    total = training["total"]
    new = training["new"] or total
    if None in (total["operations"], new["operations"]):
        raise SystemExit(
            f"The training of {scored['name']} is not where it was. Evaluate where it lies."
        )
    before, flop = total["updates"] - new["updates"], total["operations"] - new["operations"]
    losses = {} if curve is None else curve["directions"]
    points = [] if curve is None else curve["validation"]
    return {
        "system": system,
        "seed": int(seed),
        "parameters": training["parameters"],
        "updates": total["updates"],
        "target tokens": total["target_tokens"],
        "FLOP": total["operations"],
        "seconds": total["seconds"],
        # Updates and FLOP from the first update of the weights on, and the loss there
        "curve": [
            [
                before + at["update"],
                flop + new["operations"] * at["update"] / max(new["updates"], 1),
                round(at["losses"]["all"], 4),
            ]
            for at in points
        ],
        "directions": {
            name: {
                **{
                    SCORES[key]: round(value, 3)
                    for key, value in one["scores"].items()
                    if key in SCORES
                },
                **({"loss": round(losses[name], 4)} if name in losses else {}),
            }
            for name, one in scored["directions"].items()
        },
    }


def joined(old: Study | None, new: Study) -> Study:
    """Return the runs of both; of two runs of a system and seed, the new run."""
    old = old or {"directions": {}, "runs": []}
    runs = {(run["system"], run["seed"]): run for run in (*old["runs"], *new["runs"])}
    return {"directions": old["directions"] | new["directions"], "runs": list(runs.values())}


def pack(archive: Path, places: Iterable[Path]) -> None:
    """Add the translations behind evaluations, with test lines and manifests, to an archive."""
    found = unpacked(archive) if archive.exists() else {}
    for place in places:
        if (place / FILE).exists():
            found |= unpacked(place / archive.name)
            continue
        run = place.resolve().parent
        paths = chain(*(run.glob(part) for part in PARTS))
        found |= {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}
    unfinished = archive.with_name(f".{archive.name}.unfinished")
    with tarfile.open(unfinished, "w:xz") as packed:
        for name, content in sorted(found.items()):
            if name.endswith("manifest.json"):  # whose digest leaves out where inputs lay
                content = re.sub(rb'("path": ")[^"]*/', rb"\1", content)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    unfinished.replace(archive)


def unpacked(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive by name."""
    fix = "is missing or damaged. Join its parts with cat, or copy it once more."
    with read(archive, fix), tarfile.open(archive) as packed:
        return {one.name: packed.extractfile(one).read() for one in packed}  # type: ignore[union-attr]


def text_of(study: Mapping[str, Study]) -> str:
    """Return the file of a study, with a run per line."""
    sizes = []
    for size, one in sorted(study.items()):
        runs = ",\n".join(json.dumps(run, ensure_ascii=False) for run in one["runs"])
        sizes.append(
            f'"{size}": {{"directions":\n{json.dumps(one["directions"])},\n"runs": [\n{runs}\n]}}'
        )
    return "{" + ",\n".join(sizes) + "}\n"


# ---------------------------------------------------------------- the page


def study_pages(results: Path) -> dict[str, str]:
    """Return the page and the pictures of a stored study, by their paths within ``docs``."""
    study = read_study(results / FILE)
    if not study:
        return {}
    pages, parts = dict[str, str](), list[str]()
    for size, one in study.items():
        named = {"losses": losses_chart(one), "gains": gains_chart(one)}
        charts = {f"pictures/hundred_{size}_{name}.svg": x for name, x in named.items() if x}
        pages |= {path: picture(chart) for path, chart in charts.items()}
        parts += _parts(size, one, charts)
    ran = " and ".join(SIZES.get(size, size) for size in study)
    first = f"# A hundred languages\n\nThis study ran with {ran}.\n"
    return {"results/hundred.md": "\n".join([first, NOTE, *parts]), **pages}


NOTE = """\
<!-- Generated by docs/generate.py from hundred.json. -->

Scores are chrF++ where a column names no other, means over directions, then over seeds.
Differences are means over the seeds that both systems have. Their 95 % intervals follow Student's t
over seeds, with the same test lines; a single seed has none. The loss is per token, the mean over
all directions at the last update. "Loss below from" is the FLOP from which the mean loss of the
first system stays below the second's.
"""


def by_system(study: Study) -> dict[str, dict[int, Run]]:
    """Return the runs of each system by seed."""
    found: dict[str, dict[int, Run]] = {}
    for run in study["runs"]:
        found.setdefault(run["system"], {})[run["seed"]] = run
    return found


def score_of(run: Run, directions: Mapping[str, Any], group: str) -> float | None:
    """Return a run's mean score over the directions of a group; None without any."""
    score, family, resource = GROUPS[group]
    known = [
        scores[score]
        for name, scores in run["directions"].items()
        if score in scores
        and family in ("", directions[name]["family"])
        and resource in (None, directions[name]["resource"])
    ]
    return fmean(known) if known else None


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean difference of paired runs, and half the width of its 95 % interval."""
    pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(pairs) < 2:
        return fmean(pairs), None
    half = t_quantile(LEVEL, len(pairs) - 1) * stdev(pairs) / len(pairs) ** 0.5
    return fmean(pairs), half


def crossing(ours: Iterable[Run], theirs: Iterable[Run]) -> float | None:
    """Return the FLOP from which the mean loss of ours stays below theirs, if there is any."""
    (xs, ys), (flops, losses) = _mean_curve(ours), _mean_curve(theirs)
    below = [
        (x, y < np.interp(x, flops, losses))
        for x, y in zip(xs, ys, strict=True)
        if flops[0] <= x <= flops[-1] * 1.001
    ]
    above = [place for place, (_, is_below) in enumerate(below) if not is_below]
    first = above[-1] + 1 if above else 0
    return below[first][0] if first < len(below) else None


def _mean_curve(runs: Iterable[Run]) -> tuple[list[float], list[float]]:
    """Return FLOP and losses, means over runs at the validations that all have."""
    curves = [run["curve"] for run in runs]
    points = [*zip(*curves, strict=False)]
    return tuple([fmean(run[place] for run in at) for at in points] for place in (1, 2))  # type: ignore[return-value]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec).replace("-", "−")


def _parts(size: str, study: Study, charts: Iterable[str]) -> Iterator[str]:
    systems, directions = by_system(study), study["directions"]
    groups = [
        group
        for group in GROUPS
        if any(score_of(run, directions, group) is not None for run in study["runs"])
    ]
    yield f"## {SIZES.get(size, size)[:1].upper()}{SIZES.get(size, size)[1:]}\n"
    yield _table(["system", "seeds", "parameters, M", "PFLOP", *groups], _score_rows(study, groups))
    yield "Differences, with their 95 % intervals:\n"
    head = ["difference", "seeds", *groups, "loss below from, PFLOP"]
    yield _table(head, _difference_rows(systems, directions, groups))
    for path in charts:
        yield f"![{TITLES['gains' in path]}](../{path})\n"
    if gains := sorted(gains_of(study), key=lambda row: -sum(row[2:])):
        yield "chrF++ of MoE − dense by language, from the highest gain on:\n"
        rows = [
            [name, f"{pairs:,}", *(_number(one, "+.1f") for one in two)]
            for name, pairs, *two in gains
        ]
        yield _table(["language", "training pairs", "into English", "out of English"], rows)


def _spec(group: str) -> str:
    return ".3f" if GROUPS[group][0] == "loss" else ".1f"


def _score_rows(study: Study, groups: Sequence[str]) -> Iterator[list[str]]:
    for system, runs in by_system(study).items():
        means = []
        for group in groups:
            found = [score_of(run, study["directions"], group) for run in runs.values()]
            known = [one for one in found if one is not None]
            means.append(_number(fmean(known) if known else None, _spec(group)))
        sizes = [run["parameters"][0] / 1e6 for run in runs.values() if run["parameters"]]
        flop = f"{fmean(run['FLOP'] for run in runs.values()) / 1e15:.4g}"
        parameters = f"{sizes[0]:.3g}" if sizes else "–"
        yield [system, ", ".join(map(str, sorted(runs))), parameters, flop, *means]


def _difference_rows(
    systems: Mapping[str, Mapping[int, Run]], directions: Mapping[str, Any], groups: Sequence[str]
) -> Iterator[list[str]]:
    for ours, theirs in COMPARED:
        seeds = sorted(systems.get(ours, {}).keys() & systems.get(theirs, {}).keys())
        if not seeds:
            continue
        sides = [[systems[name][seed] for seed in seeds] for name in (ours, theirs)]
        cells = []
        for group in groups:
            pairs = [[score_of(run, directions, group) for run in side] for side in sides]
            if None in chain(*pairs):
                cells.append("–")
                continue
            value, half = difference(*pairs)  # type: ignore[arg-type]
            ends = [] if half is None else [value - half, value + half]
            middle, *bounds = (_number(one, f"+{_spec(group)}") for one in (value, *ends))
            cells.append(f"{middle} ({' to '.join(bounds)})" if bounds else middle)
        point = crossing(*sides) if all(run["curve"] for run in chain(*sides)) else None
        named = ", ".join(map(str, seeds))
        yield [f"{ours} − {theirs}", named, *cells, "–" if point is None else f"{point / 1e15:.4g}"]


def losses_chart(study: Study) -> str:
    """Return the curves of validation loss over FLOP, from a fifth of the FLOP on."""
    systems = by_system(study)
    most = max((run["curve"][-1][1] for run in study["runs"] if run["curve"]), default=0.0)
    series = []
    for place, (system, runs) in enumerate(systems.items()):
        xs, ys = _mean_curve(run for run in runs.values() if run["curve"])
        # Losses of the first updates would flatten the differences of the last
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if x >= 0.2 * most]
        series.append(Series(system, tuple(points), place))
    if not any(one.points for one in series):
        return ""
    return line_chart(series, title=TITLES[0], x_label="FLOP", y_label="nats per token")


def gains_of(study: Study) -> list[tuple[str, int, float, float]]:
    """Return language, training pairs and the gain of MoE over dense, into and out of English."""
    systems = by_system(study)
    dense, moe = systems.get("dense", {}), systems.get("MoE", {})
    seeds = dense.keys() & moe.keys()
    found: dict[str, dict[str, float]] = {}
    for name, about in study["directions"].items() if seeds else ():
        if about["family"] in ("into_pivot", "out_of_pivot"):
            language = name.split("-")[about["family"] == "out_of_pivot"]
            gains = (
                moe[s]["directions"][name]["chrf++"] - dense[s]["directions"][name]["chrf++"]
                for s in seeds
            )
            found.setdefault(language, {})[about["family"]] = fmean(gains)
            found[language]["lines"] = about["training_lines"]
    return [
        (language, int(one["lines"]), one["into_pivot"], one["out_of_pivot"])
        for language, one in sorted(found.items())
        if len(one) == 3
    ]


def gains_chart(study: Study) -> str:
    """Return a chart of languages, by training pairs and gain of experts."""
    gains = gains_of(study)
    if not gains:
        return ""
    _, pairs, into, out = zip(*gains, strict=True)
    series = [
        Series(name, tuple(sorted(zip(pairs, values, strict=True))), place)
        for place, (name, values) in enumerate(
            {"into English": into, "out of English": out}.items()
        )
    ]
    labels = {"x_label": "training pairs", "y_label": "chrF++, MoE − dense"}
    return line_chart(series, title=TITLES[1], **labels, joined=False)


# ---------------------------------------------------------------- command


def main() -> int:
    """Keep evaluations in the file of the study, and pack their translations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("evaluations", nargs="+", metavar="SIZE=EVALUATION")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    given = parser.parse_args()
    with read(given.out, "cannot be a folder. Give another path as --out."):
        given.out.mkdir(parents=True, exist_ok=True)
    study = read_study(given.out / FILE)
    places: dict[str, list[Path]] = {}
    for argument in given.evaluations:
        size, mark, name = argument.partition("=")
        if not mark or not re.fullmatch(r"\w+", size):
            raise SystemExit(
                f"{argument!r} is not SIZE=EVALUATION, for example card=runs/x/block_1."
            )
        place = Path(name)
        there = read_study(place / FILE)
        with read(
            place, f"has no evaluation of size {size}. Give a folder such as runs/x/block_1."
        ):
            study[size] = joined(study.get(size), there[size] if there else evaluated(place))
        places.setdefault(size, []).append(place)
    for size, those in places.items():
        pack(given.out / f"hundred-{size}.tar.xz", those)
    (given.out / FILE).write_text(text_of(study), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
