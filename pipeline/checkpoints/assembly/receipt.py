"""Report what an assembly did: an entry per tensor, tables to print, and a check of the function.

The function check compares the logits of a fixed batch. The reference runs each part from its
source, and both embeddings from the embeddings' source. If all experts are plain copies, the logits
are equal; otherwise the divergence measures the effect of the masks. Neither model is ever whole in
memory: the weights of a layer are read before it runs and dropped after it, the weights of an
expert when its tokens come.

Legend: L predicted tokens, V vocabulary, N tokens, D model width, R rows of experts.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.artifacts.tokenizer import Tokenizer, tags
from pipeline.batching.batch import Batch, Example, collate
from pipeline.checkpoints.assembly.rules import (
    PARTS,
    Assignment,
    Blueprint,
    Part,
    is_diverse,
    part_of,
)
from pipeline.checkpoints.assembly.vocabulary import meanings
from pipeline.checkpoints.names import dense_name, is_router, named_slices
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.expert_products import ExpertWeights, serve_rows
from pipeline.kernels.placement import combine, gather
from pipeline.model.building import shape_of_model
from pipeline.model.moe.dispatch import Dispatch
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator
from pipeline.terminal import counted, text_table

RECEIPT_FILE = "receipt.json"
RANDOM_RULES = ("expert of dense", "expert of expert", "rows by piece", "fresh")
"""Rules that draw from the seed."""


@dataclass(frozen=True)
class ReceiptEntry:
    """The origin of one tensor of the result.

    Attributes:
        seed: Seed of its random values; None if it has none.
        norm: Euclidean norm of the difference between target and source, 0 for copies. For fresh
            values and chosen rows, the norm of the target itself.
        digest: SHA-256 of the target's values as stored.
    """

    target: str
    part: Part
    source: str | None
    rule: str
    seed: int | None
    norm: float
    digest: str


def seed_of(entry: Assignment, blueprint: Blueprint) -> int | None:
    """Return the seed of a tensor's random values; None if it has none."""
    if entry.rule not in RANDOM_RULES:
        return None
    if entry.rule.startswith("expert of") and not is_diverse(blueprint.config):
        return None
    return blueprint.config.seed


