"""Words of segmenters from text to the model: the same in training, validation and translation.

A corpus of Japanese (MeCab), Chinese (characters), Thai (a function) and German, which has none.
"""

import os
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.corpora import make_corpus, writing
from support.fronted_models import fronted_byte_spec
from support.process_pool import ProcessPool
from support.tiny_models import attend_to_source, tiny_model
from support.tiny_training import Inputs, pretrain

from data_prep.make_shards import Sharding, pair_jobs, shard_pair
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction, Split, read_hypotheses, read_lines
from pipeline.artifacts.shards import open_shard
from pipeline.artifacts.tokenizer import load_tokenizer, tokenizer_folder
from pipeline.batching.feed import SplitData
from pipeline.batching.global_step import MicroBatch
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.checkpoint import write_model_files
from pipeline.checkpoints.weights import write_weights
from pipeline.config.recipe import load_recipe
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.hypotheses import forced_pass, source_begins
from pipeline.decoding.line_filter import filter_lines
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.text_input import IncomingLines, without_line_breaks
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ArtifactError, ConfigError
from pipeline.model.parameters import named_slices
from pipeline.model.spec import ModelSpec

SETTINGS = """
shards = {{ max_tokens = 60 }}
decoding = {{ beam_size = 2, max_length_ratio = 0.0, max_extra_length = 4 }}
tokenizer.kind = "bytes"
tokenizer.segmenters = {{ ja = "mecab", zho = "characters", th = "{folder}/words.py:pairs" }}
"""
TRAINING = """
batches = { tokens = 300, micro_batches = 1, window_steps = 2, evaluation_tokens = 300 }
optimizer = { warmup_updates = 1 }
training = { updates = 2, validate_every = 2, checkpoint_every = 2 }
[model]
encoder_layers = 1
decoder_layers = 1
width = 16
feed_forward_width = 16
num_heads = 2
max_positions = 128
front = { kind = "wsf", layers = 1 }
"""
FUNCTION = "def pairs(text):\n    return [text[i:i + 2] for i in range(0, len(text), 2)]\n"
LINES: Mapping[str, list[str]] = {
    "de-ja": ["猫は魚を食べる。", "犬が 好き", "長" * 90, "本", "東京に行く"],
    "de-th": ["แมวกินปลา", "", "ไป โรงเรียน", "ดี", "abc de"],
    "de-zh": ["猫吃鱼。", "我 爱\u3000你", "好", "好好学习", "GPT"],
}
GERMAN = ["Die Katze isst Fisch.", "Gut so", "Ja", "  zwei  Räume ", "x"]
LANGUAGES = ("de", "ja", "th", "zh")
WORDS = {  # of the first lines
    "ja": ["猫", "は", "魚", "を", "食べる", "。"],
    "th": ["แม", "วก", "ิน", "ปล", "า"],
    "zh": ["猫", "吃", "鱼", "。"],
}


