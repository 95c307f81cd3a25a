"""Play faults in the ranks of a job; Python imports this module at its start if PYTHONPATH has it.

MISCHIEF holds JSON: {"at": place, "do": fault, "rank": which, "restarts": [numbers]}. Places are
"start" (before torch is loaded), "rehearsal", "update N", "leaving" and "pair" (make_shards begins
one); faults are "memory", "kill" and seconds to sleep. Without "rank" all ranks take part, without
"restarts" all starts of the job.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _strike(fault: str | float) -> None:
    if fault == "memory":
        raise MemoryError("played by a test")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(fault))


class _After(importlib.abc.MetaPathFinder):
    """Calls functions with modules once they are loaded."""

    def __init__(self, calls: dict[str, Callable[[Any], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = self._calls.pop(name, None)
        if call is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            call(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Let a function act before it does its own work."""
    original = getattr(owner, name)

    def acting(*arguments: Any, **options: Any) -> Any:
        act(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, acting)


def _play(plan: dict[str, Any]) -> None:
    place, fault = plan["at"], plan["do"]

    def at_update(update: int | None = None) -> None:
        if update is not None and place in (f"update {update}", "every update"):
            _strike(fault)

    def always(*_: object) -> None:
        _strike(fault)

    places: dict[str, tuple[str, Callable[[Any], None]]] = {
        "start": (
            "pipeline.cli.stage_commands",
            lambda module: _before(module, "make_call", always),
        ),
        "rehearsal": (
            "pipeline.training.engine",
            lambda module: _before(module.Engine, "rehearse", always),
        ),
        "leaving": (
            "pipeline.distributed.watchdog",
            lambda module: _before(module.Peers, "end", always),
        ),
        "pair": (
            "data_prep.make_shards",
            lambda module: _before(module, "shard_pair", always),
        ),
    }
    name, call = places.get(
        place,
        ("pipeline.distributed.process", lambda module: _before(module, "advance", at_update)),
    )
    sys.meta_path.insert(0, _After({name: call}))


def _begin() -> None:
    plans = json.loads(os.environ.get("MISCHIEF", "[]"))
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if "SLURM_STEP_ID" not in os.environ or "MMNMT_REPORTS" not in os.environ:
        return
    for plan in plans:
        is_mine = plan.get("rank") in (None, int(os.environ["SLURM_PROCID"]))
        if is_mine and restart in plan.get("restarts", [restart]):
            _play(plan)


_begin()
