"""A decoder with scripted logits, and a beam search over it in plain Python.

The logits after a beginning depend on a hash of its tokens, which rows carry from step to step like
cached keys: a search that mixes up rows gets other logits.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.tiny_models import EOS_ID, PAD_ID
from torch import Tensor

from pipeline.decoding.hypotheses import Source, Translation, length_limit
from pipeline.decoding.settings import DecodingConfig

POSITIONS = 64


@dataclass
class ScriptedModel:
    """Stands for a Transformer: ``states`` of a sentence are the hash of its tokens.

    Attributes:
        logits_HV: logits for every hash.
        factor: of the earlier tokens in the hash; 0 for logits that depend on the length only.
    """

    logits_HV: Tensor
    factor: int = 31

    def __post_init__(self) -> None:
        self.device = self.logits_HV.device
        sizes = SimpleNamespace(max_positions=POSITIONS)
        self.spec = SimpleNamespace(pad_id=PAD_ID, model=sizes)

    def eval(self) -> "ScriptedModel":
        return self

    def joint_parameters_of_steps(self) -> None:
        return None

    def project(self, hash_R: Tensor) -> Tensor:
        return self.logits_HV[hash_R]

    def next_hash(self, before: Any, token: Any) -> Any:
        if not self.factor:
            return (before + 1) % len(self.logits_HV)
        return (before * self.factor + token) % len(self.logits_HV)


class ScriptedStates:
    """Stands for :class:`DecoderStates`, on a grid of hashes."""

    can_join = False

    def __init__(self, model: ScriptedModel, sources: Sequence[Source], *, route: str) -> None:
        del route
        self.model, self.device = model, model.device
        self.prompt_length = len(sources[0].prompt)
        self.hash_BJ = torch.tensor([[first_hash(model, source)] for source in sources])

    def begin(self) -> Tensor:
        return self.hash_BJ.flatten()

    def step(self, ids_R: Tensor, position_R: Tensor) -> Tensor:
        assert int(position_R.max()) < POSITIONS
        self.hash_BJ.copy_(self.model.next_hash(self.hash_BJ, ids_R.view_as(self.hash_BJ)))
        return self.hash_BJ.flatten()

    step_in_place = step

    def keep(self, keep_B: Tensor, beam_BJ: Tensor) -> None:
        self.hash_BJ = self.hash_BJ[keep_B[:, None], beam_BJ]

    def reorder(self, beam_BJ: Tensor) -> None:
        self.hash_BJ.copy_(self.hash_BJ.gather(1, beam_BJ))

    def blank(self, batch: int, *, positions: int) -> "ScriptedStates":
        assert positions >= 16
        new = copy(self)
        new.hash_BJ = self.hash_BJ.new_zeros(batch, self.hash_BJ.shape[1])
        return new

    def tensors(self) -> list[Tensor]:
        return [self.hash_BJ]


def first_hash(model: ScriptedModel, source: Source) -> int:
    """Return the hash of a sentence before its first token."""
    return sum(source.tokens) % len(model.logits_HV)


def plain_search(model: ScriptedModel, source: Source, config: DecodingConfig) -> list[Translation]:
    """Search for one sentence, one hypothesis at a time, adding up in float32 as searches do."""
    is_fairseq, beams = config.stopping == "fairseq", config.beam_size
    limit = length_limit(source, config, positions=POSITIONS - len(source.prompt))
    log_p = model.logits_HV.log_softmax(1).numpy()
    running: list[tuple[np.float32, tuple[int, ...], int]] = [
        (np.float32(0), (), first_hash(model, source))
    ]
    ended: list[Translation] = []
    for length in range(1, limit + 1):
        is_last = length == limit
        counted = length if is_fairseq else length + len(source.prompt) - 1
        candidates = [
            (log_p[state, token] + total, tokens, state, token)
            for total, tokens, state in running
            for token in range(log_p.shape[1])
            if token != PAD_ID and (token == EOS_ID or not (is_last and is_fairseq))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, tokens, _, token in candidates[:beams]:
            if token == EOS_ID or is_last:
                all_tokens = tokens if token == EOS_ID else (*tokens, token)
                score = float(total) / counted**config.length_penalty
                ended.append(Translation(all_tokens, score))
        ended = sorted(ended, key=lambda one: -one.score)[:beams]
        running = [
            (total, (*tokens, token), int(model.next_hash(state, token)))
            for total, tokens, state, token in candidates[: 2 * beams]
            if token != EOS_ID
        ][:beams]
        if len(ended) == beams and running:
            best = float(running[0][0]) / counted**config.length_penalty
            if is_fairseq or ended[-1].score >= best:
                break
    return ended[: config.n_best]
