"""Translate the test sets of a corpus over all ranks: the stage ``translate``.

It reads a checkpoint and a corpus, makes translations of all directions between languages that the
model knows, and lists the others. Batches are cut from all sentences of all directions sorted by
length and dealt out to the ranks, which meet again when all are done. Finished batches are kept in
``OUT.run`` and not repeated after an interruption. ``decoding/line_filter.py`` translates standard
input.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    Details,
    Direction,
    Hypothesis,
    details_name,
    directions,
    hypotheses_name,
    hypothesis_of,
    hypothesis_record,
    line_counts,
    read_lines,
    refuse_other_codes,
    write_details,
    write_hypotheses,
)
from pipeline.artifacts.locks import held_lock, lock_path
from pipeline.artifacts.manifest import run_dir
from pipeline.artifacts.run_folders import (
    NOTE_NAME,
    TRANSLATION_FILES,
    announce_removal,
    claim_run_folder,
    remove_files,
)
from pipeline.checkpoints.checkpoint import read_spec, read_tokenizer
from pipeline.config.documents import JsonLines, unfinished_path
from pipeline.config.recipe import describe_change, with_defaults
from pipeline.config.settings import Route
from pipeline.decoding.settings import LENGTH_LIMITS
from pipeline.decoding.translator import Job, Translator
from pipeline.distributed.process import Progress
from pipeline.distributed.world import (
    StopFlag,
    World,
    distributed_world,
    from_rank_zero,
    gather_objects,
    leave,
    on_rank_zero,
    wait_for_all,
)
from pipeline.errors import AgreedStop, ArtifactError, ConfigError
from pipeline.languages import codes_of_setting
from pipeline.stage import Stage, StageCall
from pipeline.terminal import counted, listed


@dataclass(frozen=True)
class Selection:
    """The test directions of a corpus: those that the model knows, and the others, sorted."""

    taken: tuple[Direction, ...]
    skipped: tuple[Direction, ...]
    untested: tuple[str, ...] = ()
    """Languages of ``decoding.targets`` that no direction is into, sorted."""


def run(call: StageCall) -> None:
    """Translate every test line of the corpus in all directions that the model knows."""
    corpus = call.artifacts["corpus"]
    selection = select_directions(
        corpus,
        checkpoint=call.artifacts["checkpoint"],
        targets=call.recipe.decoding.targets,
        route=call.recipe.decoding.route,
    )
    with distributed_world(stacks_dir=call.stacks_dir) as world, StopFlag() as stop:
        translator = Translator(
            call.open_inputs()["checkpoint"],
            call.recipe.decoding,
            segmenters=call.recipe.tokenizer.segmenters,
        )
        translator.load_segmenters({direction.source for direction in selection.taken})
        done = DoneLines(call, world)
        jobs = all_jobs(corpus, selection)
        todo = [job for job in jobs if not done.has([job])]
        batches = translator.cut(todo, lengths_over_ranks(translator, todo, world))
        with Progress(call.out_dir.name, total=len(todo), enabled=world.rank == 0) as bar:
            translate_batches(translator, batches, done, stop=stop, bar=bar)
        if world.rank == 0:
            publish(call, done, selection=selection)


def select_directions(
    corpus: Artifact,
    *,
    checkpoint: Artifact,
    targets: Sequence[str] = (),
    route: Route = "specific",
) -> Selection:
    """Split the directions of all pairs with test lines by whether the model knows them.

    A language that the route has no module for counts as not known. ``targets``: the only languages
    that are translated into, if there are any.

    Raises:
        ArtifactError: the corpus has no test lines.
        ConfigError: the model knows none of the directions, none is into the targets, a target is
            in neither the model nor the corpus, or a language has another code in the model.
    """
    tokenizer = read_tokenizer(checkpoint)
    known, into = set(read_spec(checkpoint).languages_of(route)), tokenizer.target_languages
    every = directions(corpus, "test")
    if not every:
        raise ArtifactError(
            f"{corpus.directory} has no test lines. Translate a corpus that has test sets."
        )
    taken = [
        way for way in every if {way.source, way.target} <= known and tokenizer.writes(way.target)
    ]
    if not taken:
        raise ConfigError(
            f"The model knows none of {counted(len(every), 'test direction')} of "
            f"{corpus.directory} ({listed(map(str, every))}): it knows {', '.join(sorted(known))}"
            + (f", and translates only into {listed(into)}" if into else "")
            + ". Name a corpus with two of those."
        )
    refuse_other_codes(corpus, known, place="the model")
    meant = codes_of_setting(targets, known, setting="decoding.targets", place="the model")
    asked = {*meant.values()}
    wanted = [direction for direction in taken if not asked or direction.target in asked]
    if not wanted:
        raise ConfigError(
            f"decoding.targets names {listed(targets)}, and none of the test directions that the "
            f"model knows ({listed(map(str, taken))}) is into them. Name a target of those."
        )
    skipped, untested = {*every} - {*wanted}, asked - {way.target for way in wanted}
    return Selection(tuple(wanted), tuple(sorted(skipped)), tuple(sorted(untested)))


def translate_batches(
    translator: Translator,
    batches: Sequence[list[Job]],
    done: "DoneLines",
    *,
    stop: StopFlag,
    bar: Progress,
) -> None:
    """Translate batches, which the ranks take in turn; all ranks call this.

    Raises:
        AgreedStop: a rank was asked to stop; the batches that are finished are kept.
    """
    world = done.world
    is_cut_short = False
    for turn in range(-(-len(batches) // world.size)):
        if stop.requested:  # no rank waits for another here
            is_cut_short = True
            break
        mine = batches[turn * world.size + world.rank :][:1]
        for batch in mine:
            done.write(batch, translator.translate(batch))
        if world.rank == 0:
            done.time.save()
        bar.advance(sum(len(b) for b in batches[turn * world.size :][: world.size]))
    wait_for_all()
    if any(gather_objects(is_cut_short)):
        raise AgreedStop(f"stopped, what is translated is kept in {done.directory}")


def lengths_over_ranks(translator: Translator, jobs: Sequence[Job], world: World) -> list[int]:
    """Return the tokens of every line; each rank encodes its share."""
    shares = gather_objects(translator.lengths(jobs[world.rank :: world.size]))
    lengths = [0] * len(jobs)
    for rank, share in enumerate(shares):
        lengths[rank :: world.size] = share
    return lengths


def all_jobs(corpus: Artifact, selection: Selection) -> list[Job]:
    """Return every test line of the selected directions, in a fixed order."""
    return [
        Job(direction, line, text)
        for direction in selection.taken
        for line, text in enumerate(read_lines(corpus, "test", direction.pair, direction.source))
    ]


class DoneLines:
    """The translations of all ranks so far, one file per rank, kept over interruptions."""

    def __init__(self, call: StageCall, world: World) -> None:
        self.directory, self.world = run_dir(call.out_dir), world
        self._lock = from_rank_zero(held_lock(lock_path(call.out_dir)))
        on_rank_zero(lambda: self._begin(call), path=self.directory, error=ArtifactError)
        self.time = WorkingTime(self.directory / "seconds.json", since=call.clock)
        self.keys = {(record["direction"], record["line"]) for record in self._read()}
        wait_for_all()
        self._lines = JsonLines(self.directory / f"rank-{world.rank:05d}.jsonl")
        self._lines.truncate_after(0)

    def write(self, jobs: Sequence[Job], hypotheses: Sequence[Hypothesis]) -> None:
        """Append the translations of a batch to this rank's file.

        Raises:
            ArtifactError: another process has taken the output's lock.
        """
        self._refuse_if_lost()
        self._lines.write(
            *(
                {"direction": str(job.direction), "line": job.line} | hypothesis_record(hypothesis)
                for job, hypothesis in zip(jobs, hypotheses, strict=True)
            )
        )

    def has(self, jobs: Sequence[Job]) -> bool:
        """Return whether every line of a batch was translated when this attempt began."""
        return all((str(job.direction), job.line) in self.keys for job in jobs)

    def by_direction(self) -> dict[str, dict[int, Hypothesis]]:
        """Return all translations on disk, after every rank has finished."""
        translated: dict[str, dict[int, Hypothesis]] = {}
        for record in self._read():
            direction, line = record.pop("direction"), record.pop("line")
            what = f"Translation {line} of {direction} in {self.directory}"
            translated.setdefault(direction, {})[line] = hypothesis_of(record, what=what)
        return translated

    def move(self, write: Callable[[], None]) -> None:
        """Let rank 0 write all translations elsewhere, and forget them; all ranks call this.

        Raises:
            ArtifactError: another process has taken the output's lock, or they cannot be written.
        """

        def act() -> None:
            self._refuse_if_lost()
            write()
            for path in self.directory.glob("rank-*.jsonl"):
                path.unlink()

        on_rank_zero(act, path=self.directory, error=ArtifactError)
        self.keys.clear()

    def _refuse_if_lost(self) -> None:
        if self._lock is not None:
            self._lock.refuse_if_lost()

    def _begin(self, call: StageCall) -> None:
        """Keep earlier translations if they have the same settings and inputs."""
        digests = {name: record.digest for name, record in call.records.items()}
        text = json.dumps([call.config, digests])
        identity = _identity_of(text, stage=call.stage)
        claim_run_folder(self.directory, work="translation")
        path = self.directory / "identity.json"
        before = _identity_of(path.read_bytes(), stage=call.stage) if path.is_file() else {}
        change = describe_change(before, identity)
        if change is None:
            return
        files = (*self.directory.glob("rank-*.jsonl"), *self.directory.glob("chunk-*.jsonl"))
        if before and not call.overwrite and any(file.stat().st_size for file in files):
            raise ArtifactError(
                f"{self.directory} holds translations of other settings or inputs ({change}). Go "
                "on with those, name another --out, or pass --overwrite to begin anew."
            )
        self.remove()
        claim_run_folder(self.directory, work="translation")
        path.write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Remove what this stage wrote, and the directory if nothing else is in it."""
        remove_files(self.directory, (*TRANSLATION_FILES, NOTE_NAME))

    def _read(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.directory.glob("rank-*.jsonl")):
            for record in JsonLines(path).read():
                if not {"direction", "line"} <= record.keys():
                    raise ArtifactError(
                        f"{path} has a line that no translation stands in. Remove {self.directory}."
                    )
                yield record


