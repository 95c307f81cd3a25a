"""Plans and batches are what they were when their digests were written down here.

Whatever makes the feed faster, a run that was stopped goes on with the sentences it would have
seen, and a published run can be done again.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.corpora import Texts, bytes_of, make_corpus, writing
from support.passes import assert_same, join
from support.stage_runs import run_stage

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction, Split
from pipeline.artifacts.shards import Mixture, Phase, ShardWriter
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.batching import feed
from pipeline.batching.batch import Batch, Example, Packing, collate
from pipeline.batching.feed import TrainingData
from pipeline.batching.global_step import MicroBatch
from pipeline.batching.settings import BatchesConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError
from pipeline.seeds import derive_seed
from pipeline.temperature_sampling import temperature_probabilities

SIZES = {
    "usual": {"de-en": 3000, "el-en": 40, "en-fr": 500},
    "tiny": {"de-en": 7, "el-en": 1, "en-fr": 3},
    "one pair": {"de-en": 800},
}
"""Training lines of a corpus."""

ONE_WAY, TARGET_TAGS = {"one_direction": True}, {"tag_scheme": "tgt"}
Case = tuple[str, tuple[int, int, int], Mapping[str, Any], float, str, str]
CASES: dict[str, Case] = {
    "usual": ("usual", (4, 150, 5), {}, 5.0, "846fcec9374f5ae3", "f6e942a8358fb92b"),
    "one way": ("usual", (4, 150, 9), ONE_WAY, 5.0, "83761b4b067550e7", "25f03dfa7c6b9ee0"),
    "tags": ("usual", (8, 200, 32), TARGET_TAGS, 2.0, "93b04a0dc786d53a", "e09f089d9f7979de"),
    "M = 2": ("usual", (2, 300, 3), {}, 1.0, "e4b4ea7320b16a1a", "1e16c2b27f92ced0"),
    "M = 32": ("usual", (32, 100, 4), {}, 5.0, "1934f28cc3aadaa5", "d983dc337fdf11cb"),
    "M = 512": ("usual", (512, 100, 2), {}, 5.0, "b53ba8fabe054aaf", "83ae8d5e7c33b4a9"),
    "tiny": ("tiny", (4, 60, 3), {}, 5.0, "fbadf4ce5a5b5cb8", "f09ec2dd93d0ccee"),
    "tiny, one way": ("tiny", (32, 50, 6), ONE_WAY, inf, "6bfbf30138e4e9bc", "cfe5ac200e6461bd"),
    "one pair": ("one pair", (3, 90, 40), {}, 5.0, "1aa5ab3f3070bbb4", "17d11a66dffc6c3e"),
}
"""Corpus; micro-batches, their tokens, steps of a window; more settings of batches; temperature;
digests of windows 0, 1 and 7, and of the tensors of the first updates and of validation."""


def digest(values: Iterable[Any]) -> str:
    """Of whole numbers, with the lengths of their lists."""
    found = hashlib.sha256()
    for value in values:
        array = np.asarray(value, dtype="<i8")
        found.update(array.size.to_bytes(8, "little") + array.tobytes())
    return found.hexdigest()[:16]


def plan_values(plan: MicroBatch) -> list[Any]:
    return [plan.pair_B, plan.reverse_B, plan.line_B, plan.num_labels, plan.num_tokens]


def batch_values(batch: Batch) -> list[Any]:
    values: list[Any] = []
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Packing):
            values += [value.index_N, value.batch, value.length, value.is_full]
        elif value is None:
            assert field.name == "source_begins_N"
        else:
            assert value.dtype == torch.int64
            values.append(value)
    return values


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of made-up sentences, some of them empty, a folder per corpus."""
    directory = tmp_path_factory.mktemp("corpora")
    description = TokenizerDescription(
        kind="bytes", languages=("de", "el", "en", "fr"), language_token_scheme="underscores"
    )
    for corpus, sizes in SIZES.items():
        generator = np.random.default_rng(11)
        with writing(directory / corpus, "shards") as writer:
            TokenizerFiles(description).write(writer.path("tokenizer/tokenizer.json").parent)
            for name, size in sizes.items():
                for split, count in (("train", size), ("valid", 5)):
                    for code in name.split("-"):
                        write_side(writer.directory, split, name, code, count, generator)  # type: ignore[arg-type]
            pairs = {name: {"train": size, "valid": 5} for name, size in sizes.items()}
            writer.statistics["pairs"] = pairs
    return directory


