"""A new front, language module, feed-forward, router, loss or stopping rule: one file and one case.

They are added, as text, to a copy of the packages, which then trains, looks into and translates
with a model that has them all.
"""

import json
import re
from inspect import getsource
from pathlib import Path
from textwrap import indent

import pytest
from support import sigmoid_router
from support.added_variants import ROOT, Variant, commands_in, copy_with, run_in
from support.raw_trees import unpack_stored_run

pytestmark = pytest.mark.slow

SMOOTH_FRONT = '''"""Every state with some of its left neighbour's, by source language."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.front_end import Passage, Source
from pipeline.model.spec import ModelSpec


class SmoothFront(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(len(spec.languages)))

    def initial_value(
        self, name: str, shape: torch.Size, *, generator: torch.Generator
    ) -> Tensor:
        return torch.full(shape, 0.25)

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        packing, tokens = source.packing, source.tokens
        before_ND = packing.pack(F.pad(packing.unpack(x_ND), (0, 0, 1, 0))[:, :-1])
        share_N1 = self.share[tokens.source_language_N][:, None].to(x_ND.dtype)
        return passage.through(x_ND + share_N1 * before_ND)
'''
GATED_FEED_FORWARD = '''"""down(activation(up(x)) * gate(x))."""

from torch import Tensor, nn

from pipeline.kernels.products import activate
from pipeline.kernels.products import Linear
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens


class GatedFeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        model = spec.model
        self.activation = model.activation
        self.up = Linear(model.width, model.feed_forward_width)
        self.gate = Linear(model.width, model.feed_forward_width)
        self.down = Linear(model.feed_forward_width, model.width)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> tuple[Tensor, None]:
        return self.down(activate(self.up(x_ND), self.activation) * self.gate(x_ND)), None
'''
SIGMOID_ROUTER = Path(sigmoid_router.__file__).read_text(encoding="utf-8")
TWO_ROUTES = """
def two_routes_loss(model: Trained, batch: AnyBatch, config: LossConfig) -> LossTerms:
    specific = loss_terms(model(batch, route="specific"), batch, config)
    shared = loss_terms(model(batch, route="shared"), batch, config)
    return LossTerms(
        objective=(specific.objective + shared.objective) / 2,
        cross_entropy=(specific.cross_entropy + shared.cross_entropy) / 2,
        balance=specific.balance,
        routing=specific.routing,
    )
"""
FIRST_RULE = '''"""Done with the hypothesis that ends first."""


class FirstRule:
    forces_end_at_limit = True

    def counted_length(self, length: int, *, prompt_length: int) -> int:
        return length

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:
        return True
'''
MODEL_SETTINGS = "pipeline/model/settings.py"
LOSS_SETTINGS = "pipeline/training/settings.py"
DECODING_SETTINGS = "pipeline/decoding/settings.py"
LANGUAGE_SCALES = '''"""A factor per language behind every feed-forward."""

import torch
from torch import Tensor, nn

from pipeline.extensions.language_modules.stack import LanguageStack


class Scales(LanguageStack):
    def __init__(self, languages, *, kept) -> None:
        super().__init__(languages, kept=kept)
        self.factor = nn.Parameter(torch.empty(len(self.slots), 1))

    def initial_value(self, name, shape, *, generator) -> Tensor:
        return torch.ones(shape)

    def forward(self, x_ND, y_ND, tokens) -> tuple[Tensor, None]:
        slot_N = self.slots_of(tokens.target_language_B, tokens)[tokens.sentence_N]
        return y_ND * self.factor[slot_N].to(y_ND.dtype), None

    def kept_bytes(self, *, tokens, width, value) -> int:
        return tokens * width * value


def add_scales(spec, config, stack) -> None:
    for layer in stack.layers:
        scales = Scales(spec.languages, kept=config.languages)
        layer.add_module("feed_forward_scales", scales)
        layer.sublayers["feed_forward"].after = scales
'''
FRONT_ENDS = "pipeline/extensions/byte_front_ends"
LANGUAGE_MODULES = "pipeline/extensions/language_modules"
VARIANTS = {
    "front": Variant(
        {f"{FRONT_ENDS}/smooth.py": SMOOTH_FRONT},
        {
            f"{FRONT_ENDS}/__init__.py": [
                (
                    "FRONT_ENDS: tuple[type[FrontSettings], ...] = (\n",
                    "class SmoothConfig(FrontSettings):\n"
                    '    """Smooth."""\n\n'
                    '    kind: Literal["smooth"] = "smooth"\n\n\n'
                    "FRONT_ENDS: tuple[type[FrontSettings], ...] = (\n    SmoothConfig,\n",
                )
            ],
            f"{FRONT_ENDS}/extension.py": [
                (
                    "        match spec.model.front:\n",
                    f"        from {FRONT_ENDS.replace('/', '.')} import SmoothConfig\n"
                    f"        from {FRONT_ENDS.replace('/', '.')}.smooth import SmoothFront\n"
                    "        match spec.model.front:\n"
                    "            case SmoothConfig():\n"
                    "                return SmoothFront(spec)\n",
                )
            ],
        },
    ),
    "language modules": Variant(
        {f"{LANGUAGE_MODULES}/scales.py": LANGUAGE_SCALES},
        {
            f"{LANGUAGE_MODULES}/__init__.py": [
                (
                    "LANGUAGE_MODULES: tuple[type[LanguageModuleSettings], ...] = (\n",
                    "class ScalesConfig(LanguageModuleSettings):\n"
                    '    """Scales."""\n\n'
                    '    kind: Literal["scales"] = "scales"\n\n\n'
                    "LANGUAGE_MODULES: tuple[type[LanguageModuleSettings], ...] = (\n"
                    "    ScalesConfig,\n",
                )
            ],
            f"{LANGUAGE_MODULES}/extension.py": [
                (
                    "            case LowRankConfig() as config:\n                add_low_rank",
                    "            case ScalesConfig() as config:\n"
                    "                add_scales(spec, config, stack)\n"
                    "            case LowRankConfig() as config:\n                add_low_rank",
                ),
                (
                    "from pipeline.extensions.language_modules.stack import LanguageStack\n",
                    "from pipeline.extensions.language_modules.scales import add_scales\n"
                    "from pipeline.extensions.language_modules import ScalesConfig\n"
                    "from pipeline.extensions.language_modules.stack import LanguageStack\n",
                ),
            ],
        },
    ),
    "feed-forward": Variant(
        {"pipeline/model/gated_feed_forward.py": GATED_FEED_FORWARD},
        {
            MODEL_SETTINGS: [
                (
                    "FeedForwardConfig = DenseConfig\n",
                    "class GatedConfig(Settings):\n"
                    '    """Gated."""\n\n'
                    '    kind: Literal["gated"] = "gated"\n\n\n'
                    "FeedForwardConfig = Annotated[DenseConfig | GatedConfig, "
                    'Field(discriminator="kind")]\n',
                ),
                (
                    "from pydantic import model_validator\n",
                    "from pydantic import Field, model_validator\n",
                ),
            ],
            "pipeline/model/building.py": [
                (
                    "import DenseConfig, ModelConfig, SubwordsConfig\n",
                    "import DenseConfig, GatedConfig, ModelConfig, SubwordsConfig\n",
                ),
                (
                    "        case DenseConfig():\n",
                    "        case GatedConfig():\n"
                    "            from pipeline.model.gated_feed_forward import GatedFeedForward\n"
                    "            return GatedFeedForward(spec)\n"
                    "        case DenseConfig():\n",
                ),
            ],
        },
    ),
    "router": Variant(
        {"pipeline/model/moe/sigmoid_router.py": SIGMOID_ROUTER},
        {
            MODEL_SETTINGS: [
                (
                    'Literal["token", "language_group"]',
                    'Literal["token", "language_group", "sigmoid"]',
                )
            ],
            "pipeline/model/moe/router.py": [
                (
                    '        case "language_group":\n',
                    '        case "sigmoid":\n'
                    "            from pipeline.model.moe.sigmoid_router import SigmoidRouter\n"
                    "            return SigmoidRouter(moe, spec)\n"
                    '        case "language_group":\n',
                )
            ],
        },
    ),
    "loss": Variant(
        {},
        {
            LOSS_SETTINGS: [
                (
                    'Literal["cross_entropy", "fuse_distillation"]',
                    'Literal["cross_entropy", "fuse_distillation", "two_routes"]',
                ),
                ('objective == "fuse_distillation"', 'objective != "cross_entropy"'),
            ],
            "pipeline/training/losses.py": [
                ("\n\ndef translation_loss(", f"\n{TWO_ROUTES}\n\ndef translation_loss("),
                (
                    '        case "cross_entropy":\n',
                    '        case "two_routes":\n'
                    "            return two_routes_loss(model, batch, config)\n"
                    '        case "cross_entropy":\n',
                ),
            ],
        },
    ),
    "stopping rule": Variant(
        {"pipeline/decoding/first_rule.py": FIRST_RULE},
        {
            DECODING_SETTINGS: [
                ('Literal["fairseq", "huggingface"]', 'Literal["fairseq", "huggingface", "first"]')
            ],
            "pipeline/decoding/hypotheses.py": [
                (
                    '        case "fairseq":\n',
                    '        case "first":\n'
                    "            from pipeline.decoding.first_rule import FirstRule\n"
                    "            return FirstRule()\n"
                    '        case "fairseq":\n',
                )
            ],
        },
    ),
}
RECIPE = """
parent = "moe_lgr.toml"
[model.front]
kind = "smooth"
[model.feed_forward]
kind = "gated"
[model.language_modules]
kind = "scales"
[model.moe]
decoder_router = "sigmoid"
[loss]
objective = "two_routes"
[training]
updates = 4
validate_every = 2
checkpoint_every = 2
[decoding]
stopping = "first"
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run, whose shards are trained on."""
    folder = tmp_path_factory.mktemp("stored")
    unpack_stored_run(folder)
    (folder / "all.toml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with(tmp_path_factory.mktemp("copy"), list(VARIANTS.values()))


def test_the_router_is_the_one_of_the_page() -> None:
    page = (ROOT / "docs/how-to/add_a_variant.md").read_text(encoding="utf-8")
    assert indent(getsource(sigmoid_router.SigmoidRouter), 4 * " ") in page


@pytest.fixture(scope="module")
def printed(copied: Path, stored: Path) -> list[str]:
    """What commands print of a model with all variants that two ranks have trained."""
    given = ["--recipe", "all.toml", "--shards", "run/shards", "--mixture", "run/mixture"]
    train = ["-m", "pipeline", "pretrain", *given, "--processes", "2", "--out", "new"]
    run_in(copied, train, cwd=stored)
    recipe = 'parent = "moe_lgr.toml"\n[model.moe]\ndecoder_router = "sigmoid"\n'
    (stored / "sigmoid.toml").write_text(recipe, encoding="utf-8")
    translate = "translate --recipe all.toml --checkpoint new --from en --to de"
    estimate = "estimate --device cpu --json"
    describe = "describe --recipe sigmoid.toml --languages"
    commands = (
        *("checkpoint inspect new --tensors --json", translate),
        *(f"{estimate} moe_lgr.toml --groups 2", f"{estimate} all.toml --languages 2"),
        *(f"{describe} 2", f"{describe} 9"),
    )
    split = [command.split() for command in commands]
    return commands_in(copied, *split, cwd=stored, stdin="one\ntwo\n")


def test_all_variants_together_train_over_ranks_and_translate(printed: list[str]) -> None:
    tensors = {tensor["name"] for tensor in json.loads(printed[0])["tensors"]}
    assert {
        "front.share",
        "encoder.layers.0.feed_forward.gate.weight",
        "encoder.layers.0.feed_forward_scales.de.factor",
        "decoder.layers.1.feed_forward.router.preference",
    } <= tensors
    assert len(printed[1].splitlines()) == 2


def test_memory_counts_what_a_variant_keeps(printed: list[str]) -> None:
    plain_bytes, varied_bytes = (
        json.loads(text)["memory"]["phases"]["backward"]["activations"] for text in printed[2:4]
    )
    assert varied_bytes > plain_bytes


def test_a_routers_tensor_per_language_is_counted(printed: list[str]) -> None:
    """4 experts, in the last of two decoder layers."""
    two, nine = (int(re.findall(r"# routers +([0-9,]+)", text)[0]) for text in printed[4:])
    assert nine - two == (9 - 2) * 4


def test_an_unknown_kind_is_one_sentence(copied: Path, stored: Path) -> None:
    (stored / "wrong.toml").write_text('[model.front]\nkind = "smoth"\n', encoding="utf-8")
    arguments = ["-m", "pipeline", "describe", "--recipe", "wrong.toml"]
    done = run_in(copied, arguments, cwd=stored, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "model.front" in done.stderr
    assert "Did you mean 'smooth'?" in done.stderr
