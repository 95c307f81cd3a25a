"""Write an assembly: its weights file by file, its receipt, and its function check.

Tensors are divided into files of bounded size. The division does not depend on how many files are
written at a time, and so the bytes are always the same. Threads write them: drawing, masking,
hashing and writing release the interpreter, and another process would first load torch.

:func:`make_declared` opens and plans everything that a declaration names and makes the checkpoint.

:func:`check_function` compares the finished model with its sources on a fixed batch. The reference
runs each part from its source, and both embeddings from the embeddings' source. If all experts are
plain copies, the logits are equal; otherwise the divergence measures the effect of the masks.
Neither model is ever whole in memory: the weights of a layer are read before it runs and dropped
after it, the weights of an expert when its tokens come.

Legend: L predicted tokens, V vocabulary, N tokens, D model width, R rows of experts.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.artifacts.artifact import ArtifactWriter, new_artifact, refuse_changed, stage_key
from pipeline.artifacts.manifest import FileRecord, read_manifest, write_hashed
from pipeline.artifacts.places import refuse_inputs, refuse_to_overwrite
from pipeline.artifacts.tokenizer import Tokenizer, tags
from pipeline.batching.batch import Batch, Example, collate
from pipeline.checkpoints.assembly.declaration import Assembly, plan_assembly
from pipeline.checkpoints.assembly.rules import (
    EXPERT_RULES,
    PARTS,
    AssemblyPlan,
    Assignment,
    Part,
    is_diverse,
    part_of,
)
from pipeline.checkpoints.assembly.vocabulary import meanings
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.weights import (
    TensorFolder,
    TensorPlace,
    Tensors,
    file_header,
    part_prefix,
    tensor_bytes,
)
from pipeline.distributed.process import track
from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.expert_products import ExpertWeights, serve_rows
from pipeline.kernels.placement import combine, gather
from pipeline.model.building import shape_of_model
from pipeline.model.moe.capacity import Dispatch
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.parameters import dense_name, is_router, named_slices
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Residual
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator
from pipeline.terminal import counted, text_table

FILE_BYTES = 256 * 1024 * 1024
"""Size of a file of the result, about."""
RECEIPT_FILE = "receipt.json"


def make_assembly(plan: AssemblyPlan, writer: ArtifactWriter, *, processes: int) -> list[str]:
    """Write weights, ``processes`` files at a time, shape, tokenizer, receipt; return a summary."""
    weights_dir = writer.directory / "weights"
    weights_dir.mkdir(parents=True, exist_ok=True)
    writer.settled |= _write_weights(plan, weights_dir, processes=processes)
    write_spec(writer, plan.spec)
    plan.tokenizer.write(tokenizer_directory(writer))
    divergence = check_function(plan, TensorFolder.of_written(weights_dir))
    check = divergence and asdict(divergence)
    unused = {source: names for source, names in plan.unused().items() if names}
    document = {
        "upcycling": plan.config.model_dump(mode="json"),
        "tensors": [asdict(entry) for entry in plan.assignments],
        "unused": unused,
        "function_check": check,
    }
    writer.write_json(RECEIPT_FILE, document)
    writer.notes.add(RECEIPT_FILE)  # paths of the sources
    writer.statistics["tensors"] = len(plan.assignments)
    if check is not None:
        writer.statistics["function_check"] = check
    rules = Counter(entry.rule for entry in plan.assignments)
    counts = ", ".join(f"{count:,} {rule}" for rule, count in sorted(rules.items()))
    tensors = counted(len(plan.assignments), "tensor")
    return [
        f"{tensors}: {counts}; the source of each is in {RECEIPT_FILE}",
        *_changes(plan),
        *([] if divergence is None else [str(divergence)]),
    ]


def _write_weights(
    plan: AssemblyPlan, directory: Path, *, processes: int
) -> dict[Path, FileRecord]:
    """Write the tensors in the model's order; return the record of each file for a manifest."""
    files = {
        directory / f"{part_prefix(0)}{number:03d}.safetensors": assignments
        for number, assignments in enumerate(_divided(plan))
    }
    threads = max(torch.get_num_threads() // processes, 1)
    pool = ThreadPoolExecutor(processes, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        futures = {
            pool.submit(write_hashed, path, _pieces(plan, assignments)): path
            for path, assignments in files.items()
        }
        finished = track(as_completed(futures), label="files", total=len(futures))
        return {futures[future]: future.result() for future in finished}
    finally:
        pool.shutdown(cancel_futures=True)


def _divided(plan: AssemblyPlan) -> list[list[Assignment]]:
    """Return the tensors in groups of about ``FILE_BYTES``."""
    groups: list[list[Assignment]] = []
    size = 0
    for entry in plan.assignments:
        nbytes = _place(plan, entry).nbytes
        if not groups or size + nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += nbytes
    return groups


def _pieces(plan: AssemblyPlan, assignments: Sequence[Assignment]) -> Iterator[memoryview]:
    """Yield the bytes of a file; a tensor is computed when its bytes are asked for."""
    yield memoryview(file_header([_place(plan, entry) for entry in assignments]))
    yield from map(tensor_bytes, plan.values(assignments))


def _place(plan: AssemblyPlan, entry: Assignment) -> TensorPlace:
    return TensorPlace(entry.target, plan.dtype, plan.shape(entry.target))


def make_declared(
    assembly: Assembly, *, out_dir: Path, processes: int = 1, overwrite: bool = False
) -> list[str]:
    """Make the checkpoint of a declaration; return a summary.

    Raises:
        UserError: Something named cannot be used or does not fit.
    """
    named = {**assembly.sources, "groups": assembly.groups, "tokenizer": assembly.tokenizer}
    paths = {name: Path(path) for name, path in named.items() if path}
    refuse_inputs(out_dir, inputs=paths, run_folder=False)
    plan = plan_assembly(assembly)
    config = {"assembly": assembly.model_dump(mode="json", exclude_defaults=True)}
    manifest = read_manifest(out_dir) if out_dir.is_dir() and not overwrite else None
    digests = {name: record.digest for name, record in plan.inputs.items()}
    key = stage_key(stage="upcycle", kind="checkpoint", config=config, inputs=digests)
    if manifest is not None and manifest.key == key:
        refuse_changed(out_dir)
        return [f"already done, {out_dir} is up to date."]
    refuse_to_overwrite(out_dir, overwrite=overwrite, kind="checkpoint")
    print("\n".join(plan_lines(plan)))
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="upcycle",
        config=config,
        inputs=plan.inputs,
        overwrite=overwrite,
    ) as writer:
        summary = make_assembly(plan, writer, processes=processes)
        writer.summary += summary
    return summary


# ---------------------------------------------------------------- text for a terminal


def plan_lines(plan: AssemblyPlan) -> list[str]:
    """Return a summary of a plan to print before it is carried out."""
    names: dict[Part, str] = {
        part: plan.sources[part].origin.name if part in plan.sources else "–" for part in PARTS
    }
    return [_headline(plan, names), "", _summary_table(plan, names), *_changes(plan)]


def _headline(plan: AssemblyPlan, names: Mapping[Part, str]) -> str:
    """Return the assembly in the paper's notation, Enc(dense)-Dec(moe_lgr), and its experts."""
    model, groups = plan.spec.model, plan.spec.num_groups
    text = (
        f"Enc({names['encoder']})-Dec({names['decoder']}), embeddings of {names['embeddings']}: "
        f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.width}"
    )
    if model.moe is None:
        return f"{text}, no experts"
    text += (
        f"; {model.moe.num_experts} experts, top-{model.moe.top_k}, in layers that are multiples "
        f"of {model.moe.every}"
    )
    return f"{text}; decoder routed by {counted(groups, 'language group')}" if groups else text


