"""translate: the test sets of a corpus, over all ranks; or standard input, line by line.

Reads a checkpoint and a corpus; makes translations. Batches are cut from all sentences of all
directions sorted by length and dealt out to the ranks; what is done is kept in ``OUT.run`` and not
done again after an interruption.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from pipeline.artifacts import Artifact
from pipeline.checkpoint import load_model, read_spec, read_tokenizer
from pipeline.config import DecodingConfig
from pipeline.corpus import (
    Direction,
    Hypothesis,
    directions,
    hypotheses_name,
    line_counts,
    read_lines,
    write_hypotheses,
)
from pipeline.decoding import Source, beam_search
from pipeline.distributed import (
    StopFlag,
    World,
    distributed_world,
    from_rank_zero,
    leave,
    wait_for_all,
)
from pipeline.errors import ArtifactError, ConfigError, Interrupted, UserError
from pipeline.languages import nearest_codes
from pipeline.model.transformer import Transformer
from pipeline.places import claim_run_folder, remove_files, run_dir
from pipeline.progress import JsonLines, Progress
from pipeline.run_directory import describe_change
from pipeline.shared_hashing import check_together
from pipeline.stages import StageCall
from pipeline.tokenizer import Tokenizer, tags

FILTER_LINES = 256
"""Lines read ahead by the filter, where standard input is not a terminal."""


@dataclass(frozen=True)
class Job:
    """One line to translate."""

    direction: Direction
    line: int
    text: str


def run(call: StageCall) -> None:
    """Translate every test line of the corpus in both directions of its pair."""
    corpus = call.artifacts["corpus"]
    with distributed_world() as world, StopFlag() as stop:
        checkpoint = call.artifacts["checkpoint"]
        check_together(checkpoint, checkpoint.names())
        translator = Translator(checkpoint, call.recipe.decoding)
        done = DoneLines(call, world)
        todo = [job for job in all_jobs(corpus) if (str(job.direction), job.line) not in done.keys]
        batches = translator.cut(todo)
        with Progress(call.out_dir.name, total=len(todo), enabled=world.rank == 0) as bar:
            for turn in range(-(-len(batches) // world.size)):
                if stop.agreed():
                    raise Interrupted(f"stopped, what is translated is kept in {done.directory}")
                mine = batches[turn * world.size + world.rank :][:1]
                for batch in mine:
                    done.write(batch, translator.translate(batch))
                bar.advance(sum(len(b) for b in batches[turn * world.size :][: world.size]))
        wait_for_all()
        if world.rank == 0:
            publish(call, done)


def all_jobs(corpus: Artifact) -> list[Job]:
    """Every test line in both directions, in a fixed order."""
    return [
        Job(direction, line, text)
        for direction in directions(corpus, "test")
        for line, text in enumerate(read_lines(corpus, "test", direction.pair, direction.source))
    ]


class Translator:
    """A checkpoint ready to translate, on this rank's device."""

    def __init__(self, checkpoint: Artifact, config: DecodingConfig) -> None:
        self.config = config
        self.tokenizer: Tokenizer = read_tokenizer(checkpoint)
        self.scheme = read_spec(checkpoint).tag_scheme
        dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Transformer = load_model(checkpoint, device=device).to(dtype)
        self._language = {code: i for i, code in enumerate(self.tokenizer.languages)}

    def cut(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Batches of similar length, longest first, within the budget of tokens times beams."""
        sized = sorted(
            ((len(self._encode(job.text)[0]), index) for index, job in enumerate(jobs)),
            reverse=True,
        )
        batches: list[list[Job]] = []
        longest = 0
        for length, index in sized:
            full = batches and (len(batches[-1]) + 1) * longest * self.config.beam_size
            if not full or full > self.config.tokens:
                batches.append([])
                longest = length + 2
            batches[-1].append(jobs[index])
        return batches

    def translate(self, jobs: Sequence[Job]) -> list[Hypothesis]:
        """Hypotheses in order; an empty line gives an empty one, a too long one is truncated.

        Raises:
            ConfigError: a language the model was not trained on.
        """
        encoded = [self._encode(job.text) for job in jobs]
        busy = [index for index, (tokens, _) in enumerate(encoded) if tokens]
        found = [Hypothesis("") for _ in jobs]
        if busy:
            sources = [self._source(jobs[index].direction, encoded[index][0]) for index in busy]
            translations = beam_search(
                self.model, sources, self.config, eos_id=self.tokenizer.eos_id
            )
            for index, translation in zip(busy, translations, strict=True):
                found[index] = Hypothesis(
                    self.tokenizer.decode(translation.tokens),
                    score=round(translation.score, 4),
                    truncated=encoded[index][1],
                )
        return found

    def language(self, code: str) -> int:
        """Index of a language of this model."""
        if code not in self._language:
            near = nearest_codes(code, self._language)
            raise ConfigError(
                f"This model does not know the language {code!r}: it knows "
                f"{', '.join(self._language)}" + (f"; nearest is {near[0]!r}." if near else ".")
            )
        return self._language[code]

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Token ids and whether they were cut to what the model's positions hold."""
        tokens = self.tokenizer.encode(text) if text.strip() else []
        limit = self.model.spec.model.max_positions - 2
        return tokens[:limit], len(tokens) > limit

    def _source(self, direction: Direction, tokens: list[int]) -> Source:
        language = self.language(direction.target)
        self.language(direction.source)
        tag = tags(self.tokenizer, self.scheme, source=direction.source, target=direction.target)
        return Source(
            tokens=[*tag.source_prefix, *tokens, self.tokenizer.eos_id],
            prompt=tag.decoder_prompt,
            target_language=language,
        )


class DoneLines:
    """What the ranks have translated so far, one file per rank, kept over interruptions."""

    def __init__(self, call: StageCall, world: World) -> None:
        self.directory = run_dir(call.out_dir)
        problem: str | None = None
        if world.rank == 0:
            try:
                self._begin(call)
            except (UserError, OSError) as error:
                problem = str(error)
        problem = from_rank_zero(problem)
        if problem:
            raise ArtifactError(problem)
        self.records = list(self._read())
        self.keys = {(record["direction"], record["line"]) for record in self.records}
        wait_for_all()
        self._lines = JsonLines(self.directory / f"rank-{world.rank:05d}.jsonl")
        self._lines.truncate_after(0)

    def write(self, jobs: Sequence[Job], hypotheses: Sequence[Hypothesis]) -> None:
        for job, hypothesis in zip(jobs, hypotheses, strict=True):
            self._lines.write(
                {"direction": str(job.direction), "line": job.line, **vars(hypothesis)}
            )

    def by_direction(self) -> dict[str, dict[int, Hypothesis]]:
        """All that is on disk, after every rank has finished."""
        found: dict[str, dict[int, Hypothesis]] = {}
        for record in self._read():
            direction, line = record.pop("direction"), record.pop("line")
            found.setdefault(direction, {})[line] = Hypothesis(**record)
        return found

    def _begin(self, call: StageCall) -> None:
        """Go on with what is there, if it was translated with the same settings and inputs."""
        digests = {name: record.digest for name, record in call.records.items()}
        text = json.dumps([call.config, digests])
        identity = _identity_of(text)
        claim_run_folder(self.directory, work="translation")
        path = self.directory / "identity.json"
        before = _identity_of(path.read_text(encoding="utf-8")) if path.is_file() else {}
        change = describe_change(before, identity)
        if change is None:
            return
        if before and not call.overwrite:
            raise ArtifactError(
                f"{self.directory} holds translations of other settings or inputs ({change}): go "
                "on with those, name another --out, or pass --overwrite to begin anew."
            )
        self.remove()
        claim_run_folder(self.directory, work="translation")
        path.write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Remove what this stage wrote, and the folder if nothing else is in it."""
        remove_files(self.directory, ("rank-*.jsonl", ".rank-*.jsonl.unfinished", "identity.json"))

    def _read(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.directory.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
                yield json.loads(line)


def publish(call: StageCall, done: DoneLines) -> None:
    """Write the artifact from the ranks' files, and remove them."""
    corpus = call.artifacts["corpus"]
    found = done.by_direction()
    with call.new_artifact() as writer:
        counts = line_counts(corpus, "test")
        for direction in directions(corpus, "test"):
            lines = found.get(str(direction), {})
            ordered = [lines[line] for line in range(counts[direction.pair])]
            write_hypotheses(writer.path(hypotheses_name(direction)), ordered)
        every = [hypothesis for lines in found.values() for hypothesis in lines.values()]
        writer.statistics.update(
            lines=len(every),
            empty=sum(not hypothesis.text for hypothesis in every),
            truncated=sum(hypothesis.truncated for hypothesis in every),
            directions={name: len(lines) for name, lines in sorted(found.items())},
        )
    done.remove()


def _identity_of(text: str) -> dict[str, object]:
    """Settings and inputs of a run as noted in its folder; empty where that was cut short."""
    try:
        settings, inputs = json.loads(text)
    except (ValueError, TypeError):
        return {}
    return {"settings": settings, "inputs": inputs}


def filter_lines(
    checkpoint: Artifact,
    *,
    decoding: DecodingConfig,
    source: str,
    target: str,
    lines: Iterator[str],
    write: Callable[[str], None],
) -> None:
    """Translate a stream of lines in order; ``write`` gets each translation without a line end."""
    translator = Translator(checkpoint, decoding)
    direction = Direction(source, target)
    translator.language(source)
    translator.language(target)
    ahead = 1 if sys.stdin.isatty() else FILTER_LINES
    while chunk := list(islice(lines, ahead)):
        jobs = [Job(direction, i, line.removesuffix("\n")) for i, line in enumerate(chunk)]
        texts = [""] * len(jobs)
        for batch in translator.cut(jobs):
            for job, hypothesis in zip(batch, translator.translate(batch), strict=True):
                texts[job.line] = hypothesis.text.replace("\n", " ")
        for text in texts:
            write(text)


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("translate"))
