"""Token ids on disk, and the stage that writes them."""

import errno
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.corpora import Texts, bytes_of, make_corpus, writing
from support.folder_listing import names_in
from support.stage_runs import run_stage

from data_prep import make_shards
from data_prep.settings import ShardsConfig
from pipeline.artifacts import artifact
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Split, emptied_pairs, imported_lines, languages, line_counts
from pipeline.artifacts.run_folders import finish_removal
from pipeline.artifacts.shards import ShardWriter, open_shard, read_mixture, shard_names
from pipeline.artifacts.tokenizer import Tokenizer, TokenizerFiles, load_tokenizer
from pipeline.batching.feed import TrainingData
from pipeline.batching.settings import BatchesConfig
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError, ConfigError, DataError
from pipeline.jobs.freshness import why_not_done
from pipeline.registry import STAGES

Inputs = tuple[Artifact, Artifact]


def made_up_lines(count: int, *, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [
        "".join(generator.choices("abc дом 家", k=generator.randint(0, 30))) for _ in range(count)
    ]


TEXTS: Texts = {
    "train": {
        "de-en": {"de": made_up_lines(900, seed=1), "en": made_up_lines(900, seed=2)},
        "en-ru": {"en": made_up_lines(50, seed=3), "ru": made_up_lines(50, seed=4)},
    },
    "valid": {"de-en": {"de": made_up_lines(20, seed=5), "en": made_up_lines(20, seed=6)}},
    "test": {"de-ru": {"de": made_up_lines(20, seed=7), "ru": made_up_lines(20, seed=8)}},
}


def make_tokenizer(directory: Path, codes: tuple[str, ...] = ("de", "en", "ru")) -> Artifact:
    with writing(directory, "tokenizer", "train_tokenizer") as writer:
        TokenizerFiles(bytes_of(codes)).write(writer.directory)
    return open_artifact(directory, kind="tokenizer")


def shard(
    corpus: Artifact,
    tokenizer: Artifact,
    out_dir: Path,
    *,
    max_tokens: int | None = 40,
    processes: int = 1,
    sections: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Artifact:
    config = ShardsConfig.model_validate({"max_tokens": max_tokens, **settings})
    recipe = Recipe.model_validate({"name": "test", "shards": config, **(sections or {})})
    artifacts = {"corpus": corpus, "tokenizer": tokenizer}
    return run_stage("make_shards", out_dir, artifacts, recipe, processes=processes)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    directory = tmp_path_factory.mktemp("inputs")
    return make_corpus(directory / "corpus", TEXTS), make_tokenizer(directory / "tokenizer")


@pytest.fixture(scope="module")
def shards(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return shard(*inputs, tmp_path_factory.mktemp("made") / "shards")


def short_pairs(split: Split, pair: str, max_tokens: int = 40) -> list[tuple[bytes, bytes]]:
    """UTF-8 of the sentence pairs that fit, without spaces around them."""
    first, second = (lines for _, lines in sorted(TEXTS[split][pair].items()))
    encoded = [(a.strip().encode(), b.strip().encode()) for a, b in zip(first, second, strict=True)]
    return [both for both in encoded if len(both[0]) <= max_tokens and len(both[1]) <= max_tokens]


@pytest.mark.parametrize(
    ("split", "pair"), [("train", "de-en"), ("train", "en-ru"), ("valid", "de-en")]
)
def test_shards_hold_both_sides_in_order(shards: Artifact, split: Split, pair: str) -> None:
    sides = [open_shard(shards, split, pair, code) for code in pair.split("-")]
    expected = short_pairs(split, pair)
    assert [len(side) for side in sides] == [len(expected)] * 2
    found = [
        tuple(bytes((side[index] - 4).astype(np.uint8)) for side in sides)
        for index in range(len(expected))
    ]
    assert found == expected


def test_lengths_count_the_tokens_of_each_sentence(shards: Artifact) -> None:
    side = open_shard(shards, "train", "en-ru", "ru")
    assert side.lengths.dtype == np.int32
    assert side.lengths.tolist() == [len(second) for _, second in short_pairs("train", "en-ru")]
    assert side[0].dtype == np.uint16
    for index in (-1, len(side)):
        with pytest.raises(IndexError):
            side[index]


def test_shards_note_the_lines_before_any_were_dropped(inputs: Inputs, tmp_path: Path) -> None:
    corpus, tokenizer = inputs
    found = shard(corpus, tokenizer, tmp_path / "shards", max_tokens=9)
    assert imported_lines(found) == line_counts(corpus, "train")
    assert line_counts(found, "train") != line_counts(corpus, "train")


def test_statistics_agree_with_the_text(shards: Artifact) -> None:
    statistics = shards.statistics
    kept = {pair: short_pairs("train", pair) for pair in ("de-en", "en-ru")}
    valid = short_pairs("valid", "de-en")
    assert statistics["pairs"] == {
        "de-en": {"train": len(kept["de-en"]), "valid": len(valid)},
        "en-ru": {"train": len(kept["en-ru"]), "valid": 0},
        "de-ru": {"train": 0, "valid": 0},
    }
    assert statistics["too_long"] == {
        "de-en": 920 - len(kept["de-en"]) - len(valid),
        "en-ru": 50 - len(kept["en-ru"]),
        "de-ru": 0,
    }
    assert statistics["tokens"] == {
        pair: {
            code: sum(len(both[side]) for both in sentences)
            for side, code in enumerate(pair.split("-"))
        }
        for pair, sentences in kept.items()
    }
    assert 0 < statistics["too_long"]["en-ru"] < 50


def test_pairs_without_training_lines_are_known_but_have_no_shards(shards: Artifact) -> None:
    assert languages(shards) == ["de", "en", "ru"]
    assert list(line_counts(shards, "train")) == ["de-en", "en-ru"]
    assert shards.names("train/de-ru") == shards.names("test/") == []


@pytest.mark.slow
def test_the_number_of_workers_and_of_lines_at_once_changes_nothing(
    shards: Artifact, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = shard(*inputs, tmp_path / "parallel", processes=2)
    assert parallel.manifest.files == shards.manifest.files
    assert parallel.statistics == shards.statistics
    monkeypatch.setattr(make_shards, "CHUNK_LINES", 7)
    assert shard(*inputs, tmp_path / "chunks").manifest.files == shards.manifest.files


class HalfUnknown(Tokenizer):
    """Encodes every line as one known and one unknown token."""

    def encode_batch(self, lines: Sequence[str], *, language: str | None = None) -> list[list[int]]:
        assert language in self.languages
        return [[self.unk_id, 70] for _ in lines]


def test_the_share_of_unknown_tokens_is_counted_per_language(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(directory: Path) -> Tokenizer:
        tokenizer = load_tokenizer(directory)
        tokenizer.__class__ = HalfUnknown
        return tokenizer

    monkeypatch.setattr(make_shards, "load_tokenizer", load)
    made = shard(*inputs, tmp_path / "out")
    assert made.statistics["unknown_share"] == {"de": 0.5, "en": 0.5, "ru": 0.5}


@pytest.mark.parametrize("size", [2**16, 2**16 + 1])
def test_the_stored_type_is_found_again(size: int, tmp_path: Path) -> None:
    sentences = [[size - 1, 0], [], [5]]
    with writing(tmp_path / "shards", "shards", "make_shards") as artifact_writer:
        for code, lines in (("de", sentences), ("en", [[], [], []])):
            writer = ShardWriter(
                artifact_writer.directory, split="train", pair="de-en", language=code, size=size
            )
            writer.append(lines[:1])
            writer.append(lines[1:])
            writer.close()
    made = open_artifact(tmp_path / "shards", kind="shards")
    stored = made.file("train/de-en/de.tokens").read_bytes()
    width = 2 if size == 2**16 else 4
    assert stored == b"".join(number.to_bytes(width, "little") for number in (size - 1, 0, 5))
    side = open_shard(made, "train", "de-en", "de")
    assert [side[index].tolist() for index in range(3)] == sentences
    empty = open_shard(made, "train", "de-en", "en")
    assert [empty[index].tolist() for index in range(3)] == [[], [], []]


def test_a_truncated_shard_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    made = shard(*inputs, tmp_path / "shards")
    tokens = made.file(shard_names("valid", "de-en", "de")[0])
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ArtifactError, match=r"de\.tokens has \d+ bytes, its manifest says \d+"):
        open_shard(made, "valid", "de-en", "de")
    offsets = made.file(shard_names("valid", "de-en", "en")[1])
    offsets.write_bytes(b"no array")
    with pytest.raises(ArtifactError, match=r"en\.offsets\.npy"):
        open_shard(made, "valid", "de-en", "en")


@pytest.mark.parametrize(
    ("offsets", "told"),
    [([0, 2], r"de\.tokens has 5 bytes for 2 tokens"), ([0, 9, 2], "do not ascend")],
)
def test_two_files_of_a_side_that_do_not_fit_together_are_refused(
    offsets: list[int], told: str, tmp_path: Path
) -> None:
    tokens_name, offsets_name = shard_names("valid", "de-en", "de")
    with writing(tmp_path / "shards", "shards", "make_shards") as writer:
        writer.path(tokens_name).write_bytes(b"12345")
        np.save(writer.path(offsets_name), np.array(offsets))
    made = open_artifact(tmp_path / "shards", kind="shards")
    fix = "Restore .* from a copy, or move it away and run stage 'make_shards' again"
    with pytest.raises(ArtifactError, match=f"{told}.*{fix}"):
        open_shard(made, "valid", "de-en", "de")


def test_a_tokenizer_that_lacks_a_language_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    small = make_tokenizer(tmp_path / "small", ("de", "en"))
    with pytest.raises(ConfigError, match="no token for ru"):
        shard(inputs[0], small, tmp_path / "out")


@pytest.mark.parametrize(
    ("plain", "spelling", "code"), [("zh", "zho_Hant", "zh_Hant"), ("pt", "pt-BR", "pt_BR")]
)
def test_text_of_one_script_or_region_is_not_given_the_token_of_another(
    plain: str, spelling: str, code: str, tmp_path: Path
) -> None:
    pair, text = f"en-{plain}", {"en": ["one"], plain: ["uno"]}
    plain_corpus = make_corpus(tmp_path / "plain", {"train": {pair: text}})
    with writing(tmp_path / "corpus", "corpus") as writer:
        for name in plain_corpus.names():
            writer.take_over(name, plain_corpus)
        found = {"languages": {plain: {"spellings": [spelling]}}}
        writer.statistics.update(plain_corpus.statistics, **found)
    corpus = open_artifact(tmp_path / "corpus", kind="corpus").part(("train", "valid"))
    shard(corpus, make_tokenizer(tmp_path / "small", ("en", plain)), tmp_path / "out")
    large = make_tokenizer(tmp_path / "large", tuple(sorted(("en", plain, code))))
    shard(plain_corpus, large, tmp_path / "plain_out")
    with pytest.raises(ConfigError, match=f"calls '{plain}' what .*large knows as '{code}'"):
        shard(corpus, large, tmp_path / "again")


def test_a_training_pair_of_which_nothing_is_short_enough_is_left_without_training_data(
    inputs: Inputs, tmp_path: Path
) -> None:
    texts: Texts = {
        "train": {**TEXTS["train"], "de-ru": {"de": ["a" * 99, "b"], "ru": ["b", "c" * 41]}}
    }
    made = shard(make_corpus(tmp_path / "corpus", texts), inputs[1], tmp_path / "out")
    assert list(line_counts(made, "train")) == ["de-en", "en-ru"]
    assert emptied_pairs(made) == {"de-ru"}
    assert made.statistics["too_long_sides"]["de-ru"] == {"de": 1, "ru": 1}
    assert made.manifest.summary[-1] == "no training data left: de-ru"


def test_a_corpus_of_long_sentences_only_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    texts: Texts = {"train": {"de-ru": {"de": ["a" * 99], "ru": ["b"]}}}
    with pytest.raises(DataError, match=r"No training sentence of .* shards\.max_tokens\. Raise"):
        shard(make_corpus(tmp_path / "corpus", texts), inputs[1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_summary_says_what_was_read_kept_and_too_long(inputs: Inputs, tmp_path: Path) -> None:
    texts: Texts = {
        "train": {"de-en": {"de": ["abc", "a" * 41, "d"], "en": ["ab", "b", "c" * 50]}},
        "valid": {"de-en": {"de": ["x"], "en": ["y"]}},
    }
    made = shard(make_corpus(tmp_path / "corpus", texts), inputs[1], tmp_path / "out")
    assert made.manifest.summary == (
        "read 3 training lines and 1 of validation, kept 1 and 1: 5 training tokens",
        "left out 2 of more than 40 tokens (de 1, en 1)",
    )


def test_chunks_have_bounded_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a" * 10, "b" * 30, "", "c", "d" * 100, "e"]
    corpus = make_corpus(tmp_path / "corpus", {"train": {"de-en": {"de": lines, "en": lines}}})
    monkeypatch.setattr(make_shards, "CHUNK_CHARACTERS", 50)
    monkeypatch.setattr(make_shards, "CHUNK_LINES", 2)
    chunks = [first for first, _ in make_shards.line_pairs(corpus, "de-en", "train")]
    assert chunks == [lines[:2], lines[2:4], lines[4:5], lines[5:]]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_unequal_sides_are_refused(inputs: Inputs, tmp_path: Path, processes: int) -> None:
    texts: Texts = {"train": {"de-en": {"de": ["a", "b"], "en": ["c"]}}}
    made = make_corpus(tmp_path / "corpus", texts)
    with pytest.raises(ArtifactError, match=r"train/de-en/.* differ in their number of lines"):
        shard(made, inputs[1], tmp_path / "out", processes=processes)


def test_a_corpus_without_training_lines_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    made = make_corpus(tmp_path / "corpus", {"test": TEXTS["test"]})
    with pytest.raises(DataError, match="no training lines"):
        shard(made, inputs[1], tmp_path / "out")


class Stopped(Exception):
    """A kill, as far as a test can raise one."""


def test_pairs_that_were_finished_when_the_stage_was_stopped_are_not_made_again(
    shards: Artifact, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    shard_pair = make_shards.shard_pair

    def until_the_last(
        sharding: make_shards.Sharding, job: make_shards.PairWork
    ) -> make_shards.FinishedPair:
        if job.pair == "de-ru" and "de-ru" not in made:
            made.append(job.pair)
            raise Stopped
        made.append(job.pair)
        return shard_pair(sharding, job)

    monkeypatch.setattr(make_shards, "shard_pair", until_the_last)
    with pytest.raises(Stopped):
        shard(*inputs, tmp_path / "out")
    assert made == ["de-en", "en-ru", "de-ru"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.run"]
    again = shard(*inputs, tmp_path / "out")
    assert made == ["de-en", "en-ru", "de-ru", "de-ru"]
    assert again.manifest.files == shards.manifest.files
    assert again.statistics == shards.statistics
    again.check()
    assert not (tmp_path / "out.run").exists()


def stopped_at_the_end(inputs: Inputs, out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a run folder with every pair finished."""

    def stop(*_given: object, **_named: object) -> None:
        raise Stopped

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(make_shards, "take_files", stop)
        shard(*inputs, out_dir)


@pytest.mark.parametrize("error", [Stopped(), OSError(errno.ENOSPC, "No space left on device")])
def test_finished_pairs_are_kept_until_the_shards_are_there(
    error: Exception, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(artifact, "seal_artifact", mock.Mock(side_effect=error))
        with pytest.raises((Stopped, ArtifactError)):
            shard(*inputs, tmp_path / "out")
    assert names_in(tmp_path) == ["out.run"]
    monkeypatch.setattr(make_shards, "shard_pair", mock.Mock(side_effect=AssertionError))
    shard(*inputs, tmp_path / "out").check()
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("killed_at", "calls"), [("remove_pairs", [None, Stopped()]), ("remove_files", [Stopped()])]
)
def test_the_next_start_removes_finished_pairs_that_a_kill_left(
    killed_at: str,
    calls: list[Stopped | None],
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make_shards, killed_at, mock.Mock(side_effect=calls))
    with pytest.raises(Stopped):
        shard(*inputs, tmp_path / "out")
    assert names_in(tmp_path) == ["out", "out.run"]
    assert finish_removal(tmp_path / "out") is None
    assert names_in(tmp_path) == ["out"]
    open_artifact(tmp_path / "out", kind="shards").check()


def test_what_is_left_of_other_shards_or_was_cut_off_is_made_anew(
    shards: Artifact, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_at_the_end(inputs, tmp_path / "out", monkeypatch)
    cut = tmp_path / "out.run" / "pair.en-ru" / shard_names("train", "en-ru", "ru")[0]
    cut.write_bytes(cut.read_bytes()[:-2])
    (tmp_path / "out.run" / "pair.de-ru" / "finished.json").write_text("{")
    assert shard(*inputs, tmp_path / "out").manifest.files == shards.manifest.files
    stopped_at_the_end(inputs, tmp_path / "other", monkeypatch)
    other = shard(*inputs, tmp_path / "other", max_tokens=20)
    fresh = shard(*inputs, tmp_path / "fresh", max_tokens=20)
    assert other.manifest.files == fresh.manifest.files != shards.manifest.files


@pytest.mark.parametrize(
    ("positions", "tokens", "limit"), [(24, 4096, 22), (64, 32, 30), (1024, 4096, 1022)]
)
def test_without_a_limit_shards_keep_every_sentence_that_the_model_takes_and_no_other(
    positions: int, tokens: int, limit: int, inputs: Inputs, tmp_path: Path
) -> None:
    """A tag and end-of-sentence go with the tokens of a sentence: training accepts the rest."""
    sections = {"model": {"max_positions": positions}, "batches": {"tokens": tokens}}
    found = shard(*inputs, tmp_path / "shards", max_tokens=None, sections=sections)
    expected = shard(*inputs, tmp_path / "expected", max_tokens=limit)
    assert found.manifest.files == expected.manifest.files
    assert found.manifest.config == expected.manifest.config
    recipe = Recipe.model_validate({"name": "test", **sections})
    mixture = read_mixture(run_stage("mix", tmp_path / "mix", {"shards": found}, recipe))
    data = TrainingData(found, mixture, recipe.batches, seed=1)
    data.check(max_positions=positions)


def test_sentences_longer_than_the_model_takes_are_refused_with_the_limit_to_set(
    inputs: Inputs, shards: Artifact, tmp_path: Path
) -> None:
    """Also where the model is imported, and cannot have more positions."""
    recipe = Recipe(name="test")
    mixture = read_mixture(run_stage("mix", tmp_path / "mix", {"shards": shards}, recipe))
    longest = max(
        len(line)
        for split in ("train", "valid")
        for pair in TEXTS[split]
        for both in short_pairs(split, pair)
        for line in both
    )
    data = TrainingData(shards, mixture, recipe.batches, seed=1)
    data.check(max_positions=longest + 2)
    with pytest.raises(ConfigError) as refused:
        data.check(max_positions=longest + 1)
    said = str(refused.value)
    assert f"{longest + 2} tokens with its tags, and the model {longest + 1} positions" in said
    assert f"Set shards.max_tokens to {longest - 1} or less and make the shards again" in said
    fewer = BatchesConfig(tokens=longest + 1)
    with pytest.raises(ConfigError, match=f"set shards.max_tokens to {longest - 1} or less"):
        TrainingData(shards, mixture, fewer, seed=1)
    fitting = shard(*inputs, tmp_path / "fitting", max_tokens=longest - 1)
    mixture = read_mixture(run_stage("mix", tmp_path / "again", {"shards": fitting}, recipe))
    TrainingData(fitting, mixture, fewer, seed=1).check(max_positions=longest + 1)


def test_no_sentence_within_a_limit_that_follows_the_model_names_what_it_follows(
    inputs: Inputs, tmp_path: Path
) -> None:
    corpus = make_corpus(tmp_path / "corpus", {"train": {"de-en": {"de": ["abcd"], "en": ["ab"]}}})
    sections = {"model": {"max_positions": 5}}
    with pytest.raises(DataError, match=r"3 tokens, the limit by model\.max_positions and batches"):
        shard(corpus, inputs[1], tmp_path / "shards", max_tokens=None, sections=sections)


@pytest.fixture(scope="module")
def of_limit(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Artifact]:
    """Make the shards of a limit once."""
    folder = tmp_path_factory.mktemp("limits")
    return cache(lambda limit: shard(*inputs, folder / str(limit), max_tokens=limit))


@pytest.mark.parametrize("old", [20, 40, 70, 1000])
@pytest.mark.parametrize("new", [19, 30, 60, 69, 254, 1022])
def test_another_limit_makes_shards_stale_where_it_keeps_other_sentences_alone(
    old: int, new: int, of_limit: Callable[[int], Artifact]
) -> None:
    """A plan goes on with shards of a time when the limit was 1,000 whatever the model."""
    made, fresh = of_limit(old), of_limit(new)
    reason = why_not_done(
        made.directory,
        stage=STAGES["make_shards"],
        config=fresh.manifest.config,
        digests=made_of(made),
    )
    if made.manifest.files == fresh.manifest.files:
        assert reason is None
    else:
        assert reason == f"shards.max_tokens: {old} → {new}"


def made_of(artifact: Artifact) -> dict[str, str]:
    return {name: record.digest for name, record in artifact.manifest.inputs.items()}


def test_shards_of_damaged_offsets_are_stale_below_a_limit(inputs: Inputs, tmp_path: Path) -> None:
    made = shard(*inputs, tmp_path / "old", max_tokens=1000)
    config = {"shards": {**made.manifest.config["shards"], "max_tokens": 254}}
    stage = STAGES["make_shards"]
    assert why_not_done(made.directory, stage=stage, config=config, digests=made_of(made)) is None
    path = made.directory / shard_names("train", "en-ru", "ru")[1]
    path.write_bytes(path.read_bytes()[:-3])
    reason = why_not_done(made.directory, stage=stage, config=config, digests=made_of(made))
    assert reason == "shards.max_tokens: 1000 → 254"


def test_a_folder_of_the_users_is_not_worked_in(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "thesis.tex").write_text("mine")
    with pytest.raises(ArtifactError, match="was not made by a stage"):
        shard(*inputs, tmp_path / "out")
    assert (tmp_path / "out.run" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 2], [1] * 1000])
def test_offsets_are_the_file_that_numpy_writes(sizes: list[int], tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, split="train", pair="de-en", language="de", size=10)
    for part in (sizes[:2], sizes[2:]):
        writer.append([[1] * size for size in part])
    writer.close()
    np.save(tmp_path / "numpy.npy", np.cumsum([0, *sizes], dtype="<i8"))
    written = (tmp_path / shard_names("train", "de-en", "de")[1]).read_bytes()
    assert written == (tmp_path / "numpy.npy").read_bytes()
