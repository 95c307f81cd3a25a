"""The parameters of every row of MMNMT's and MoCE's tables, beside the paper's number.

A vocabulary is what the paper says of it, with a token per language: 64,000 pieces of 95 languages
(OPUS-100, MMNMT), 256 bytes and four specials of 59 (TED-59), and so on.
"""

from dataclasses import dataclass

import pytest

from pipeline.config.recipe import load_recipe
from pipeline.extensions.byte_front_ends import MshaConfig
from pipeline.jobs.plan import load_plan
from pipeline.model.parameters import count_parameters
from pipeline.model.settings import ModelConfig

BYTES = 4 + 256
MMNMT_SIZES = "Table 2 prints no sizes; Table 3 prints 0.4 B dense and 3.5 B with experts"
NO_SIZES = "this table prints no sizes"


@dataclass(frozen=True)
class Row:
    """One system of a table."""

    plan: str
    evaluation: str
    system: str
    vocabulary: int
    ours: int
    paper: str = ""
    """As printed, ``44.3M`` or ``3.5B``; empty: the paper prints none."""
    active: tuple[int, str] | None = None
    """Parameters that a token meets, ours and as printed."""
    reason: str = ""
    """Why ours is not the paper's number, or why there is none."""


def opus100(system: str, ours: int, active: int) -> Row:
    return Row(
        "opus100", "evaluation", system, 64_000 + 95, ours, active=(active, ""), reason=MMNMT_SIZES
    )


def pc32(system: str, ours: int, paper: str, active: tuple[int, str], reason: str = "") -> Row:
    return Row("pc32", "evaluation", system, 64_000 + 33, ours, paper, active, reason)


def moce(plan: str, evaluation: str, vocabulary: int, **systems: object) -> list[Row]:
    """Rows of a table, ``system = (ours, paper)`` or ``(ours, paper, reason)``."""
    found = []
    for system, values in systems.items():
        assert isinstance(values, tuple)
        ours, paper, *reason = values
        found.append(Row(plan, evaluation, system, vocabulary, ours, paper, reason="".join(reason)))
    return found