class WorkingTime:
    """Seconds of work, including interrupted attempts, kept in a file.

    ``since`` is ``time.monotonic()`` when this attempt began. What an attempt did after it last
    saved is forgotten, as are lines that it had not yet written.
    """

    def __init__(self, path: Path, *, since: float) -> None:
        self._path, self._since = path, since
        self._earlier = _read_seconds(path)

    @property
    def seconds(self) -> float:
        """Seconds so far, to the millisecond."""
        return round(self._earlier + time.monotonic() - self._since, 3)

    def save(self) -> None:
        """Write the seconds so far to the file."""
        temporary = unfinished_path(self._path)
        temporary.write_text(json.dumps(self.seconds), encoding="utf-8")
        temporary.replace(self._path)


def _read_seconds(path: Path) -> float:
    """Read what an earlier attempt saved; 0 if there is no valid duration."""
    try:
        seconds = float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0


def publish(call: StageCall, done: DoneLines, *, selection: Selection) -> None:
    """Write the artifact from the ranks' files, and remove them."""
    counts = line_counts(call.artifacts["corpus"], "test")
    translated = done.by_direction()
    ordered = {
        direction: [translated[str(direction)][line] for line in range(counts[direction.pair])]
        for direction in selection.taken
    }
    tally = Tally(selection.taken)
    announce_removal(done.directory, key=call.key)
    with call.new_artifact(wall_seconds=done.time.seconds) as writer:
        for direction, hypotheses in ordered.items():
            write_hypotheses(writer.path(hypotheses_name(direction)), hypotheses)
            if call.recipe.decoding.wants_details:
                details = [hypothesis.details or Details() for hypothesis in hypotheses]
                write_details(writer.path(details_name(direction)), details)
            for hypothesis in hypotheses:
                tally.add(direction, vars(hypothesis))
        skipped = [str(direction) for direction in selection.skipped]
        writer.statistics.update(tally.statistics(), skipped_directions=skipped)
        summarize(writer, selection)
    done.remove()