def _summary_table(plan: AssemblyPlan, names: Mapping[Part, str]) -> str:
    """Return a table of the plan: part, modules, source, tensors, parameters, rule."""
    sizes: dict[tuple[Part, str, str], list[int]] = defaultdict(list)
    for entry in plan.assignments:
        key = entry.part, _module(entry.target), _worded(entry, plan)
        sizes[key].append(plan.targets[entry.target].value.numel())
    sizes_by_part = sorted(sizes.items(), key=lambda row: PARTS.index(row[0][0]))
    rows = [
        [part, module, names[part], f"{len(counts):,}", f"{sum(counts):,}", rule]
        for (part, module, rule), counts in sizes_by_part
    ]
    total = sum(map(sum, sizes.values()))
    rows.append(["all", "", "", f"{len(plan.assignments):,}", f"{total:,}", ""])
    return text_table(["part", "modules", "from", "tensors", "parameters", "rule"], rows)


def _changes(plan: AssemblyPlan) -> list[str]:
    """Return a line per source with its unused tensors, and one on a changed vocabulary."""
    lines = []
    for source, names in plan.unused().items():
        if names:
            counts = Counter(part_of(name) for name in names)
            listed = ", ".join(f"{count:,} of the {part}" for part, count in counts.items())
            lines.append(f"not used of {source}: {counted(len(names), 'tensor')} ({listed})")
    return lines if plan.rows is None else [*lines, plan.rows.line()]


