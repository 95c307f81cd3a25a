"""fairseq's Transformer with mixtures of experts: one file of what ranks share, one of each rank's.

fairseq's branches with experts (``moe``, ``nllb``) are not installed here. From their public source
(``fairseq/moe_checkpoint_utils.py``, ``fairseq/modules/transformer_layer.py``,
``fairseq/modules/moe/{moe_layer,top1gate,top2gate}.py``) and that of Hugging Face's converter of
NLLB-MoE: ``X-shared.pt`` holds all but the experts, whose tensors lie
in ``X-rank-K.pt`` under the number they have on rank K; with n experts on each, number i of rank K
is expert K · n + i of the model. A layer has experts where its number from 1 is a multiple of
``moe_freq``. Of two experts the kept probabilities are renormalised, of one it stays as it is.

What fairseq drops in evaluation, tokens beyond an expert's capacity, is dropped only where a recipe
says so: that depends on the other sentences of a batch.
"""

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from pipeline.checkpoints.foreign.fairseq import FairseqSettings
from pipeline.checkpoints.foreign.refusals import refuse_other
from pipeline.checkpoints.foreign.tensors import NameTable
from pipeline.checkpoints.foreign.torch_file import StateDict, read_torch_file
from pipeline.errors import CheckpointError
from pipeline.model.settings import MoEConfig

EXPERTS = NameTable.parse("""
{stack}.layers.{layer}.moe_layer.gate.wg.weight                {stack}.layers.{layer}.feed_forward.router.weight
{stack}.layers.{layer}.moe_layer.experts.{expert}.fc1.{kind}   {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
{stack}.layers.{layer}.moe_layer.experts.{expert}.fc2.{kind}   {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}  # times what training kept
""")  # noqa: E501 (a table)

_SHARED = "-shared.pt"
_RANK = re.compile(r"-rank-(0|[1-9]\d{0,4})\.pt", re.ASCII)
_EXPERT = re.compile(
    r"(?P<layer>.+\.moe_layer\.experts)\.(?P<number>0|[1-9]\d{0,4})\.(?P<rest>.+)", re.ASCII
)


def moe_config(settings: FairseqSettings, origin: Path) -> MoEConfig | None:
    """The experts that settings describe; None where there are none.

    Raises:
        CheckpointError: encoder and decoder differ, or experts are of another width.
    """
    encoder = max(settings.encoder_moe_freq, settings.moe_freq)
    decoder = max(settings.decoder_moe_freq, settings.moe_freq)
    if not encoder and not decoder:
        return None
    width = settings.encoder_ffn_embed_dim
    refuse_other(
        origin,
        decoder_moe_freq=(decoder, encoder),
        moe_expert_ffn_dim=(settings.moe_expert_ffn_dim or width, width),
    )
    if not settings.moe_top1_expert:  # others choose the second by chance, in evaluation too
        refuse_other(origin, moe_second_expert_policy=(settings.moe_second_expert_policy, "all"))
    return MoEConfig(
        num_experts=settings.moe_expert_count,
        top_k=1 if settings.moe_top1_expert else 2,
        every=encoder,
        combine_weights="probability" if settings.moe_top1_expert else "renormalized",
        batch_prioritized=settings.moe_batch_prioritized_routing,
    )


def kept_share(settings: FairseqSettings) -> float:
    """What fairseq's evaluation multiplies outputs of experts by.

    In training it masks outputs of experts (``moe_eom``) and of whole layers (``moe_fom``).
    """
    return (1 - settings.moe_eom) * (1 - settings.moe_fom)


def is_shared_file(path: Path) -> bool:
    """Whether files of ranks belong to it."""
    return path.name.endswith(_SHARED)


def refuse_rank_file(path: Path) -> None:
    """Raises CheckpointError where a file is of one rank, and says which is meant."""
    if _RANK.search(path.name) is not None:
        shared = _RANK.sub(_SHARED, path.name)
        raise CheckpointError(f"{path} holds the experts of one rank alone: name {shared} instead.")


def rank_files(shared: Path) -> list[Path]:
    """The files of the ranks beside the shared one, in the order of ranks.

    Raises:
        CheckpointError: there is none, or one is missing; names it.
    """
    stem = shared.name.removesuffix(_SHARED)
    names = [path.name for path in shared.parent.iterdir() if path.name.startswith(stem)]
    matches = filter(None, (_RANK.fullmatch(name.removeprefix(stem)) for name in names))
    found = {int(match[1]) for match in matches}
    for rank in range(max(found, default=0) + 1):
        if rank not in found:
            raise _missing(shared, rank)
    return [_rank_file(shared, rank) for rank in sorted(found)]


def with_experts(weights: StateDict, num_experts: int) -> StateDict:
    """The shared weights together with the experts in the files of all ranks.

    Raises:
        CheckpointError: a file is missing, holds other things than experts, or another number of
            them than the first.
    """
    shared = weights.origin
    tensors = dict(weights.tensors)
    local = None
    files = rank_files(shared)
    for rank, path in enumerate(files):
        experts = StateDict.checked(path, read_torch_file(path, keep=["model"]).get("model"))
        numbers = _numbers(experts)
        if local is None:
            local = len(numbers)
            if len(files) * local < num_experts and num_experts % local == 0:
                raise _missing(shared, len(files))
        if numbers != set(range(local)) or len(files) * local != num_experts:
            raise CheckpointError(
                f"{path} holds {len(numbers):,} experts of a layer, where {len(files):,} files "
                f"share {num_experts:,}: restore the files of all ranks from one checkpoint."
            )
        tensors |= _renumbered(experts, first=rank * local)
    return replace(weights, tensors=tensors)


def _numbers(experts: StateDict) -> set[int]:
    """The numbers that the experts have on their rank."""
    matches = {name: _EXPERT.fullmatch(name) for name in experts.names()}
    others = [name for name, match in matches.items() if match is None]
    if others:
        raise CheckpointError(
            f"{experts.origin} holds {others[0]}, which is of no expert: restore the files of all "
            "ranks from one checkpoint."
        )
    return {int(match["number"]) for match in matches.values() if match is not None}


def _renumbered(experts: StateDict, *, first: int) -> dict[str, Tensor]:
    """Their tensors under the numbers that they have in the model."""
    tensors = {}
    for name, value in experts.tensors.items():
        match = _EXPERT.fullmatch(name)
        assert match is not None
        tensors[f"{match['layer']}.{first + int(match['number'])}.{match['rest']}"] = value
    return tensors


def _rank_file(shared: Path, rank: int) -> Path:
    return shared.with_name(f"{shared.name.removesuffix(_SHARED)}-rank-{rank}.pt")


def _missing(shared: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{_rank_file(shared, rank)} is missing, which holds the experts of a rank: put the files "
        f"of all ranks beside {shared.name}."
    )