_REMARKS = ("truncated", "split", "invalid", "unknown", "at_limit")
"""Properties of translations of which lines are counted."""


class Tally:
    """Counts of translations, as the statistics of translations and translated text hold them."""

    def __init__(self, directions: Iterable[Direction]) -> None:
        self._lines = {str(direction): 0 for direction in directions}
        self._invalid = Counter[str]()
        self._counts = dict.fromkeys(("empty", *_REMARKS), 0)

    def add(self, direction: Direction, record: Mapping[str, Any]) -> None:
        """Count one translation, given as a JSON object."""
        self._lines[str(direction)] += 1
        self._invalid[str(direction)] += record["invalid"]
        self._counts["empty"] += not record["text"]
        for name in _REMARKS:
            self._counts[name] += record.get(name, 0) > 0

    def statistics(self) -> dict[str, Any]:
        """Return lines by direction, lines by property, and byte sequences that were dropped."""
        return {
            "lines": sum(self._lines.values()),
            **self._counts,
            "invalid_sequences": dict(+self._invalid),
            "directions": self._lines,
        }


def _identity_of(noted: str | bytes, *, stage: Stage) -> dict[str, object]:
    """Parse the inputs and deciding settings that a run noted; empty if it was cut short."""
    try:
        settings, inputs = json.loads(noted)
    except (ValueError, TypeError, RecursionError):
        return {}
    if not isinstance(settings, dict):
        return {}
    completed = with_defaults(settings, sections=stage.sections)
    return {"settings": stage.deciding(completed), "inputs": inputs}