DENSE, MOE, LGR = 418_352_128, 3_541_212_160, 3_541_998_592
ACTIVE, ACTIVE_LGR = 519_470_080, 520_256_512
ROWS = [
    opus100("(1) Dense", DENSE, DENSE),
    opus100("(2) Dense, 79 h", DENSE, DENSE),
    opus100("(3) MoE", MOE, ACTIVE),
    opus100("(4) MoE, 158 h", MOE, ACTIVE),
    opus100("(5) MoE-LGR", LGR, ACTIVE_LGR),
    opus100("(6) MoE-LGR, 158 h", LGR, ACTIVE_LGR),
    opus100("(7) Enc(1)-Dec(rand)", MOE, ACTIVE),
    opus100("(8) Enc(1)-Dec(rand), 130 h", MOE, ACTIVE),
    opus100("(9) Enc(1)-Dec(1)", MOE, ACTIVE),
    opus100("(10) Enc(1)-Dec(1), 130 h", MOE, ACTIVE),
    opus100("(11) Enc(1)-Dec(3)", MOE, ACTIVE),
    opus100("(12) Enc(1)-Dec(5)", LGR, ACTIVE_LGR),
    # Positions of both sides are learned: 2 · 1,026 · 1,024 more than on OPUS-100.
    pc32("Dense", 420_389_888, "0.4B", (420_389_888, "0.4B")),
    pc32("MoE", 3_543_249_920, "3.5B", (521_507_840, "0.5B")),
    pc32("MMNMT (Dense)", 3_543_249_920, "3.5B", (521_507_840, "0.5B")),
    pc32("MMNMT (mRASP2)", 3_543_254_016, "3.5B", (521_511_936, "0.5B")),
    *moce(
        "ted59",
        "evaluation",
        BYTES + 59,
        **{
            "Transformer (byte)": (44_301_824, "44.3M"),
            "Byte-nCF": (46_662_660, "46.7M"),
            "MSC": (44_425_088, "44.4M"),
            "MoCE Δ5": (44_404_928, "44.4M"),
            "MoCE Δ5 +lid": (44_405_312, "44.4M"),
            "MoCE Δ6": (44_450_112, "44.5M"),
            "MoCE Δ6 +lid": (44_450_560, "44.5M"),
        },
    ),
    *moce("ted59", "evaluation", 32_000 + 59, **{"Transformer (subword)": (60_552_704, "60.6M")}),
    *moce(
        "ted59",
        "evaluation_scales",
        BYTES + 59,
        **{
            "Transformer (byte)": (44_301_824, "44.3M"),
            "MoCE Δ4 +lid": (44_368_256, "", "Figure 5 prints no sizes"),
            "MoCE Δ5 +lid": (44_405_312, "44.4M"),
            "MoCE Δ6 +lid": (44_450_560, "44.5M"),
        },
    ),
    *moce(
        "ted59",
        "evaluation_layers",
        BYTES + 59,
        **{
            "Transformer (byte)": (44_301_824, "44.3M"),
            **{
                f"MoCE Δ5 +lid, layer {layer}": (44_405_312, "", "Figure 6 prints no sizes")
                for layer in range(1, 7)
            },
        },
    ),
    *moce(
        "ted59",
        "evaluation_top_k",
        BYTES + 59,
        **{
            "Transformer (byte)": (44_301_824, "44.3M"),
            "MoCE Δ5 +lid": (44_405_312, "44.4M"),
            "MoCE Δ5 +lid, top 1": (44_405_312, "", NO_SIZES),
            "MoCE Δ5 +lid, top 3": (44_405_312, "", NO_SIZES),
        },
    ),
    *moce(
        "ted59", "evaluation_subwords", BYTES + 59, **{"Transformer (byte)": (44_301_824, "44.3M")}
    ),
    *moce(
        "ted59",
        "evaluation_subwords",
        32_000 + 59,
        **{
            "Transformer (subword)": (60_552_704, "60.6M"),
            "MoCE Δ4, subword": (60_618_816, "", NO_SIZES),
            "MoCE Δ4 +lid, subword": (60_619_136, "", NO_SIZES),
            "MoCE Δ5, subword": (60_655_808, "", NO_SIZES),
            "MoCE Δ5 +lid, subword": (60_656_192, "", NO_SIZES),
        },
    ),
    *moce(
        "ted59",
        "evaluation_low",
        BYTES + 30,
        **{
            "Transformer (byte)": (44_286_976, "", NO_SIZES),
            "Byte-nCF": (46_647_812, "", NO_SIZES),
            "MSC": (44_410_240, "", NO_SIZES),
            "MoCE Δ5": (44_390_080, "", NO_SIZES),
            "MoCE Δ5 +lid": (44_390_464, "", NO_SIZES),
        },
    ),
    *moce(
        "ted59",
        "evaluation_low",
        32_000 + 30,
        **{"Transformer (subword)": (60_537_856, "", NO_SIZES)},
    ),
    *moce(
        "opus100_bytes",
        "evaluation",
        BYTES + 100,
        **{
            "Transformer (byte)": (44_322_816, "44.3M"),
            "MSC": (44_413_312, "44.4M"),
            "MoCE Δ5": (44_425_920, "44.4M"),
            "MoCE Δ5 +lid": (44_426_304, "44.4M"),
            "MoCE Δ6": (44_471_104, "44.5M"),
            "MoCE Δ6 +lid": (44_471_552, "44.5M"),
        },
    ),
    *moce(
        "opus100_bytes",
        "evaluation",
        64_000 + 100,
        **{"Transformer (subword)": (76_957_696, "77.0M")},
    ),
    *moce(
        "pc6",
        "evaluation",
        BYTES + 6,
        **{
            "Transformer (byte)": (44_274_688, "44.3M"),
            "Byte-nCF": (46_635_524, "46.6M"),
            "MSC": (44_365_184, "45.0M", "theirs is MSC in all six layers, by its size"),
            "MoCE Δ5": (44_377_792, "44.4M"),
            "MoCE Δ5 +lid": (44_378_176, "44.4M"),
            "MoCE Δ6": (44_422_976, "44.5M", "printed as on TED-59, of 53 languages more"),
            "MoCE Δ6 +lid": (44_423_424, "44.5M", "printed as on TED-59, of 53 languages more"),
        },
    ),
]
PUBLISHED = {
    "mRASP2": (64_000, 420_360_192, "0.4B", ""),
    "M2M-100": (128_112, 1_239_470_080, "1.2B", ""),
    "NLLB": (256_206, 1_370_638_336, "1.3B", "1.3B is the model's name, and 1.37 B its size"),
}
"""Models that are translated with as they come: pieces, ours, paper, reason."""


