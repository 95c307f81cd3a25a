"""Saving and resuming a training state, beside plain writing and reading of the same bytes.

A dense model under the engine has done one update, so that masters and moments are there. Its state
is saved as a training run does it in the foreground; the peer writes as many bytes from memory into
one file and forces them to disk. In the background, training waits while the state is copied in
memory and is slower while the copy is written. Updates are made meanwhile; the time that they take
beyond their own is divided by that of the updates between two saves by default. A state is resumed
from a cold cache, all digests checked; the peer reads the same files by one thread. Saving, like
its peer, begins by removing what was written in the round before. Peak memory is the process's
own, mapped files not counted, beyond what it had before.

    python tests/bench/checkpoint.py [--parameters MILLIONS] [--rounds N] [--quick] [--json FILE]
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

from feed import own_memory, watching_memory
from ratios import Options, Row, beside, bounded, compare, interleaved, parse_options, report
from support.passes import passes_of
from support.tiny_models import random_batch

from pipeline.artifacts import artifact as remembering
from pipeline.artifacts.artifact import Artifact, ArtifactWriter, open_artifact
from pipeline.artifacts.manifest import READ_BYTES
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.resharding import CheckedState, Piece, write_pieces
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World, distributed_world, leave
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import placeholder_spec
from pipeline.training.engine import Engine, connect
from pipeline.training.optim import make_optimizer
from pipeline.training.run_directory import RunDirectory
from pipeline.training.settings import TrainingConfig

MEBIBYTE = 2**20
SAVE_TARGET = 0.9
MOST_PERCENT = 5.0
"""Of the training time between two saves."""
RESUME_TARGET = 0.6
PEAK_TARGET = 4.0
"""The state is this many times the memory that saving it takes."""

CASES = {
    r"save a state of \d+\.\d GB, against writing and syncing": "milliseconds",
    r"what a save of \d+\.\d GB in the background adds to [\d,]+ updates, at most": "percent",
    r"resume from a state of \d+\.\d GB, against reading": "milliseconds",
    r"peak memory of (saving|resuming) a state of \d+\.\d GB, against its size": "mebibytes",
}
DEFAULT_MILLIONS = 100
WIDTH = 1024
LAYER_MILLIONS = 29
"""Of an encoder and a decoder layer of M2M-100's width."""
VOCABULARY = 32_000
TAGS = 2
BUFFER_BYTES = 64 * MEBIBYTE


def forget_pages(path: Path) -> None:
    """Ask the kernel to drop a file from its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(path: Path) -> None:
    """Read all of a file, into one buffer again and again."""
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


@dataclass(frozen=True)
class Saved:
    """A run's folder with one state, the engine it was saved from, and what updates that."""

    engine: Engine
    run_directory: RunDirectory
    folder: Path
    update: Callable[[], object]

    @property
    def place(self) -> Path:
        return self.run_directory.states_dir / "update-0000001"

    @property
    def state(self) -> Artifact:
        return open_artifact(self.place, kind="training_state")

    def save(self) -> None:
        self._save(self.engine.optimizer_pieces(copied=False), in_background=False)

    def added_seconds(self) -> tuple[float, float]:
        """Seconds that a save in the background adds to training, and those of an update."""
        begin, updates = time.perf_counter(), 0
        self._save(iter(list(self.engine.optimizer_pieces())), in_background=True)
        while not self.place.exists():
            self.update()
            updates += 1
            self.run_directory.publish_written()
        saved = time.perf_counter()
        for _ in range(updates):
            self.update()
        alone = time.perf_counter() - saved
        return saved - begin - alone, alone / updates

    def _save(self, pieces: Iterator[Piece], *, in_background: bool) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

        def write(writer: ArtifactWriter) -> None:
            writer.settled |= write_pieces(writer.directory / "optimizer", pieces, part=0)

        self.run_directory.write(
            self.place, kind="training_state", write=write, in_background=in_background
        )

    def resume(self) -> None:
        """As a process does that knows nothing of the state, on a machine that has not read it."""
        self.forget()
        self.engine.load_optimizer_pieces(CheckedState(self.state), update=1)

    def read(self) -> None:
        self.forget()
        for path in self.files():
            read(path)

    def write_plainly(self) -> None:
        path, left = self.folder / "plain", self.size
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as stream:
            while left:
                left -= stream.write(RANDOM[:left])
            os.fsync(stream.fileno())

    def forget(self) -> None:
        remembering._INTACT.clear()
        for path in self.files():
            forget_pages(path)

    def files(self) -> list[Path]:
        return sorted(self.place.glob("optimizer/*"))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    @property
    def gigabytes(self) -> str:
        """The size, which the name of every case has: a run measures one."""
        return f"{self.size / 1e9:.1f} GB"


