"""A new front, feed-forward, router, loss or stopping rule is one file, one setting, one case.

The five are added, as text, to a copy of the house, which then trains, looks into and translates
with a model that has them all.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from support.added_slots import Variant, copy_of_the_house, run_in, touched_files

pytestmark = pytest.mark.slow

SMOOTH_FRONT = '''"""Every state with some of its left neighbour's, by source language."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.front.passage import Passage, Source
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
LANGUAGE_ROUTER = '''"""logits = W x + a bias of the target language."""

import torch
from torch import Tensor, nn

from pipeline.model.settings import MoEConfig
from pipeline.kernels.products import linear
from pipeline.model.moe.router import Routing, choose
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens


class LanguageRouter(nn.Module):
    def __init__(self, moe: MoEConfig, spec: ModelSpec) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, spec.model.width))
        self.preference = nn.Parameter(torch.empty(len(spec.languages), moe.num_experts))

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Routing:
        logits_NE = linear(x_ND.float(), self.weight.float())
        logits_NE = logits_NE + self.preference.float()[tokens.target_language_N]
        return choose(logits_NE, top_k=self.moe.top_k, combine_weights=self.moe.combine_weights)
'''
TWO_ROUTES = '''"""The mean over both routes of a model."""

from pipeline.batching.batch import Batch
from pipeline.training.settings import LossConfig
from pipeline.model.transformer import Transformer
from pipeline.training.losses import LossTerms, loss_terms


def two_routes_loss(model: Transformer, batch: Batch, config: LossConfig) -> LossTerms:
    specific = loss_terms(model(batch, route="specific"), batch, config)
    shared = loss_terms(model(batch, route="shared"), batch, config)
    return LossTerms(
        objective=(specific.objective + shared.objective) / 2,
        cross_entropy=(specific.cross_entropy + shared.cross_entropy) / 2,
        balance=specific.balance,
        routing=specific.routing,
    )
'''
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
VARIANTS = {
    "front": Variant(
        {"pipeline/model/front/smooth.py": SMOOTH_FRONT},
        {
            MODEL_SETTINGS: [
                (
                    "FrontConfig = Annotated[\n    SubwordsConfig |",
                    "class SmoothConfig(Settings):\n"
                    '    """Smooth."""\n\n'
                    '    kind: Literal["smooth"] = "smooth"\n\n\n'
                    "FrontConfig = Annotated[\n    SubwordsConfig | SmoothConfig |",
                )
            ],
            "pipeline/model/front/choice.py": [
                ("    SubwordsConfig,\n", "    SmoothConfig,\n    SubwordsConfig,\n"),
                (
                    "        case SubwordsConfig():\n",
                    "        case SmoothConfig():\n"
                    "            from pipeline.model.front.smooth import SmoothFront\n"
                    "            return SmoothFront(spec)\n"
                    "        case SubwordsConfig():\n",
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
                )
            ],
            "pipeline/model/feed_forward.py": [
                (
                    "import DenseConfig, LanguageExpertsConfig, ModelConfig\n",
                    "import DenseConfig, GatedConfig, LanguageExpertsConfig, ModelConfig\n",
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
        {"pipeline/model/moe/language_router.py": LANGUAGE_ROUTER},
        {
            MODEL_SETTINGS: [
                (
                    'Literal["token", "language_group"]',
                    'Literal["token", "language_group", "language"]',
                )
            ],
            "pipeline/model/moe/router.py": [
                (
                    '        case "language_group":\n',
                    '        case "language":\n'
                    "            from pipeline.model.moe.language_router import LanguageRouter\n"
                    "            return LanguageRouter(moe, spec)\n"
                    '        case "language_group":\n',
                )
            ],
        },
    ),
    "loss": Variant(
        {"pipeline/training/two_routes.py": TWO_ROUTES},
        {
            LOSS_SETTINGS: [
                (
                    'Literal["cross_entropy", "fuse_distillation"]',
                    'Literal["cross_entropy", "fuse_distillation", "two_routes"]',
                )
            ],
            "pipeline/training/losses.py": [
                (
                    '        case "cross_entropy":\n',
                    '        case "two_routes":\n'
                    "            from pipeline.training.two_routes import two_routes_loss\n"
                    "            return two_routes_loss(model, batch, config)\n"
                    '        case "cross_entropy":\n',
                )
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
TOUCHED = {
    "front": {"pipeline/model/front/smooth.py", MODEL_SETTINGS, "pipeline/model/front/choice.py"},
    "feed-forward": {
        "pipeline/model/gated_feed_forward.py",
        MODEL_SETTINGS,
        "pipeline/model/feed_forward.py",
    },
    "router": {
        "pipeline/model/moe/language_router.py",
        MODEL_SETTINGS,
        "pipeline/model/moe/router.py",
    },
    "loss": {"pipeline/training/two_routes.py", LOSS_SETTINGS, "pipeline/training/losses.py"},
    "stopping rule": {
        "pipeline/decoding/first_rule.py",
        DECODING_SETTINGS,
        "pipeline/decoding/hypotheses.py",
    },
}
RECIPE = """
parent = "moe_lgr.toml"
[model.front]
kind = "smooth"
[model.feed_forward]
kind = "gated"
[model.moe]
decoder_router = "language"
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
    with tarfile.open(Path(__file__).with_name("stored_run.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    (folder / "all.toml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_house(tmp_path_factory.mktemp("house"), list(VARIANTS.values()))


@pytest.mark.parametrize("slot", VARIANTS)
def test_a_variant_touches_its_file_the_settings_and_one_choice(slot: str, tmp_path: Path) -> None:
    copy = copy_of_the_house(tmp_path / "house", [VARIANTS[slot]])
    assert touched_files(copy) == TOUCHED[slot]
    shutil.rmtree(copy)


def test_all_variants_together_train_over_ranks_translate_and_are_counted(
    house: Path, stored: Path
) -> None:
    mmnmt = ["-m", "pipeline"]
    given = ["--recipe", "all.toml", "--shards", "run/shards", "--mixture", "run/mixture"]
    run_in(house, [*mmnmt, "pretrain", *given, "--processes", "2", "--out", "new"], cwd=stored)
    found = run_in(
        house, [*mmnmt, "checkpoint", "inspect", "new", "--tensors", "--json"], cwd=stored
    )
    tensors = {tensor["name"] for tensor in json.loads(found.stdout)["tensors"]}
    assert {
        "front.share",
        "encoder.layers.0.feed_forward.gate.weight",
        "decoder.layers.1.feed_forward.router.preference",
    } <= tensors
    filtered = [*mmnmt, "translate", "--recipe", "all.toml", "--checkpoint", "new"]
    answers = run_in(
        house, [*filtered, "--from", "en", "--to", "de"], cwd=stored, stdin="one\ntwo\n"
    )
    assert len(answers.stdout.splitlines()) == 2


def test_memory_counts_what_a_variant_keeps(house: Path, stored: Path) -> None:
    bytes_of = {}
    for recipe in ("moe_lgr.toml", "all.toml"):
        arguments = ["memory", "--recipe", recipe, "--processes", "1", "--json"]
        groups = ["--groups", "2"] if recipe == "moe_lgr.toml" else []
        done = run_in(house, ["-m", "pipeline", *arguments, *groups], cwd=stored)
        bytes_of[recipe] = json.loads(done.stdout)["phases"]["backward"]["activations"]
    assert bytes_of["all.toml"] > bytes_of["moe_lgr.toml"]


def test_an_unknown_kind_is_one_sentence(house: Path, stored: Path) -> None:
    (stored / "wrong.toml").write_text('[model.front]\nkind = "smoth"\n', encoding="utf-8")
    arguments = ["-m", "pipeline", "describe", "--recipe", "wrong.toml"]
    done = run_in(house, arguments, cwd=stored, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "model.front" in done.stderr
    assert "Did you mean 'smooth'?" in done.stderr
