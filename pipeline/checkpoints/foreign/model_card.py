"""Write the model card of an exported checkpoint: ``README.md`` with a header for model hubs.

The card states what manifests record: the manifest of the checkpoint, and the manifests of the
artifacts that it was made from, if they can still be found.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.artifacts.artifact import Artifact, Lineage, open_recorded
from pipeline.artifacts.corpus import pair_name
from pipeline.artifacts.manifest import to_json
from pipeline.artifacts.tokenizer import MODEL_NAME, TokenizerFiles
from pipeline.checkpoints.foreign.layouts import Layout
from pipeline.checkpoints.names import num_parameters
from pipeline.languages import language
from pipeline.model.spec import ModelSpec

NOT_RECORDED = "Not recorded."


@dataclass(frozen=True)
class Card:
    """The facts of a model card."""

    checkpoint: Artifact
    spec: ModelSpec
    """The exported model."""
    tokenizer: TokenizerFiles
    to: str
    """The format: ``hf-m2m100``, ``hf-nllb-moe`` or ``ctranslate2``."""
    license: str
    targets: tuple[str, ...]
    """Target languages of the exported model."""
    scores: Artifact | None
    """The evaluation to quote."""

    @cached_property
    def lineage(self) -> Lineage:
        """Return the checkpoint and the artifacts that it was made from."""
        found = Lineage()
        found.add(self.checkpoint, follow=lambda record: record.kind != "raw")
        return found

    def text(self, *, loading: str, tokens: Mapping[str, str]) -> str:
        """Return the whole file; ``tokens`` maps codes of languages to their tokens."""
        sections = {
            "Languages": self._languages(tokens),
            "How to load it": loading,
            "Data": self._data(),
            "Recipe": self._recipe(),
            "Scores": self._scores(),
            "Licence": f"{self.license}\n",
        }
        body = "\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
        return f"{self._header()}\n# {self.checkpoint.directory.name}\n\n{self._about()}\n{body}"

    # ------------------------------------------------------------ head

    def _header(self) -> str:
        """Return the front matter, quoted as JSON so that YAML reads ``no`` as a language."""
        languages = [f"- {json.dumps(code)}" for code in self.spec.languages]
        library = "ctranslate2" if self.to == "ctranslate2" else "transformers"
        lines = [
            *("---", "language:", *languages, f"license: {json.dumps(self.license)}"),
            *(f"library_name: {library}", "pipeline_tag: translation"),
            *("tags:", "- translation", *(["- moe"] if self.spec.model.moe else []), "---", ""),
        ]
        return "\n".join(lines)

    def _about(self) -> str:
        model, moe = self.spec.model, self.spec.model.moe
        experts = f" and {moe.num_experts} experts in every {moe.every}. layer" if moe else ""
        return (
            f"A multilingual translation model of {num_parameters(self.spec):,} parameters: a "
            f"Transformer of {model.encoder_layers} encoder and {model.decoder_layers} decoder "
            f"layers, width {model.width:,}{experts}. Written by mmnmt from the checkpoint "
            f"`{self.checkpoint.digest}`.\n"
        )

    def _languages(self, tokens: Mapping[str, str]) -> str:
        rows = [
            (language(code).name, f"`{code}`", f"`{tokens[code]}`") for code in self.spec.languages
        ]
        table = _table(("language", "code", "token"), rows)
        if set(self.targets) == set(self.spec.languages):
            return f"From and into all of these languages:\n\n{table}"
        into = ", ".join(f"`{code}`" for code in self.targets)
        return (
            f"From all of these languages:\n\n{table}\nInto: {into}. This is the model for one "
            "group of target languages: into others it is another model than the one that was "
            "trained.\n"
        )

    # ------------------------------------------------------------ loading

    def transformers_loading(self, layout: Layout) -> str:
        """Return an example in Python that translates a sentence with transformers."""
        source, target = self._example()
        name = "M2M100Tokenizer" if layout.of_hundred else "NllbTokenizer"
        of_source, of_target = layout.token_of[source], layout.token_of[target]
        spelling = of_source.strip("_") if layout.of_hundred else of_source
        model = "M2M100" if self.to == "hf-m2m100" else "NllbMoe"
        code = [
            f"from transformers import {model}ForConditionalGeneration, {name}",
            "",
            f"model = {model}ForConditionalGeneration.from_pretrained(DIR).eval()",
            f'tokenizer = {name}.from_pretrained(DIR, src_lang="{spelling}")',
            f'text = "a sentence in {language(source).name}"',
            'batch = tokenizer([text], return_tensors="pt")',
            f'target = tokenizer.convert_tokens_to_ids("{of_target}")',
            "output = model.generate(**batch, forced_bos_token_id=target)",
            "print(tokenizer.batch_decode(output, skip_special_tokens=True))",
        ]
        return _python(code)

    def ctranslate2_loading(self) -> str:
        """Return an example in Python that translates a sentence with CTranslate2."""
        source, target = self._example()
        written = self.tokenizer.description.language_token
        of_source, of_target = written(source), written(target)
        prefixed = self.spec.tag_scheme == "src-tgt"
        tag = of_source if prefixed else of_target
        prefix = f', target_prefix=[["{of_target}"]]' if prefixed else ""
        shown = "hypothesis[1:]" if prefixed else "hypothesis"
        code = [
            "import ctranslate2",
            "from sentencepiece import SentencePieceProcessor",
            "",
            f'pieces = SentencePieceProcessor(model_file="DIR/{MODEL_NAME}")',
            'translator = ctranslate2.Translator("DIR")',
            f'text = "a sentence in {language(source).name}"',
            f'tokens = ["{tag}", *pieces.encode(text, out_type=str), "</s>"]',
            f"options = dict(max_decoding_length={min(256, self.spec.model.max_positions)})",
            f"results = translator.translate_batch([tokens]{prefix}, **options)",
            "hypothesis = results[0].hypotheses[0]",
            f"print(pieces.decode({shown}))",
        ]
        return _python(code)

    def _example(self) -> tuple[str, str]:
        """Return source and target language of the examples: the pair with most training text.

        If the text is not recorded, they are the first languages, a source from English.
        """
        drawn = {
            code
            for artifact in self.lineage.found.values()
            if artifact.manifest.kind == "mixture"
            for code in artifact.manifest.config.get("mixture", {}).get("targets", ())
        }
        targets = [code for code in self.targets if not drawn or code in drawn] or self.targets
        lines = self._training_pairs()
        ways = [(one, other) for other in targets for one in self.spec.languages if one != other]
        return min(
            ways,
            key=lambda way: (-lines.get(pair_name(*way), 0), way[0] != "en", way),
            default=(targets[0], targets[0]),
        )

    # ------------------------------------------------------------ records

    def _data(self) -> str:
        pairs = self._training_pairs()
        if not pairs:
            return f"{NOT_RECORDED}{self._missing()}\n"
        rows = [(pair, f"{lines:,}") for pair, lines in sorted(pairs.items())]
        total = f"{sum(pairs.values()):,} sentence pairs for training.{self._missing()}\n\n"
        return total + _table(("pair", "sentence pairs"), rows)

    def _training_pairs(self) -> dict[str, int]:
        """Return pair → number of training lines in the shards."""
        pairs: dict[str, int] = {}
        for artifact in self.lineage.found.values():
            if artifact.manifest.kind == "shards":
                counts = artifact.statistics.get("pairs", {})
                pairs |= {pair: lines["train"] for pair, lines in counts.items() if lines["train"]}
        return pairs

    def _missing(self) -> str:
        missing = ", ".join(sorted(self.lineage.missing))
        return f" Some of its inputs could not be found: {missing}." if missing else ""

    def _recipe(self) -> str:
        stages = [
            f"- `{artifact.manifest.stage}`: {'; '.join(artifact.manifest.summary) or 'done'}\n"
            for artifact in self.lineage.found.values()
        ]
        settings = to_json(self.checkpoint.manifest.config)
        return f"{''.join(stages)}\nSettings of the last stage:\n\n```json\n{settings}```\n"

    def _scores(self) -> str:
        if self.scores is None:
            return f"{NOT_RECORDED}\n"
        systems: Mapping[str, Mapping[str, Mapping[str, float]]]
        systems = self.scores.statistics.get("systems", {})
        own = [name for name in systems if self._is_own(self.scores, name)]
        rows = [
            (system, family.replace("_", " "), score, "" if value is None else f"{value:.2f}")
            for system in own or systems
            for family, scores in systems[system].items()
            for score, value in scores.items()
        ]
        note = "" if own else "It is not known which of these systems is this model.\n\n"
        return note + _table(("system", "directions", "score", "mean"), rows)

    def _is_own(self, scores: Artifact, system: str) -> bool:
        """Return whether a system's translations are recorded as made by this checkpoint."""
        record = scores.manifest.inputs.get(f"systems/{system}")
        translations = open_recorded(record) if record else None
        used = translations.manifest.inputs.get("checkpoint") if translations else None
        return used is not None and used.digest == self.checkpoint.digest


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _python(lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    return f"```python\n{body}\n```\n"
