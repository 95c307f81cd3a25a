"""Tests of pipeline/jobs/inside_job.py and stage.sbatch, with stand-ins for SLURM's commands.

tests/cluster/ runs the same on a real controller.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from support.forked import started_code

from pipeline.errors import EXIT_RUN_AGAIN, EXIT_USER_ERROR
from pipeline.jobs.inside_job import (
    environment_of_ranks,
    failed_nodes,
    main,
    meeting_port,
    running_job,
    step_options,
    why_asked,
)
from pipeline.jobs.job_endings import (
    REPORTS,
    TOLD_TO_END,
    Asked,
    Verdict,
    read_ends,
    start_dir,
    verdicts,
)
from pipeline.jobs.slurm_commands import job_fields

SBATCH_PATH = Path(__file__).parents[2] / "slurm" / "stage.sbatch"
STATE = "JobId=54321 JobState={} Reason={}"
PROGRAM = "import sys; from pipeline.jobs.inside_job import main; sys.exit(main(sys.argv[1:]))"


class Bench:
    """A batch script's environment, whose ``srun`` is a few lines of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out_dir = folder, folder / "a b" / "model"
        self.state = STATE.format("RUNNING", "None")
        self.variables: dict[str, str] = {}
        self.refusals = 0
        """How often SLURM fails to requeue the job."""
        self.kill_wait = 1
        self.arguments = ["pretrain", f"--out={self.out_dir}"]
        self.said = ""
        self.out_dir.parent.mkdir()

    def run(
        self, step: str, *, restarts: int = 0, tasks: str = "2(x2)", script: bool = False
    ) -> int | None:
        """Run what the script becomes, or the whole script; ``step`` is what srun does.

        ``end(rank, kind, cause)`` reports.
        """
        commands = {
            "scontrol": f'log "$@"\n[ "$2" != hostnames ] || printf "n1\\nn2\\n"\n'
            f"[ \"$1\" != --oneliner ] || echo '{self.state} Restarts={restarts}'\n"
            f"[ \"$*\" != 'show config' ] || echo 'KillWait     = {self.kill_wait} sec'\n"
            '[ "$1" != requeue ] || '
            f'[ $(grep -c "^scontrol requeue" {self.folder}/calls) -gt {self.refusals} ]',
            "scancel": 'log "$@"',
            "srun": f'log "$@"\n[[ "$*" != *pipeline.doctor* ]] || exit 0\n'
            f"exec {sys.executable} {self.folder}/step.py",
            "python": f'exec {sys.executable} "$@"',
        }
        for name, body in commands.items():
            path = self.folder / name
            log = f'log() {{ echo "{name} $*" >> {self.folder}/calls; }}'
            path.write_text(f"#!/bin/bash\n{log}\n{body}\n")
            path.chmod(0o755)
        (self.folder / "step.py").write_text(STEP + step)
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(SBATCH_PATH.parents[1]),
            "SLURM_JOB_ID": "54321",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_TASKS_PER_NODE": tasks,
            "SLURM_CPUS_PER_TASK": "3",
            "FOLDER": str(self.folder),
            "OUT": str(self.out_dir),
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **self.variables,
        }
        if not script:
            with started_code(PROGRAM, self.arguments, environment=environment) as job:
                code, _, self.said = job.end()
            return code
        command = ["bash", str(SBATCH_PATH), *self.arguments]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120
        )
        self.said = ended.stderr
        return ended.returncode

    def calls(self, name: str) -> list[str]:
        """What the script called, the look at the job left out."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.startswith(name)]

    def requeued(self) -> int:
        return self.calls("scontrol").count("scontrol requeue 54321")

    def verdict(self) -> Verdict:
        return verdicts(self.out_dir)[-1]


STEP = f"""
import json, os, signal, sys, time
from pathlib import Path

def end(rank, kind, cause="", update=None):  # as write_end does, which takes long to import
    report = dict(rank=rank, size=4, node=["n1", "n1", "n2", "n2"][rank], end=kind, cause=cause)
    path = Path(os.environ["{REPORTS}"]) / f"rank-{{rank}}.json"
    path.with_suffix(".new").write_text(json.dumps(report | dict(update=update, stage="pretrain")))
    path.with_suffix(".new").rename(path)

def save(update):
    state = Path(os.environ["OUT"] + ".run") / "states" / f"update-{{update}}"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{{}}")

