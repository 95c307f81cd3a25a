"""Paired bootstrap of one direction, four systems, beside sacreBLEU's own.

Both draw 1,000 resamples and score BLEU and chrF from the statistics of every line; sacreBLEU's
draws are scored one by one, ours all at once. The time of all 188 directions of OPUS-100 follows.

    python tests/bench/significance.py [--quick] [--rounds N] [--json FILE]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import _bootstrap_resample

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import compare, interleaved, parse_options, report

from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.statistics import ResampleTask, resampled_scores

CASES = {
    r"4 systems, 2000 lines, 1000 resamples, against sacreBLEU's bootstrap": "milliseconds",
}
LINES, SYSTEMS, RESAMPLES, DIRECTIONS = 2000, 4, 1000, 188

Statistics = npt.NDArray[np.int32]


def main() -> None:
    options = parse_options(__doc__ or "")
    lines, resamples = (100, 20) if options.quick else (LINES, RESAMPLES)
    generator = np.random.default_rng(1)
    bleu = [generator.integers(1, 30, (lines, 10), dtype=np.int32) for _ in range(SYSTEMS)]
    chrf = [generator.integers(1, 90, (lines, 24), dtype=np.int32) for _ in range(SYSTEMS)]

    def theirs() -> None:
        for statistics in bleu:
            _bootstrap_resample(statistics.tolist(), BLEU(), n_samples=resamples)
        for statistics in chrf:
            _bootstrap_resample(statistics.tolist(), CHRF(word_order=2), n_samples=resamples)

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{system}.npz" for system in range(SYSTEMS)]
        for path, of_bleu, of_chrf in zip(paths, bleu, chrf, strict=True):
            np.savez_compressed(path, bleu=of_bleu, chrf=of_chrf)
        task = ResampleTask(paths, (Bleu("13a", {}), Chrf()), seed=1, resamples=resamples)
        timed = {"ours": lambda: resampled_scores(task), "sacreBLEU's bootstrap": theirs}
        seconds = interleaved(timed, rounds=options.rounds, warm_up=1)
    case = f"{SYSTEMS} systems, {lines} lines, {resamples} resamples"
    report(compare(seconds, case=case, target=1.0), options, shapes="one direction")
    each = sorted(seconds["ours"])[len(seconds["ours"]) // 2]
    print(f"{DIRECTIONS} directions: {DIRECTIONS * each:.0f} s in one process")


if __name__ == "__main__":
    main()
