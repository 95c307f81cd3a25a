"""The forward pass on CUDA tensors without values: whether devices and types fit together there.

The operators' own checks for CUDA are part of PyTorch's CUDA builds alone.
"""

from typing import Any

import pytest
import torch
from support.fronted_models import fronted_spec
from support.tiny_models import EVERYWHERE, random_batch, tiny_spec
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.batching.batch import with_each_tensor
from pipeline.model.building import build_model
from pipeline.model.settings import MoEConfig
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.training.losses import training_loss
from pipeline.training.settings import LossConfig

CUDA = torch.device("cuda", 0)
MOE = {"num_experts": 4, "every": 1}
CAPACITY = {**MOE, "dispatch": "capacity", "batch_prioritized": True}

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this PyTorch was built without CUDA"
)


def put_on_cuda(model: Transformer, dtype: torch.dtype) -> None:
    """Memory without values for every parameter and buffer, on the device of the fake mode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=dtype, device=CUDA)
                module._parameters[name] = nn.Parameter(value)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)


LMS: dict[str, Any] = {"kind": "low_rank", "rank": 8, "within": EVERYWHERE}


@pytest.mark.parametrize(
    ("moe", "groups", "modules", "capability"),
    [
        (None, 0, None, (8, 0)),  # with experts the host asks older cards for a number, and waits
        (None, 0, None, (9, 0)),
        (MOE, 0, None, (9, 0)),
        (MOE, 2, None, (9, 0)),
        (CAPACITY, 0, None, (9, 0)),
        (CAPACITY, 2, None, (10, 0)),
        *(
            (None, 0, modules, capability)
            for modules in (
                LMS,
                {**LMS, "synthesis": "language_wise", "languages": ["de", "en"]},
                {"kind": "clsr"},
                {"kind": "clsr", "tables": "per_sublayer", "shared_projection": "none"},
                {"kind": "language_experts"},
            )
            for capability in ((8, 0), (9, 0))
        ),
        (None, 0, {**LMS, "rank": 20}, (9, 0)),  # grouped products do not take it
    ],
)
def test_the_loss_of_a_micro_batch_is_made_on_the_device(
    moe: dict[str, Any] | None,
    groups: int,
    modules: dict[str, Any] | None,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # asks for a driver
    config = None if moe is None else MoEConfig.model_validate(moe)
    spec = tiny_spec(moe=config, groups=groups, model={"language_modules": modules})
    rates = Regularization(dropout=0.1, attention_dropout=0.1)
    model = build_model(spec, regularization=rates, device=torch.device("meta")).train()
    batch = random_batch(spec, sentences=128, seed=1).keyed(1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        put_on_cuda(model, torch.bfloat16)
        on_device = with_each_tensor(batch, lambda part: part.to(CUDA))
        terms = training_loss(model, on_device, LossConfig(label_smoothing=0.1))
    assert terms.objective.device == CUDA
    assert terms.objective.dtype == torch.float32
    assert len(terms.routing) == (0 if moe is None else 4)


class Waiting(TorchDispatchMode):
    """Notes operators for which the host waits, though they return no value to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        # isin sorts among many ids, and index_put_ copies a number of the host.
        if name == "isin" or (name == "index_put_" and args[2].device != args[0].device):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("front", [None, {"kind": "wsf", "layers": 1}])
def test_padded_attention_waits_for_no_copy_of_a_number(
    front: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    spec = fronted_spec(front) if front else tiny_spec()
    model = build_model(spec, device=torch.device("meta")).train()
    batch = random_batch(spec, sentences=8, seed=1).keyed(1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        put_on_cuda(model, torch.float16)
        on_device = with_each_tensor(batch, lambda part: part.to(CUDA))
        with Waiting() as waiting:
            training_loss(model, on_device, LossConfig())
    assert not waiting.seen
