"""Submitting plans, and showing and canceling their jobs, with made-up commands of SLURM."""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import FakeSlurm, install
from support.raw_trees import write
from support.tiny_plan import PLAN, RAW, RECIPE, in_this_process

from pipeline import cli
from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.manifest import run_dir
from pipeline.artifacts.raw_input import HubDataset, RawInput
from pipeline.config.documents import toml_path
from pipeline.errors import ArtifactError, ConfigError, Interrupted, SchedulerError
from pipeline.jobs import slurm_commands
from pipeline.jobs.job_endings import RankEnd, Start, Verdict, write_end, write_start, write_verdict
from pipeline.jobs.job_status import show_jobs
from pipeline.jobs.plan import ResolvedPlan, load_plan, plan_names, resolve_plan
from pipeline.jobs.runner import run_plan, stage_arguments
from pipeline.jobs.sbatch import Request
from pipeline.jobs.site import Site
from pipeline.jobs.slurm_commands import SlurmJob, look_up
from pipeline.jobs.submission import (
    RECORD_NAME,
    cancel_jobs,
    last_log,
    log_dir,
    show_commands,
    submit_plan,
)
from pipeline.registry import STAGES

pytestmark = pytest.mark.slow

SITE = Site.model_validate(
    {"partition": "gpu", "account": "ours", "time": "12:00:00", "node": {"cpus": 16, "gpus": 8}}
)
GRAPH = """
[defaults]
recipe = "demo_dense"
[defaults.pretrain]
inputs = { shards = "shards", mixture = "mixture" }
processes = 2
[stages]
corpus = { run = "import_corpus" }
clean = { run = "clean", inputs = { corpus = "corpus" } }
tokenizer = { run = "train_tokenizer", inputs = { corpus = "clean" } }
shards = { run = "make_shards", inputs = { corpus = "clean", tokenizer = "tokenizer" } }
mixture = { run = "mix", inputs = { shards = "shards" } }
dense = { run = "pretrain" }
moe = { run = "pretrain", recipe = "demo_moe" }
lengths = { run = "analyze_lengths", inputs = { corpus = "clean" } }
translate = { run = "translate", inputs = { checkpoint = "dense", corpus = "clean" } }
[stages.evaluation]
run = "evaluate"
inputs = { corpus = "clean", systems = { dense = "translate" }, analyses = { lengths = "lengths" } }
"""
OTHER_TOKENIZER = {"tokenizer": {"vocabulary_size": 777}}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def graph(out: Path, **changes: Mapping[str, Any]) -> ResolvedPlan:
    path = out.with_name("graph.toml")
    path.write_text(GRAPH, encoding="utf-8")
    return resolve_plan(load_plan(str(path)), out_dir=out, overrides=changes, auto="cpu_fp32")


def one_stage(out: Path) -> ResolvedPlan:
    return graph(out).chosen(only=["corpus"])


