"""What preparing data costs: make_shards beside SentencePiece, import and clean, and their memory.

Lines of real text in two dozen languages (the Bible's, beside the checkout), halves of them joined
anew so that no two are alike. In interleaved rounds of one process, by its processor time, so that
what else the machine does counts little,

- make_shards, all of the stage, against SentencePiece's own encoding of the same lines;
- import of the same text as a tree, and clean, in pairs of lines per second.

Then the trainer of the vocabulary against itself with a million seed pieces, SentencePiece's
default: its time, and the tokens per line of held-out text of all languages.

From these, from how long the trainer takes for two sizes of a sample, and from how fast lines are
drawn, follow the minutes that OPUS-100 takes on 16 cores, were the spread over them even. What the
trainer's main thread does counts in full, the rest by the cores. With
--memory each stage runs in a fresh process at two sizes of a corpus, and its peak is compared.

    python tests/bench/data.py [--lines N] [--memory [N N]] [--quick] [--rounds N] [--json FILE]

With --many, what a pair costs beyond the work on its lines, and a file of many languages:

- import, clean and make_shards with two workers, for all pairs of few and of many languages with
  two lines a split: processor time of all processes, by which a further pair adds to it;
- import of a TMX of 24 languages and 3,000 units, which has 276 pairs, and of the same text as TSV
  with a column per language.
"""

import argparse
import gzip
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before folders of the same names

import sentencepiece
from ratios import Row, Seconds, beside, bounded, check_cases, compare, processor, provenance
from support.corpora import make_corpus

from data_prep import clean, import_corpus, make_shards, train_tokenizer
from data_prep.settings import TokenizerConfig
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import read_lines
from pipeline.artifacts.raw_input import RawPaths
from pipeline.config.recipe import Recipe
from pipeline.languages import FAMILIES
from pipeline.machine import peak_memory
from pipeline.registry import STAGES
from pipeline.stage import StageCall

BIBLE = Path(__file__).parents[3] / "shared" / "data" / "bible"
PAIR = ("de", "en")
"""What the made pair is called; its text is of all languages."""
SPEED_LINES, TRAINER_LINES, MEMORY_LINES = 40_000, (20_000, 80_000), (500_000, 2_000_000)
VOCABULARY = 16_000
TOKENS_TARGET = 0.998
"""Of the tokens per held-out line with a million seed pieces, by those with ours."""
SHARE_TARGET = 0.85
"""Of SentencePiece's speed, for all of make_shards."""
OPUS_PAIRS, CORES, MINUTES = 55_000_000, 16, 6.0
FLAT_SHARE = 0.15
"""How much more a stage may hold at four times the lines."""
CASES = {
    r"make_shards, against SentencePiece": "milliseconds",
    r"(import_corpus|clean|make_shards), a further pair, at most": "milliseconds of processor time",
    r"import_corpus, (TMX|TSV) of 24 languages and 3,000 units, at most": (
        "seconds of processor time"
    ),
    r"train_tokenizer, 16,000 pieces, against a million seed pieces": "milliseconds",
    r"held-out text, 16,000 pieces, against a million seed pieces": "tokens per line",
    r"OPUS-100 on 16 cores, at most": "minutes, computed",
}
PAIR_LANGUAGES, QUICK_LANGUAGES, MILLISECONDS = (10, 45), (3, 5), 5.0
FILE_LANGUAGES, FILE_UNITS, FILE_SECONDS = 24, 3000, 4.0
FORMS = ("tmx", "tsv")
MEBIBYTE = 2**20
CODE: dict[str, ModuleType] = {
    "import_corpus": import_corpus,
    "clean": clean,
    "make_shards": make_shards,
    "train_tokenizer": train_tokenizer,
}


@dataclass(frozen=True)
class Peak:
    """Largest memory of a stage in its process beyond what that held before it, in MiB."""

    stage: str
    fewer: float
    more: float

    @property
    def is_flat(self) -> bool:
        return self.more <= self.fewer * (1 + FLAT_SHARE)


