"""What preparing data costs: make_shards beside SentencePiece, import and clean.

Lines of real text in two dozen languages (the Bible's, beside the checkout), halves of them joined
anew so that no two are alike. In interleaved rounds of one process, by its processor time, so that
what else the machine does counts little,

- make_shards, all of the stage, against SentencePiece's own encoding of the same lines;
- import of the same text as a tree, and clean, in pairs of lines per second.

Then the trainer of the vocabulary against itself with a million seed pieces, SentencePiece's
default: its time, and the tokens per line of held-out text of all languages.

From these, from how long the trainer takes for two sizes of a sample, and from how fast lines are
drawn, follow the minutes that OPUS-100 takes on 16 cores, were the spread over them even. What the
trainer's main thread does counts in full, the rest by the cores.

    python tests/bench/data.py [--lines N] [--many] [--quick] [--rounds N] [--json FILE]

With --many, what a pair costs beyond the work on its lines: import, clean and make_shards with two
workers, for all pairs of few and of many languages with two lines a split. The processor time of
all processes counts, by which a further pair adds to it.
"""

import argparse
import gzip
import json
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any
from unittest import mock

import sentencepiece
from ratios import Row, beside, bounded, check_cases, compare, interleaved, processor, provenance
from support.bible_lines import BIBLE, bible_lines
from support.stage_runs import run_stage

from data_prep import train_tokenizer
from data_prep.settings import TokenizerConfig
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import read_lines
from pipeline.artifacts.raw_input import RawInput
from pipeline.config.recipe import Recipe
from pipeline.languages import FAMILIES

PAIR = ("de", "en")
"""What the made pair is called; its text is of all languages."""
SPEED_LINES, TRAINER_LINES, VOCABULARY = 40_000, (20_000, 80_000), 16_000
QUICK_LINES, QUICK_TRAINER_LINES, QUICK_VOCABULARY, QUICK_FOLDERS = 2_000, (1_000, 2_000), 500, 2
TOKENS_TARGET = 0.998
"""Of the tokens per held-out line with a million seed pieces, by those with ours."""
SHARE_TARGET = 0.85
"""Of SentencePiece's speed, for all of make_shards."""
OPUS_PAIRS, CORES, MINUTES = 55_000_000, 16, 6.0
CASES = {
    r"make_shards, against SentencePiece": "milliseconds",
    r"(import_corpus|clean|make_shards), a further pair, at most": "milliseconds of processor time",
    r"train_tokenizer, 16,000 pieces, against a million seed pieces": "milliseconds",
    r"held-out text, 16,000 pieces, against a million seed pieces": "tokens per line",
    r"OPUS-100 on 16 cores, at most": "minutes, computed",
}
PAIR_LANGUAGES, QUICK_LANGUAGES, MILLISECONDS = (10, 45), (3, 5), 5.0