@dataclass(frozen=True)
class Made:
    """What the stages made in a folder."""

    folder: Path

    def recipe(self, name: str = "recipe.toml") -> Path:
        return self.folder / name

    def stage(self, name: str, recipe: str = "recipe.toml", **inputs: str) -> list[str]:
        named = [
            part for key, value in inputs.items() for part in (f"--{key}", f"{self.folder}/{value}")
        ]
        out = ["--out", str(self.folder / name)]
        return [name, "--recipe", str(self.recipe(recipe)), *named, *out]

    @property
    def shards(self) -> Artifact:
        return open_artifact(self.folder / "make_shards", kind="shards")

    @property
    def corpus(self) -> Artifact:
        return open_artifact(self.folder / "corpus", kind="corpus")

    @property
    def named(self) -> dict[str, str]:
        """The segmenter that only a recipe can find."""
        return {"th": f"{self.folder}/words.py:pairs"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Corpus, tokenizer, shards and mixture."""
    made = Made(tmp_path_factory.mktemp("words"))
    (made.folder / "words.py").write_text(FUNCTION, encoding="utf-8")
    settings = SETTINGS.format(folder=made.folder)
    made.recipe().write_text(settings, encoding="utf-8")
    made.recipe("training.toml").write_text(settings + TRAINING, encoding="utf-8")
    sides = {pair: {"de": GERMAN, pair[3:]: lines} for pair, lines in LINES.items()}
    splits: tuple[Split, ...] = ("train", "valid", "test")
    make_corpus(made.folder / "corpus", dict.fromkeys(splits, sides))
    for command in (
        made.stage("train_tokenizer", corpus="corpus"),
        made.stage("make_shards", corpus="corpus", tokenizer="train_tokenizer"),
        made.stage("mix", shards="make_shards"),
    ):
        assert cli.main(command) == 0
    return made


def write_checkpoint(directory: Path, spec: ModelSpec, tokenizer_dir: Path) -> Artifact:
    """A checkpoint that nothing has trained, whose translations differ with their sources."""
    model = tiny_model(spec)
    attend_to_source(model, factor=6)
    with writing(directory, "checkpoint", "pretrain") as writer:
        tensors = ((entry.name, entry.value) for entry in named_slices(model))
        write_weights(writer.directory / "weights", tensors)
        write_model_files(writer, spec=spec, tokenizer_dir=tokenizer_dir)
    return open_artifact(directory, kind="checkpoint")


@pytest.fixture(scope="module")
def checkpoint(made: Made) -> Artifact:
    spec = fronted_byte_spec({"kind": "wsf", "layers": 1}, model={"max_positions": 64})
    spec = spec.model_copy(update={"languages": LANGUAGES})
    return write_checkpoint(made.folder / "model", spec, tokenizer_folder(made.shards))


def split_data(made: Made, split: Split) -> SplitData:
    tokenizer = load_tokenizer(tokenizer_folder(made.shards))
    return SplitData(made.shards, split, tokenizer=tokenizer, config=BatchesConfig())


def plan_of(sentences: list[tuple[int, int, int]]) -> MicroBatch:
    pair_B, reverse_B, line_B = (np.array(column) for column in zip(*sentences, strict=True))
    return MicroBatch(pair_B, reverse_B, line_B, num_labels=0, num_tokens=0)


def kept_lines(pair: str) -> list[int]:
    return [i for i, line in enumerate(LINES[pair]) if len(line.encode()) <= 60]


@pytest.mark.slow
def test_shards_hold_the_words_of_languages_with_a_segmenter_and_of_no_other(made: Made) -> None:
    for pair, lines in LINES.items():
        code = pair[3:]
        for split in ("train", "valid"):
            shard = open_shard(made.shards, split, pair, code, has_begins=True)
            assert shard.begins is not None
            first = shard.begins[: int(shard.offsets[1])]
            starts = [*np.flatnonzero(first).tolist(), len(first)]
            text = lines[0].encode()
            found = [text[begin:end].decode() for begin, end in pairwise(starts)]
            assert found == WORDS[code]
    names = made.shards.names("")
    assert {Path(name).stem for name in names if name.endswith(".begins")} == {"ja", "th", "zh"}
    assert any(
        re.fullmatch(r"words of training lines: ja \d+ by mecab, th \d+ .*, zh 15 .*", line)
        for line in made.shards.manifest.summary
    )


def test_a_worker_finds_the_words_by_the_names_that_it_is_sent(made: Made, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(made.shards))
    recipe = load_recipe(str(made.recipe()))
    sharding = Sharding(made.corpus, tokenizer, recipe.max_tokens, recipe.tokenizer.segmenters)
    [job] = [job for job in pair_jobs(made.corpus, work_dir=tmp_path) if job.pair == "de-th"]
    assert "th" in sharding.words
    sharding.words.load(["th"])
    sent = pickle.dumps(sharding)
    for name in [name for name in sys.modules if name.startswith("segmenter_")]:
        del sys.modules[name]
    finished = shard_pair(pickle.loads(sent), job)
    kept = made.shards.manifest.files
    assert finished.files == {name: kept[name] for name in kept if "/de-th/" in name}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_training_and_translation_have_the_same_words(
    made: Made, checkpoint: Artifact, split: Split
) -> None:
    """In one batch of all languages, in both directions, and each line alone."""
    data = split_data(made, split)
    translator = Translator(checkpoint, DecodingConfig(), segmenters=made.named)
    sentences, jobs = [], []
    for index, pair in enumerate(sorted(LINES)):
        for reverse in (0, 1):
            direction = Direction(pair[3:], "de") if reverse else Direction("de", pair[3:])
            texts = read_lines(made.corpus, split, pair, direction.source)
            for stored, line in enumerate(kept_lines(pair)):
                if texts[line].strip():
                    sentences.append((index, reverse, stored))
                    jobs.append(Job(direction, line, texts[line]))
    batch = data.batch(plan_of(sentences))
    sources = translator.sources(jobs)
    assert batch.source_N.tolist() == [token for source in sources for token in source.tokens]
    assert batch.source_begins_N is not None
    expected = source_begins(sources, torch.device("cpu"))
    assert expected is not None
    assert torch.equal(batch.source_begins_N, expected)
    alone = [data.batch(plan_of([one])).source_begins_N for one in sentences]
    assert torch.equal(batch.source_begins_N, torch.cat([one for one in alone if one is not None]))
    for source, job in zip(sources, jobs, strict=True):
        assert any(source.begins) == (job.direction.source != "de")


def test_the_model_is_given_the_words_and_attends_within_them(
    made: Made, checkpoint: Artifact
) -> None:
    data = split_data(made, "train")
    translator = Translator(checkpoint, DecodingConfig(), segmenters=made.named)
    model = translator.model.eval()
    seen: list[torch.Tensor] = []
    model.front.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].begins_N))
    batch = data.batch(plan_of([(0, 1, 0), (0, 0, 0), (2, 1, 0)]))
    model(batch)
    texts = {"ja-de": LINES["de-ja"][0], "de-ja": GERMAN[0], "zh-de": LINES["de-zh"][0]}
    translator.translate([Job(Direction(*d.split("-")), 0, text) for d, text in texts.items()])
    trained, decoded = seen
    assert trained.sum() == decoded.sum() == len(WORDS["ja"]) + len(WORDS["zh"])


@pytest.mark.slow
def test_a_line_is_translated_alone_as_among_others_and_by_its_words(
    made: Made, checkpoint: Artifact
) -> None:
    decoding = DecodingConfig(beam_size=2, max_length_ratio=0.0, max_extra_length=6)
    translator = Translator(checkpoint, decoding, segmenters=made.named)
    jobs = [
        Job(Direction(pair[3:], "de"), number, line)
        for pair, lines in sorted(LINES.items())
        for number, line in enumerate(lines)
    ]
    jobs += [Job(Direction("de", "zh"), number, line) for number, line in enumerate(GERMAN)]
    together = translator.translate(jobs)
    alone = [translator.translate([job])[0] for job in jobs]
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.split > 0 for one in together] == [len(j.text.encode()) > 62 for j in jobs]
    blind = [replace(source, begins=()) for source in translator.sources(jobs)]
    found = [beam_search(translator.model, [one], decoding, eos_id=2)[0].tokens for one in blind]
    seeing = [
        beam_search(translator.model, [one], decoding, eos_id=2)[0].tokens
        for one in translator.sources(jobs)
    ]
    differ = [a != b for a, b in zip(found, seeing, strict=True)]
    assert any(differ[: -len(GERMAN)])
    assert not any(differ[-len(GERMAN) :])


@torch.inference_mode()
def test_the_pass_over_a_translation_sees_the_words_that_the_search_saw(
    made: Made, checkpoint: Artifact
) -> None:
    config = DecodingConfig(beam_size=1, max_length_ratio=0.0, max_extra_length=6)
    translator = Translator(checkpoint, config, segmenters=made.named)
    model, eos_id = translator.model, translator.tokenizer.eos_id
    sources = translator.sources([Job(Direction("ja", "de"), 0, LINES["de-ja"][0])])
    found = beam_search(model, sources, config, eos_id=eos_id)
    (forced,) = forced_pass(model, sources, found, eos_id=eos_id)
    steps = len(forced.log_p)
    assert sum(forced.log_p) / steps == pytest.approx(found[0].score, abs=1e-4)
    blind = [replace(source, begins=()) for source in sources]
    (other,) = forced_pass(model, blind, found[:1], eos_id=eos_id)
    assert sum(other.log_p) != pytest.approx(sum(forced.log_p), abs=1e-3)


def test_a_model_of_another_front_needs_no_segmenter(made: Made, tmp_path: Path) -> None:
    spec = fronted_byte_spec({"kind": "ncf"}).model_copy(update={"languages": LANGUAGES})
    stored = write_checkpoint(tmp_path / "model", spec, tokenizer_folder(made.shards))
    translator = Translator(stored, DecodingConfig(beam_size=1, max_extra_length=2))
    translator.load_segmenters(LANGUAGES)
    (source,) = translator.sources([Job(Direction("th", "de"), 0, "แมว")])
    assert source.begins == ()


# ---------------------------------------------------------------- the command line


@pytest.mark.slow
def test_a_checkpoint_segments_by_itself_and_asks_for_a_function_it_cannot_have(
    made: Made, checkpoint: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = made.recipe("bare.toml")
    bare.write_text("[decoding]\nbeam_size = 1\ntargets = ['de']\n", encoding="utf-8")
    command = made.stage("translate", "bare.toml", checkpoint="model", corpus="corpus")
    assert cli.main(command) != 0
    told = capsys.readouterr().err
    assert "The words of th are found by a user's function 'pairs'" in told
    assert "Traceback" not in told
    assert cli.main(made.stage("translate", checkpoint="model", corpus="corpus")) == 0
    found = open_artifact(made.folder / "translate", kind="translations")
    assert len(read_hypotheses(found, Direction("ja", "de"))) == len(GERMAN)
    translator = Translator(checkpoint, DecodingConfig(beam_size=1))
    translator.load_segmenters(["ja", "zh", "de"])
    with pytest.raises(ConfigError, match=r"The words of th .*no model includes"):
        translator.load_segmenters(["th"])


def test_lines_of_a_pipe_are_translated_by_their_words(made: Made, checkpoint: Artifact) -> None:
    config = DecodingConfig(beam_size=2, max_length_ratio=0.0, max_extra_length=6)
    translator = Translator(checkpoint, config, segmenters=made.named)
    lines = [line for line in LINES["de-th"] if line]
    expected = [translator.translate([Job(Direction("th", "de"), 0, line)])[0] for line in lines]
    read, write = os.pipe()
    os.write(write, "".join(f"{line}\n" for line in lines).encode())
    os.close(write)
    found: list[str] = []
    said: list[str] = []
    filter_lines(
        checkpoint,
        decoding=config,
        source="tha",
        target="de",
        lines=IncomingLines(read),
        write=found.append,
        say=said.append,
        segmenters=made.named,
    )
    os.close(read)
    assert found == [without_line_breaks(one.text) for one in expected]


@pytest.mark.slow
def test_pretraining_takes_the_words_and_names_no_language_without_spaces(
    made: Made, pool1: ProcessPool, tmp_path: Path
) -> None:
    with writing(tmp_path / "groups", "groups") as writer:
        writer.write_json(
            "groups.json", {"groups": {code: int(code == "de") for code in LANGUAGES}}
        )
    inputs = Inputs(
        made.shards,
        open_artifact(made.folder / "mix", kind="mixture"),
        open_artifact(tmp_path / "groups", kind="groups"),
    )
    recipe = load_recipe(str(made.recipe("training.toml")))
    assert pool1.run(pretrain, inputs, tmp_path / "model", recipe) == ["done"]
    trained = open_artifact(tmp_path / "model", kind="checkpoint")
    assert "white space" not in " ".join(trained.manifest.summary)
    tokenizer = load_tokenizer(tokenizer_folder(trained))
    assert {code: one.name for code, one in tokenizer.segmenters.items()} == {
        "ja": "mecab",
        "th": "pairs",
        "zh": "characters",
    }


def test_a_file_of_beginnings_that_is_cut_off_is_refused(made: Made, tmp_path: Path) -> None:
    shards = made.shards
    with writing(tmp_path / "cut", "shards", "x") as writer:
        for name in shards.names("train/de-zh/"):
            content = shards.file(name).read_bytes()
            cut = content[:-1] if name.endswith(".begins") else content
            writer.path(name).write_bytes(cut)
    damaged = open_artifact(tmp_path / "cut", kind="shards")
    open_shard(damaged, "train", "de-zh", "zh")
    with pytest.raises(ArtifactError, match=r"zh.begins has \d+ bytes for \d+ tokens"):
        open_shard(damaged, "train", "de-zh", "zh", has_begins=True)
