"""The names of the rules, in the order in which they are tried."""

from typing import Literal, get_args

Rule = Literal[
    "empty",
    "too_long",
    "control_characters",
    "copy",
    "swapped",
    "length_ratio",
    "wrong_language",
    "duplicate",
    "near_duplicate",
    "held_out_overlap",
]
RULES: tuple[Rule, ...] = get_args(Rule)
"""In the order they are tried."""

SIDED_RULES: tuple[Rule, ...] = (
    *("empty", "too_long", "control_characters", "wrong_language"),
    "held_out_overlap",
)
"""Those that a side breaks; the others are broken by both together."""

Sides = tuple[bool, bool]
"""Which sides of a line break a rule."""

NO_SIDE: Sides = (False, False)
"""No side by itself: both together break the rule, or none is broken."""
