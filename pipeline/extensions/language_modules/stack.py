"""Modules of several languages as stacked tensors, and which of them serves a sentence.

In memory a parameter of all languages is one tensor, (S, …), so that every rank gives every
language a gradient, of zeros where its sentences have none of that language. In artifacts every
language has tensors of its own, under its code: ``….low_rank.de.vertical``.

Slots may be spread over ranks, in order and as evenly as they go. All ranks then have parameters of
one shape, since DeepSpeed cuts its buckets by size: behind the last slot there is padding, which
serves nobody and belongs to no artifact.

Legend: B sentences, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config.variants import SHARED
from pipeline.kernels.products import SentenceSlots
from pipeline.model.stacked import StackedModules
from pipeline.model.tokens import Tokens


class LanguageStack(StackedModules):
    """Parameters below it have a first dimension over ``slots``.

    Args:
        languages: codes, by the language indices of batches.
        kept: codes of those that have a module; None: all of them.
        has_shared: whether there is one for all of them, behind theirs.
        ranks, rank: over how many ranks the slots are spread, and which of these this one is.
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

    @property
    def share(self) -> int:
        """Slots for which a rank has parameters, padding included."""
        return -(-len(self.slots) // self.ranks)

    @property
    def is_spread(self) -> bool:
        return self.ranks > 1

    @property
    def held_slots(self) -> tuple[str, ...]:
        """Those whose parameters this rank has, in their order."""
        return self.slots[self.first_slot : self.first_slot + self.share]

    def slots_of(self, language_B: Tensor, tokens: Tokens) -> Tensor:
        """The slot of each sentence: its language's, or, on the shared route, the shared one."""
        if tokens.route == "shared" and self.has_shared:
            return torch.full_like(language_B, len(self.slots) - 1)
        if self._slot_of_language is None:
            return language_B
        return language_B.new_tensor(self._slot_of_language)[language_B]

    def sentence_slots(self, first_B: Tensor, second_B: Tensor, tokens: Tokens) -> SentenceSlots:
        """The slots of two stacked tensors, by two languages per sentence."""
        return SentenceSlots(
            tokens.sentence_N, self.slots_of(first_B, tokens), self.slots_of(second_B, tokens)
        )


def _place(codes: Sequence[str], code: str) -> int:
    """Of a language without a module, a slot that is not there."""
    return codes.index(code) if code in codes else -(2**31)
