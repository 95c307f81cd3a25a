"""What assembling a mixture of experts costs, beside copying a file of the result's size.

A dense checkpoint in float32 of M2M-100's width, with as many layers as asked for (12 are the
paper's 418 million parameters), becomes 32 experts in every second layer, in
bfloat16, 10 % of their entries zero: ``mmnmt upcycle ASSEMBLY.toml`` in a process of its own, as a
user runs it. The peer copies the files of the result and forces them to disk. Memory is that of all
processes together, mapped files not counted, looked at every few milliseconds.

    python tests/bench/upcycle.py [--layers N] [--processes N] [--rounds N] [--quick] [--json FILE]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from feed import own_memory
from ratios import Options, bounded, compare, interleaved, parse_options, report

from pipeline.artifacts.artifact import new_artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.artifacts.vocabularies import SPECIALS, ByteVocabulary, Numbering
from pipeline.checkpoints.checkpoint import read_spec, tokenizer_directory, write_spec
from pipeline.checkpoints.weights import write_weights
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, named_slices, num_parameters
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec

MEBIBYTE = 2**20
SPEED_TARGET = 0.5
MOST_MEBIBYTES = 2384
CASES = {
    r"assemble 32 experts, \d+ \+ \d+ layers, \d+ processes, against copying the result": (
        "milliseconds"
    ),
    r"peak memory, \d+ \+ \d+ layers, \d+ processes, at most": "mebibytes",
}
LANGUAGES = ("de", "en")
VOCABULARY = 64_000
ASSEMBLY = """
precision = "bfloat16"
[sources]
dense = "dense"
[parts]
embeddings = "dense"
encoder = "dense"
decoder = "dense"
[experts]
num_experts = {experts}
"""


def spare_rows(vocabulary: int) -> TokenizerFiles:
    """A tokenizer of bytes with so many ids, most of which nothing has."""
    size = ByteVocabulary.size
    tokens = {code: size + number for number, code in enumerate(LANGUAGES)}
    numbering = Numbering(
        size=vocabulary, **SPECIALS, pieces=tuple(range(size)), language_tokens=tokens
    )
    return TokenizerFiles(
        TokenizerDescription(
            kind="bytes",
            languages=LANGUAGES,
            language_token_scheme="underscores",
            numbering=numbering,
        ),
        None,
    )


class Upcycling:
    """One dense checkpoint, and what is made of it again and again."""

    def __init__(
        self,
        folder: Path,
        *,
        layers: int,
        width: int,
        vocabulary: int,
        experts: int,
        processes: int,
    ) -> None:
        self.folder, self.processes = folder, processes
        spec = ModelSpec(
            model=ModelConfig(
                encoder_layers=layers,
                decoder_layers=layers,
                width=width,
                feed_forward_width=4 * width,
                num_heads=width // 64,
            ),
            vocabulary_size=vocabulary,
            pad_id=SPECIALS["pad"],
            languages=LANGUAGES,
        )
        model = build_model(spec)
        initialize_weights(model, seed=1)
        with new_artifact(
            folder / "dense", kind="checkpoint", stage="pretrain", config={}, inputs={}
        ) as writer:
            weights = ((entry.name, entry.value) for entry in named_slices(model))
            writer.settled |= write_weights(writer.directory / "weights", weights)
            write_spec(writer, spec)
            spare_rows(vocabulary).write(tokenizer_directory(writer))
        (folder / "assembly.toml").write_text(ASSEMBLY.format(experts=experts), encoding="utf-8")
        self.dense_parameters = num_parameters(spec)
        self.peak_bytes = 0

    def upcycle(self) -> None:
        command = [sys.executable, "-m", "pipeline", "upcycle", "assembly.toml", "--out", "made"]
        command += ["--overwrite", "--processes", str(self.processes)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.DEVNULL
        ) as process:
            done = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(process.pid, done))
            watcher.start()
            code = process.wait()
            done.set()
            watcher.join()
        if code:
            raise SystemExit("mmnmt upcycle did not succeed")

    def copy(self) -> None:
        target = self.folder / "copy"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in self.files():
            shutil.copyfile(path, target / path.name)
            with (target / path.name).open("rb") as stream:
                os.fsync(stream.fileno())

    def files(self) -> list[Path]:
        return sorted((self.folder / "made" / "weights").iterdir())

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    @property
    def parameters(self) -> int:
        return num_parameters(read_spec(open_artifact(self.folder / "made", kind="checkpoint")))

    def _watch(self, process_id: int, done: threading.Event) -> None:
        while not done.wait(0.02):
            with suppress(OSError):  # one of them may end meanwhile
                total = sum(map(own_memory, descendants(process_id)))
                self.peak_bytes = max(self.peak_bytes, total)


def descendants(process_id: int) -> list[int]:
    """A process and all that it has started."""
    found = [process_id]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    given, sys.argv[1:] = parser.parse_known_args()
    options: Options = parse_options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        upcycling = Upcycling(
            Path(folder),
            layers=2 if options.quick else given.layers,
            width=64 if options.quick else 1024,
            vocabulary=300 if options.quick else VOCABULARY,
            experts=4 if options.quick else 32,
            processes=given.processes,
        )
        if not options.quick:
            upcycling.upcycle()  # the first time is slower
        seconds = interleaved(
            {"ours": upcycling.upcycle, "copying the result": upcycling.copy},
            rounds=options.rounds,
            warm_up=0,
        )
        run = f"{given.layers} + {given.layers} layers, {given.processes} processes"
        rows = [
            *compare(seconds, case=f"assemble 32 experts, {run}", target=SPEED_TARGET),
            bounded(
                f"peak memory, {run}",
                "mebibytes",
                upcycling.peak_bytes // MEBIBYTE,
                most=MOST_MEBIBYTES,
            ),
        ]
        shapes = (
            f"{upcycling.dense_parameters / 1e6:,.0f} M parameters in float32 to "
            f"{upcycling.parameters / 1e6:,.0f} M in bfloat16, {upcycling.size / 1e9:.2f} GB, {run}"
        )
    report(rows, options, shapes=shapes)


if __name__ == "__main__":
    main()