def text_pairs(count: int) -> Iterator[tuple[str, str]]:
    """Pairs of lines: the beginning of one and the end of another, on both sides alike."""
    generator = random.Random(1)
    sides: list[tuple[str, str]] = []
    for folder in sorted(BIBLE.glob("en-*")):
        files = sorted(folder.glob("train.*.gz"))
        texts = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
        sides += zip(*texts, strict=True)
    for _ in range(count):
        (a, b), (c, d) = generator.choice(sides), generator.choice(sides)
        yield a[: len(a) // 2] + c[len(c) // 2 :], b[: len(b) // 2] + d[len(d) // 2 :]


def write_tree(root: Path, count: int) -> Path:
    """The pairs as a raw tree."""
    folder = root / "-".join(PAIR)
    folder.mkdir(parents=True)
    with (
        (folder / f"train.{PAIR[0]}").open("w", encoding="utf-8") as first,
        (folder / f"train.{PAIR[1]}").open("w", encoding="utf-8") as second,
    ):
        for one, other in text_pairs(count):
            first.write(one + "\n")
            second.write(other + "\n")
    return root


def run_stage(
    name: str, out_dir: Path, recipe: Recipe, processes: int = 1, **inputs: Artifact | Path
) -> Artifact:
    """Run a stage here, whatever lies at its output."""
    stage = STAGES[name]
    artifacts = {key: value for key, value in inputs.items() if isinstance(value, Artifact)}
    raw = {key: RawPaths((value,)) for key, value in inputs.items() if isinstance(value, Path)}
    call = StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw=dict(raw),
        out_dir=out_dir,
        records={},
        config=recipe.sections(stage.sections),
        overwrite=True,
        processes=processes,
    )
    CODE[name].run(call)
    return open_artifact(out_dir, kind=stage.makes)


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

    def timed(name: str, processes: int = 2, **inputs: Artifact | Path) -> Artifact:
        begin = _all_seconds()
        made = run_stage(name, folder / name, recipe, processes, **inputs)
        seconds[name] = _all_seconds() - begin
        return made

    corpus = timed("import_corpus", raw=folder / "raw")
    tokenizer = run_stage("train_tokenizer", folder / "tokenizer", recipe, corpus=corpus)
    timed("make_shards", corpus=timed("clean", corpus=corpus), tokenizer=tokenizer)
    return seconds


def _all_seconds() -> float:
    """Processor time of this process and of its workers that have ended."""
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + workers.ru_utime + workers.ru_stime


def measure_file(folder: Path, form: str, *, languages: int, units: int) -> float:
    """Processor time of importing a file with all pairs of its languages, in seconds."""
    codes = sorted(chain.from_iterable(FAMILIES.values()))[:languages]
    lines = [side for pair in text_pairs(units) for side in pair]
    rows = [
        [lines[(unit + place) % len(lines)] for place in range(languages)] for unit in range(units)
    ]
    folder.mkdir()
    path = folder / f"all.{form}"
    path.write_text(_as_tmx(codes, rows) if form == "tmx" else _as_tsv(codes, rows), "utf-8")
    recipe = Recipe.model_validate(
        {"name": "bench", "corpus": {"source": form, "swapped_sides": "accept"}}
    )
    begin = time.process_time()
    made = run_stage("import_corpus", folder / "corpus", recipe, raw=path)
    seconds = time.process_time() - begin
    assert len(made.statistics["pairs"]) == languages * (languages - 1) // 2
    return seconds


def _as_tmx(codes: list[str], rows: list[list[str]]) -> str:
    units = (
        "".join(
            f'<tuv xml:lang="{code}"><seg>{escape(text)}</seg></tuv>'
            for code, text in zip(codes, row, strict=True)
        )
        for row in rows
    )
    body = "".join(f"<tu>{unit}</tu>\n" for unit in units)
    return f'<tmx version="1.4"><header/><body>\n{body}</body></tmx>\n'


