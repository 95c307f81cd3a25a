"""Translate names of tensors of other software to ours, by one table per family.

A table is text. Each row has their name and ours for one kind of tensor, and after a ``#`` a
remark if the row needs one::

    model.{stack}.layers.{layer}.fc1.{kind}    {stack}.layers.{layer}.feed_forward.up.{kind}
    lm_head.weight                             embedding.weight    # tied: saved once more
    final_logits_bias                          -                   # zeros

``{stack}`` is encoder or decoder, ``{kind}`` weight or bias, ``{layer}`` and ``{expert}`` are
numbers. ``-`` means that we have no such tensor. If several of their tensors are a single
tensor of ours, an export writes the first row, and an import checks that the others hold the same
values. :class:`ForeignTensors` reads files by our names.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoints.checkpoint import refuse_misfit
from pipeline.checkpoints.weights import Tensors, refuse_not_finite
from pipeline.errors import CheckpointError
from pipeline.model.spec import ModelSpec

_PLACEHOLDERS = {
    "{stack}": r"(?P<stack>encoder|decoder)",
    "{layer}": r"(?P<layer>0|[1-9]\d{0,4})",
    "{expert}": r"(?P<expert>0|[1-9]\d{0,4})",
    "{kind}": r"(?P<kind>weight|bias)",
}
NOTHING = "-"
EMBEDDINGS = ("embedding.weight", "embedding.output_weight")


@dataclass(frozen=True)
class NameTable:
    """The names of all tensors of one family: rows of their name and ours, with placeholders."""

    rows: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "NameTable":
        """Parse the text of a table."""
        lines = (line.partition("#")[0].split() for line in text.splitlines())
        return cls(tuple((theirs, ours) for theirs, ours in filter(None, lines)))

    def renamed(self, *changes: tuple[str, str]) -> "NameTable":
        """Return the table with parts of their names replaced."""
        rows = []
        for theirs, ours in self.rows:
            for old, new in changes:
                theirs = theirs.replace(old, new)
            rows.append((theirs, ours))
        return NameTable(tuple(rows))

    def __add__(self, other: "NameTable") -> "NameTable":
        return NameTable(self.rows + other.rows)

    def to_ours(self, name: str) -> str | None:
        """Return our name for one of theirs: ``NOTHING`` if we have none, None if it is unknown."""
        names = (_translated(theirs, ours, name) for theirs, ours in self.rows)
        return next(filter(None, names), None)

    def to_theirs(self, name: str) -> str | None:
        """Return their name for one of ours; None if they have none."""
        names = (_translated(ours, theirs, name) for theirs, ours in self.rows)
        return next(filter(None, names), None)


def _translated(pattern: str, replacement: str, name: str) -> str | None:
    match = _expression(pattern).fullmatch(name)
    return None if match is None else replacement.format_map(match.groupdict())


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    expression = re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}")
    for placeholder, group in _PLACEHOLDERS.items():
        expression = expression.replace(placeholder, group)
    return re.compile(expression, re.ASCII)


@dataclass(frozen=True)
class ForeignTensors:
    """Tensors of other software by our names."""

    stored: Tensors
    """The tensors under their own names."""
    stored_names: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Our name → their names; the first is read, the others must hold the same values."""
    expert_output_scale: float = 1.0
    """Factor of the last linear layer of every expert."""
    absent_rows: Sequence[int] = ()
    """Rows of the embeddings to leave out."""

    @classmethod
    def through(
        cls,
        table: NameTable,
        stored: Tensors,
        *,
        spec: ModelSpec,
        expert_output_scale: float = 1.0,
        absent_rows: Sequence[int] = (),
    ) -> "ForeignTensors":
        """Find all tensors of a model through a family's table.

        Raises:
            CheckpointError: Tensors are unknown, missing or of another shape; lists them all.
        """
        known: dict[str, list[str]] = defaultdict(list)
        unknown = []
        for name in stored.names():
            ours = table.to_ours(name)
            if ours is None:
                unknown.append(name)
            elif ours != NOTHING:
                known[ours].append(name)
        names = {ours: tuple(theirs) for ours, theirs in known.items()}
        tensors = cls(stored, names, expert_output_scale, absent_rows)
        refuse_misfit(tensors, spec, unknown=unknown, called=lambda name: names[name][0])
        return tensors

    @property
    def origin(self) -> Path:
        """Return the folder or file that holds the tensors."""
        return self.stored.origin

    def names(self) -> list[str]:
        """Return our names of all tensors, sorted."""
        return sorted(self.stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        shape = self.stored.shape(self.stored_names[name][0])
        if self.absent_rows and name in EMBEDDINGS:
            return (shape[0] - len(self.absent_rows), *shape[1:])
        return shape

    def read(self, name: str) -> Tensor:
        """Return one tensor, and check that its values are finite.

        Raises:
            CheckpointError: It is stored twice with different values, or it has values that are not
                finite or not floating-point numbers.
        """
        first, *others = self.stored_names[name]
        value = self.stored.read(first)
        value = refuse_not_finite(value, first, self.origin, fix="fetch this one again")
        for other in others:
            if not torch.equal(value, self.stored.read(other)):
                raise CheckpointError(
                    f"{self.origin}: {first} and {other} are one tensor in this model, but their "
                    "values differ. Name a checkpoint that ties them."
                )
        if self.absent_rows and name in EMBEDDINGS:
            is_kept = torch.ones(len(value), dtype=torch.bool)
            is_kept[list(self.absent_rows)] = False
            return value[is_kept]
        if self.expert_output_scale == 1 or not _is_expert_output(name):
            return value
        # in float32 or wider, to round only once
        return value.to(torch.promote_types(value.dtype, torch.float32)) * self.expert_output_scale


def _is_expert_output(name: str) -> bool:
    return ".feed_forward.experts." in name and ".down." in name


# ---------------------------------------------------------------- fairseq and Hugging Face

STACKS = NameTable.parse("""
{stack}.layer_norm.{kind}                              {stack}.final_norm.{kind}
{stack}.layers.{layer}.self_attn_layer_norm.{kind}     {stack}.layers.{layer}.self_attention_norm.{kind}
{stack}.layers.{layer}.self_attn.q_proj.{kind}         {stack}.layers.{layer}.self_attention.query.{kind}
{stack}.layers.{layer}.self_attn.k_proj.{kind}         {stack}.layers.{layer}.self_attention.key.{kind}
{stack}.layers.{layer}.self_attn.v_proj.{kind}         {stack}.layers.{layer}.self_attention.value.{kind}
{stack}.layers.{layer}.self_attn.out_proj.{kind}       {stack}.layers.{layer}.self_attention.output.{kind}
{stack}.layers.{layer}.encoder_attn_layer_norm.{kind}  {stack}.layers.{layer}.cross_attention_norm.{kind}
{stack}.layers.{layer}.encoder_attn.q_proj.{kind}      {stack}.layers.{layer}.cross_attention.query.{kind}
{stack}.layers.{layer}.encoder_attn.k_proj.{kind}      {stack}.layers.{layer}.cross_attention.key.{kind}
{stack}.layers.{layer}.encoder_attn.v_proj.{kind}      {stack}.layers.{layer}.cross_attention.value.{kind}
{stack}.layers.{layer}.encoder_attn.out_proj.{kind}    {stack}.layers.{layer}.cross_attention.output.{kind}
{stack}.layers.{layer}.final_layer_norm.{kind}         {stack}.layers.{layer}.feed_forward_norm.{kind}
{stack}.layers.{layer}.fc1.{kind}                      {stack}.layers.{layer}.feed_forward.up.{kind}
{stack}.layers.{layer}.fc2.{kind}                      {stack}.layers.{layer}.feed_forward.down.{kind}
""")  # noqa: E501 (a table)
"""The layers, which Hugging Face's M2M-100 and mBART name like fairseq."""
FAIRSEQ_TABLE = STACKS + NameTable.parse("""
encoder.embed_tokens.weight            embedding.weight
decoder.embed_tokens.weight            embedding.weight          # tied, saved once more
encoder.version                        -                         # 3: norms follow the last layer
decoder.version                        -                         # 3: norms follow the last layer
{stack}.embed_positions._float_tensor  -                         # sinusoids: computed
{stack}.embed_positions.weights        -                         # sinusoids: computed
{stack}.embed_positions.weight         {stack}.positions.weight  # learned; row 2 is the first
{stack}.layernorm_embedding.{kind}     {stack}.embedding_norm.{kind}
{stack}.layers.{layer}.moe_layer.gate.wg.weight               {stack}.layers.{layer}.feed_forward.router.weight
{stack}.layers.{layer}.moe_layer.experts.{expert}.fc1.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
{stack}.layers.{layer}.moe_layer.experts.{expert}.fc2.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}  # times (1 - moe_eom) · (1 - moe_fom)
""")  # noqa: E501 (a table)
FAIRSEQ_OUTPUT = "decoder.output_projection.weight"
M2M100_TABLE = NameTable.parse("""
model.shared.weight                    embedding.weight
model.encoder.embed_tokens.weight      embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight      embedding.weight  # tied, saved once more
model.encoder.embed_positions.weights  -                 # sinusoids: computed
model.decoder.embed_positions.weights  -                 # sinusoids: computed
""") + STACKS.renamed(("{stack}.layer", "model.{stack}.layer"))
MBART50_TABLE = M2M100_TABLE + NameTable.parse("""
final_logits_bias                         -                         # zeros: looked at when the folder is opened
model.{stack}.embed_positions.weight      {stack}.positions.weight  # two rows more than positions, as ours: they count from 2
model.{stack}.layernorm_embedding.{kind}  {stack}.embedding_norm.{kind}
""")  # noqa: E501 (a table)
NLLB_MOE_TABLE = M2M100_TABLE.renamed(
    ("encoder_attn", "cross_attention"),
    ("final_layer_norm", "ff_layer_norm"),
    (".fc", ".ffn.fc"),
) + NameTable.parse("""
model.{stack}.layers.{layer}.ffn.router.classifier.weight            {stack}.layers.{layer}.feed_forward.router.weight  # has no bias: router_bias is refused
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc1.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc2.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}  # times 1 - moe_token_dropout
""")  # noqa: E501 (a table)


def without_name(origin: Path, name: str) -> CheckpointError:
    """Return the refusal to export a tensor of a variant, which no format has."""
    return CheckpointError(
        f"{origin} has the tensor {name}, for which no format has a name. Export a model "
        "without it."
    )


def with_output(table: NameTable, theirs: str, *, tied: bool) -> NameTable:
    """Return a table with the output projection, the embedding saved once more if tied."""
    ours = "embedding.weight" if tied else "embedding.output_weight"
    return table + NameTable(((theirs, ours),))
