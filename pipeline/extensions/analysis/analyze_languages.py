"""analyze_languages: compare languages inside a model (MMNMT, Figures 4 and 6).

Reads a checkpoint and a corpus. Makes an analysis: ``languages.json``; ``experts-{family}.svg``,
the experts that the directions of a family use; and ``states.svg``, encoder states of the same
lines in all languages. A dense model has no experts, and a corpus may have too few such lines.

The routes of a direction (Figure 6) are counted on its test lines with teacher forcing. The state
of a line (Figure 4) is the mean of the encoder's output over its tokens, tag and end-of-sentence
included. Lines that are empty or too long for the model are left out.

Legend: N real tokens, B sentences, P parallel lines, D model width, L MoE layers, E experts, X and
Y places of a grid.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.artifacts.spelling import is_blank
from pipeline.batching.batch import Batch, Packing
from pipeline.decoding.hypotheses import Source, not_numbers, source_begins
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.distributed.process import track
from pipeline.errors import ArtifactError, lacks_package
from pipeline.evaluation.scores import describe_directions
from pipeline.extensions.analysis.analyze_lengths import most_paired, translations_of
from pipeline.extensions.analysis.report import write_analysis
from pipeline.model.moe.routing_statistics import moe_layer_names
from pipeline.model.transformer import Transformer
from pipeline.seeds import derive_seed, named_generator
from pipeline.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import counted

MAX_LINES = 200  # of a direction, and of parallel lines
MIN_POINTS, MAX_POINTS = 10, 1000  # lines of all languages together that t-SNE places
SEED = derive_seed("analyze_languages", "t-SNE") % 2**32  # t-SNE takes 32 bits

SHARES = (0.5, 0.9)  # of the density of a language's points, held by outlines
PLACES = 48  # cells of the grid of an outline in each dimension
MARGIN = 3.0  # of that grid around the points, in standard deviations of a kernel

Floats = npt.NDArray[np.float64]
Segment = tuple[tuple[float, float], tuple[float, float]]


def run(call: StageCall) -> None:
    """Run test lines of all directions; ArtifactError if there is nothing to compare."""
    installed_tsne()  # refuses its absence before anything is computed
    corpus, checkpoint = call.artifacts["corpus"], call.artifacts["checkpoint"]
    profiles = describe_directions(
        corpus,
        thresholds=(1,),  # of resource groups, which are not used here
        training=call.artifacts.get("training"),
    )
    selection = select_directions(corpus, checkpoint=checkpoint)
    translator = Translator(checkpoint, DecodingConfig())
    translator.model.eval()
    layers = list(moe_layer_names(translator.model.spec))
    states = encode_parallel_lines(translator, corpus, selection.taken)
    routes = count_routes(translator, corpus, selection.taken)
    if not states.lines and not routes:
        raise ArtifactError(
            f"{corpus.directory} has no test line of {states.pivot!r} that fits into the model's "
            f"{translator.max_tokens:,} tokens and is in all of its pairs, and no token of its "
            "lines goes to an expert of the model: there is nothing to compare. Name a corpus of "
            "one text in several languages, or a model with experts or with more max_positions."
        )
    families = {str(profile.direction): profile.family for profile in profiles}
    points = place_points(states.state_PD)
    document = {
        "analysis": "languages",
        "pivot": states.pivot,
        "layers": layers,
        "directions": {name: {"family": families[name], **routes[name]} for name in routes},
        "parallel_lines": len(states.lines),
        "encoded": {code: str(direction) for code, direction in states.directions.items()},
        "pairs": {
            f"{one}-{other}": compare(states.state_PD[one], states.state_PD[other])
            for one, other in combinations(states.state_PD, 2)
            if states.lines
        },
        "points": points,
        "outlines": {code: outlines(of_language) for code, of_language in points.items()},
    }
    with call.new_artifact() as writer:
        write_analysis(writer, document)
        writer.statistics.update(
            directions=len(selection.taken),
            parallel_lines=len(states.lines),
            skipped_directions=[str(direction) for direction in selection.skipped],
        )
        writer.summary.append(
            f"tokens of {counted(len(routes), 'direction')} counted at "
            f"{counted(len(layers), 'MoE layer')}"
            if routes
            else "the model has no experts: no tokens are counted"
        )
        writer.summary.append(
            f"encoder states of {counted(len(states.lines), 'line')} compared in "
            f"{counted(len(states.state_PD), 'language')}"
            if states.lines
            else f"no line of {states.pivot} that fits into the model is in all of its pairs: no "
            "encoder states are compared"
        )


@dataclass(frozen=True)
class States:
    """Encoder states of lines that several languages have."""

    pivot: str  # language of most pairs
    lines: tuple[str, ...]  # its lines that fit and are in all of its pairs
    directions: Mapping[str, Direction]  # language → direction that gives its lines their tags
    state_PD: Mapping[str, Floats]  # language → states of its translations of the lines


def batch_of(
    model: Transformer, sources: Sequence[Source], targets: Sequence[Sequence[int]] | None = None
) -> Batch:
    """Return sources, and the tokens of their targets if given, as a batch without labels."""
    behind = targets if targets is not None else [()] * len(sources)
    inputs = [(*one.prompt, *ids) for one, ids in zip(sources, behind, strict=True)]
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = Batch(
        source_N=torch.tensor([token for source in sources for token in source.tokens]),
        source=Packing.from_lengths([len(source.tokens) for source in sources]),
        target_N=torch.tensor([token for ids in inputs for token in ids]),
        target=Packing.from_lengths([len(ids) for ids in inputs]),
        label_rows_L=nothing,
        labels_L=nothing,
        source_language_B=torch.tensor([source.source_language for source in sources]),
        target_language_B=torch.tensor([source.target_language for source in sources]),
        pair_B=nothing,
        line_B=nothing,
        source_begins_N=source_begins(sources, torch.device("cpu")),
    )
    return batch.to(model.device)


@torch.inference_mode()
def encode(model: Transformer, batch: Batch) -> Tensor:
    """Return the encoder's output for the sources of a batch, (N, D)."""
    x_ND, _ = model.encode(
        batch.source_N,
        model.embedding(batch.source_N),
        batch.source,
        model.tokens_of(batch.source, batch.source_language_B, batch.target_language_B),
        begins_N=batch.source_begins_N,
    )
    return x_ND