def identity(row: Row) -> str:
    return f"{row.plan}-{row.evaluation}-{row.system}"


def model_of(plan: str, evaluation: str, system: str) -> ModelConfig:
    stages = load_plan(plan).stages
    systems = stages[evaluation].inputs["systems"]
    assert isinstance(systems, dict)
    translated = stages[systems[system]]
    return load_recipe(translated.recipe, translated.set).model


def printed(parameters: int, like: str) -> str:
    """Rounded as the paper prints it: one decimal, of millions or of billions."""
    unit = {"M": 10**6, "B": 10**9}[like[-1]]
    return f"{parameters / unit:.1f}{like[-1]}"


@pytest.mark.parametrize("row", ROWS, ids=identity)
def test_every_row_has_the_papers_parameters_or_a_reason(row: Row) -> None:
    model = model_of(row.plan, row.evaluation, row.system)
    by_group = model.moe is not None and model.moe.decoder_router == "language_group"
    found = count_parameters(model, vocabulary_size=row.vocabulary, num_groups=4 if by_group else 0)
    assert found["total"] == row.ours
    assert (not row.paper or printed(row.ours, row.paper) != row.paper) == bool(row.reason)
    if row.active is not None:
        active, paper = row.active
        assert found["active"] == active
        assert not paper or printed(active, paper) == paper


def test_no_row_of_the_tables_is_without_its_size() -> None:
    pinned = {(row.plan, row.evaluation, row.system) for row in ROWS}
    pinned |= {("pc32", "evaluation", name) for name in PUBLISHED}
    expected = set()
    for plan in ("opus100", "pc32", "ted59", "opus100_bytes", "pc6"):
        for name, stage in load_plan(plan).stages.items():
            if name == "evaluation_zero_shot":
                continue  # Table 4 has no sizes
            systems = stage.inputs.get("systems", {})
            expected |= {(plan, name, system) for system in systems}
    assert pinned == expected


def test_the_models_of_table_3_from_elsewhere_have_their_published_sizes() -> None:
    """mRASP2: learned positions and embedding norms; M2M-100 1.2 B and NLLB-200 1.3 B: 24 + 24
    layers with feed-forwards of 8,192.
    """
    of_mrasp2 = load_recipe("mmnmt_mrasp2_pc32").model.model_copy(update={"moe": None})
    large = ModelConfig(encoder_layers=24, decoder_layers=24, feed_forward_width=8192, num_heads=16)
    for name, (vocabulary, ours, paper, reason) in PUBLISHED.items():
        model = of_mrasp2 if name == "mRASP2" else large
        found = count_parameters(model, vocabulary_size=vocabulary, num_groups=0)
        assert found["total"] == ours, name
        assert (printed(ours, paper) != paper) == bool(reason), name


def test_msha_has_the_convolutions_of_msc_with_the_same_kernels() -> None:
    """It is a step of MoCE's derivation (§3.1), and in none of its tables."""
    model = load_recipe("bytes_ted59").model
    fixed = model.model_copy(update={"front": MshaConfig(scales=(0, 0, 2, 2, 3, 3, 4, 4))})
    found = count_parameters(fixed, vocabulary_size=BYTES + 59, num_groups=0)
    assert found["total"] == 44_425_088


def test_the_reasons_of_table_12_follow_from_its_own_numbers() -> None:
    """MSC in six layers prints as 45.0 M. No vocabulary fits both Byte-nCF and Δ6."""
    plain, ncf = 44_274_688, 46_635_524 - 44_274_688
    assert printed(plain + 6 * 123_264, "M") == "45.0M"
    assert printed(plain + 123_264, "M") == printed(plain + 90_496, "M") == "44.4M"
    body = plain - 512 * (BYTES + 6)
    sizes = [body + 512 * vocabulary for vocabulary in range(BYTES, 2000)]
    of_ncf = {size for size in sizes if printed(size + ncf, "M") == "46.6M"}
    of_scales = {size for size in sizes if printed(size + 147_840 + 448, "M") == "44.5M"}
    assert of_ncf
    assert of_scales
    assert not of_ncf & of_scales