def summary_table(blueprint: Blueprint, names: Mapping[Part, str]) -> str:
    """Return a table of the plan: part, modules, source, tensors, parameters, rule."""
    counts: dict[tuple[Part, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in blueprint.plan:
        count = counts[entry.part, _module(entry.target), _worded(entry, blueprint)]
        count[0] += 1
        count[1] += blueprint.targets[entry.target].value.numel()
    rows = [
        [part, module, names[part], f"{tensors:,}", f"{parameters:,}", rule]
        for part in PARTS
        for (of, module, rule), (tensors, parameters) in counts.items()
        if of == part
    ]
    total = sum(parameters for _, parameters in counts.values())
    rows.append(["all", "", "", f"{len(blueprint.plan):,}", f"{total:,}", ""])
    return text_table(["part", "modules", "from", "tensors", "parameters", "rule"], rows)


def headline(blueprint: Blueprint, names: Mapping[Part, str]) -> str:
    """Return the assembly in the paper's notation, Enc(dense)-Dec(moe_lgr), and its experts."""
    model = blueprint.spec.model
    text = (
        f"Enc({names['encoder']})-Dec({names['decoder']}), embeddings of {names['embeddings']}: "
        f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.width}"
    )
    if model.moe is None:
        return f"{text}, no experts"
    layers = range(model.moe.every, max(model.encoder_layers, model.decoder_layers) + 1)
    numbers = ", ".join(map(str, layers[:: model.moe.every]))
    text += f"; {model.moe.num_experts} experts, top-{model.moe.top_k}, in layers {numbers}"
    groups = blueprint.spec.num_groups
    return f"{text}; decoder routed by {groups} language groups" if groups else text


def unused_lines(unused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per source with the number of its unused tensors."""
    lines = []
    for source, names in unused.items():
        counts = Counter(part_of(name) for name in names)
        if counts:
            listed = ", ".join(f"{count:,} of the {part}" for part, count in counts.items())
            lines.append(
                f"not used of {source}: {counted(sum(counts.values()), 'tensor')} ({listed})"
            )
    return lines


def _module(target: str) -> str:
    """Return the name of a tensor's module for the table."""
    if target.startswith("front."):
        return "front"
    if dense_name(target) is not None:
        return "experts"
    if ".group_weight" in target:
        return "language-group routers"
    if is_router(target):
        return "routers"
    if ".feed_forward." in target:
        return "dense feed-forwards"
    if "attention." in target:
        return "attention"
    if "norm." in target:
        return "norms"
    return target.split(".")[1] if "." in target else target


def _worded(entry: Assignment, blueprint: Blueprint) -> str:
    """Return a rule with its settings for the table."""
    config = blueprint.config
    if not entry.rule.startswith("expert of"):
        return entry.rule
    kind = f"{entry.rule}, " + (
        f"plus noise of {config.noise_std:g} of its deviation (seed {config.seed})"
        if config.method == "noise"
        else f"{config.mask_ratio:.0%} of its "
        f"{'entries' if config.method == 'elementwise' else 'neurons'} zero (seed {config.seed})"
    )
    return kind if is_diverse(config) else f"{entry.rule}, a copy"


SENTENCES = 8
"""Sentences of the fixed batch."""
LENGTH = 12
"""Pieces of a sentence, on either side."""


@dataclass(frozen=True)
class Divergence:
    """The difference between the logits of two models.

    Attributes:
        tokens: Number of compared predicted tokens.
        largest: Largest absolute difference of two logits, divided by the largest absolute logit.
        mean_kl: Mean over tokens of the Kullback–Leibler divergence of the reference's
            distribution from the model's, in nats.
        same_choice: Share of tokens with the same most probable id.
    """

    tokens: int
    largest: float
    mean_kl: float
    same_choice: float

    def __str__(self) -> str:
        return (
            f"logits of a fixed batch ({self.tokens} tokens) beside the sources': largest "
            f"difference {self.largest:.1e} of the largest logit, mean divergence "
            f"{self.mean_kl:.1e} nats, the same choice at {self.same_choice:.1%}"
        )


def divergence(
    spec: ModelSpec,
    tensors: Tensors,
    tokenizer: Tokenizer,
    sources: Mapping[Part, ModelSource | None],
) -> Divergence | None:
    """Return the divergence of a finished model from its sources.

    Returns:
        None if a part started fresh, or if the vocabularies have no text in common.
    """
    embeddings, encoder, decoder = (sources[p] for p in ("embeddings", "encoder", "decoder"))
    if embeddings is None or encoder is None or decoder is None:
        return None
    old = embeddings.tokenizer.build()
    pairs = shared_ids(old, tokenizer)
    if not _have_common_text(old, tokenizer, pairs):
        return None
    outputs = [ids for ids in pairs if _are_outputs(ids, old, tokenizer)]
    into = common_targets(old, tokenizer)
    batch = fixed_batch(old, [one for one, _ in pairs], decoder.spec, into=into)
    with sparing_loops():
        before_LV = Streamed.of_parts(embeddings, encoder, decoder).logits(batch)
        batch = fixed_batch(tokenizer, [other for _, other in pairs], spec, into=into)
        after_LV = Streamed(spec, dict.fromkeys(PARTS, tensors)).logits(batch)
    old_ids, new_ids = (torch.tensor(ids) for ids in zip(*outputs, strict=True))
    return compare(before_LV[:, old_ids], after_LV[:, new_ids])


def _have_common_text(old: Tokenizer, new: Tokenizer, pairs: list[tuple[int, int]]) -> bool:
    """Return whether both vocabularies have an output piece and a target language in common."""
    return bool(common_targets(old, new)) and any(
        old.piece(ids[0]) and _are_outputs(ids, old, new) for ids in pairs
    )


def common_targets(old: Tokenizer, new: Tokenizer) -> set[str]:
    """Return the target languages that both tokenizers have."""
    both = set(old.languages) & set(new.languages)
    return {code for code in both if old.writes(code) and new.writes(code)}


def compare(before_LV: Tensor, after_LV: Tensor) -> Divergence:
    """Return the divergence of logits over the same ids."""
    before_LV, after_LV = before_LV.double(), after_LV.double()
    log_p, log_q = before_LV.log_softmax(-1), after_LV.log_softmax(-1)
    return Divergence(
        tokens=len(before_LV),
        largest=float((before_LV - after_LV).abs().max() / before_LV.abs().max()),
        mean_kl=max(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), 0.0),
        same_choice=float((before_LV.argmax(-1) == after_LV.argmax(-1)).double().mean()),
    )


def shared_ids(old: Tokenizer, new: Tokenizer) -> list[tuple[int, int]]:
    """Return pairs of (old, new) ids with the same meaning, without padding, bos and unknown."""
    of_old = meanings(old)
    of_new = of_old if new.fingerprint == old.fingerprint else meanings(new)
    known = {meaning: index for index, meaning in enumerate(of_old) if meaning is not None}
    return [
        (known[meaning], index)
        for index, meaning in enumerate(of_new)
        if meaning in known and meaning.name not in ("pad", "bos", "unk")
    ]


def _is_output(index: int, tokenizer: Tokenizer) -> bool:
    """Return whether an id can be part of a translation."""
    return tokenizer.output_size is None or index < tokenizer.output_size


def _are_outputs(ids: tuple[int, int], old: Tokenizer, new: Tokenizer) -> bool:
    return _is_output(ids[0], old) and _is_output(ids[1], new)


def fixed_batch(
    tokenizer: Tokenizer, ids: list[int], spec: ModelSpec, *, into: Collection[str]
) -> Batch:
    """Return sentences of random pieces, whose directions take turns through the languages.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Ids to draw from, in an order that both vocabularies share.
        spec: The model that the batch is for.
        into: Languages that may be targets.
    """
    pieces = [index for index in ids if tokenizer.piece(index) is not None]
    outputs = [index for index in pieces if _is_output(index, tokenizer)]
    generator = named_generator("function check")
    drawn = torch.randint(len(pieces), (SENTENCES, 2, LENGTH), generator=generator)
    codes = [code for code in tokenizer.languages if tokenizer.language_token_id(code) in ids]
    targets = [code for code in codes if code in into]
    examples = []
    for number, (source, target) in enumerate(drawn.tolist()):
        one, other = codes[number % len(codes)], targets[(number + 1) % len(targets)]
        found = tags(tokenizer, spec.tag_scheme, source=one, target=other)
        examples.append(
            Example(
                source=[pieces[index] for index in source[: LENGTH - number]],
                target=[outputs[index % len(outputs)] for index in target[: 1 + number]],
                source_prefix=found.source_prefix,
                decoder_prompt=found.decoder_prompt,
                source_language=tokenizer.languages.index(one),
                target_language=tokenizer.languages.index(other),
            )
        )
    return collate(examples, eos_id=tokenizer.eos_id)


class ExpertsInTurn(nn.Module):
    """The experts of an MoE layer, one of which is in memory while its tokens are served.

    Fresh memory costs more time than reading: a layer of 32 experts would take 16 times the
    memory of a dense one.
    """

    def __init__(self, experts: Experts, prefix: str, tensors: Tensors) -> None:
        super().__init__()
        self.activation = experts.activation
        self._names = {
            f"{prefix}.{slot}": [name for name, _ in experts.named_parameters()]
            for slot in experts.held_slots
        }
        self._tensors = tensors
        self._shapes = [(1, *parameter.shape[1:]) for parameter in experts.parameters()]

    def serve(self, x_ND: Tensor, dispatch: Dispatch) -> Tensor:
        """Return the weighted sum of every token's experts, (N, D)."""
        weights = ExpertWeights(*map(torch.empty, self._shapes))
        rows_E: list[int] = dispatch.rows_E.tolist()
        served = []
        for (expert, names), x_RD in zip(
            self._names.items(), gather(x_ND, dispatch).split(rows_E), strict=True
        ):
            if len(x_RD):
                for name, value in zip(names, weights, strict=True):
                    value[0] = self._tensors.read(f"{expert}.{name}")
                served.append(serve_rows(x_RD, [len(x_RD)], weights, activation=self.activation))
        return combine(torch.cat(served), dispatch.weight_NC, dispatch)


class Streamed:
    """A model that keeps only one layer at a time in memory, and one of its experts."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[Part, Tensors], model: Transformer | None = None
    ) -> None:
        self.spec = spec
        self.tensors = tensors
        self.model = (model or shape_of_model(spec)).eval()
        for name, layer in self.model.named_modules():
            if isinstance(layer, MixtureOfExperts):
                of_layer = tensors[part_of(name)]
                in_turn = ExpertsInTurn(layer.experts, f"{name}.experts", of_layer)
                layer.register_module("experts", in_turn)
        self._spare: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)

    @classmethod
    def of_parts(
        cls, embeddings: ModelSource, encoder: ModelSource, decoder: ModelSource
    ) -> "Streamed":
        """Return the model of the embeddings, the encoder and the decoder of three models."""
        model = shape_of_model(decoder.spec)
        of_encoder = shape_of_model(encoder.spec)
        model.encoder, model.front = of_encoder.encoder, of_encoder.front
        model.embedding = shape_of_model(embeddings.spec).embedding
        tensors: dict[Part, Tensors] = {
            "embeddings": embeddings.tensors,
            "encoder": encoder.tensors,
            "decoder": decoder.tensors,
        }
        return cls(decoder.spec, tensors, model)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits (L, V) of a batch in float32."""
        layers = [*self.model.encoder.layers, *self.model.decoder.layers]
        inner = {module for layer in layers for module in layer.modules()}
        for name, module in self.model.named_modules():
            if module not in inner and any(True for _ in module.parameters(recurse=False)):
                self._fill(name, module, recurse=False)
        for stack in ("encoder", "decoder"):
            for number, layer in enumerate(getattr(self.model, stack).layers):
                name = f"{stack}.layers.{number}"
                layer.register_forward_pre_hook(lambda m, _, n=name: self._fill(n, m))
                layer.register_forward_hook(lambda m, _i, _o: self._empty(m))
        self.model.reset_buffers(torch.device("cpu"))
        found: Tensor = self.model(batch).logits_LV
        self._empty(self.model)
        self._spare.clear()
        return found

    def _fill(self, prefix: str, module: nn.Module, *, recurse: bool = True) -> None:
        for owner in module.modules() if recurse else [module]:
            for name, parameter in list(owner.named_parameters(recurse=False)):
                spare = self._spare[parameter.shape]
                values = spare.pop() if spare else torch.empty(parameter.shape)
                setattr(owner, name, nn.Parameter(values, requires_grad=False))
        for entry in named_slices(module):
            if not recurse and entry.owner is not module:
                continue
            name = f"{prefix}.{entry.name}"
            entry.value.copy_(self.tensors[part_of(name)].read(name))

    def _empty(self, module: nn.Module) -> None:
        """Give the memory of a module's parameters to the next layer."""
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                self._spare[parameter.shape].append(parameter.data)
                nothing = torch.empty(parameter.shape, device="meta")
                setattr(owner, name, nn.Parameter(nothing, requires_grad=False))