def _module(target: str) -> str:
    """Return the name of a tensor's module for the table."""
    if target.startswith("front."):
        return "front"
    if dense_name(target) is not None:
        return "experts"
    if is_router(target):
        return "language-group routers" if ".group_weight" in target else "routers"
    kinds = {".feed_forward.": "dense feed-forwards", "attention.": "attention", "norm.": "norms"}
    return next((kind for part, kind in kinds.items() if part in target), target.split(".")[1])


def _worded(entry: Assignment, plan: AssemblyPlan) -> str:
    """Return a rule with its settings for the table."""
    config = plan.config
    if entry.rule not in EXPERT_RULES:
        return entry.rule
    if not is_diverse(config):
        return f"{entry.rule}, a copy"
    if config.method == "noise":
        return f"{entry.rule}, plus noise of {config.noise_std:g} of its deviation"
    unit = "entries" if config.method == "elementwise" else "neurons"
    return f"{entry.rule}, {config.mask_ratio:.0%} of its {unit} zero (seed {config.seed})"


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
    """Return the divergence of a finished model, with these tensors, from its sources.

    It is None if a part started fresh, or if the vocabularies have no text in common.
    """
    if len(plan.sources) < len(PARTS):
        return None
    old, new = plan.sources["embeddings"].tokenizer.build(), plan.tokenizer.build()
    ids = shared_ids(old, new)
    outputs = [pair for pair in ids if _is_output(pair[0], old) and _is_output(pair[1], new)]
    specs = (plan.spec, *(source.spec for source in plan.sources.values()))
    codes = set.intersection(*({*spec.languages_with_modules} for spec in specs))
    targets = {code for code in codes if old.writes(code) and new.writes(code)}
    if not targets or not any(old.piece(old_id) for old_id, _ in outputs):
        return None
    old_ids, new_ids = (list(side) for side in zip(*ids, strict=True))
    with sparing_loops():
        batch = fixed_batch(old, old_ids, plan.spec, sources=codes, targets=targets)
        before_LV = StreamedModel.of_sources(plan).logits(batch)
        batch = fixed_batch(new, new_ids, plan.spec, sources=codes, targets=targets)
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
    tokenizer: Tokenizer,
    ids: list[int],
    spec: ModelSpec,
    *,
    sources: Collection[str],
    targets: Collection[str],
) -> Batch:
    """Return sentences of random pieces in directions that take turns through the languages.

    ``ids`` are drawn from; their order is the same for both vocabularies.
    """
    pieces = [index for index in ids if tokenizer.piece(index) is not None]
    outputs = [index for index in pieces if _is_output(index, tokenizer)]
    generator = named_generator("function check")
    drawn = torch.randint(len(pieces), (SENTENCES, 2, LENGTH), generator=generator)
    codes = [code for code in tokenizer.languages if code in sources]
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
        self._spare: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    @classmethod
    def of_sources(cls, plan: AssemblyPlan) -> "StreamedModel":
        """Return the model of the embeddings, the encoder and the decoder of three models."""
        shapes = {part: shape_of_model(source.spec) for part, source in plan.sources.items()}
        model, decoder = shapes["encoder"], shapes["decoder"]
        model.decoder, model.embedding = decoder.decoder, shapes["embeddings"].embedding
        groups = decoder.spec.language_groups
        model.spec = model.spec.model_copy(update={"language_groups": groups})
        tensors = {part: source.tensors for part, source in plan.sources.items()}
        return cls(model.spec, tensors, model)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits (L, V) of a batch in float32."""
        layers = [*self.model.encoder.layers, *self.model.decoder.layers]
        inner = {module for layer in layers for module in layer.modules()}
        for name, module in self.model.named_modules():
            if module in layers:
                module.register_forward_pre_hook(lambda m, _, n=name: self._fill(n, m))
                module.register_forward_hook(lambda m, _, x: self._left(m, x))
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
                spare = self._spare[parameter.shape, parameter.dtype]
                values = spare.pop() if spare else torch.empty_like(parameter, device="cpu")
                setattr(owner, name, nn.Parameter(values, requires_grad=False))
        for entry in named_slices(module):
            if recurse or entry.owner is module:
                name = f"{prefix}.{entry.name}"
                entry.value.copy_(self.tensors[part_of(name)].read(name))

    def _left(self, layer: nn.Module, x: Residual) -> Residual:
        """Add what waits for the sum, which may need the layer's norm, and empty the layer."""
        x = x._replace(x_ND=x.sum(), y_ND=None, bias_D=None, norm=None)
        self._empty(layer)
        return x

    def _empty(self, module: nn.Module) -> None:
        """Give the memory of a module's parameters to the next layer."""
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                self._spare[parameter.shape, parameter.dtype].append(parameter.data)
                nothing = torch.empty_like(parameter, device="meta")
                setattr(owner, name, nn.Parameter(nothing, requires_grad=False))