def write_side(
    directory: Path,
    split: Split,
    pair: str,
    code: str,
    count: int,
    generator: np.random.Generator,
) -> None:
    side = ShardWriter(directory, split=split, pair=pair, language=code, size=300)
    lengths = generator.integers(0, 30, count)
    side.append([generator.integers(4, 260, length).tolist() for length in lengths])
    side.close()


def open_data(corpora: Path, case: str, **more: Any) -> TrainingData:
    corpus, (micro_batches, tokens, steps), settings, temperature, *_ = CASES[case]
    sizes = {"micro_batches": micro_batches, "tokens": tokens, "window_steps": steps}
    config = BatchesConfig.model_validate({**sizes, **settings, **more})
    shares = temperature_probabilities(SIZES[corpus], sampling_temperature=temperature)
    shards = open_artifact(corpora / corpus, kind="shards")
    return TrainingData(shards, Mixture.constant(shares), config, seed=3)


@pytest.mark.parametrize("case", CASES)
def test_a_window_is_planned_as_it_always_was(corpora: Path, case: str) -> None:
    planner = open_data(corpora, case).planner
    plans = [plan for window in (0, 1, 7) for plan in planner.window(window)]
    values = [value for plan in plans for value in plan_values(plan)]
    assert digest([planner.window_sentences, *values]) == CASES[case][-2]


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_a_batch_are_what_they_always_were(corpora: Path, case: str) -> None:
    data = open_data(corpora, case)
    steps = islice(data.planner.steps((0, 0)), 3)
    batches = [data.train.batch(plan) for step in steps for plan in step.micro_batches]
    batches += [data.valid.batch(plan) for _, plan in data.validation(budget=60)]
    assert digest(value for batch in batches for value in batch_values(batch)) == CASES[case][-1]


INTO_ENGLISH = {"de-en": 1.0, "en-fr": 0.0}


@pytest.mark.parametrize(
    ("forward", "zero_shot"),
    [({}, {"de-fr", "fr-de"}), (INTO_ENGLISH, set()), ({"en-fr": 0.0}, {"fr-de"})],
)
def test_zero_shot_directions_are_validated_into_the_targets_of_training_only(
    forward: dict[str, float], zero_shot: set[str], tmp_path: Path
) -> None:
    """With mixture.targets, validation had directions into other languages than those."""
    pairs = ("de-en", "en-fr", "de-fr")
    valid = {pair: {code: ["ab", "c"] for code in pair.split("-")} for pair in pairs}
    train = {pair: valid[pair] for pair in pairs[:2]}
    train["de+distilled-en"] = {"de+distilled": ["ab"], "en": ["ab"]}
    texts: Texts = {"train": train, "valid": valid}
    given = {"corpus": make_corpus(tmp_path / "corpus", texts)}
    with writing(tmp_path / "tokenizer", "tokenizer") as writer:
        TokenizerFiles(bytes_of(("de", "en", "fr"))).write(writer.directory)
    given["tokenizer"] = open_artifact(tmp_path / "tokenizer", kind="tokenizer")
    shards = run_stage("make_shards", tmp_path / "shards", given, Recipe(name="test"))
    none = {"de-en": 0.0, "en-fr": 0.0, "de+distilled-en": 0.0}
    mixture = Mixture((Phase(1, none | {"de-en": 0.5, "en-fr": 0.5}, forward),))
    data = TrainingData(shards, mixture, BatchesConfig(), seed=1)
    found = {str(way) for way, _ in data.validation(budget=60)}
    assert found & {"de-fr", "fr-de"} == zero_shot
    assert found >= {"de-en", "fr-en"}
    # A pair that no phase draws is neither validated nor counted, and no target of training.
    for kept, own in (("de-en", {"de", "en"}), ("en-fr", {"en", "fr"})):
        phase = Phase(1, none | {kept: 1.0}, forward)
        data = TrainingData(shards, Mixture((phase, phase)), BatchesConfig(), seed=1)
        ways = {way for way, _ in data.validation(budget=60)}
        assert {way.pair for way in ways} - {"de-fr"} == {kept}
        assert {way.target for way in ways} <= own
        assert data.train_lines == {kept: 2}
    # Lines that a machine wrote are validated by lines that it did not write.
    phase = Phase(1, none | {"de+distilled-en": 1.0}, {"de+distilled-en": 0.0})
    data = TrainingData(shards, Mixture((phase,)), BatchesConfig(), seed=1)
    assert data.validated() == {Direction("en", "de"), Direction("fr", "de")}