# Experts


@torch.inference_mode()
def count_routes(
    translator: Translator, corpus: Artifact, directions: Sequence[Direction]
) -> dict[str, dict[str, Any]]:
    """Count the routes to the experts of every direction that has lines.

    Returns:
        Direction → its number of ``lines``, and their routes before the capacity limit, ``routed``
        (L, E); empty for a model without experts.
    """
    spec, found = translator.model.spec, {}
    for direction in track(directions if spec.model.moe else (), label="experts"):
        codes = (direction.source, direction.target)
        sources, targets = (read_lines(corpus, "test", direction.pair, code) for code in codes)
        tokens: dict[int, list[int]] = {}
        jobs = []
        for job in _drawn([Job(direction, line, text) for line, text in enumerate(sources)]):
            ids = translator.tokenizer.encode(targets[job.line].strip(), language=direction.target)
            if _fits(translator, len(ids), *translator.lengths([job])):
                tokens[job.line] = ids
                jobs.append(job)
        experts = spec.model.moe.num_experts if spec.model.moe else 0
        routed_LE = np.zeros((len(moe_layer_names(spec)), experts), dtype=np.int64)
        for cut in translator.cut(jobs):
            behind = [tokens[job.line] for job in cut]
            batch = batch_of(translator.model, translator.sources(cut), behind)
            for counts_E, record in zip(routed_LE, translator.model(batch).routing, strict=True):
                counts_E += record.routed_E.cpu().numpy()
        if jobs:
            found[str(direction)] = {"lines": len(jobs), "routed": routed_LE.tolist()}
    return found


def _drawn(items: Sequence[Any]) -> list[Any]:
    """Draw at most MAX_LINES items: the same places for as many items."""
    generator = named_generator("analyze_languages")
    places = torch.randperm(len(items), generator=generator)[:MAX_LINES].tolist()
    return [items[place] for place in sorted(places)]


def _fits(translator: Translator, *lengths: int) -> bool:
    return all(0 < length <= translator.max_tokens for length in lengths)


# Encoder states


def encode_parallel_lines(
    translator: Translator, corpus: Artifact, directions: Sequence[Direction]
) -> States:
    """Encode the lines of the language of most pairs that are in all of its pairs.

    A language is encoded with the tags of its direction into that language where there is one. A
    language without lines is left out.
    """
    pivot = most_paired([direction.pair for direction in directions])
    chosen: dict[str, Direction] = {}
    for one in sorted(directions, key=lambda one: (one.source, one.target != pivot, one.target)):
        if pivot in (one.source, one.target):
            chosen.setdefault(one.source, one)
    texts = dict(_translations(corpus, chosen, pivot))
    shared = set.intersection(*map(set, texts.values())) if len(texts) > 1 else set()
    lines = [
        line
        for line in _drawn(sorted(shared))
        if _fits(
            translator,
            *translator.lengths([Job(chosen[code], 0, texts[code][line]) for code in texts]),
        )
    ]
    state_PD = {
        code: _mean_states(translator, chosen[code], [of_language[line] for line in lines])
        for code, of_language in track(sorted(texts.items()), label="states")
    }
    return States(pivot, tuple(lines), {code: chosen[code] for code in state_PD}, state_PD)