def _as_tsv(codes: list[str], rows: list[list[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in [codes, *rows])


def recipe_of(**settings: object) -> Recipe:
    """Few pieces, so that they are soon learned; nothing that clean would drop as odd."""
    tokenizer = {"vocabulary_size": VOCABULARY, "sample_lines": 60_000, **settings}
    return Recipe.model_validate(
        {
            "name": "bench",
            "tokenizer": tokenizer,
            "corpus": {"swapped_sides": "accept"},
            "clean": {"max_length_ratio": 1000.0, "drop_swapped": False},
        }
    )


@dataclass(frozen=True)
class Prepared:
    """The text in each of its forms."""

    tree: Path
    corpus: Artifact
    tokenizer: Artifact


def prepare(folder: Path, lines: int) -> Prepared:
    tree = write_tree(folder / "raw", lines)
    corpus = run_stage("import_corpus", folder / "corpus", recipe_of(), raw=tree)
    tokenizer = run_stage("train_tokenizer", folder / "tokenizer", recipe_of(), corpus=corpus)
    return Prepared(tree, corpus, tokenizer)


def measure_stages(
    prepared: Prepared, folder: Path, *, lines: int, rounds: int
) -> tuple[list[Row], dict[str, float]]:
    """make_shards against its peer, and pairs of lines per second of each stage."""
    processor_ = sentencepiece.SentencePieceProcessor(
        model_proto=prepared.tokenizer.file("sentencepiece.model").read_bytes()
    )
    sides = [read_lines(prepared.corpus, "train", "-".join(PAIR), code) for code in PAIR]
    stages: dict[str, Callable[[], object]] = {
        "ours": lambda: run_stage(
            "make_shards",
            folder / "shards",
            recipe_of(),
            corpus=prepared.corpus,
            tokenizer=prepared.tokenizer,
        ),
        "SentencePiece": lambda: [
            processor_.encode(side, out_type=int, num_threads=1) for side in sides
        ],
        "import_corpus": lambda: run_stage(
            "import_corpus", folder / "again", recipe_of(), raw=prepared.tree
        ),
        "clean": lambda: run_stage("clean", folder / "clean", recipe_of(), corpus=prepared.corpus),
    }
    seconds = interleaved(stages, rounds=rounds)
    both = {name: seconds[name] for name in ("ours", "SentencePiece")}
    rows = compare(both, case="make_shards", target=SHARE_TARGET)
    named = {"make_shards": "ours", "import_corpus": "import_corpus", "clean": "clean"}
    rates = {
        stage: lines / statistics.median(seconds[contestant]) for stage, contestant in named.items()
    }
    return rows, rates


def interleaved(contestants: Mapping[str, Callable[[], object]], *, rounds: int) -> Seconds:
    """Processor time of everyone, once a round after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(1 + rounds):
        for name, work in contestants.items():
            started = time.process_time()
            work()
            seconds[name].append(time.process_time() - started)
    return {name: values[1:] for name, values in seconds.items()}


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
    recipe = recipe_of(sample_lines=lines)
    text = sum(len(line.encode()) for line in _sample(prepared.corpus, recipe.tokenizer))
    begin, begin_main = time.process_time(), time.thread_time()
    made = run_stage("train_tokenizer", folder / "trained", recipe, corpus=prepared.corpus)
    seconds, main_seconds = time.process_time() - begin, time.thread_time() - begin_main
    assert made.statistics["pieces"] == VOCABULARY
    trained = sentencepiece.SentencePieceProcessor(
        model_proto=made.file("sentencepiece.model").read_bytes()
    )
    tokens = [
        statistics.mean(map(len, trained.encode(lines, num_threads=1)))
        for lines in held_out_lines().values()
    ]
    return Trained(text / 1e6, seconds, main_seconds, statistics.mean(tokens))


def held_out_lines() -> dict[str, list[str]]:
    """Language → its lines of validation text."""
    paths = {path.name.split(".")[1]: path for path in sorted(BIBLE.glob("en-*/valid.*.gz"))}
    return {
        code: gzip.decompress(path.read_bytes()).decode().splitlines()
        for code, path in paths.items()
    }


def measure_tokenizer(
    prepared: Prepared, folder: Path, *, sizes: tuple[int, int]
) -> tuple[list[Row], dict[str, float]]:
    """The trainer against a million seed pieces; its seconds per MB, and lines drawn per second."""
    fewer, more = (train_on(prepared, folder, lines=size) for size in sizes)
    with mock.patch.object(train_tokenizer, "LEAST_SEEDS", train_tokenizer.MOST_SEEDS):
        peer = train_on(prepared, folder, lines=sizes[1])
    both = {"ours": [more.seconds], "a million seed pieces": [peer.seconds]}
    rows = compare(both, case=f"train_tokenizer, {VOCABULARY:,} pieces", target=1.0)
    case = f"held-out text, {VOCABULARY:,} pieces, against a million seed pieces"
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


def measure_peaks(folder: Path, tokenizer: Artifact, *, sizes: tuple[int, int]) -> list[Peak]:
    """Peak memory of each stage but the tokenizer at both sizes, each in a fresh process."""
    found: dict[str, list[float]] = {name: [] for name in ("import_corpus", "clean", "make_shards")}
    for size in sizes:
        place = folder / f"lines-{size}"
        write_tree(place / "raw", size)
        for name, peaks in found.items():
            command = [sys.executable, __file__, "--stage", name, "--folder", str(place)]
            command += ["--tokenizer", str(tokenizer.directory)]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks.append(float(ended.stdout.splitlines()[-1]))
    return [Peak(name, round(fewer, 1), round(more, 1)) for name, (fewer, more) in found.items()]


def one_stage(name: str, folder: Path, tokenizer_dir: Path) -> None:
    """Run a stage in this process and print its peak, in MiB."""
    make_corpus(folder / "tiny" / name, {"train": {"de-en": {"de": ["a"], "en": ["b"]}}})
    tokenizer = open_artifact(tokenizer_dir, kind="tokenizer")
    inputs: dict[str, Any] = {"raw": folder / "raw"}
    if name != "import_corpus":
        inputs = {"corpus": open_artifact(folder / "import_corpus", kind="corpus")}
    if name == "make_shards":
        inputs["tokenizer"] = tokenizer
    with peak_memory() as peak:  # (the process's own maximum begins at that of its parent)
        run_stage(name, folder / name, recipe_of(), **inputs)
    print((peak.num_bytes or 0) / MEBIBYTE)


def main() -> None:
    parser = argparse.ArgumentParser(description="what preparing data costs")
    parser.add_argument("--lines", type=int, default=SPEED_LINES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--memory",
        type=int,
        nargs="*",
        metavar="N",
        help="peaks too, at two numbers of lines (half a million and two: minutes, 4 GB)",
    )
    parser.add_argument("--many", action="store_true", help="many pairs and a TMX alone (minutes)")
    parser.add_argument("--quick", action="store_true", help="few lines: only whether it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--stage", choices=sorted(CODE), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        one_stage(options.stage, options.folder, options.tokenizer)
        return
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
    """Measure many pairs and a file of many languages, print, and write where asked."""
    languages, units = (QUICK_LANGUAGES, 50) if options.quick else (PAIR_LANGUAGES, FILE_UNITS)
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure_many_pairs(Path(folder), languages=languages)
        files = {
            form: measure_file(Path(folder) / form, form, languages=FILE_LANGUAGES, units=units)
            for form in FORMS
        }
    rows = [
        bounded(
            f"{name}, a further pair", "milliseconds of processor time", value, most=MILLISECONDS
        )
        for name, value in pairs.items()
    ]
    rows += [
        bounded(
            f"import_corpus, {form.upper()} of {FILE_LANGUAGES} languages and {units:,} units",
            "seconds of processor time",
            seconds,
            most=FILE_SECONDS,
        )
        for form, seconds in files.items()
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
    lines = 12_000 if options.quick else options.lines
    sizes = (6_000, 12_000) if options.quick else TRAINER_LINES
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = prepare(folder, lines)
        rows, rates = measure_stages(prepared, folder, lines=lines, rounds=rounds)
        rows_of_trainer, rates_of_trainer = measure_tokenizer(prepared, folder, sizes=sizes)
        rows, rates = rows + rows_of_trainer, rates | rates_of_trainer
        fewer, more = options.memory or MEMORY_LINES
        peaks = (
            measure_peaks(folder, prepared.tokenizer, sizes=(fewer, more))
            if options.memory is not None
            else []
        )
    minutes = opus_minutes(rates)
    total = round(sum(minutes.values()), 2)
    print(processor())
    for row in rows:
        print(f"{row.case}: {row.ours} and {row.peer} {row.metric}, ratio {row.ratio}")
    for name, rate in rates.items():
        print(f"{name}: {rate:,.2f}" + " pairs of lines/s" * (name in CODE))
    for peak in peaks:
        print(f"{peak.stage}: {peak.fewer} MiB at {fewer:,} lines, {peak.more} at {more:,}")
    parts = ", ".join(f"{stage} {value}" for stage, value in minutes.items())
    print(f"OPUS-100 on {CORES} cores, computed: {total} minutes ({parts}), aim {MINUTES}")
    write_found(
        options,
        [*rows, bounded(f"OPUS-100 on {CORES} cores", "minutes, computed", total, most=MINUTES)],
        shapes=f"{lines:,} pairs of lines",
        rates=rates,
        peak_lines=[fewer, more],
        peaks=[asdict(peak) | {"flat": peak.is_flat} for peak in peaks],
        opus_minutes=minutes | {"total": total, "cores": CORES},
    )


if __name__ == "__main__":
    main()