def summarize(writer: ArtifactWriter, selection: Selection) -> None:
    """Describe the statistics in the summary."""
    counts = writer.statistics
    writer.summary.append(
        f"{counted(counts['lines'], 'line')} in {counted(len(selection.taken), 'direction')} "
        f"translated; {counts['empty']:,} of the translations are empty"
    )
    if counts["split"]:
        writer.summary.append(
            f"{counted(counts['split'], 'line')} too long for the model: translated in parts, "
            "split at sentence ends where there are any, and joined again"
        )
    if counts["truncated"]:
        writer.summary.append(
            f"{counted(counts['truncated'], 'line')} truncated: a single character has more tokens "
            "than the model takes"
        )
    if counts["unknown"]:
        writer.summary.append(
            f"{counted(counts['unknown'], 'line')} with characters that the model's vocabulary "
            "does not have"
        )
    if counts["at_limit"]:
        writer.summary.append(
            f"{counted(counts['at_limit'], 'translation')} as long as {LENGTH_LIMITS} permit: "
            "the end may be cut off"
        )
    if counts["invalid"]:
        invalid = counts["invalid_sequences"]
        by_count = sorted(invalid, key=lambda name: (-invalid[name], name))
        writer.summary.append(
            f"{counted(sum(invalid.values()), 'sequence')} of bytes that are no UTF-8 dropped from "
            f"{counted(counts['invalid'], 'translation')}: "
            f"{listed(f'{name} {invalid[name]:,}' for name in by_count)}"
        )
    if selection.skipped:
        writer.summary.append(
            f"{counted(len(selection.skipped), 'direction')} skipped: the model lacks one of "
            "the languages, or its module on this route, or decoding.targets excludes the target "
            "language: "
            f"{listed(map(str, selection.skipped))}"
        )
    if selection.untested:
        writer.summary.append(
            f"decoding.targets names {listed(selection.untested)}, into which the corpus has no "
            "test lines that the model can translate"
        )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("translate"))