def ask(number):
    os.kill(os.getppid(), number)
    time.sleep(1)

"""
PUBLISH = """
from pipeline.artifacts.artifact import new_artifact
out_dir = Path(os.environ["OUT"])
with new_artifact(out_dir, kind="checkpoint", stage="pretrain", config={}, inputs={}):
    pass
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.slow
def test_a_job_whose_artifact_is_finished_ends_with_0(bench: Bench) -> None:
    names = "MASTER_ADDR MASTER_PORT OMP_NUM_THREADS SRUN_CPUS_PER_TASK MMNMT_ATTEMPT".split()
    dump = (
        f"json.dump({{n: os.environ[n] for n in {names}}}, open(os.environ['FOLDER']+'/env', 'w'))"
    )
    step = f"{PUBLISH}{dump}; [end(rank, 'done') for rank in range(4)]"
    assert bench.run(step, restarts=2, script=True) == 0, bench.said
    assert (bench.verdict().verdict, bench.requeued()) == ("done", 0)
    preflight, command = bench.calls("srun")
    assert " -m pipeline.doctor --out " in preflight
    assert command == (
        "srun --kill-on-bad-exit=1 --nodes=2 --ntasks=4 --distribution=block --label "
        f"{Path(sys.executable)} -P -m pipeline pretrain --out={bench.out_dir}"
    )
    variables = json.loads((bench.folder / "env").read_text())
    assert variables.pop("MASTER_PORT").startswith("24")
    of_job = {"MASTER_ADDR": "n1", "OMP_NUM_THREADS": "3", "SRUN_CPUS_PER_TASK": "3"}
    assert variables == of_job | {"MMNMT_ATTEMPT": "54321.2"}


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["kill -USR1 $$", "(sleep 0.2; kill -USR1 $$) & sleep 0.5"])
def test_a_request_to_stop_while_a_job_is_set_up_does_not_end_it(bench: Bench, setup: str) -> None:
    """SLURM sends it at once if the time limit is shorter than the warning."""
    bench.variables["MMNMT_SETUP"] = setup
    assert bench.run(f"{PUBLISH}[end(rank, 'done') for rank in range(4)]", script=True) == 0
    assert bench.verdict().verdict == "done"


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_do_not_take_the_place_that_a_variable_of_the_user_s_shell_names(
    bench: Bench, rank: str
) -> None:
    """Sbatch passes on what the shell exports, for example for torchrun by hand."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    bench.variables = {**world, "MASTER_ADDR": "elsewhere", "USER_S": "stays"}
    names = {*world, "USER_S"}
    bench.run(f'end(0, "failed", str(sorted({names} & {{*os.environ}})))')
    assert "['USER_S']" in bench.verdict().cause


def test_a_step_that_ends_with_0_but_without_its_artifact_failed(bench: Bench) -> None:
    assert bench.run("[end(rank, 'done') for rank in range(4)]") == 1
    assert "failed: ended without an error but left no finished artifact" in bench.said
    assert bench.requeued() == 0


@pytest.mark.slow
def test_an_agreed_stop_requeues_the_job_whatever_code_srun_returns(bench: Bench) -> None:
    assert bench.run("save(4); end(0, 'again', 'saved', 4); sys.exit(143)") == EXIT_RUN_AGAIN
    assert bench.requeued() == 1
    found = bench.verdict()
    assert (found.verdict, found.update, found.progress) == ("again", 4, True)


@pytest.mark.slow
def test_a_step_that_outlives_a_report_is_ended_and_requeued(bench: Bench) -> None:
    """srun waits for ever for the ranks of a node that crashed and came back at once."""
    bench.kill_wait = 0
    step = "end(0, 'lost', 'rank 1 has ended')\ntime.sleep(900)"
    assert bench.run(step, tasks="1(x2)") == EXIT_RUN_AGAIN
    (verdict,) = verdicts(bench.out_dir)
    assert (verdict.verdict, verdict.nodes) == ("again", ("n2",))
    assert bench.calls("scontrol")[-1] == "scontrol requeue 54321"


@pytest.mark.slow
def test_a_rank_that_was_told_to_end_may_take_its_time_to_save(bench: Bench) -> None:
    bench.kill_wait = 0
    told = f"end(0, 'lost', {TOLD_TO_END!r})\ntime.sleep(3)\nsave(4)"
    bench.run(f"{told}\nend(0, 'again', 'saved')\nsys.exit(75)")
    assert (bench.verdict().cause, bench.verdict().progress) == ("saved", True)


def test_a_warning_is_passed_on_and_the_job_waits_for_the_save(bench: Bench) -> None:
    step = "ask(signal.SIGUSR1); save(4); [end(rank, 'again', 'saved', 4) for rank in range(4)]"
    assert bench.run(step) == EXIT_RUN_AGAIN
    assert bench.calls("scancel") == ["scancel --signal=USR1 54321"]
    assert bench.requeued() == 1
    assert bench.verdict().cause == "asked to stop: saved"


@pytest.mark.slow
def test_a_job_is_requeued_although_slurm_does_not_answer_at_first(bench: Bench) -> None:
    bench.refusals = 1
    step = "[end(rank, 'again', 'saved', 4) for rank in range(4)]; save(4); sys.exit(75)"
    assert bench.run(step) == EXIT_RUN_AGAIN
    assert bench.requeued() == 2
    assert "scontrol requeue 54321: exit code 1" in bench.said


@pytest.mark.slow
def test_a_rank_of_mpi_says_that_mpi_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no libmpi')")
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", REPORTS: str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline.jobs.inside_job", "mpi-rank", "clean", "--mpi"],
        env={"PYTHONPATH": f"{tmp_path}:{SBATCH_PATH.parents[1]}", **slurm},
        timeout=60,
    )
    assert ended.returncode == EXIT_USER_ERROR
    (found,) = read_ends(tmp_path)
    assert (found.rank, found.size, found.end, found.stage) == (1, 2, "failed", "clean")
    assert found.cause == "MPI cannot be used (no libmpi). Install mmnmt[mpi] and MPI."


@pytest.mark.slow
def test_a_job_that_is_killed_while_it_waits_has_left_a_verdict(bench: Bench) -> None:
    bench.state = STATE.format("COMPLETING", "TimeLimit")
    assert bench.run("save(4); ask(signal.SIGTERM); os.kill(os.getppid(), signal.SIGKILL)") == -9
    found = bench.verdict()
    assert (found.verdict, found.progress) == ("again", True)
    assert found.cause == "time limit: ended before all ranks had saved"
    assert bench.requeued() == 1


@pytest.mark.slow
def test_an_error_of_one_rank_fails_the_job_whatever_code_srun_returns(bench: Bench) -> None:
    step = "end(3, 'failed', 'There is no recipe.'); end(0, 'lost', 'gloo'); sys.exit(75)"
    assert bench.run(step) == 1
    assert bench.requeued() == 0
    said = bench.said.splitlines()
    assert said.count("mmnmt pretrain: rank 3 on n2: There is no recipe.") == 1
    assert said[-1].endswith("failed: rank 3 on n2: There is no recipe.")
    assert not any("gloo" in line for line in said)


@pytest.mark.slow
def test_a_cancelled_job_is_not_requeued(bench: Bench) -> None:
    bench.state = STATE.format("COMPLETING", "None")
    step = "ask(signal.SIGTERM); ask(signal.SIGTERM); end(0, 'again', 'saved', 4); sys.exit(143)"
    assert bench.run(step) == EXIT_RUN_AGAIN
    assert bench.requeued() == 0
    assert (bench.verdict().verdict, bench.verdict().cause) == ("again", "canceled: saved")


@pytest.mark.slow
def test_crashes_without_progress_are_given_up_and_progress_begins_a_new_count(
    bench: Bench,
) -> None:
    bench.variables["MMNMT_MAX_RESTARTS"] = "1"
    crash = "end(2, 'crashed', 'MemoryError'); sys.exit(1)"
    for restart, step in enumerate((crash, f"save(4); {crash}", crash)):
        assert bench.run(step, restarts=restart) == EXIT_RUN_AGAIN
    assert bench.run(crash, restarts=3) == 1
    assert bench.verdict().cause.endswith("MemoryError (2 starts in a row saved nothing new)")
    assert bench.requeued() == 3


@pytest.mark.slow
def test_a_start_that_left_no_verdict_is_judged_by_the_next(bench: Bench) -> None:
    kill = "end(1, 'crashed', 'lost power'); os.kill(os.getppid(), signal.SIGKILL)"
    assert bench.run(kill) == -9
    assert verdicts(bench.out_dir) == []
    assert bench.run("[end(rank, 'again', 'saved') for rank in range(4)]", restarts=1) == 75
    first, second = verdicts(bench.out_dir)
    assert (first.attempt, first.cause) == ("54321.0", "rank 1 on n1: lost power")
    assert (second.attempt, second.fruitless) == ("54321.1", 2)


@pytest.mark.slow
def test_a_stage_that_is_one_process_gets_one_task_on_the_first_node(bench: Bench) -> None:
    bench.arguments[0] = "mix"
    bench.run("")
    assert "--nodes=1 --ntasks=1" in bench.calls("srun")[0]


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("source /there/is/no/site.sh", "failed."),
        ("module load cuda\nexport CUDA=12", "failed."),
        ("false; true", "failed."),
        ("exit 0", "ended the job by exit."),
        ("leave() { exit; }; leave", "ended the job by exit."),
    ],
)
def test_any_line_of_a_site_that_fails_ends_the_job(bench: Bench, setup: str, told: str) -> None:
    bench.variables = {"MMNMT_SETUP": f"module() {{ return 1; }}\n{setup}"}
    assert bench.run("", script=True) == EXIT_USER_ERROR
    assert f"(MMNMT_SETUP) {told}" in bench.said
    assert bench.said.count("mmnmt:") == 1
    assert not (bench.folder / "calls").exists()


@pytest.mark.slow
def test_a_site_may_read_unset_variables_call_what_fails_and_change_folders(bench: Bench) -> None:
    site = bench.folder / "site.sh"
    site.write_text('module() { test -z "$UNSET"; false; true; }\nmodule load cuda\nfalse\ntrue\n')
    setup = f"source '{site}'\nfalse || true\n[ -z x ] && true\ncd /"
    bench.variables = {"MMNMT_SETUP": setup, "MMNMT_CONTAINER": "env IN_CONTAINER=1"}
    here = "Path(os.environ['FOLDER'], 'here').write_text(os.getcwd())\n"
    assert bench.run(f"{PUBLISH}{here}end(0, 'done')", script=True) == 0, bench.said
    assert (bench.folder / "here").read_text() == str(Path.cwd())
    assert " env IN_CONTAINER=1 python -P -m pipeline" in bench.calls("srun")[0]


@pytest.mark.parametrize(
    "arguments", [[], ["pretrain"], ["pretrain", "--out"], ["report", "--out=x"]]
)
def test_a_job_without_a_stage_or_output_says_why(bench: Bench, arguments: list[str]) -> None:
    bench.arguments = arguments
    assert bench.run("") == EXIT_USER_ERROR
    assert bench.said.startswith("usage: sbatch")
    assert not (bench.folder / "calls").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("MMNMT_MAX_RESTARTS", text) for text in ("abc", "-1", "")),
        ("SLURM_RESTART_COUNT", "x"),
        *(("SLURM_TASKS_PER_NODE", text) for text in ("2(x2", "4", "2(x3)", "0(x0)")),
        *(("MMNMT_CONTAINER", text) for text in ("apptainer exec 'x", 'run "')),
    ],
)
def test_a_variable_that_cannot_be_of_this_job_is_one_sentence_before_any_rank_starts(
    bench: Bench, name: str, text: str
) -> None:
    bench.variables = {name: text}
    assert bench.run("") == EXIT_USER_ERROR
    lines = [line for line in bench.said.splitlines() if not line.endswith("ranks 0-3")]
    assert len(lines) == 1
    assert lines[0].startswith("mmnmt pretrain: ")
    assert f"{name} " in lines[0]
    assert not bench.calls("srun")


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        ([], "scontrol did not expand the node list 'n[1-2]'"),
        (["scontrol", "scancel"], "srun cannot be started (No such file or directory)."),
    ],
)
def test_a_setup_that_takes_away_slurm_s_commands_is_told_to_load_them(
    bench: Bench, commands: list[str], told: str
) -> None:
    left = bench.folder / "left"
    left.mkdir()
    for name in commands:
        (left / name).symlink_to(bench.folder / name)
    bench.variables = {"PATH": str(left)}
    assert bench.run("") == EXIT_USER_ERROR
    last = bench.said.splitlines()[-1]
    assert told in last
    assert last.endswith("Load SLURM's module in the setup of the site file (MMNMT_SETUP).")
    known = [verdict.cause for verdict in verdicts(bench.out_dir)]
    assert known == ([last.removeprefix("mmnmt pretrain: ")] if commands else [])


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.ENOSPC, "make room, or"), (errno.EROFS, "mount that disk for")]
)
def test_a_disk_that_cannot_be_written_is_told_with_its_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    fix: str,
) -> None:
    def refuse(_: object) -> int:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr("pipeline.jobs.inside_job._StageRun.run", refuse)
    monkeypatch.setattr("pipeline.jobs.inside_job.slurm_hosts", lambda *_, **__: ["n1"])
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    start_dir(tmp_path / "out", "9.0").mkdir(parents=True)
    assert main(["mix", f"--out={tmp_path / 'out'}"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert f"({os.strerror(number)}): {fix}" in said
    assert "name an --out on storage that all nodes share." in said
    assert [verdict.verdict for verdict in verdicts(tmp_path / "out")] == ["failed"]


# ---------------------------------------------------------------- pure parts


def test_variables_tell_the_ranks_and_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["n1", "n2", "n7"]
    monkeypatch.setattr("pipeline.jobs.inside_job.slurm_hosts", lambda *_, **__: hosts)
    variables = {"SLURM_JOB_NODELIST": "n[1-2,7]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    job = running_job(variables | {"SLURM_JOB_ID": "9"})
    assert job.nodes == ("n1", "n1", "n2", "n2", "n7")
    assert job.attempt == "9.0"
    assert step_options(job.of_one_process())[2:4] == ["--nodes=1", "--ntasks=1"]


def test_the_ranks_of_a_node_see_all_its_gpus() -> None:
    per_task = {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "single:1", "SLURM_GPUS_ON_NODE": "2"}
    assert environment_of_ranks(per_task) == {"SLURM_GPUS_ON_NODE": "2"}


def test_a_port_that_is_taken_is_left_out() -> None:
    first = meeting_port("4711")
    with socket.socket() as listener:
        listener.bind(("", first))
        listener.listen()
        assert meeting_port("4711") == first + 1


@pytest.mark.parametrize(
    ("number", "fields", "reason"),
    [
        (signal.SIGTERM, {"JobState": "COMPLETING"}, "canceled"),
        (signal.SIGTERM, {"JobState": "COMPLETING", "Reason": "TimeLimit"}, "time limit"),
        (signal.SIGTERM, {"JobState": "COMPLETING", "Restarts": "3"}, "preempted or requeued"),
        (signal.SIGUSR1, {"PreemptTime": "2026-01-01T11:59:00"}, "preempted or requeued"),
        (signal.SIGUSR1, {"EndTime": "2026-01-01T12:05:00", "Restarts": "2"}, "time limit"),
        (signal.SIGUSR1, {"EndTime": "2026-01-01T18:00:00"}, "asked to stop"),
        (signal.SIGUSR1, {"EndTime": "Unknown"}, "asked to stop"),
        (signal.SIGUSR1, {"EndTime": "2026-01-01T12:05:00+0000"}, "asked to stop"),
        (signal.SIGTERM, {"Restarts": "x"}, "canceled"),
        (signal.SIGTERM, {"Restarts": ""}, "canceled"),
        (signal.SIGUSR1, {}, "asked to stop"),
    ],
)
def test_the_reason_for_a_signal_is_read_from_what_the_controller_says_of_the_job(
    number: signal.Signals, fields: dict[str, str], reason: Asked
) -> None:
    assert why_asked(number, fields, restart=2, at=datetime(2026, 1, 1, 12)) == reason


def test_fields_of_a_job_are_read_from_one_line() -> None:
    text = "JobId=5 JobState=RUNNING Reason=None Command=/a JobState=b c=d TRES=cpu=2,mem=4G"
    found = job_fields(text)
    assert (found["JobState"], found["TRES"]) == ("RUNNING", "cpu=2,mem=4G")


def test_nodes_that_are_down_or_do_not_respond_have_failed() -> None:
    states = "node1 mixed\nnode2 down*\nnode2 down*\nnode3 idle*\nnode4 failing\nnode5 draining\n"
    assert failed_nodes(states) == ["node2", "node3", "node4"]
    assert failed_nodes(None) == []