def one_by_one(data: TrainingData, plan: MicroBatch) -> Batch:
    """A batch from its sentences, each read and laid out alone."""
    tokenizer, examples = data.tokenizer, []
    for pair, reverse, line in zip(plan.pair_B, plan.reverse_B, plan.line_B, strict=True):
        opened = data.train._pairs[pair]
        codes, sides = opened.languages, opened.sides
        if reverse:
            codes, sides = codes[::-1], sides[::-1]
        prefix, prompt = (
            (tokenizer.language_token_id(codes[0]),),
            (tokenizer.eos_id, tokenizer.language_token_id(codes[1])),
        )
        examples.append(
            Example(
                source=sides[0][int(line)],
                target=sides[1][int(line)],
                source_prefix=prefix,
                decoder_prompt=prompt,
                source_language=tokenizer.languages.index(codes[0]),
                target_language=tokenizer.languages.index(codes[1]),
                pair=int(pair),
                line=int(line),
            )
        )
    return collate(examples, eos_id=tokenizer.eos_id)


def test_a_batch_read_at_once_is_the_one_read_sentence_by_sentence(corpora: Path) -> None:
    data = open_data(corpora, "usual")
    for plan in data.planner.window(2):
        found, expected = data.train.batch(plan), one_by_one(data, plan)
        assert digest(batch_values(found)) == digest(batch_values(expected))


def test_a_tag_behind_the_source_moves_and_nothing_else(corpora: Path) -> None:
    before = open_data(corpora, "usual")
    behind = open_data(corpora, "usual", tag_scheme="src-suffix-tgt")
    for plan in before.planner.window(0):
        one, other = before.train.batch(plan), behind.train.batch(plan)
        lengths = np.bincount(one.source.sentence_N.numpy()).tolist()
        rows = [[*row[1:], row[0]] for row in one.source_N.split(lengths)]
        assert other.source_N.tolist() == [int(token) for row in rows for token in row]
        assert one.target_N.tolist() == other.target_N.tolist()
        assert one.labels_L.tolist() == other.labels_L.tolist()