def tiny(folder: Path, **changes: Mapping[str, Any]) -> ResolvedPlan:
    if not (folder / "text").exists():
        write(folder / "text", RAW)
        (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
        plan = PLAN.replace("{recipe}", str(folder / "recipe.toml"))
        (folder / "plan.toml").write_text(plan.format(), encoding="utf-8")
    return resolve_plan(
        load_plan(str(folder / "plan.toml")),
        out_dir=folder / "run",
        overrides=changes,
        given={"text": RawInput((folder / "text",))},
    )


def submit(resolved: ResolvedPlan, **options: Any) -> list[str]:
    submit_plan(resolved, SITE, say=(said := list[str]()).append, **options)
    return said


def shown(resolved: ResolvedPlan, site: Site = SITE, **options: Any) -> list[str]:
    show_commands(resolved, site, say=(said := list[str]()).append, **options)
    return said


def make(resolved: ResolvedPlan) -> None:
    assert run_plan(resolved, launcher=in_this_process, say=lambda _: None) == 0


def status(resolved: ResolvedPlan) -> dict[str, str]:
    """Stage → its line of the table; lines of ended starts below ``STAGE JOB.RESTART``."""
    show_jobs(resolved, say=(said := list[str]()).append)
    found: dict[str, str] = {}
    stage = ""
    for line in said[0].splitlines()[2:]:
        name = line.split(" ")[0]
        stage = name or stage
        found[name or f"{stage} {line.split()[1]}"] = " ".join(line.split())
    return found


def needed(slurm: FakeSlurm) -> dict[str, set[str]]:
    """Stage → stages whose success its newest job waits for."""
    names = {job_id: stage for stage, job_id in slurm.ids().items()}
    found = {}
    for stage, job_id in slurm.ids().items():
        after = slurm.jobs[job_id]["after"].split(",")[0]
        ids = after.split(":")[1:] if after.startswith("afterok") else []
        found[stage] = {names[one] for one in ids}
    return found


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_an_evaluation_of_systems_in_another_order_is_submitted_anew(out: Path, names: str) -> None:
    """The first is the baseline."""

    def placed(names: str) -> ResolvedPlan:
        systems = ", ".join(f'{name} = "translate"' for name in names)
        path = out.with_name("graph.toml")
        path.write_text(GRAPH.replace('dense = "translate"', systems), encoding="utf-8")
        return resolve_plan(load_plan(str(path)), out_dir=out, auto="cpu_fp32")

    before, again, after = (submit(placed(one)) for one in (names, names, names[::-1]))
    assert [line for line in again if "waits as job" not in line] == []
    assert [line for line in after if "waits as job" not in line] == after[-1:]
    assert after[-1].startswith("evaluation: submitted as job"), before


def test_every_job_waits_for_the_stages_it_reads_from(slurm: FakeSlurm, out: Path) -> None:
    resolved = graph(out)
    submit(resolved)
    assert needed(slurm) == {task.name: set(task.planned.dependencies()) for task in resolved.tasks}
    assert needed(slurm)["dense"] == needed(slurm)["moe"] == {"shards", "mixture"}
    for task in resolved.tasks:
        job = slurm.jobs[slurm.ids()[task.name]]
        given = [one for one in job["stage"] if one not in ("--overwrite", "--if-stale")]
        wanted = [one for one in stage_arguments(resolved, task) if one != "--overwrite"]
        assert given == wanted
        assert ("--overwrite" in job["stage"]) == (not task.stage.trains)
        assert "--kill-on-invalid-dep=yes" in job["options"]
        assert f"--output={out}/{task.name}.logs/%j.log" in job["options"]
        assert (out / f"{task.name}.logs").is_dir()
    before = slurm.jobs
    assert all("waits as job" in line for line in submit(graph(out))), "submitted again"
    assert slurm.jobs == before


@pytest.mark.parametrize(
    ("limit", "asked"),
    [("1", "B:USR1@0"), ("5", "B:USR1@80"), ("00:15:00", "B:USR1@280"), ("16", None), (None, None)],
)
def test_a_job_is_asked_to_stop_after_most_of_a_short_time_limit(
    slurm: FakeSlurm, out: Path, limit: str | None, asked: str | None
) -> None:
    """The job script asks for 300 seconds; SLURM sends a signal up to 60 seconds too early."""
    submit_plan(one_stage(out), SITE.model_copy(update={"time": limit}))
    options = slurm.jobs[slurm.ids()["corpus"]]["options"]
    assert [one for one in options if "signal" in one] == ([f"--signal={asked}"] if asked else [])


def test_resources_and_the_site_reach_the_job(slurm: FakeSlurm, out: Path) -> None:
    site = SITE.model_copy(
        update={
            "setup": "module load gcc\nsource /it's here/activate",
            "container": ("apptainer", "exec", "/an image"),
            "max_restarts": 2,
            "options": ("--constraint=h100",),
            "environment": {"MMNMT_FUSED_KERNELS": "off", "SLURM_MPI_TYPE": ""},
        }
    )
    submit_plan(graph(out), site)
    job = slurm.jobs[slurm.ids()["dense"]]
    asked = {
        *("--partition=gpu", "--account=ours", "--time=12:00:00", "--constraint=h100"),
        *("--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--gpus-per-node=2"),
        "--cpus-per-task=1",
    }
    assert asked <= set(job["options"])
    assert job["environment"] == {
        "MMNMT_SETUP": "module load gcc\nsource /it's here/activate",
        "MMNMT_CONTAINER": "apptainer exec '/an image'",
        "MMNMT_THREADS": "1",
        "MMNMT_MAX_RESTARTS": "2",
        "MMNMT_FUSED_KERNELS": "off",
        "SLURM_MPI_TYPE": "",
    }
    assert not any("gpus" in one for one in slurm.jobs[slurm.ids()["shards"]]["options"])


@pytest.mark.parametrize("options", [("--mem=4G",), ("--mem", "4G")])
@pytest.mark.parametrize("own", ["128G", None])
def test_the_memory_of_a_stage_comes_before_the_site_s(
    slurm: FakeSlurm, out: Path, options: tuple[str, ...], own: str | None
) -> None:
    path, job = out.with_name("memory.toml"), f', job = {{ memory = "{own}" }}' if own else ""
    text = GRAPH.replace('run = "import_corpus"', f'run = "import_corpus"{job}')
    path.write_text(text, encoding="utf-8")
    plan = resolve_plan(load_plan(str(path)), out_dir=out, auto="cpu_fp32").chosen(only=["corpus"])
    submit_plan(plan, SITE.model_copy(update={"options": options}), say=lambda _: None)
    last = ("--mem=128G",) if own else options  # which sbatch takes
    assert slurm.jobs[slurm.ids()["corpus"]]["options"][-len(last) :] == [*last]


@pytest.mark.parametrize("said", ["Access/permission denied", "Invalid job id specified"])
def test_a_refusal_to_cancel_names_what_can_be_done(slurm: FakeSlurm, out: Path, said: str) -> None:
    """A user may have submitted to the folder of another, or a job has just been forgotten."""
    submit(one_stage(out))
    answers(slurm, "scancel", f'echo "scancel: error: Kill job error: {said}" >&2; exit 1')
    told = r"Run this again, or let the user who submitted them cancel them\.$"
    with pytest.raises(SchedulerError, match=f"{said}.*{told}"):
        cancel_jobs(one_stage(out), [])


def test_a_job_whose_id_was_never_recorded_is_found_again(slurm: FakeSlurm, out: Path) -> None:
    """The command may be killed after sbatch took the job and before its id is written."""
    submit(graph(out))
    path = out / RECORD_NAME
    record = json.loads(path.read_text(encoding="utf-8"))
    record["stages"]["dense"]["id"] = ""
    path.write_text(json.dumps(record), encoding="utf-8")
    submit(graph(out))
    assert len(slurm.live()) == len(slurm.jobs)
    assert json.loads(path.read_text("utf-8"))["stages"]["dense"]["id"] == slurm.ids()["dense"]


def test_the_next_call_goes_on_after_a_refusal(slurm: FakeSlurm, out: Path) -> None:
    slurm.set(refused="mmnmt-shards")
    with pytest.raises(SchedulerError, match=r"does not take the job of mmnmt-shards .*account"):
        submit(graph(out))
    assert set(slurm.ids()) == {"corpus", "clean", "tokenizer"}
    slurm.set(refused="")
    submit(graph(out))
    assert set(slurm.live()) == {task.name for task in graph(out).tasks}


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("stopped by SIGTERM")])
def test_a_stop_between_two_jobs_says_that_jobs_stay_and_how_to_go_on(
    slurm: FakeSlurm, out: Path, stop: BaseException, is_taken: bool
) -> None:
    original = slurm_commands.submit

    def submit_or_stop(request: Request) -> str:
        if request.name != "mmnmt-tokenizer":
            return original(request)
        if is_taken:
            original(request)
        raise stop

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(stop)):
        patch.setattr(slurm_commands, "submit", submit_or_stop)
        submit_plan(graph(out), SITE, say=said.append)
    assert [line.partition(" ")[0] for line in said] == ["corpus:", "clean:", "Stopped"]
    assert said[-1].endswith("submit again to go on, or end them with `mmnmt cancel`.")
    first = slurm.ids()
    assert len(first) == 2 + is_taken
    submit(graph(out))
    assert len(slurm.jobs) == len(slurm.live()) == len(graph(out).tasks)
    assert slurm.ids().items() >= first.items()