RANDOM = memoryview(os.urandom(BUFFER_BYTES))


def make_saved(world: World, folder: Path, *, millions: int, quick: bool) -> Saved:
    """A model of about so many parameters, after one update, and a place for its state."""
    connect(world)
    layers = max(1, round((millions - VOCABULARY * WIDTH / 1e6) / LAYER_MILLIONS))
    width, vocabulary = (64, 400) if quick else (WIDTH, VOCABULARY)
    recipe = Recipe(
        name="checkpoint",
        model=ModelConfig(
            encoder_layers=layers,
            decoder_layers=layers,
            width=width,
            feed_forward_width=4 * width,
            num_heads=16,
        ),
        batches=BatchesConfig(micro_batches=1),
    )
    spec = placeholder_spec(recipe.model, vocabulary_size=vocabulary, num_groups=TAGS)
    model = build_model(spec)
    initialize_weights(model, seed=1)
    engine = Engine(
        model,
        recipe,
        world=world,
        ds_config={"zero_optimization": {"stage": 1}},
        make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
    )
    batch = random_batch(spec, sentences=2, seed=1)
    update = partial(
        engine.train_step, passes_of([batch]), total_labels=batch.num_labels, learning_rate=1e-4
    )
    update()
    run_directory = RunDirectory(
        folder / "model", stage="pretrain", config={}, inputs={}, world=world
    )
    return Saved(engine, run_directory, folder, update)


def compare_saving(saved: Saved, options: Options) -> list[Row]:
    seconds = interleaved(
        {"ours": saved.save, "writing and syncing": saved.write_plainly},
        rounds=options.rounds,
        warm_up=1,
    )
    between = TrainingConfig().checkpoint_every
    shares = [
        100 * added / (between * of_update)
        for added, of_update in (saved.added_seconds() for _ in range(options.rounds))
    ]
    return [
        *compare(seconds, case=f"save a state of {saved.gigabytes}", target=SAVE_TARGET),
        bounded(
            f"what a save of {saved.gigabytes} in the background adds to {between:,} updates",
            "percent",
            max(median(shares), 0.001),
            most=MOST_PERCENT,
        ),
    ]


def compare_resuming(saved: Saved, options: Options) -> list[Row]:
    seconds = interleaved(
        {"ours": saved.resume, "reading": saved.read}, rounds=options.rounds, warm_up=1
    )
    case = f"resume from a state of {saved.gigabytes}"
    return compare(seconds, case=case, target=RESUME_TARGET)


def peak_row(action: Callable[[], None], saved: Saved, *, verb: str) -> Row:
    """The memory that an action takes, and the state's size by it."""
    before = own_memory()
    with watching_memory() as peak:
        action()
    taken = max(1, (peak.bytes - before) // MEBIBYTE)
    size = saved.size // MEBIBYTE
    case = f"peak memory of {verb} a state of {saved.gigabytes}, against its size"
    return beside(case, "mebibytes", taken, size, target=PEAK_TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--parameters", type=int, default=DEFAULT_MILLIONS)
    given, sys.argv[1:] = parser.parse_known_args()
    options = parse_options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder, distributed_world() as world:
        millions = 1 if options.quick else given.parameters
        saved = make_saved(world, Path(folder), millions=millions, quick=options.quick)
        parameters = sum(value.numel() for value in saved.engine.model.parameters())
        rows = [
            peak_row(saved.save, saved, verb="saving"),
            peak_row(saved.resume, saved, verb="resuming"),
            *compare_saving(saved, options),
            *compare_resuming(saved, options),
        ]
        shapes = f"{parameters / 1e6:,.0f} M parameters, a state of {saved.size / 1e9:.2f} GB"
    report(rows, options, shapes=shapes)


if __name__ == "__main__":
    main()
    leave(0)
