"""Modules of several languages as stacked tensors, and which of them serves a sentence.

In memory a parameter of all languages is one tensor, (S, …), so that every rank gives every
language a gradient, of zeros where its sentences have none of that language. In artifacts every
language has tensors of its own, under its code: ``….low_rank.de.vertical``.

Legend: B sentences, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.kernels.low_rank_products import SentenceSlots
from pipeline.model.tokens import Tokens

SHARED = "shared"
"""The slot of all languages, behind theirs."""


class LanguageStack(nn.Module):
    """Parameters below it have a first dimension over ``slots``.

    Args:
        languages: codes, by the language indices of batches.
        kept: codes of those that have a module; None: all of them.
        has_shared: whether there is one for all of them, behind theirs.
    """

    def __init__(
        self,
        languages: Sequence[str],
        *,
        kept: Sequence[str] | None = None,
        has_shared: bool = False,
    ) -> None:
        super().__init__()
        own = list(languages) if kept is None else [code for code in languages if code in set(kept)]
        self.slots: tuple[str, ...] = (*own, *([SHARED] if has_shared else []))
        self.has_shared = has_shared
        self._slot_of_language = None if kept is None else [_place(own, code) for code in languages]

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
