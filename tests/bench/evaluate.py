"""Scores of an evaluation, line by line: what each costs, beside langdetect's and sacreBLEU's own.

Language accuracy is both of its scores, plain and restricted to the languages of the lines; the
peer asks langdetect for every line twice. The peer of BLEU and chrF++ is sacreBLEU. The processor
time of four systems in 188 directions of 2,000 lines follows, with the paired tests of the
statistics, on one processor and on two. chrF++ of all pairs of candidates, which minimum Bayes risk
needs, is measured beside a loop over the pairs with sacreBLEU's score of a sentence. The lines are
the Bible's test lines, in shared/data beside the repository.

    python tests/bench/evaluate.py [--quick] [--rounds N] [--json FILE]
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from ratios import beside, compare, interleaved, parse_options, report
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from support.bible_lines import bible_lines

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf, pairwise_chrf
from pipeline.evaluation.language_detector import (
    LanguageAccuracy,
    grams_of_lines,
    langdetect_profiles,
)
from pipeline.evaluation.scores import Score, TranslatedLines
from pipeline.evaluation.statistics import ResampleTask, resampled_scores

LANGUAGES = "cs da de el es fi fr he hu ja ko lv mg ml my nl pl pt ru sr sv tl vi zh".split()
DIRECTIONS, LINES, SYSTEMS = 188, 2000, 4
TARGET_MINUTES = 15.0
PEER_LINES = 110
CASES = {
    r"LangAcc, against langdetect": "milliseconds",
    r"(BLEU|chrF\+\+), against sacreBLEU": "milliseconds",
    r"chrF\+\+ of all pairs of 32 candidates of \d+ characters, against sacreBLEU": "milliseconds",
    r"4 systems, 188 directions, 2000 lines, computed, against the target, in minutes of one "
    r"processor": "minutes",
}
CANDIDATES, KEPT_WORDS, PAIRS_TARGET = 32, 0.8, 20.0


def main() -> None:
    options = parse_options(__doc__ or "")
    texts = read_lines(240 if options.quick else LINES)
    lines = TranslatedLines(Direction("xx", "en"), texts, texts[::-1], texts)
    known = frozenset((*LANGUAGES, "en"))
    names = ("language", "language_restricted")
    accuracies = tuple(LanguageAccuracy.named(name, known, seed=1) for name in names)
    others: tuple[Score, ...] = (Bleu("13a", {"en": "13a"}), Chrf())
    share = max(len(texts) // PEER_LINES, 1)

    def detect() -> None:
        grams_of_lines.cache_clear()
        for score in accuracies:
            score.line_statistics(lines)

    few = texts[::share]
    candidates = variations_of(max(texts[: len(LANGUAGES)], key=len))
    contestants: dict[str, Callable[[], object]] = {
        "ours": detect,
        "langdetect": lambda: langdetects(few),
        **{one.column.title: partial(one.line_statistics, lines) for one in others},
        **{
            f"sacreBLEU's {one.column.title}": partial(peers_statistics, one, texts, texts[::-1])
            for one in others
        },
        "paired tests": paired_tests(lines, (*others,)),
        "all pairs": partial(pairwise_chrf, candidates),
        "sacreBLEU's pairs": lambda: pairs_by_sacrebleu(candidates),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    timed = {name: counted(one, seconds[name]) for name, one in contestants.items()}
    for _ in range(options.rounds):
        interleaved(timed, rounds=1, warm_up=0)
    seconds["langdetect"] = [one * len(texts) / len(few) for one in seconds["langdetect"]]
    rows = compare(
        {name: seconds[name] for name in ("ours", "langdetect")}, case="LangAcc", target=1
    )
    for one in others:
        name = one.column.title
        versus = {name: seconds[name], "sacreBLEU": seconds[f"sacreBLEU's {name}"]}
        rows += compare(versus, case=name, target=1, ours=name)
    versus = {"ours": seconds["all pairs"], "sacreBLEU": seconds["sacreBLEU's pairs"]}
    case = f"chrF++ of all pairs of {CANDIDATES} candidates of {len(candidates[0])} characters"
    rows += compare(versus, case=case, target=PAIRS_TARGET)
    whole = 0.0
    for name in ("ours", *(one.column.title for one in others), "paired tests"):
        each = statistics.median(seconds[name])
        per_direction = each * LINES / len(texts) * (1 if name == "paired tests" else SYSTEMS)
        whole += per_direction * DIRECTIONS
        title = "LangAcc" if name == "ours" else name
        speed, of_all = len(texts) / each, per_direction * DIRECTIONS
        print(f"{title}: {speed:,.0f} lines per processor second, {of_all:,.0f} s in all")
    minutes = whole / 60
    what = f"{SYSTEMS} systems, {DIRECTIONS} directions, {LINES} lines, computed"
    rows.append(
        beside(
            f"{what}, against the target, in minutes of one processor",
            "minutes",
            minutes,
            TARGET_MINUTES,
            target=1.0,
        )
    )
    print(f"{what}: {minutes:.1f} minutes of one processor, {minutes / 2:.1f} on two")
    report(rows, options, shapes=f"{len(texts)} lines in {len(LANGUAGES)} languages")


def variations_of(text: str) -> list[str]:
    """Candidates that share most of their words, as the samples of a sentence do."""
    words, generator = text.split(), np.random.default_rng(1)
    kept = generator.random((CANDIDATES, len(words))) < KEPT_WORDS
    return [" ".join(np.array(words)[row]) for row in kept]


def pairs_by_sacrebleu(texts: Sequence[str]) -> list[list[float]]:
    """The score of every text with every text as its reference, one call per pair."""
    peer = CHRF(word_order=2)
    return [[peer.sentence_score(one, [other]).score for other in texts] for one in texts]


def peers_statistics(
    score: Score, hypotheses: Sequence[str], references: Sequence[str]
) -> list[list[int]]:
    """sacreBLEU's own, from an object that has no line's tokens in store."""
    peer = BLEU(tokenize="13a") if isinstance(score, Bleu) else CHRF(word_order=2)
    found: list[list[int]] = peer._extract_corpus_statistics(hypotheses, [references])
    return found


def counted(contestant: Callable[[], object], seconds: list[float]) -> Callable[[], object]:
    """The contestant, which leaves behind what it took of the processor: on a machine that is
    shared it takes longer, by as much as the others run."""

    def run() -> None:
        started = time.process_time()
        contestant()
        seconds.append(time.process_time() - started)

    return run


def read_lines(total: int) -> list[str]:
    """The first test lines of every language, in turns."""
    lines = bible_lines(total // len(LANGUAGES) + 1)
    rows = zip(*(lines[code] for code in LANGUAGES), strict=True)
    return [line for row in rows for line in row][:total]


def langdetects(texts: Sequence[str]) -> None:
    """langdetect's answer for every text, twice, as two priors ask for it."""
    from langdetect import DetectorFactory, LangDetectException, detect_langs

    DetectorFactory.seed = 1
    for _ in range(2):
        for text in texts:
            with contextlib.suppress(LangDetectException):  # raised for a line without letters
                detect_langs(text)


def paired_tests(lines: TranslatedLines, scores: tuple[Score, ...]) -> Callable[[], object]:
    """Paired bootstrap of one direction, all systems, from stored statistics."""
    folder = Path(tempfile.mkdtemp())
    rows = {one.column.name: one.line_statistics(lines).rows for one in scores}
    paths = []
    for system in range(SYSTEMS):
        order = np.random.default_rng(system).permutation(len(lines.hypotheses))
        paths.append(folder / f"{system}.npz")
        np.savez_compressed(paths[-1], **{name: one[order] for name, one in rows.items()})
    task = ResampleTask(paths, scores, seed=1, resamples=1000)
    return lambda: resampled_scores(task)


if __name__ == "__main__":
    langdetect_profiles()
    main()
