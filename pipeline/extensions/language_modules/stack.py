"""Modules of several languages as stacked tensors, and the slot of each sentence.

In memory, a parameter of all languages is one tensor (S, …): every rank has a gradient for
every language: zeros if none of its sentences is in that language. In checkpoints, every language
has its own tensors under its code: ``….low_rank.de.vertical``.

Slots may be spread over ranks, in order and as evenly as possible. DeepSpeed cuts its buckets by
size, so that parameters must have one shape on all ranks: the last slot is followed by padding,
which is never used and not saved.

Legend: B sentences, S slots.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pipeline.config.settings import SHARED
from pipeline.kernels.slot_products import SentenceSlots, copied_to
from pipeline.model.moe.experts import StackedModules
from pipeline.model.tokens import Tokens

SentenceSide = Literal["source", "target"]
"""Side of a sentence: its language selects a module."""


class LanguageStack(StackedModules):
    """A module with parameters that have a first dimension over ``slots``.

    Args:
        languages: codes, in the order of the language indices of batches.
        kept: codes of the languages that have a module; None: all of them.
        has_shared: whether a slot for all languages follows theirs.
        ranks: number of ranks that the slots are spread over.
        rank: index of this rank among them.
    """

    def __init__(
        self,
        languages: Sequence[str],
        *,
        kept: Sequence[str] | None = None,
        has_shared: bool = False,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__()
        own = list(languages) if kept is None else [code for code in languages if code in set(kept)]
        self.slots: tuple[str, ...] = (*own, *([SHARED] if has_shared else []))
        self.has_shared = has_shared
        self.ranks = ranks
        self.first_slot = rank * self.share
        self._slot_of_language = None if kept is None else [_place(own, code) for code in languages]
        self._slots_of_device: dict[torch.device, Tensor] = {}

    @property
    def share(self) -> int:
        """Return the number of slots that a rank has parameters for, padding included."""
        return -(-len(self.slots) // self.ranks)

    @property
    def is_spread(self) -> bool:
        """Return whether ranks hold different slots."""
        return self.ranks > 1

    @property
    def held_slots(self) -> tuple[str, ...]:
        """Return the slots that this rank holds, in order."""
        return self.slots[self.first_slot : self.first_slot + self.share]

    def slots_of(self, language_B: Tensor, tokens: Tokens) -> Tensor:
        """Return the slot of each sentence: its language's, or the shared one on that route."""
        if self._is_shared(tokens):
            return torch.full_like(language_B, len(self.slots) - 1)
        if self._slot_of_language is None:
            return language_B
        return self._slots_on(language_B.device).index_select(0, language_B)

    def sentence_slots(
        self, kind: str, sides: tuple[SentenceSide, SentenceSide], tokens: Tokens
    ) -> SentenceSlots:
        """Return the slots of two stacked tensors, cached for all layers of a kind in a pass.

        Args:
            kind: kind of the module.
            sides: whether the source or the target language selects each of the tensors.
            tokens: metadata of the rows.
        """
        key = (kind, sides, self.slots)
        if key not in tokens.kept_slots:
            language_of = {"source": tokens.source_language_B, "target": tokens.target_language_B}
            slots_of = {side: self.slots_of(language_of[side], tokens) for side in {*sides}}
            first_B, second_B = (slots_of[side] for side in sides)
            is_one = self._is_shared(tokens)
            tokens.kept_slots[key] = SentenceSlots(
                tokens.sentence_N, first_B, first_B if is_one else second_B
            )
        return tokens.kept_slots[key]

    def _is_shared(self, tokens: Tokens) -> bool:
        return tokens.route == "shared" and self.has_shared

    def _slots_on(self, device: torch.device) -> Tensor:
        """Return the slots of all languages on a device."""
        if device not in self._slots_of_device:
            slots = torch.tensor(self._slot_of_language, device="cpu")
            self._slots_of_device[device] = copied_to(device, slots)
        return self._slots_of_device[device]


def _place(codes: Sequence[str], code: str) -> int:
    """Return the slot of a language, or an invalid one that no kernel can read by mistake."""
    return codes.index(code) if code in codes else -(2**31)