@pytest.mark.parametrize(("ranks", "per_pass"), [(1, 1), (1, 3), (3, 1), (3, 2), (4, 2)])
def test_reading_ahead_gives_every_rank_its_passes_in_order(
    corpora: Path, ranks: int, per_pass: int
) -> None:
    data = open_data(corpora, "usual")
    threads = set(threading.enumerate())
    for rank in range(ranks):
        steps = islice(data.planner.steps((0, 2)), 9)
        with closing(
            data.updates((0, 2), rank=rank, ranks=ranks, update=7, per_pass=per_pass)
        ) as updates:
            for number, (step, update) in enumerate(zip(steps, updates, strict=False), start=8):
                assert (update.number, update.step.next_cursor) == (number, step.next_cursor)
                turns = [turn[rank] for turn in step.turns(ranks)]
                shared = [turns[at : at + per_pass] for at in range(0, len(turns), per_pass)]
                for found, taken in zip(update.ahead, shared, strict=True):
                    indices = [index for index in taken if index is not None]
                    plans = [step.micro_batches[index] for index in indices] or [step.stand_in()]
                    assert found.micro_batches == tuple(indices)
                    names: Sequence[int | str] = indices or ["stand-in"]
                    seeds = [derive_seed("dropout", 3, number, name) for name in names]
                    batches = [
                        data.train.batch(plan).keyed(seed)
                        for plan, seed in zip(plans, seeds, strict=True)
                    ]
                    assert isinstance(found.batch, Batch)
                    assert_same(found.batch, batches[0] if per_pass == 1 else join(batches))
    del steps
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("gpu", [1, 7])
def test_the_thread_that_reads_ahead_pins_on_the_gpu_of_its_rank(
    corpora: Path, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new thread has GPU 0: allocating pinned memory there makes a CUDA context on it.
    found: list[tuple[str, int]] = []

    def note(device: int) -> None:
        found.append((threading.current_thread().name.rstrip("_0"), device))

    def pin(batch: Batch, *, pinned: bool) -> Batch:
        note(found[-1][1] if found and pinned else 0)
        return batch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", note)
    monkeypatch.setattr(feed, "in_one_buffer", pin)
    with closing(open_data(corpora, "usual").updates((0, 0), rank=0, ranks=1)) as updates:
        next(updates)
    assert len(found) > 1
    assert set(found) == {("read ahead", gpu)}


def test_an_update_whose_passes_are_not_taken_does_not_shift_the_next(corpora: Path) -> None:
    data = open_data(corpora, "usual")
    with closing(data.updates((0, 0), rank=0, ranks=1, per_pass=3)) as updates:
        next(updates)
        second = next(updates)
        assert [one.micro_batches for one in second.ahead] == [
            one.micro_batches for one in second.passes()
        ]


def test_passes_leave_micro_batches_out(corpora: Path) -> None:
    data = open_data(corpora, "usual")
    with closing(data.updates((0, 0), rank=0, ranks=1, per_pass=2)) as updates:
        update = next(updates)
    first, second, third, fourth = (turn[0] for turn in update.step.turns(1))
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is not None
    passes = list(update.passes(without={second, third, fourth}))
    assert [one.micro_batches for one in passes] == [(first,), ()]
    assert passes[1].batch.num_labels > 0, "one sentence stands in"
    taken = update.step.micro_batches[first]
    assert isinstance(passes[1].batch, Batch)
    assert passes[1].batch.line_B.tolist() == taken.line_B[:1].tolist()


@pytest.mark.parametrize(("ending", "size"), [(".tokens", 0), (".offsets.npy", 2**13)])
def test_a_file_that_changes_in_size_under_a_run_is_named(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, size: int
) -> None:
    """To read pages beyond the end of a file that was cut off ends a process by SIGBUS."""
    monkeypatch.setattr("pipeline.batching.feed.LOOK_SECONDS", 0.0)
    shutil.copytree(corpora, tmp_path / "copy")
    data = open_data(tmp_path / "copy", "usual")
    plan = next(data.planner.steps((0, 0))).micro_batches[0]
    assert data.train.batch(plan).num_labels > 0
    for path in (tmp_path / "copy").rglob(f"train/*/*{ending}"):
        os.truncate(path, size)
    said = rf"copy/.*{ending} has {size:,} bytes, and had [\d,]+ when this run began\. Restore"
    with pytest.raises(ArtifactError, match=said):
        data.train.batch(plan)


def test_a_line_beyond_its_pair_is_refused(corpora: Path) -> None:
    data = open_data(corpora, "tiny")
    plan = data.planner.window(0)[0]
    with pytest.raises(IndexError, match="a line that its pair does not have"):
        data.train.batch(replace(plan, line_B=plan.line_B + 7))