def _translations(
    corpus: Artifact, chosen: Mapping[str, Direction], pivot: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each language that has lines, with line of the pivot → its translation."""
    for code, direction in chosen.items():
        found = translations_of(corpus, direction.pair, pivot)
        if code == pivot:
            lines = map(str.strip, read_lines(corpus, "test", direction.pair, pivot))
            found = {line: line for line in lines if not is_blank(line)}
        if found:
            yield code, found


def _mean_states(translator: Translator, direction: Direction, texts: Sequence[str]) -> Floats:
    """Return the mean of every line's encoder states, (P, D)."""
    model = translator.model
    mean_PD = np.zeros((len(texts), model.spec.model.width))
    jobs = [Job(direction, line, text) for line, text in enumerate(texts)]
    for cut in translator.cut(jobs):
        batch = batch_of(model, translator.sources(cut))
        x_ND = encode(model, batch)
        sum_BD = x_ND.new_zeros(len(cut), x_ND.shape[1], dtype=torch.float64)
        sum_BD.index_add_(0, batch.source.sentence_N, x_ND.double())
        mean_BD = sum_BD / batch.source.bound_B.diff()[:, None]
        mean_PD[[job.line for job in cut]] = mean_BD.cpu().numpy()
    if not np.isfinite(mean_PD).all():
        raise not_numbers()
    return mean_PD


def compare(one_PD: Floats, other_PD: Floats) -> dict[str, float | None]:
    """Compare the states of the same lines in two languages.

    Returns:
        ``same``, the mean cosine of a line and its translation; ``different``, of two different
        lines, None of a single line; and ``retrieved``, the share of lines with a translation that
        is the nearest line of the other language, averaged over both directions of retrieval.
    """
    unit_PD, other_unit_PD = (
        state_PD / np.linalg.norm(state_PD, axis=1, keepdims=True)
        for state_PD in (one_PD, other_PD)
    )
    cosine_PP = unit_PD @ other_unit_PD.T
    number, own_P = len(cosine_PP), np.arange(len(cosine_PP))
    same, others = float(np.trace(cosine_PP)), number * (number - 1)
    return {
        "same": same / number,
        "different": (float(cosine_PP.sum()) - same) / others if others else None,
        "retrieved": float(np.mean([cosine_PP.argmax(axis) == own_P for axis in (0, 1)])),
    }


def installed_tsne() -> Any:
    """Return scikit-learn's t-SNE; raise ConfigError if it is not installed."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise lacks_package("analyze_languages", "scikit-learn", error, extra="analysis") from error
    return TSNE


def place_points(state_PD: Mapping[str, Floats]) -> dict[str, list[list[float]]]:
    """Return the states of the first lines in two dimensions; empty if they are too few."""
    each = MAX_POINTS // max(len(state_PD), 1) or 1
    parts = [of_language[:each] for of_language in state_PD.values()]
    points = sum(map(len, parts))
    if points < MIN_POINTS:
        return {}
    # scikit-learn's default perplexity, as far as the number of points allows it.
    perplexity = min(30.0, (points - 1) / 3)
    reduction = installed_tsne()(perplexity=perplexity, random_state=SEED)
    xy_N2 = reduction.fit_transform(np.concatenate(parts))
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return {
        code: xy_P2.astype(np.float64).round(3).tolist()
        for code, xy_P2 in zip(state_PD, np.split(xy_N2, ends), strict=True)
    }


# Outlines


def outlines(points: Sequence[Sequence[float]]) -> list[list[Segment]]:
    """Return an outline per share; none of points (x, y) that are too few or lie on a line.

    An outline bounds the cells of a grid with the highest density that hold the share of it. It
    consists of the edges between a cell inside and a cell outside, in no order.
    """
    from scipy.stats import gaussian_kde  # scikit-learn brings it

    xy_2N = np.asarray(points, dtype=np.float64).reshape(-1, 2).T
    covariance_22 = np.cov(xy_2N) if xy_2N.shape[1] > 2 else np.zeros((2, 2))
    if not np.linalg.det(covariance_22) > 1e-9 * np.trace(covariance_22) ** 2:
        return []
    density = gaussian_kde(xy_2N)
    margin_2 = MARGIN * np.sqrt(density.covariance.diagonal())
    low_2, high_2 = xy_2N.min(axis=1) - margin_2, xy_2N.max(axis=1) + margin_2
    step_2 = (high_2 - low_2) / PLACES
    middles = (np.arange(PLACES) + 0.5) * step_2[:, None] + low_2[:, None]
    grid_2XY = np.stack(np.meshgrid(*middles, indexing="ij"))
    density_XY = density(grid_2XY.reshape(2, -1)).reshape(PLACES, PLACES)
    falling = np.sort(density_XY, axis=None)[::-1]
    held = np.cumsum(falling) / falling.sum()
    found = []
    for share in SHARES:
        is_inside_XY = np.pad(density_XY >= falling[np.searchsorted(held, share)], 1)
        segments: list[Segment] = []
        for axis in (0, 1):
            # An edge between two cells along one axis runs along the other axis.
            along_2 = np.array([axis == 1, axis == 0])
            corner_E2 = np.argwhere(np.diff(is_inside_XY, axis=axis)) - 1 + ~along_2
            for corner_2 in corner_E2:
                ends = (low_2 + step_2 * place_2 for place_2 in (corner_2, corner_2 + along_2))
                (x1, y1), (x2, y2) = (end_2.round(3).tolist() for end_2 in ends)
                segments.append(((x1, y1), (x2, y2)))
        found.append(segments)
    return found


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_languages"))
