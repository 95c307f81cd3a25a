"""Compare an assembled model with its sources: the logits of a fixed batch.

The reference runs each part from its source, and both embeddings from the embeddings' source. If
all experts are plain copies, the logits are equal; otherwise the divergence measures the effect of
the masks. Neither model is ever whole in memory: the weights of a layer are read before it runs and
dropped after it, the weights of an expert when its tokens come.

Legend: L predicted tokens, V vocabulary, N tokens, D model width, R rows of experts.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.artifacts.tokenizer import Tokenizer, tags
from pipeline.batching.batch import Batch, Example, collate
from pipeline.checkpoints.assembly.rules import PARTS, AssemblyPlan, Part, part_of
from pipeline.checkpoints.assembly.vocabulary import meanings
from pipeline.checkpoints.weights import Tensors
from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.expert_products import ExpertWeights, serve_rows
from pipeline.kernels.placement import combine, gather
from pipeline.model.building import shape_of_model
from pipeline.model.moe.capacity import Dispatch
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.parameters import named_slices
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator

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
            f"logits of a fixed batch ({self.tokens} tokens) compared with the sources': largest "
            f"difference {self.largest:.1e} of the largest logit, mean divergence "
            f"{self.mean_kl:.1e} nats, the same choice at {self.same_choice:.1%}"
        )


def check_function(plan: AssemblyPlan, tensors: Tensors) -> Divergence | None:
    """Return the divergence of a finished model from its sources.

    Args:
        plan: The assembly.
        tensors: The weights of the finished model.

    Returns:
        None if a part started fresh, or if the vocabularies have no text in common.
    """
    if len(plan.sources) < len(PARTS):
        return None
    old, new = plan.sources["embeddings"].tokenizer.build(), plan.tokenizer.build()
    ids = shared_ids(old, new)
    outputs = [pair for pair in ids if _is_output(pair[0], old) and _is_output(pair[1], new)]
    codes = set(old.languages) & set(new.languages)
    targets = {code for code in codes if old.writes(code) and new.writes(code)}
    if not targets or not any(old.piece(old_id) for old_id, _ in outputs):
        return None
    old_ids, new_ids = (list(side) for side in zip(*ids, strict=True))
    reference_spec = plan.sources["decoder"].spec
    with sparing_loops():
        batch = fixed_batch(old, old_ids, reference_spec, targets=targets)
        before_LV = StreamedModel.of_sources(plan).logits(batch)
        batch = fixed_batch(new, new_ids, plan.spec, targets=targets)
        after_LV = StreamedModel(plan.spec, dict.fromkeys(PARTS, tensors)).logits(batch)
    old_outputs, new_outputs = (torch.tensor(side) for side in zip(*outputs, strict=True))
    return compare(before_LV[:, old_outputs], after_LV[:, new_outputs])


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
    known = {meaning: index for index, meaning in enumerate(meanings(old)) if meaning is not None}
    return [
        (known[meaning], index)
        for index, meaning in enumerate(meanings(new))
        if meaning in known and meaning.name not in ("pad", "bos", "unk")
    ]


def _is_output(index: int, tokenizer: Tokenizer) -> bool:
    """Return whether an id can be part of a translation."""
    return tokenizer.output_size is None or index < tokenizer.output_size


def fixed_batch(
    tokenizer: Tokenizer, ids: list[int], spec: ModelSpec, *, targets: Collection[str]
) -> Batch:
    """Return sentences of random pieces in directions that take turns through the languages.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Ids to draw from, in an order that both vocabularies share.
        spec: The model that the batch is for.
        targets: Languages that may be targets.
    """
    pieces = [index for index in ids if tokenizer.piece(index) is not None]
    outputs = [index for index in pieces if _is_output(index, tokenizer)]
    generator = named_generator("function check")
    drawn = torch.randint(len(pieces), (SENTENCES, 2, LENGTH), generator=generator)
    codes = [code for code in tokenizer.languages if tokenizer.language_token_id(code) in ids]
    target_codes = [code for code in codes if code in targets]
    examples = []
    for number, (source_places, target_places) in enumerate(drawn.tolist()):
        source = codes[number % len(codes)]
        target = target_codes[(number + 1) % len(target_codes)]
        tokens = tags(tokenizer, spec.tag_scheme, source=source, target=target)
        examples.append(
            Example(
                source=[pieces[index] for index in source_places[: LENGTH - number]],
                target=[outputs[index % len(outputs)] for index in target_places[: 1 + number]],
                source_prefix=tokens.source_prefix,
                decoder_prompt=tokens.decoder_prompt,
                source_language=tokenizer.languages.index(source),
                target_language=tokenizer.languages.index(target),
            )
        )
    return collate(examples, eos_id=tokenizer.eos_id)


class ExpertsInTurn(nn.Module):
    """The experts of an MoE layer; each is in memory only while its tokens are served.

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


class StreamedModel:
    """A model that keeps only one layer at a time in memory, and of its experts only one."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[Part, Tensors], model: Transformer | None = None
    ) -> None:
        self.tensors = tensors
        self.model = (model or shape_of_model(spec)).eval()
        for name, layer in self.model.named_modules():
            if isinstance(layer, MixtureOfExperts):
                of_layer = tensors[part_of(name)]
                in_turn = ExpertsInTurn(layer.experts, f"{name}.experts", of_layer)
                layer.register_module("experts", in_turn)
        self._spare: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)

    @classmethod
    def of_sources(cls, plan: AssemblyPlan) -> "StreamedModel":
        """Return the model of the embeddings, the encoder and the decoder of three models."""
        sources = plan.sources
        model = shape_of_model(sources["decoder"].spec)
        of_encoder = shape_of_model(sources["encoder"].spec)
        model.encoder, model.front = of_encoder.encoder, of_encoder.front
        model.embedding = shape_of_model(sources["embeddings"].spec).embedding
        tensors = {part: source.tensors for part, source in sources.items()}
        return cls(sources["decoder"].spec, tensors, model)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits (L, V) of a batch in float32."""
        layers = [*self.model.encoder.layers, *self.model.decoder.layers]
        inner = {module for layer in layers for module in layer.modules()}
        for name, module in self.model.named_modules():
            if module in layers:
                module.register_forward_pre_hook(lambda m, _, n=name: self._fill(n, m))
                module.register_forward_hook(lambda m, _i, _o: self._empty(m))
            elif module not in inner and any(True for _ in module.parameters(recurse=False)):
                self._fill(name, module, recurse=False)
        self.model.reset_buffers(torch.device("cpu"))
        logits_LV: Tensor = self.model(batch).logits_LV
        self._empty(self.model)  # the hooks refer to this object, so it would hold memory for long
        self._spare.clear()
        return logits_LV

    def _fill(self, prefix: str, module: nn.Module, *, recurse: bool = True) -> None:
        for owner in module.modules() if recurse else [module]:
            for name, parameter in list(owner.named_parameters(recurse=False)):
                spare = self._spare[parameter.shape]
                values = spare.pop() if spare else torch.empty(parameter.shape)
                setattr(owner, name, nn.Parameter(values, requires_grad=False))
        for entry in named_slices(module):
            if recurse or entry.owner is module:
                name = f"{prefix}.{entry.name}"
                entry.value.copy_(self.tensors[part_of(name)].read(name))

    def _empty(self, module: nn.Module) -> None:
        """Give the memory of a module's parameters to the next layer."""
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                self._spare[parameter.shape].append(parameter.data)
                nothing = torch.empty(parameter.shape, device="meta")
                setattr(owner, name, nn.Parameter(nothing, requires_grad=False))