def text_pairs(count: int, *, folders: int | None) -> Iterator[tuple[str, str]]:
    """Pairs of lines: the beginning of one and the end of another, on both sides alike."""
    generator = random.Random(1)
    sides: list[tuple[str, str]] = []
    for folder in sorted(BIBLE.glob("en-*"))[:folders]:
        files = sorted(folder.glob("train.*.gz"))
        texts = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
        sides += zip(*texts, strict=True)
    for _ in range(count):
        (a, b), (c, d) = generator.choice(sides), generator.choice(sides)
        yield a[: len(a) // 2] + c[len(c) // 2 :], b[: len(b) // 2] + d[len(d) // 2 :]


def write_tree(root: Path, count: int, *, folders: int | None) -> Path:
    """The pairs as a raw tree."""
    folder = root / "-".join(PAIR)
    folder.mkdir(parents=True)
    with (
        (folder / f"train.{PAIR[0]}").open("w", encoding="utf-8") as first,
        (folder / f"train.{PAIR[1]}").open("w", encoding="utf-8") as second,
    ):
        for one, other in text_pairs(count, folders=folders):
            first.write(one + "\n")
            second.write(other + "\n")
    return root


def measure_many_pairs(folder: Path, *, languages: tuple[int, int]) -> dict[str, float]:
    """Milliseconds of processor time that a further pair adds to each stage."""
    fewer, more = (_pair_seconds(folder / str(number), number) for number in languages)
    pairs = [number * (number - 1) // 2 for number in languages]
    return {name: (more[name] - fewer[name]) / (pairs[1] - pairs[0]) * 1e3 for name in more}


def _pair_seconds(folder: Path, languages: int) -> dict[str, float]:
    """Processor time of each stage and its workers for all pairs of so many languages."""
    codes = sorted(chain.from_iterable(FAMILIES.values()))[:languages]
    for pair in combinations(codes, 2):
        place = folder / "raw" / "-".join(pair)
        place.mkdir(parents=True)
        for split, code in product(("train", "valid", "test"), pair):
            text = "".join(f"{split} {code} {'-'.join(pair)} {line}\n" for line in "ab")
            (place / f"{split}.{code}").write_text(text, encoding="utf-8")
    recipe = recipe_of(kind="bytes")
    seconds: dict[str, float] = {}

    def timed(name: str, raw: RawInput | None = None, **inputs: Artifact) -> Artifact:
        begin = _all_seconds()
        made = run_stage(name, folder / name, inputs, recipe, raw=raw, processes=2)
        seconds[name] = _all_seconds() - begin
        return made

    corpus = timed("import_corpus", RawInput((folder / "raw",)))
    tokenizer = run_stage("train_tokenizer", folder / "tokenizer", {"corpus": corpus}, recipe)
    timed("make_shards", corpus=timed("clean", corpus=corpus), tokenizer=tokenizer)
    return seconds


def _all_seconds() -> float:
    """Processor time of this process and of its workers that have ended."""
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + workers.ru_utime + workers.ru_stime


def recipe_of(**settings: object) -> Recipe:
    """Few pieces, so that they are soon learned; nothing that clean would drop as odd."""
    tokenizer = {"vocabulary_size": VOCABULARY, "sample_lines": 60_000, **settings}
    return Recipe.model_validate(
        {
            "name": "bench",
            "tokenizer": tokenizer,
            "corpus": {"swapped_sides": "accept"},
            "clean": {"max_length_ratio": 1000.0},
        }
    )


@dataclass(frozen=True)
class Prepared:
    """The text in each of its forms."""

    tree: RawInput
    corpus: Artifact
    tokenizer: Artifact
    vocabulary: int


def prepare(folder: Path, lines: int, *, quick: bool) -> Prepared:
    tree = RawInput((write_tree(folder / "raw", lines, folders=QUICK_FOLDERS if quick else None),))
    vocabulary = QUICK_VOCABULARY if quick else VOCABULARY
    recipe = recipe_of(vocabulary_size=vocabulary)
    corpus = run_stage("import_corpus", folder / "corpus", {}, recipe, raw=tree)
    tokenizer = run_stage("train_tokenizer", folder / "tokenizer", {"corpus": corpus}, recipe)
    return Prepared(tree, corpus, tokenizer, vocabulary)


def measure_stages(
    prepared: Prepared, folder: Path, *, lines: int, rounds: int
) -> tuple[list[Row], dict[str, float]]:
    """make_shards against its peer, and pairs of lines per second of each stage."""
    encoder = sentencepiece.SentencePieceProcessor(
        model_proto=prepared.tokenizer.file("sentencepiece.model").read_bytes()
    )
    sides = [read_lines(prepared.corpus, "train", "-".join(PAIR), code) for code in PAIR]
    corpus = {"corpus": prepared.corpus}

    def stage(name: str, inputs: Mapping[str, Artifact], **options: Any) -> Callable[[], object]:
        out_dir, options["overwrite"] = folder / f"again {name}", True
        return lambda: run_stage(name, out_dir, inputs, recipe_of(), **options)

    stages: dict[str, Callable[[], object]] = {
        "ours": stage("make_shards", {**corpus, "tokenizer": prepared.tokenizer}),
        "SentencePiece": lambda: [
            encoder.encode(side, out_type=int, num_threads=1) for side in sides
        ],
        "import_corpus": stage("import_corpus", {}, raw=prepared.tree),
        "clean": stage("clean", corpus),
    }
    seconds = interleaved(stages, rounds=rounds, warm_up=1, clock=time.process_time)
    both = {name: seconds[name] for name in ("ours", "SentencePiece")}
    rows = compare(both, case="make_shards", target=SHARE_TARGET)
    named = {"make_shards": "ours", "import_corpus": "import_corpus", "clean": "clean"}
    rates = {
        stage: lines / statistics.median(seconds[contestant]) for stage, contestant in named.items()
    }
    return rows, rates


@dataclass(frozen=True)
class Trained:
    """A vocabulary, and what its trainer took."""

    megabytes: float
    """Text of the sample."""
    seconds: float
    """Processor time."""
    main_seconds: float
    """Processor time of the main thread."""
    tokens: float
    """Tokens per line of held-out text, over all languages alike."""


def train_on(prepared: Prepared, folder: Path, *, lines: int) -> Trained:
    """Train a vocabulary on so many lines."""
    recipe = recipe_of(sample_lines=lines, vocabulary_size=prepared.vocabulary)
    text = sum(len(line.encode()) for line in _sample(prepared.corpus, recipe.tokenizer))
    begin, begin_main = time.process_time(), time.thread_time()
    corpus = {"corpus": prepared.corpus}
    made = run_stage("train_tokenizer", folder / "trained", corpus, recipe, overwrite=True)
    seconds, main_seconds = time.process_time() - begin, time.thread_time() - begin_main
    assert made.statistics["pieces"] == prepared.vocabulary
    trained = sentencepiece.SentencePieceProcessor(
        model_proto=made.file("sentencepiece.model").read_bytes()
    )
    tokens = [
        statistics.mean(map(len, trained.encode(lines, num_threads=1)))
        for lines in bible_lines(10**9, split="valid", english=True).values()
    ]
    return Trained(text / 1e6, seconds, main_seconds, statistics.mean(tokens))


def measure_tokenizer(
    prepared: Prepared, folder: Path, *, sizes: tuple[int, int]
) -> tuple[list[Row], dict[str, float]]:
    """The trainer against a million seed pieces; its seconds per MB, and lines drawn per second."""
    fewer, more = (train_on(prepared, folder, lines=size) for size in sizes)
    with mock.patch.object(train_tokenizer, "LEAST_SEEDS", train_tokenizer.MOST_SEEDS):
        peer = train_on(prepared, folder, lines=sizes[1])
    both = {"ours": [more.seconds], "a million seed pieces": [peer.seconds]}
    rows = compare(both, case=f"train_tokenizer, {prepared.vocabulary:,} pieces", target=1.0)
    case = f"held-out text, {prepared.vocabulary:,} pieces, against a million seed pieces"
    rows.append(beside(case, "tokens per line", more.tokens, peer.tokens, target=TOKENS_TARGET))
    few = recipe_of(sample_lines=100).tokenizer
    started = time.process_time()
    drawn = sum(1 for _ in _sample(prepared.corpus, few))
    assert drawn
    read = sum(prepared.corpus.statistics["pairs"]["-".join(PAIR)].values()) * 2
    megabytes = more.megabytes - fewer.megabytes
    return rows, {
        "trainer_seconds_per_megabyte": (more.seconds - fewer.seconds) / megabytes,
        "trainer_main_seconds_per_megabyte": (more.main_seconds - fewer.main_seconds) / megabytes,
        "lines_drawn_from_per_second": read / (time.process_time() - started),
    }


def _sample(corpus: Artifact, config: TokenizerConfig) -> Iterator[str]:
    return iter(train_tokenizer.draw_sample(corpus, config=config))


def opus_minutes(rates: dict[str, float]) -> dict[str, float]:
    """Minutes per stage of OPUS-100: over all cores where a stage has workers, else on one."""
    megabytes = TokenizerConfig().memory_bytes / train_tokenizer.MEMORY_PER_BYTE / 1e6
    drawing = 2 * OPUS_PAIRS / rates["lines_drawn_from_per_second"]
    main = rates["trainer_main_seconds_per_megabyte"]
    others = rates["trainer_seconds_per_megabyte"] - main
    spread = {name: OPUS_PAIRS / rates[name] / CORES for name in ("import_corpus", "clean")}
    seconds = {
        **spread,
        "train_tokenizer": drawing + megabytes * (main + others / CORES),
        "make_shards": OPUS_PAIRS / rates["make_shards"] / CORES,
    }
    return {name: round(value / 60, 2) for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="what preparing data costs")
    parser.add_argument("--lines", type=int, default=SPEED_LINES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many", action="store_true", help="many pairs alone (minutes)")
    parser.add_argument("--quick", action="store_true", help="few lines: only whether it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not options.quick and 2 * options.lines < max(TRAINER_LINES):
        parser.error(
            f"--lines is {max(TRAINER_LINES) // 2:,} or more: the trainer's samples are drawn"
        )
    if not BIBLE.is_dir():
        sys.exit(f"{BIBLE} is not there: put the text beside the checkout.")
    if options.many:
        report_many(options)
        return
    report(options)


def report_many(options: argparse.Namespace) -> None:
    """Measure many pairs, print, and write where asked."""
    languages = QUICK_LANGUAGES if options.quick else PAIR_LANGUAGES
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure_many_pairs(Path(folder), languages=languages)
    rows = [
        bounded(
            f"{name}, a further pair", "milliseconds of processor time", value, most=MILLISECONDS
        )
        for name, value in pairs.items()
    ]
    print(processor())
    for row in rows:
        print(f"{row.case} {row.peer}: {row.ours} {row.metric}")
    fewer, more = languages
    write_found(options, rows, shapes=f"all pairs of {fewer} and of {more} languages")


def write_found(
    options: argparse.Namespace, rows: list[Row], *, shapes: str, **figures: object
) -> None:
    """Rows, other figures, and what they were measured on, where asked."""
    check_cases(rows, quick=options.quick)
    if options.json:
        found = {
            "processor": processor(),
            "python": platform.python_version(),
            **provenance(),
            "sentencepiece": sentencepiece.__version__,
            "shapes": shapes,
            "rows": [asdict(row) for row in rows],
            **figures,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report(options: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for."""
    lines = QUICK_LINES if options.quick else options.lines
    sizes = QUICK_TRAINER_LINES if options.quick else TRAINER_LINES
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = prepare(folder, lines, quick=options.quick)
        rows, rates = measure_stages(prepared, folder, lines=lines, rounds=rounds)
        rows_of_trainer, rates_of_trainer = measure_tokenizer(prepared, folder, sizes=sizes)
        rows, rates = rows + rows_of_trainer, rates | rates_of_trainer
    minutes = opus_minutes(rates)
    total = round(sum(minutes.values()), 2)
    print(processor())
    for row in rows:
        print(f"{row.case}: {row.ours} and {row.peer} {row.metric}, ratio {row.ratio}")
    for name, rate in rates.items():
        print(f"{name}: {rate:,.2f}")
    parts = ", ".join(f"{stage} {value}" for stage, value in minutes.items())
    print(f"OPUS-100 on {CORES} cores, computed: {total} minutes ({parts}), aim {MINUTES}")
    write_found(
        options,
        [*rows, bounded(f"OPUS-100 on {CORES} cores", "minutes, computed", total, most=MINUTES)],
        shapes=f"{lines:,} pairs of lines",
        rates=rates,
        opus_minutes=minutes | {"total": total, "cores": CORES},
    )


if __name__ == "__main__":
    main()