def answers(slurm: FakeSlurm, name: str, script: str) -> None:
    (slurm.bin / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Unable to contact slurm controller (connect failure)", "controller may be down"),
        ("Socket timed out on send/recv operation", "controller may be down"),
        ("Job violates policy (job submit limit, user's size)", "when fewer jobs wait"),
        ("Invalid partition name specified", "Correct the site file or the stage's job settings."),
    ],
)
def test_a_refusal_says_what_to_do(slurm: FakeSlurm, out: Path, said: str, told: str) -> None:
    answers(slurm, "sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    with pytest.raises(SchedulerError) as refused:
        submit(one_stage(out))
    assert told in str(refused.value)


@pytest.mark.parametrize("answer", ["Welcome to 12 nodes\\n7;big", "7;big", "7\\n"])
def test_the_id_of_a_job_stands_on_a_line_of_its_own(
    slurm: FakeSlurm, out: Path, answer: str
) -> None:
    answers(slurm, "sbatch", f"printf '{answer}\\n'")
    assert submit(one_stage(out)) == ["corpus: submitted as job 7 (missing)"]


def test_variables_of_the_shell_change_neither_jobs_nor_answers(
    slurm: FakeSlurm, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site may set options of sbatch, which override those of the job script."""
    dropped = "SBATCH_EXPORT SBATCH_OPEN_MODE SBATCH_CLUSTERS SQUEUE_STATES MMNMT_CONTAINER"
    dropped += " SBATCH_TIMELIMIT"  # the name that --time has there
    kept = {"SBATCH_RESERVATION", "SLURM_JWT", "SLURM_CONF"}
    for name in (*dropped.split(), *kept):
        monkeypatch.setenv(name, "x")
    answers(slurm, "sbatch", f"env > '{out}.env'; echo 7")
    submit(one_stage(out))
    lines = Path(f"{out}.env").read_text(encoding="utf-8").splitlines()
    assert {line.partition("=")[0] for line in lines if line.endswith("=x")} == kept


def test_what_is_made_is_skipped_and_not_waited_for(slurm: FakeSlurm, tmp_path: Path) -> None:
    resolved = tiny(tmp_path).chosen(only=["corpus"])
    make(resolved)
    assert submit(tiny(tmp_path))[0] == "corpus: done"
    assert needed(slurm) == {"clean": set()}


@pytest.mark.parametrize("state", ["FAILED", "COMPLETED"])
def test_jobs_without_artifacts_are_resubmitted(slurm: FakeSlurm, out: Path, state: str) -> None:
    submit(graph(out))
    first = slurm.ids()
    slurm.become(first["lengths"], state)
    submit(graph(out))
    second = slurm.ids()
    assert second["lengths"] != first["lengths"]
    assert slurm.jobs[first["evaluation"]]["state"] == "CANCELLED", "it waited for the old job"
    assert {name for name in first if first[name] != second[name]} == {"lengths", "evaluation"}
    assert set(slurm.live()) == set(first)


def test_a_job_that_slurm_has_forgotten_is_not_taken_for_done(slurm: FakeSlurm, out: Path) -> None:
    submit(one_stage(out))
    slurm.forget(slurm.ids()["corpus"])
    assert "failed" in status(one_stage(out))["corpus"]
    submit(one_stage(out))
    assert slurm.ids()["corpus"] in slurm.live().values()


def test_accounting_tells_how_a_forgotten_job_ended(slurm: FakeSlurm, out: Path) -> None:
    submit(one_stage(out))
    (slurm.bin / "sacct").write_text(
        "#!/bin/sh\necho 'PREEMPTED|2026-11-23T12:00:00'\necho 'TIMEOUT|2026-11-23T13:00:00'\n",
        encoding="utf-8",
    )
    (slurm.bin / "sacct").chmod(0o755)
    job = slurm.ids()["corpus"]
    slurm.forget(job)
    assert status(graph(out))["corpus"].startswith(f"corpus failed {job}.1 2026-11-23T")
    assert "SLURM ended it as TIMEOUT" in status(graph(out))["corpus"]
    # Accounting that missed the end takes the job for running for ever.
    (slurm.bin / "sacct").write_text("#!/bin/sh\necho 'RUNNING|Unknown'\n", encoding="utf-8")
    assert "failed" in status(graph(out))["corpus"]
    assert "submitted as job" in submit(one_stage(out))[0]


@pytest.mark.parametrize("script", ["exec sleep 60", "exit 1"])
def test_a_forgotten_job_has_ended_although_accounting_does_not_answer(
    slurm: FakeSlurm, out: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    submit(one_stage(out))
    slurm.forget(slurm.ids()["corpus"])
    answers(slurm, "sacct", script)
    (slurm.bin / "sacct").chmod(0o755)
    monkeypatch.setattr(slurm_commands, "ANSWER_SECONDS", 0.2)
    assert "SLURM does not know the job any more" in status(one_stage(out))["corpus"]
    assert "submitted as job" in submit(one_stage(out))[0]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_the_jobs_of_a_folder_are_not_those_of_its_copy(
    slurm: FakeSlurm, out: Path, state: str
) -> None:
    submit(graph(out))
    slurm.become(slurm.ids()["corpus"], state)
    before, copy = slurm.jobs, out.with_name("copy")
    shutil.copytree(out, copy)
    cancel_jobs(graph(copy), [])
    assert status(graph(copy))["corpus"] == "corpus missing"
    assert all("instead of" not in line for line in submit(graph(copy)))
    assert len(slurm.jobs) == 2 * len(before)
    assert slurm.jobs.items() >= before.items()
    assert all("as job" in line for line in submit(graph(copy))), "its own jobs are kept"
    assert len(slurm.jobs) == 2 * len(before)


def test_a_folder_that_was_moved_keeps_its_jobs(slurm: FakeSlurm, out: Path) -> None:
    submit(graph(out))
    moved = out.rename(out.with_name("moved"))
    out.symlink_to(moved)
    assert all("waits as job" in line for line in submit(graph(out))), "the same folder"
    out.unlink()
    submit(graph(moved))  # where they would write is gone
    jobs = [job for job in slurm.jobs.values() if job["state"] == "PENDING"]
    assert len(jobs) == len(graph(moved).tasks)
    assert all(f"--out={moved}/" in " ".join(job["stage"]) for job in jobs)


@pytest.mark.parametrize("row", ["PENDING", "RUNNING"])
def test_jobs_are_known_from_another_folder_and_through_a_link(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    monkeypatch.chdir(tmp_path)
    submit(tiny(tmp_path))
    slurm.become(slurm.ids()["corpus"], row)
    before = slurm.jobs
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "other").mkdir()
    for folder, root in (("other", tmp_path), (".", tmp_path / "link"), ("other", Path("../link"))):
        monkeypatch.chdir(tmp_path / folder)
        assert all("as job" in line for line in submit(tiny(root.absolute())))
        assert slurm.jobs == before
    submit(tiny(tmp_path / "link", clean={"max_length_ratio": 3.5}))
    assert len(slurm.jobs) > len(before), "another setting still counts"


@pytest.mark.parametrize("other", [{"name": "bash"}, {"comment": "mmnmt-0123456789abcdef"}])
def test_a_job_of_somebody_else_with_the_recorded_id_is_neither_kept_nor_canceled(
    slurm: FakeSlurm, out: Path, other: dict[str, str]
) -> None:
    """Ids begin anew when a controller loses its state."""
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    slurm.become(job, "RUNNING", **other)
    cancel_jobs(graph(out), [])
    assert slurm.jobs[job]["state"] == "RUNNING"
    assert "failed" in status(graph(out))["corpus"]
    assert "submitted as job" in submit(one_stage(out))[0]


@pytest.mark.parametrize(
    ("shown", "restarts"), [("x", 0), ("", 0), ("1.5", 0), ("(null)", 0), (12, 12)]
)
def test_restarts_that_are_no_number_count_as_none(
    slurm: FakeSlurm, out: Path, shown: object, restarts: int
) -> None:
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    slurm.become(job, "RUNNING", restarts=shown)
    assert f"corpus running {job}.{restarts} " in status(one_stage(out))["corpus"]


def test_a_job_that_still_ends_is_kept_or_followed(slurm: FakeSlurm, out: Path) -> None:
    """A user cancels and submits again while the stage still saves its state."""
    submit(one_stage(out))
    first = slurm.ids()["corpus"]
    end(out / "corpus", f"{first}.0", "again", "preempted")
    slurm.become(first, "COMPLETING", restarts=1)
    submit(one_stage(out))
    assert slurm.ids()["corpus"] == first
    slurm.become(first, "COMPLETING", restarts=0)
    (said,) = submit(one_stage(out))
    assert f"instead of job {first}" in said
    assert slurm.jobs[slurm.ids()["corpus"]]["after"] == f"afterany:{first}"


def test_another_setting_resubmits_what_follows(slurm: FakeSlurm, out: Path) -> None:
    submit(graph(out))
    first = slurm.ids()
    submit(graph(out, **OTHER_TOKENIZER))
    second = slurm.ids()
    stays = {name for name in first if first[name] == second[name]}
    assert stays == {"corpus", "clean", "lengths"}
    assert set(slurm.live()) == set(first)
    for name in set(first) - stays:
        assert slurm.jobs[first[name]]["state"] == "CANCELLED"
        assert f"afterany:{first[name]}" in slurm.jobs[second[name]]["after"]
    submit(graph(out, **OTHER_TOKENIZER))
    assert slurm.ids() == second


def test_a_running_job_stays_if_its_resources_change(slurm: FakeSlurm, out: Path) -> None:
    submit(graph(out))
    first = slurm.ids()
    slurm.become(first["corpus"], "RUNNING")
    longer = SITE.model_copy(update={"time": "13:00:00"})
    submit_plan(graph(out), longer, say=lambda _: None)
    assert slurm.ids()["corpus"] == first["corpus"]
    assert slurm.ids()["clean"] != first["clean"]
    assert "--time=13:00:00" in slurm.jobs[slurm.ids()["clean"]]["options"]
    assert needed(slurm)["clean"] == {"corpus"}


def test_a_running_job_is_replaced_if_its_raw_data_is_named_elsewhere(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny(tmp_path)
    submit(plan)
    first = slurm.ids()
    slurm.become(first["corpus"], "RUNNING")
    monkeypatch.chdir(tmp_path)
    for name in ("other", "more"):
        (tmp_path / name).mkdir()
    for same in (Path("text"), tmp_path / "other" / ".." / "text"):
        submit(replace(plan, given={"text": RawInput((same,))}))
        assert slurm.ids()["corpus"] == first["corpus"], "the same folder"
    places = [RawInput((tmp_path / "other",)), RawInput((tmp_path / "text", tmp_path / "more"))]
    datasets = [RawInput(dataset=HubDataset("our/text", commit * 40)) for commit in "ab"]
    for given in places + datasets:
        before = slurm.ids()
        slurm.become(before["corpus"], "RUNNING")
        said = submit(replace(plan, given={"text": given}))
        assert f"instead of job {before['corpus']}" in said[0]
        assert slurm.jobs[before["corpus"]]["state"] == "CANCELLED"
        assert needed(slurm)["clean"] == {"corpus"}


@pytest.mark.parametrize("row", ["PENDING", "RUNNING"])
@pytest.mark.parametrize(
    "other", [{"clean": {"max_length_ratio": 3.5}}, {"corpus": {"max_train_lines": 2}}]
)
def test_a_job_that_would_replace_what_is_up_to_date_again_is_canceled(
    slurm: FakeSlurm, tmp_path: Path, row: str, other: dict[str, dict[str, Any]]
) -> None:
    """A user submits with another setting, thinks better of it, and submits without it."""
    make(tiny(tmp_path))
    submit(tiny(tmp_path, **other))
    first = slurm.ids()
    slurm.become(next(iter(first.values())), row)
    for revoked in (first, {}):
        done = {name: f"{name}: done" for name in ("corpus", "clean")}
        for name, job in revoked.items():
            done[name] += f"; canceled job {job}, which would replace it"
        assert submit(tiny(tmp_path)) == [*done.values()]
        assert not slurm.live()
    # One that would find it done stays.
    submit(tiny(tmp_path, **other))
    make(tiny(tmp_path, **other))
    before = slurm.live()
    assert submit(tiny(tmp_path, **other)) == ["corpus: done", "clean: done"]
    assert slurm.live() == before != {}


def test_running_training_is_canceled_only_if_asked(slurm: FakeSlurm, out: Path) -> None:
    submit(graph(out))
    first = slurm.ids()
    slurm.become(first["dense"], "RUNNING")
    with pytest.raises(ArtifactError, match=f"dense runs as job {first['dense']}"):
        submit(graph(out, **OTHER_TOKENIZER))
    assert slurm.ids() == first
    submit(graph(out, **OTHER_TOKENIZER), rebuild=["dense"])
    assert slurm.jobs[first["dense"]]["state"] == "CANCELLED"
    assert "--overwrite" in slurm.jobs[slurm.ids()["dense"]]["stage"]


def test_a_left_out_stage_is_waited_or_asked_for(slurm: FakeSlurm, out: Path) -> None:
    with pytest.raises(ArtifactError, match="corpus, which is not made yet"):
        submit(graph(out).chosen(only=["clean"]))
    submit(one_stage(out))
    submit(graph(out).chosen(only=["clean"]))
    assert needed(slurm) == {"corpus": set(), "clean": {"corpus"}}


def test_nothing_is_submitted_if_one_stage_cannot_run(slurm: FakeSlurm, out: Path) -> None:
    def check(task: Any, _: Any) -> None:
        if task.name == "moe":
            raise ConfigError("Stage moe: 3 ranks do not divide")

    with pytest.raises(ConfigError, match="3 ranks"):
        submit(graph(out), check=check)
    assert not slurm.jobs


def test_a_scheduler_that_is_silent_or_absent_is_one_sentence(
    slurm: FakeSlurm, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(one_stage(out))
    slurm.set(down=True)
    with pytest.raises(SchedulerError, match="SLURM gives scontrol no answer"):
        submit(graph(out))
    show_jobs(graph(out), say=(said := list[str]()).append)
    assert "States of jobs are unknown. SLURM gives scontrol no answer" in said[1]
    (slurm.bin / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    monkeypatch.setattr(slurm_commands, "ANSWER_SECONDS", 0.2)
    with pytest.raises(SchedulerError, match="no answer \\(nothing in 0 s\\)"):
        submit(graph(out))
    monkeypatch.setenv("PATH", str(out))
    with pytest.raises(SchedulerError, match="There is no scontrol on this machine"):
        submit(graph(out))


def test_the_printed_commands_submit_the_same_jobs_when_bash_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / 'a run; of $HOME\'s 100 % & "touch" `touch made` hé'
    site = SITE.model_copy(update={"setup": "module load 'gcc'\nset -o nounset"})
    dropped = "SBATCH_EXPORT SBATCH_OPEN_MODE SLURM_JOB_ID SLURM_ODD;NAME MMNMT_MAX_RESTARTS"
    for name in (*dropped.split(), "MMNMT_SETUP", "SBATCH_RESERVATION", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    ours = install(tmp_path / "one", monkeypatch)
    submit_plan(graph(out), site, say=lambda _: None)
    (out / RECORD_NAME).unlink()
    theirs = install(tmp_path / "two", monkeypatch)
    said = shown(graph(out), site)
    assert not theirs.jobs
    subprocess.run(["bash", "-euc", "\n".join(said)], check=True, timeout=120)
    assert theirs.jobs == ours.jobs
    given = {frozenset(job["environment"]) for job in ours.jobs.values()}
    assert given == {
        frozenset(("MMNMT_SETUP", "MMNMT_THREADS", "SBATCH_RESERVATION", "SLURM_CONF"))
    }


def test_printed_commands_tell_similar_names_apart(slurm: FakeSlurm, out: Path) -> None:
    """Variables of bash have neither hyphens nor letters beyond ASCII."""
    names = ("moe-a", "moe_a", "mo\u00e9_a", "mo\u00e8_a")
    path, stages = out.with_name("names.toml"), ""
    for name in names:
        stages += f'[stages."{name}"]\nrun = "pretrain"\n[stages."{name}-test"]\n'
        stages += f'run = "translate"\ninputs = {{ checkpoint = "{name}", corpus = "clean" }}\n'
    path.write_text(GRAPH + stages, encoding="utf-8")
    plan = resolve_plan(load_plan(str(path)), out_dir=out, auto="cpu_fp32")
    said = shown(plan)
    subprocess.run(["bash", "-euc", "\n".join(said)], check=True, timeout=120)
    for name in names:
        assert needed(slurm)[f"{name}-test"] == {"clean", name}


def test_commands_can_be_shown_without_slurm(out: Path) -> None:
    said = shown(graph(out))
    assert sum(line.startswith("job_") for line in said) == len(graph(out).tasks)
    assert not out.exists()


@pytest.mark.parametrize(
    ("down", "told"),
    [
        ("Could not establish a configuration source", "SLURM is not configured on this machine"),
        (True, "SLURM gives squeue no answer"),
    ],
)
def test_commands_are_shown_with_a_warning_where_slurm_does_not_tell_the_jobs(
    slurm: FakeSlurm, out: Path, down: str | bool, told: str
) -> None:
    slurm.set(refused="mmnmt-corpus")
    with pytest.raises(SchedulerError):
        submit(graph(out))
    slurm.set(down=down)
    said = shown(graph(out))
    assert said[0].startswith("# States of jobs are unknown: no stage counts as submitted. ")
    assert told in said[0]
    assert sum(line.startswith("job_") for line in said) == len(graph(out).tasks)
    for stage in ("corpus", "clean"):  # refused, and not tried
        with pytest.raises(ArtifactError, match=f"No job of stage {stage} is recorded, and"):
            last_log(graph(out), stage)


def test_a_machine_without_slurm_s_configuration_is_told(slurm: FakeSlurm, out: Path) -> None:
    submit(one_stage(out))
    slurm.set(down="Could not establish a configuration source")
    where = r"SLURM is not configured on this machine \(.*a configuration source\)\. Run this"
    with pytest.raises(SchedulerError, match=where):
        cancel_jobs(graph(out), [])
    (out / RECORD_NAME).unlink()
    with pytest.raises(SchedulerError, match=where):
        submit(graph(out))


def test_cancel_ends_all_jobs_or_those_of_some_stages(slurm: FakeSlurm, out: Path) -> None:
    submit(graph(out))
    total = len(slurm.jobs)
    said: list[str] = []
    cancel_jobs(graph(out), ["moe"], say=said.append)
    assert said == [f"moe: canceled job {slurm.ids()['moe']}"]
    assert len(slurm.live()) == total - 1
    cancel_jobs(graph(out), [])
    assert not slurm.live()
    said.clear()
    cancel_jobs(graph(out), [], say=said.append)
    assert said == ["No job waits or runs."]
    with pytest.raises(ConfigError, match="has no stage"):
        cancel_jobs(graph(out), ["moo"])
    elsewhere = graph(out.with_name("elsewhere"))
    for look in (lambda: cancel_jobs(elsewhere, []), lambda: last_log(elsewhere, "corpus")):
        with pytest.raises(ArtifactError, match=f"Nothing was submitted to {elsewhere.out_dir}"):
            look()


def test_cancel_leaves_the_jobs_of_another_plan_in_the_same_folder(
    slurm: FakeSlurm, out: Path
) -> None:
    submit(one_stage(out))
    other = out.with_name("other.toml")
    renamed = GRAPH.replace('"corpus"', '"texts"').replace("corpus = { run", "texts = { run")
    other.write_text(renamed, encoding="utf-8")
    plan = resolve_plan(load_plan(str(other)), out_dir=out, auto="cpu_fp32")
    submit(plan.chosen(only=["texts"]))
    ids, said = slurm.ids(), list[str]()
    cancel_jobs(plan, [], say=said.append)
    stays = f"corpus: job {ids['corpus']} of plan graph stays; --only corpus cancels it"
    assert said == [f"texts: canceled job {ids['texts']}", stays]
    assert slurm.live() == {"corpus": ids["corpus"]}
    cancel_jobs(plan, ["corpus"])
    assert not slurm.live()


@pytest.mark.parametrize("is_typed", [False, True])
def test_jobs_that_the_record_lacks_are_found(slurm: FakeSlurm, out: Path, is_typed: bool) -> None:
    """The folder was removed while they waited, or a user typed the printed lines."""
    if is_typed:
        lines = "\n".join(shown(graph(out)))
        subprocess.run(["bash", "-euc", lines], check=True, timeout=120)
    else:
        submit(graph(out))
    before = slurm.live()
    slurm.become(before["corpus"], "RUNNING")
    shutil.rmtree(out)
    said = submit(graph(out))
    assert said.pop(0) == f"corpus: runs as job {before['corpus']}"
    assert all(f", instead of job {before[line.split(':')[0]]} (" in line for line in said)
    assert slurm.live().keys() == before.keys()
    assert [*before.values()].count(slurm.live()["clean"]) == 0
    copy = graph(out.with_name("copy"))
    with pytest.raises(ArtifactError, match=r"Nothing was submitted to .*/copy"):
        cancel_jobs(copy, [])
    shutil.rmtree(out)
    cancel_jobs(graph(out), [], say=lambda _: None)
    assert not slurm.live()


@pytest.mark.parametrize("running", [[], ["clean"]])
def test_a_submission_tells_which_left_out_jobs_slurm_cancels_with_it(
    slurm: FakeSlurm, out: Path, running: list[str]
) -> None:
    submit(graph(out))
    ids, site = slurm.live(), SITE.model_copy(update={"time": "1:00:00"})
    for name in running:
        slurm.become(ids[name], "RUNNING")
    lines = shown(one_stage(out), site)
    submit_plan(one_stage(out), site, say=(said := list[str]()).append)
    others = [task.name for task in graph(out).tasks[1:] if not running]
    told = ", which waits for these; submit it, too"
    assert said[1:] == [f"{name}: SLURM cancels job {ids[name]}{told}" for name in others]
    assert [line[2:] for line in lines if line.endswith(told)] == said[1:]


@pytest.mark.parametrize(
    ("name", "problem"), [("nowhere", "does not exist"), ("empty", "has no manifest.json")]
)
def test_an_input_that_a_later_stage_cannot_read_is_refused_before_any_is_submitted(
    slurm: FakeSlurm, out: Path, name: str, problem: str
) -> None:
    path = out.with_name("given.toml")
    out.with_name("empty").mkdir()
    text = GRAPH.replace('tokenizer = "tokenizer" }', 'tokenizer = "$words" }')
    path.write_text(f'[inputs]\nwords = "a tokenizer"\n{text}', encoding="utf-8")
    given = {"words": RawInput((out.parent / name,))}
    plan = resolve_plan(load_plan(str(path)), out_dir=out, given=given, auto="cpu_fp32")
    for act in (submit, shown):
        with pytest.raises(ArtifactError, match=problem):
            act(plan)
    assert not slurm.jobs


@pytest.mark.parametrize(("stage", "row"), [("moe", "waiting"), ("dense", "running")])
def test_the_job_of_a_stage_that_left_the_plan_is_shown_and_can_be_canceled(
    slurm: FakeSlurm, out: Path, monkeypatch: pytest.MonkeyPatch, stage: str, row: str
) -> None:
    submit(graph(out))
    job = slurm.ids()[stage]
    slurm.become(job, "PENDING" if row == "waiting" else "RUNNING")
    renamed = GRAPH.replace(f"{stage} = {{ run", "other = { run")
    renamed = renamed.replace(f'checkpoint = "{stage}"', 'checkpoint = "other"')
    monkeypatch.setitem(globals(), "GRAPH", renamed)
    found = status(graph(out))[stage]
    assert found.startswith(f"{stage} {row} {job}.0 ")
    assert f"not in this plan; `mmnmt cancel` with --only {stage} ends" in found
    for chosen in ({"only": ["corpus"]}, {"until": ["shards"]}):
        assert stage in (few := status(graph(out).chosen(**chosen)))
        assert "evaluation" not in few, "it is left out, and in the plan"
    log = log_dir(out / stage) / f"{job}.log"
    log.write_text("its log", encoding="utf-8")
    assert last_log(graph(out), stage) == log
    cancel_jobs(graph(out), [stage])
    assert stage not in slurm.live()
    assert stage not in status(graph(out))


# ---------------------------------------------------------------- status


START = "2026-11-23T10:00:00+00:00"


def end(out_dir: Path, attempt: str, verdict: Any, cause: str, update: int | None = None) -> None:
    write_start(out_dir, Start(attempt, START, ("node1",), ()))
    write_verdict(out_dir, Verdict(verdict, cause, attempt, START, START, update=update))


def test_status_joins_artifacts_jobs_and_verdicts(slurm: FakeSlurm, tmp_path: Path) -> None:
    resolved = tiny(tmp_path)
    show_jobs(resolved, say=(said := list[str]()).append)
    assert said[0].split("\n")[0].split() == ["stage", "state"]
    make(resolved.chosen(only=["corpus"]))
    submit(resolved)
    job = slurm.ids()["clean"]
    found = status(resolved)
    assert found["corpus"].startswith("corpus done")
    local = datetime(2026, 11, 23, 10)
    since = local.astimezone(UTC).isoformat(timespec="seconds")
    assert found["clean"] == f"clean waiting {job}.0 {since} other jobs have a higher priority"
    end(tmp_path / "run" / "clean", f"{job}.0", "again", "preempted on node1", update=1200)
    slurm.become(job, "RUNNING", restarts=1, reason="None")
    found = status(resolved)
    assert found["clean"].startswith(f"clean running {job}.1 ")
    assert found[f"clean {job}.0"].endswith("preempted on node1 (update 1,200)")
    end(tmp_path / "run" / "clean", f"{job}.1", "failed", "rank 3 on node2: no memory")
    slurm.become(job, "FAILED", restarts=1, reason="NonZeroExitCode")
    assert "rank 3 on node2: no memory; its log is in" in status(resolved)["clean"]


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_finished_stage_whose_settings_change_is_stale_and_did_not_fail(
    slurm: FakeSlurm, tmp_path: Path, is_forgotten: bool
) -> None:
    only = {"only": ["corpus"]}
    submit(tiny(tmp_path).chosen(**only))
    job = slurm.ids()["corpus"]
    make(tiny(tmp_path).chosen(**only))
    slurm.become(job, "COMPLETED")
    if is_forgotten:
        end(tmp_path / "run" / "corpus", f"{job}.0", "done", "")
        slurm.forget(job)
    changed = tiny(tmp_path, corpus={"max_train_lines": 1}).chosen(**only)
    assert status(changed)["corpus"].startswith("corpus stale corpus.max_train_lines: ")


def test_a_stage_that_ends_meanwhile_is_done(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = tiny(tmp_path).chosen(only=["corpus"])
    submit(resolved)

    def look_up_slowly(job_id: str) -> SlurmJob | None:
        make(resolved)
        slurm.become(job_id, "COMPLETED")
        return look_up(job_id)

    monkeypatch.setattr(slurm_commands, "look_up", look_up_slowly)
    said: list[str] = []
    show_jobs(resolved, say=said.append)
    assert said[0].splitlines()[2].split()[:2] == ["corpus", "done"]


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_job_canceled_while_it_waits_again_has_no_cause_of_an_earlier_start(
    slurm: FakeSlurm, out: Path, restarts: int
) -> None:
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    before = f"{job}.{restarts - 1}"
    end(out / "corpus", before, "again", "preempted on node1", update=5)
    slurm.become(job, "CANCELLED", restarts=restarts, reason="None")
    found = status(one_stage(out))
    assert found["corpus"].startswith(f"corpus canceled {job}.{restarts} ")
    assert "preempted" not in found["corpus"]
    assert found[f"corpus {before}"].endswith("preempted on node1 (update 5)")


def test_the_row_of_a_canceled_stage_tells_where_it_stopped(slurm: FakeSlurm, out: Path) -> None:
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    end(out / "corpus", f"{job}.0", "again", "canceled: stopped after update 5", update=5)
    slurm.become(job, "CANCELLED", reason="None")
    found = status(one_stage(out))
    assert "canceled: stopped after update 5; its log is in" in found["corpus"]
    assert f"corpus {job}.0" not in found, "it is told twice"


def test_a_start_whose_first_node_crashed_is_told(slurm: FakeSlurm, out: Path) -> None:
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    folder = write_start(out / "corpus", Start(f"{job}.0", START, ("node1", "node2"), ()))
    write_end(folder, RankEnd(1, 2, "node2", "lost", "gloo", 7, "pretrain"))
    slurm.become(job, "PENDING", restarts=1, reason="BeginTime")
    told = f"corpus {job}.0"
    assert "rank 0 on node1: ended without a word" in status(one_stage(out))[told]
    slurm.become(job, "RUNNING", restarts=0)
    assert told not in status(one_stage(out)), "it runs"
    slurm.set(down=True)
    assert told not in status(one_stage(out)), "it may run"


def test_a_start_that_saves_before_its_end_has_not_ended(slurm: FakeSlurm, out: Path) -> None:
    """Its job leaves a verdict at the warning, for the case that it is killed."""
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    slurm.become(job, "RUNNING")
    end(out / "corpus", f"{job}.0", "again", "time limit: ended before all ranks had saved")
    assert f"corpus {job}.0" not in status(one_stage(out))
    slurm.set(down=True)
    assert "time limit" in status(one_stage(out))[f"corpus {job}.0"]


def test_status_tells_why_stages_wait_or_ended(slurm: FakeSlurm, out: Path) -> None:
    submit(graph(out))
    ids = slurm.ids()
    assert status(graph(out))["clean"].endswith("after corpus")
    slurm.become(ids["corpus"], "FAILED")
    slurm.become(ids["clean"], "CANCELLED", reason="DependencyNeverSatisfied")
    slurm.become(ids["lengths"], "CANCELLED", reason="None")
    slurm.become(ids["tokenizer"], "PENDING", reason="QOSMaxJobsPerUserLimit")
    slurm.become(ids["shards"], "PENDING", reason="ReqNodeNotAvail,_UnavailableNodes:node2")
    found = status(graph(out))
    assert "SLURM ended it as FAILED" in found["corpus"]
    assert found["clean"].endswith("a stage that it needs failed or was canceled")
    assert found["lengths"].startswith(f"lengths canceled {ids['lengths']}.0")
    assert "log" not in found["lengths"].split(), "it never started"
    assert "a limit of the account" in found["tokenizer"]
    for state, shown_as, hour in (("CONFIGURING", "running", 11), ("REQUEUE_HOLD", "waiting", 10)):
        slurm.become(ids["dense"], state, reason="job_requeued_in_held_state")
        line = status(graph(out))["dense"]
        since = datetime(2026, 11, 23, hour).astimezone(UTC).isoformat(timespec="seconds")
        assert f"dense {shown_as} {ids['dense']}.0 {since}" in line
    assert line.endswith("it is held: `scontrol release` lets it go")
    assert "down, drained or reserved" in found["shards"]


def test_status_tells_why_a_job_never_came_to_start_its_stage(slurm: FakeSlurm, out: Path) -> None:
    submit(one_stage(out))
    job = slurm.ids()["corpus"]
    slurm.become(job, "FAILED")
    assert "without a log: name an --out where all nodes can write" in status(graph(out))["corpus"]
    log = log_dir(out / "corpus") / f"{job}.log"
    log.write_text("script: line 7: exec: python: not found\n\n", encoding="utf-8")
    told = "SLURM ended it as FAILED before the stage started: script: line 7: exec: python: not"
    assert told in status(graph(out))["corpus"]


def test_a_stage_whose_submission_was_refused_says_so(slurm: FakeSlurm, out: Path) -> None:
    slurm.set(refused="mmnmt-corpus")
    with pytest.raises(SchedulerError):
        submit(one_stage(out))
    assert (
        status(one_stage(out))["corpus"] == "corpus missing its job was not submitted; submit again"
    )


@pytest.mark.usefixtures("slurm")
def test_a_stage_waits_for_another_once_however_often_it_reads_it(tmp_path: Path) -> None:
    resolved = resolve_plan(load_plan("demo"), out_dir=tmp_path / "demo", auto="cpu_fp32")
    submit(resolved)
    assert status(resolved)["assembled"].endswith("after dense, moe_lgr")


@pytest.mark.parametrize(
    "edited",
    ["", '{"kind": "train"}\n', '{"kind": "train", "update": "x", "seconds": [1]}\n', "[1]\n"],
)
def test_status_says_how_far_training_is(slurm: FakeSlurm, out: Path, edited: str) -> None:
    submit(graph(out))
    slurm.become(slurm.ids()["dense"], "RUNNING")
    folder = run_dir(out / "dense")
    folder.mkdir(parents=True)
    records = [{"kind": "train", "update": n, "seconds": 2.0 * n} for n in (10, 20, 30)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + edited, encoding="utf-8")
    total = dict(graph(out).tasks[5].config)["training"]["updates"]
    minutes, seconds = divmod(2 * (total - 30), 60)
    left = f"30 of {total} updates, {minutes}:{seconds:02} left"
    assert status(graph(out))["dense"].endswith(left if edited[:1] != "[" else "+00:00")


@pytest.mark.parametrize("unit", ["dense", "bytes"])
def test_updates_in_the_unit_of_another_model_are_the_most_that_are_made(
    slurm: FakeSlurm, out: Path, unit: str
) -> None:
    resolved = graph(out, training={"updates_of": unit, "updates": 1000})
    submit(resolved)
    slurm.become(slurm.ids()["moe"], "RUNNING")
    folder = run_dir(out / "moe")
    folder.mkdir(parents=True)
    records = [{"kind": "train", "update": n, "seconds": 2.0 * n} for n in (10, 20)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    assert status(resolved)["moe"].endswith(" 20 of at most 1,000 updates, at most 32:40 left")


@pytest.mark.parametrize("state", ["FAILED", "RUNNING"])
def test_status_names_the_option_of_submit_where_a_stage_names_its_own(
    slurm: FakeSlurm, out: Path, state: str
) -> None:
    submit(graph(out))
    job = slurm.ids()["dense"]
    cause = "out holds another result (input shards changed). Pass --overwrite to replace it."
    end(out / "dense", f"{job}.0", "failed", cause)
    slurm.become(job, state, restarts=int(state == "RUNNING"), reason="None")
    said = status(graph(out))["dense" if state == "FAILED" else f"dense {job}.0"]
    assert "(input shards changed). Pass --rebuild dense to replace it." in said


# ---------------------------------------------------------------- the command


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run ``mmnmt`` in a folder with a site file; return exit code and output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.toml").write_text("[node]\ncpus = 16\n", encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str]:
        code = cli.main(arguments)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_the_commands_submit_show_print_logs_and_cancel(
    slurm: FakeSlurm, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    tiny(tmp_path)
    given = ("plan.toml", "--input", f"text={tmp_path / 'text'}")
    code, said = run("submit", *given, "--site", "site.toml")
    assert code == 0, said
    job = slurm.jobs[slurm.ids()["clean"]]
    folder = tmp_path / "runs" / "plan"
    assert f"--out={folder / 'clean'}" in job["stage"], "an absolute path"
    assert run("status", *given)[1].count("waiting") == 2
    code, said = run("logs", "plan.toml", "clean")
    assert code == 2
    assert "There is no log of stage clean" in said
    log = folder / "clean.logs" / f"{slurm.ids()['clean']}.log"
    text = "mmnmt clean: job\n00: first\n10: tenth\n01: second: 0: not of rank 0\n"
    log.write_text(text, encoding="utf-8")
    assert run("logs", "plan.toml", "clean") == (0, text)
    assert run("logs", "plan.toml", "clean", "--rank", "0") == (0, "00: first\n")
    code, said = run("logs", "plan.toml", "clean", "--rank", "7")
    assert code == 2
    assert "has no line of rank 7. Its ranks are 0, 1, 10." in said
    log.write_text("mmnmt clean: job\n", encoding="utf-8")
    assert (
        "no line of rank 0. Leave --rank out." in run("logs", *given[:1], "clean", "--rank", "0")[1]
    )
    code, said = run("cancel", "plan.toml", "--only", "clean")
    assert said == f"clean: canceled job {slurm.ids()['clean']}\n"
    assert list(slurm.live()) == ["corpus"]


@pytest.mark.parametrize("edited", ["[clean]\nmax_charcters = 3\n", "[clean\n"])
def test_jobs_are_canceled_and_logs_printed_while_a_recipe_is_edited(
    slurm: FakeSlurm, tmp_path: Path, run: Callable[..., tuple[int, str]], edited: str
) -> None:
    tiny(tmp_path)
    given = ("plan.toml", "--input", f"text={tmp_path / 'text'}", "--site", "site.toml")
    assert run("submit", *given)[0] == 0
    ids = slurm.ids()
    (tmp_path / "recipe.toml").write_text(edited, encoding="utf-8")
    (tmp_path / "runs/plan/clean.logs" / f"{ids['clean']}.log").write_text("a\n", encoding="utf-8")
    assert run("logs", "plan.toml", "clean") == (0, "a\n")
    canceled = [f"{name}: canceled job {ids[name]}" for name in ("corpus", "clean")]
    assert run("cancel", "plan.toml") == (0, "\n".join(canceled) + "\n")
    assert not slurm.live()


def test_status_after_a_submission_takes_auto_for_the_cluster_s_ds_config(
    slurm: FakeSlurm, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    """A login node has no GPU: its own ds_config would make every model look stale."""
    site = "[node]\ncpus = 16\ngpus = 8\n"
    (tmp_path / "site.toml").write_text(site, encoding="utf-8")
    assert run("submit", "demo", "--until", "dense", "--site", "site.toml")[0] == 0
    job = slurm.jobs[slurm.ids()["dense"]]
    assert "--ds-config=zero1_bf16" in job["stage"]
    record = json.loads((tmp_path / "runs/demo" / RECORD_NAME).read_text(encoding="utf-8"))
    assert record["ds_config"] == "zero1_bf16"


@pytest.mark.parametrize("on_gpus", ["", 'ds_config = "zero2_fp16"\n'])
def test_auto_stands_for_the_ds_config_of_a_cpu_where_a_stage_has_no_gpu(
    slurm: FakeSlurm, tmp_path: Path, run: Callable[..., tuple[int, str]], on_gpus: str
) -> None:
    site = f"{on_gpus}[node]\ncpus = 16\ngpus = 8\n"
    (tmp_path / "site.toml").write_text(site, encoding="utf-8")
    plan = GRAPH.replace('recipe = "demo_moe"', 'recipe = "demo_moe", job.gpus_per_process = 0')
    (tmp_path / "graph.toml").write_text(plan, encoding="utf-8")
    assert run("submit", "graph.toml", "--site", "site.toml")[0] == 0
    jobs = {name: slurm.jobs[job_id]["stage"] for name, job_id in slurm.ids().items()}
    assert "--ds-config=cpu_fp32" in jobs["moe"]
    assert f"--ds-config={'zero2_fp16' if on_gpus else 'zero1_bf16'}" in jobs["dense"]


def test_training_that_does_not_fit_is_refused_before_anything_is_submitted(
    slurm: FakeSlurm, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    chosen = ("submit", "demo", "--until", "dense", "--site", "site.toml")
    for memory, told in (("20M", "20 MiB"), ("1K", "0.000977 MiB")):
        site = f'node = {{ cpus = 16, gpus = 8, gpu_memory = "{memory}" }}'
        (tmp_path / "site.toml").write_text(site, encoding="utf-8")
        code, said = run(*chosen)
        assert code == 2
        assert "Stage dense: a rank needs" in said
        assert f"where a GPU has {told}. " in said
    (tmp_path / "site.toml").write_text('node = { cpus = 16, memory = "20M" }', encoding="utf-8")
    assert "2 ranks need" in run(*chosen)[1]
    (tmp_path / "site.toml").write_text("node = { cpus = 16 }", encoding="utf-8")
    plan = toml_path("demo", folder="plans", what="plan").read_text(encoding="utf-8")
    whole = plan.replace("[defaults]", '[defaults]\njob.memory = "0"', 1)  # all of a node's
    (tmp_path / "whole.toml").write_text(whole, encoding="utf-8")
    code, said = run(*("submit", str(tmp_path / "whole.toml"), *chosen[2:], "--dry-run"))
    assert (code, "--mem=0" in said) == (0, True), said
    for memory, refused in (("20M", True), ("64G", False)):
        site = f'node = {{ cpus = 16, memory = "{memory}" }}'
        (tmp_path / "site.toml").write_text(site, encoding="utf-8")
        said = run(*("submit", str(tmp_path / "whole.toml"), *chosen[2:], "--dry-run"))[1]
        assert ("2 ranks need" in said) == refused
    assert not slurm.jobs


@pytest.mark.parametrize("name", plan_names())
def test_every_plan_that_ships_names_all_of_its_stages_and_jobs_and_makes_nothing(
    name: str, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    plan = load_plan(name)
    for stage in plan.stages.values():
        for key, source in stage.inputs.items():
            kind = STAGES[stage.run].inputs[key].kind
            if isinstance(source, str) and source.startswith("$"):
                (given := tmp_path / "given" / source[1:]).mkdir(parents=True, exist_ok=True)
                if kind != "raw" and not any(given.iterdir()):
                    given.rmdir()
                    with new_artifact(given, kind=kind, stage="", config={}, inputs={}):
                        pass
    site = 'node = { cpus = 64, gpus = 8, gpu_memory = "80G", memory = "1T" }'
    (tmp_path / "site.toml").write_text(site, encoding="utf-8")
    inputs = [f"--input={key}={tmp_path / 'given' / key}" for key in plan.inputs]
    assert not any("{" in one or "{" in stage.recipe for one, stage in plan.stages.items())
    code, said = run("run", name, "--dry-run", *inputs)
    assert (code, said.splitlines()) == (0, [f"{one}: would run (missing)" for one in plan.stages])
    code, said = run("run", name, "--dry-run", "--with", "smoke", "--processes", "1", *inputs)
    assert code == 0, said
    code, said = run("submit", name, "--dry-run", "--site", "site.toml", *inputs)
    assert code == 0, said
    assert said.count("\njob_") + said.startswith("job_") == len(plan.stages)
    assert not (tmp_path / "runs").exists()
