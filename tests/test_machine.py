"""What is made of the GPUs a machine has, and of those an environment shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import machine
from pipeline.config import ds_config
from pipeline.config.ds_config import load_ds_config, name_for
from pipeline.machine import Gpus, gpus_of, processes_here, visible_gpus

A100, V100 = 8.0, 7.0


@pytest.mark.parametrize(
    ("capabilities", "named", "count", "has_bf16"),
    [
        ((), None, 0, False),
        ((), "0", 0, False),
        ((A100, A100), None, 2, True),
        ((A100, V100), None, 2, False),
        ((A100, V100), "0", 1, True),
        ((A100, V100), "1,0", 2, False),
        ((A100, A100), "", 0, False),
        ((A100, A100), "-1", 0, False),
        ((A100, A100), "0,7,1", 1, True),
        ((A100, A100, A100), "GPU-6f1b,GPU-77aa", 2, True),
        ((A100,), "MIG-1,MIG-2,MIG-3", 1, True),
        ((A100, A100), "GPU-6f1b,none", 1, True),
        ((A100, A100), "none", 0, False),
        ((A100,), "NoDevFiles", 0, False),
        ((A100, A100), "0,-1", 1, True),
        ((A100, A100), "1,,0", 1, True),
    ],
)
def test_gpus_are_those_that_the_environment_shows(
    capabilities: tuple[float, ...], named: str | None, count: int, has_bf16: bool
) -> None:
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert gpus_of(capabilities, environment) == Gpus(count, has_bf16=has_bf16)


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [(2, 0, 2), (2, 1, 1), (2, 8, 2), (8, 3, 2), (8, 7, 4), (1, 4, 1)],
)
def test_one_process_per_gpu_and_a_divisor_of_those_asked_for(
    wanted: int, gpus: int, expected: int
) -> None:
    assert processes_here(wanted, gpus=gpus) == expected


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (Gpus(0, has_bf16=False), "cpu_fp32"),
        (Gpus(1, has_bf16=True), "zero1_bf16"),
        (Gpus(8, has_bf16=False), "zero2_fp16"),
    ],
)
def test_auto_is_what_fits_the_machine(
    gpus: Gpus, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ds_config, "visible_gpus", lambda: gpus)
    assert name_for(gpus) == name
    assert load_ds_config("auto") == load_ds_config(name)


@pytest.mark.parametrize("has_driver", [False, True])
def test_gpus_are_those_that_a_driver_lists(
    has_driver: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if has_driver:
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\necho 9.0\necho 9.0\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if has_driver else str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine._capabilities.cache_clear()
    try:
        assert visible_gpus() == Gpus(2 * has_driver, has_bf16=has_driver)
    finally:
        machine._capabilities.cache_clear()


PREPARE = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
from pipeline.distributed.world import most_open_files
from pipeline.machine import prepare_process
assert most_open_files() == 64
prepare_process()
names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
print(most_open_files(), *(os.environ.get(name) for name in names))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "128 expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "128 backend:native None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "128 None backend:native"),
    ],
)
def test_a_process_may_open_all_files_that_its_user_may_and_keeps_a_setting_of_the_allocator(
    given: dict[str, str], expected: str
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    others = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE],
        env={**others, **given},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == expected, done.stderr


CLOSED = """
import os, sys
from pipeline.machine import prepare_process
os.close(int(sys.argv[1]))
setattr(sys, sys.argv[2], None)  # as Python does if it is closed before
prepare_process()
from pipeline.cli.ending import guarded
from pipeline.distributed.process import Progress
from pipeline.distributed.world import leave
def act():
    with Progress("lines") as bar, open(sys.executable, "rb") as file:
        bar.advance()
        return 0 if file.fileno() > 2 else 9
code = guarded("x", act)
import torch
leave(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_command_with_a_closed_stream_does_its_work_and_gives_no_file_its_number(
    number: int,
) -> None:
    stream = ("stdin", "stdout", "stderr")[number]
    command = [sys.executable, "-c", CLOSED, str(number), stream]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LEFT = """
import os
from pipeline.machine import prepare_process
prepare_process()
from torch.distributed import TCPStore
for call in ("add", "set"):
    (ports, port), (waiting, end) = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port, b"%d" % store.port)
        os.read(waiting, 1)
        os._exit(2)
    store = TCPStore("127.0.0.1", int(os.read(ports, 9)), is_master=False)
    os.write(end, b" ")
    os.waitpid(other, 0)
    try:
        for _ in range(5):
            store.add("a", 1) if call == "add" else store.set("a", "1")
    except RuntimeError:
        print("left by", call)
"""


@pytest.mark.slow
def test_a_rank_that_another_one_left_prints_no_stack_of_native_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    command = [sys.executable, "-c", LEFT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left by add\nleft by set\n", "")
