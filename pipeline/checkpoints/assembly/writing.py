"""Write an assembly: its weights file by file, its receipt, and its function check.

Tensors are divided into files of bounded size. The division does not depend on how many files are
written at a time, and so the bytes are always the same. Threads write them: drawing, masking,
hashing and writing release the interpreter, and another process would first load torch.

:func:`make_declared` opens and plans everything that a declaration names and makes the checkpoint.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch

from pipeline.artifacts.artifact import ArtifactWriter, new_artifact, refuse_changed, stage_key
from pipeline.artifacts.digests import write_hashed
from pipeline.artifacts.manifest import FileRecord, read_manifest
from pipeline.artifacts.places import refuse_inputs, refuse_to_overwrite
from pipeline.checkpoints.assembly.declaration import Assembly, plan_assembly
from pipeline.checkpoints.assembly.function_check import check_function
from pipeline.checkpoints.assembly.rules import (
    EXPERT_RULES,
    PARTS,
    AssemblyPlan,
    Assignment,
    Part,
    is_diverse,
    part_of,
)
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.weights import (
    TensorFolder,
    TensorPlace,
    file_header,
    part_prefix,
    tensor_bytes,
)
from pipeline.model.parameters import dense_name, is_router
from pipeline.terminal import counted, text_table, track

FILE_BYTES = 256 * 1024 * 1024
"""Size of a file of the result, about."""
RECEIPT_FILE = "receipt.json"


def make_assembly(plan: AssemblyPlan, writer: ArtifactWriter, *, processes: int) -> list[str]:
    """Write weights, shape, tokenizer and receipt of an artifact; return a summary.

    Args:
        plan: The planned assembly.
        writer: The writer of the artifact.
        processes: Number of files that are written at a time.
    """
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
