"""Translate files and folders of text over all ranks: the stage ``translate_text``.

The output has every input file as it was read and once per target language, line by line. The
lines of all files are translated in chunks (``decoding/text_input.py``), and memory does not grow
with the text. A chunk is cut into batches that do not depend on the ranks, which take them in
turn. Finished batches, and then finished chunks, are kept in ``OUT.run`` and not repeated after an
interruption.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction, hypothesis_record, scores_name, translated_name
from pipeline.artifacts.run_folders import announce_removal
from pipeline.config.documents import read_json_lines, unfinished_path
from pipeline.decoding.text_input import (
    ENDINGS,
    Chunk,
    TextFile,
    chunks,
    find_texts,
    without_line_breaks,
)
from pipeline.decoding.translator import Job, Translator
from pipeline.distributed import process
from pipeline.distributed.process import Progress
from pipeline.distributed.world import StopFlag, distributed_world, leave, on_rank_zero
from pipeline.errors import ConfigError, DataError
from pipeline.stage import StageCall
from pipeline.stages.translate import (
    DoneLines,
    Selection,
    Tally,
    lengths_over_ranks,
    summarize,
    translate_batches,
)
from pipeline.terminal import counted, listed


def run(call: StageCall) -> None:
    """Translate every line of every file into all target languages."""
    settings, decoding = call.recipe.text, call.recipe.decoding
    texts, left_out = find_texts(call.raw["text"], field=settings.field)
    states = [state_of(text) for text in texts]
    with distributed_world(stacks_dir=call.stacks_dir) as world, StopFlag() as stop:
        checkpoint = call.open_inputs()["checkpoint"]
        translator = Translator(checkpoint, decoding, segmenters=call.recipe.tokenizer.segmenters)
        directions = find_directions(translator, settings.source, targets=decoding.targets)
        translator.load_segmenters([directions[0].source])
        done = DoneLines(call, world)
        copies = len(directions)
        finished, left = on_rank_zero(
            lambda: count_left(texts, done.directory, copies=copies),
            path=texts[0].path,
            error=DataError,
        )
        with Progress(call.out_dir.name, total=left * copies, enabled=world.rank == 0) as bar:
            for chunk in islice(chunks(texts, copies=copies), finished, None):
                translate_chunk(translator, chunk, directions, done, stop=stop, bar=bar)
        if world.rank == 0:
            publish(call, done, directions, texts=texts, states=states, left_out=left_out)


def state_of(text: TextFile) -> tuple[int, int]:
    """Return size and time of a file, by which a change is told."""
    status = text.path.stat()
    return status.st_size, status.st_mtime_ns


def translate_chunk(
    translator: Translator,
    chunk: Chunk,
    directions: Sequence[Direction],
    done: DoneLines,
    *,
    stop: StopFlag,
    bar: Progress,
) -> None:
    """Translate the lines of a chunk that are not translated yet, and keep all of them."""
    jobs = [
        Job(direction, line, text)
        for direction in directions
        for line, text in enumerate(chunk.texts, start=chunk.first)
    ]
    lengths = lengths_over_ranks(translator, jobs[: len(chunk.texts)], done.world)
    batches = translator.cut(jobs, lengths * len(directions))
    # A batch is the same in every attempt, so no score is rounded otherwise.
    todo = [batch for batch in batches if not done.has(batch)]
    translate_batches(translator, todo, done, stop=stop, bar=bar)
    done.move(partial(write_chunk, done, chunk, directions))


def find_directions(
    translator: Translator, source: str, *, targets: Sequence[str]
) -> list[Direction]:
    """Return the directions from the source into all targets, in the model's own codes.

    Raises:
        ConfigError: no source is named, the model does not know a language, or the source is a
            target.
    """
    if not source:
        raise ConfigError(
            "text.source names no language. Say which one the text is in, for example with --set "
            "text.source=en."
        )
    code, tokenizer = translator.code_of(source), translator.tokenizer
    others = [
        language
        for language in translator.model.spec.languages_of(translator.config.route)
        if language != code and tokenizer.writes(language)
    ]
    wanted = [translator.code_of(target) for target in targets] or others
    if code in wanted:
        raise ConfigError(
            f"decoding.targets names {code}, the language of the text (text.source). Leave it out."
        )
    if not wanted:
        raise ConfigError(
            f"The model translates only into {code}, the language of the text. Name another "
            "model, or another text."
        )
    for language in (code, *wanted):
        translator.language(language)
    for language in wanted:
        tokenizer.refuse_to_write(language)
    return [Direction(code, target) for target in dict.fromkeys(wanted)]


def chunk_path(directory: Path, number: int) -> Path:
    """Return the file that keeps the translations of a chunk."""
    return directory / f"chunk-{number:08d}.jsonl"


def count_left(texts: Sequence[TextFile], directory: Path, *, copies: int) -> tuple[int, int]:
    """Read all text; return the number of finished chunks, and of the lines in all others.

    Raises:
        ConfigError, DataError: A line is no text, which is to be known before any is translated.
    """
    finished = next(number for number in count() if not chunk_path(directory, number).is_file())
    left = 0
    for chunk in chunks(texts, copies=copies):
        process.advance()
        left += len(chunk.texts) if chunk.number >= finished else 0
    return finished, left


def write_chunk(done: DoneLines, chunk: Chunk, directions: Sequence[Direction]) -> None:
    """Keep the translations of a chunk, one JSON object per direction and line, in this order."""
    translated = done.by_direction()
    path = chunk_path(done.directory, chunk.number)
    temporary = unfinished_path(path)
    with temporary.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps({"files": chunk.files}, ensure_ascii=False) + "\n")
        for direction in directions:
            for line in range(chunk.first, chunk.first + len(chunk.texts)):
                record = hypothesis_record(translated[str(direction)][line])
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def publish(
    call: StageCall,
    done: DoneLines,
    directions: Sequence[Direction],
    *,
    texts: Sequence[TextFile],
    states: Sequence[tuple[int, int]],
    left_out: Sequence[str],
) -> None:
    """Write the artifact from the finished chunks, and remove them.

    Raises:
        DataError: A file is not in its state of before, so that lines may be of another text.
    """
    refuse_changed(texts, states)
    tally = Tally(directions)
    announce_removal(done.directory, key=call.key)
    with call.new_artifact(wall_seconds=done.time.seconds) as writer:
        for chunk in chunks(texts, copies=len(directions)):
            process.advance()
            _append_texts(writer, chunk, directions[0].source)
            path = chunk_path(done.directory, chunk.number)
            for direction, record in _append_chunk(writer, path, directions):
                tally.add(direction, record)
        refuse_changed(texts, states)  # they have been read once more
        writer.statistics.update(tally.statistics(), files=len(texts), files_left_out=len(left_out))
        summarize(writer, Selection(tuple(directions), skipped=()))
        if left_out:
            writer.summary.append(
                f"{counted(len(left_out), 'file')} left out, since text ends in {listed(ENDINGS)}: "
                f"{listed(left_out)}"
            )
    done.remove()


def refuse_changed(texts: Sequence[TextFile], states: Sequence[tuple[int, int]]) -> None:
    """Raise DataError for the first file that is not in this state any more."""
    for text, state in zip(texts, states, strict=True):
        if not text.path.is_file() or state_of(text) != state:
            raise DataError(
                f"{text.path} was changed while it was translated. Run again, with --overwrite if "
                "its text is another now."
            )


def _append_texts(writer: ArtifactWriter, chunk: Chunk, language: str) -> None:
    """Append the lines of a chunk, which its translations are paired with."""
    lines = iter(chunk.texts)
    for name, number in chunk.files:
        with writer.path(translated_name(language, name)).open(
            "a", encoding="utf-8", newline="\n"
        ) as stream:
            stream.writelines(f"{line}\n" for line in islice(lines, number))


def _append_chunk(
    writer: ArtifactWriter, path: Path, directions: Sequence[Direction]
) -> Iterator[tuple[Direction, dict[str, Any]]]:
    """Append a chunk to the files of the artifact; yield every direction and record."""
    records = read_json_lines(path)
    files = next(records)["files"]
    for direction in directions:
        for name, number in files:
            text = writer.path(translated_name(direction.target, name))
            scores = writer.path(scores_name(direction.target, name))
            with (
                text.open("a", encoding="utf-8", newline="\n") as texts,
                scores.open("a", encoding="utf-8", newline="\n") as others,
            ):
                for record in islice(records, number):
                    yield direction, record
                    texts.write(without_line_breaks(record.pop("text")) + "\n")
                    others.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("translate_text"))
