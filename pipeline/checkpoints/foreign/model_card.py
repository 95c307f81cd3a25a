"""Write the model card of an exported checkpoint: ``README.md`` with a header for model hubs.

The card states what manifests record: the manifest of the checkpoint, and the manifests of the
artifacts that it was made from, if they can still be found. ``model_card.md.j2`` has its text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.artifacts.artifact import Artifact, Lineage, open_recorded
from pipeline.artifacts.corpus import pair_name
from pipeline.artifacts.tokenizer import MODEL_NAME
from pipeline.languages import language
from pipeline.model.parameters import num_parameters
from pipeline.model.spec import ModelSpec

OLDEST_TRANSFORMERS = ">=4.50"
BELOW_TRANSFORMERS_5 = ",<5"
"""Limit of NLLB-MoE: ``NllbMoeSparseMLP`` of transformers 5.0 to 5.24 gives ``NllbMoeExperts`` a
one-hot mask where it takes indices: each token goes to experts 0 and 1."""


@dataclass(frozen=True)
class Card:
    """The facts of a model card."""

    checkpoint: Artifact
    spec: ModelSpec
    """The exported model."""
    to: str
    """The format: ``hf-m2m100``, ``hf-nllb-moe`` or ``ctranslate2``."""
    license: str
    targets: tuple[str, ...]
    """Target languages of the exported model."""
    scores: Artifact | None
    """The evaluation to quote."""

    def text(self, tokens: Mapping[str, str], *, tokenizer_class: str = "") -> str:
        """Return the whole file.

        Args:
            tokens: Code of a language → its token in the exported vocabulary.
            tokenizer_class: The class of transformers that reads the exported vocabulary.
        """
        lineage = Lineage()
        lineage.add(self.checkpoint, follow=lambda record: record.kind != "raw")
        artifacts = list(lineage.found.values())
        pairs = _training_pairs(artifacts)
        source, target = self._example(artifacts, pairs)
        systems = {} if self.scores is None else self.scores.statistics.get("systems", {})
        own = [name for name in systems if self._is_own(name)]
        kind = "M2M100" if self.to == "hf-m2m100" else "NllbMoe"
        only_4 = kind == "NllbMoe" or tokenizer_class == "NllbTokenizer"
        # The header is quoted as JSON because YAML reads ``no`` as a truth value.
        environment = Environment(
            loader=PackageLoader("pipeline.checkpoints.foreign", ""),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            keep_trailing_newline=True,
        )
        environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
        return environment.get_template("model_card.md.j2").render(
            vars(self),
            parameters=num_parameters(self.spec),
            targets=() if set(self.targets) == set(self.spec.languages) else self.targets,
            name_of=lambda code: language(code).name,
            tokens=tokens,
            # Hubs refuse codes with a script or a region
            hub_codes=dict.fromkeys(re.split("[_-]", code)[0] for code in self.spec.languages),
            source=source,
            target=target,
            sentencepiece=MODEL_NAME,
            is_prefixed=self.spec.tag_scheme == "src-tgt",
            model_class=f"{kind}ForConditionalGeneration",
            tokenizer_class=tokenizer_class,
            is_fast=tokenizer_class.endswith("Fast"),
            versions=OLDEST_TRANSFORMERS + BELOW_TRANSFORMERS_5 * only_4,
            pairs=pairs,
            missing=sorted(lineage.missing),
            manifests=[artifact.manifest for artifact in artifacts],
            scores=_score_rows({name: systems[name] for name in own or systems}),
            is_own=bool(own),
        )

    def _example(self, artifacts: Sequence[Artifact], pairs: Mapping[str, int]) -> tuple[str, str]:
        """Return source and target language of the example: the pair with most training text.

        If the text is not recorded, they are the first languages, a source from English.
        """
        trained = {
            code
            for artifact in artifacts
            if artifact.manifest.kind == "mixture"
            for code in artifact.manifest.config.get("mixture", {}).get("targets", ())
        }
        targets = [code for code in self.targets if code in trained] or self.targets
        ways = [(one, other) for other in targets for one in self.spec.languages if one != other]
        return min(
            ways,
            key=lambda way: (-pairs.get(pair_name(*way), 0), way[0] != "en", way),
            default=(targets[0], targets[0]),
        )

    def _is_own(self, system: str) -> bool:
        """Return whether a system's translations are recorded as made by this checkpoint."""
        assert self.scores is not None
        record = self.scores.manifest.inputs.get(f"systems/{system}")
        translations = open_recorded(record) if record else None
        used = translations.manifest.inputs.get("checkpoint") if translations else None
        return used is not None and used.digest == self.checkpoint.digest


def _training_pairs(artifacts: Sequence[Artifact]) -> dict[str, int]:
    """Return pair → number of training lines in the shards."""
    pairs: dict[str, int] = {}
    for artifact in artifacts:
        if artifact.manifest.kind == "shards":
            counts = artifact.statistics.get("pairs", {})
            pairs |= {pair: lines["train"] for pair, lines in counts.items() if lines["train"]}
    return pairs


def _score_rows(
    systems: Mapping[str, Mapping[str, Mapping[str, float | None]]],
) -> list[tuple[str, str, str, str]]:
    """Return a row per system, family of directions and score."""
    return [
        (system, family.replace("_", " "), score, "" if value is None else f"{value:.2f}")
        for system, families in systems.items()
        for family, scores in families.items()
        for score, value in scores.items()
    ]
