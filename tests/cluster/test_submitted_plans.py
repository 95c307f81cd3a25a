"""Plans from `mmnmt submit` to their report on a real controller with two nodes."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.raw_trees import write
from support.slurm_cluster import ENDED, Cluster, why_not

from pipeline.artifacts.manifest import read_manifest
from pipeline.config.documents import toml_lines
from pipeline.jobs.job_endings import verdicts
from pipeline.jobs.submission import RECORD_NAME

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OVERLAY = """
[corpus]
max_train_lines = 60
max_valid_lines = 2
max_test_lines = 2
[tokenizer]
vocabulary_size = 300
[model]
encoder_layers = 2
decoder_layers = 2
width = 16
feed_forward_width = 32
num_heads = 2
[shards]
max_tokens = 100
[batches]
tokens = 400
micro_batches = 2
window_steps = 2
[optimizer]
warmup_updates = 1
[training]
updates = 8
validate_every = 4
checkpoint_every = 1
resource_thresholds = [20, 50]
[decoding]
beam_size = 1
max_length_ratio = 0.1
max_extra_length = 2
[evaluation]
language_accuracy = false
[logging]
every = 1
"""
PLAN = """
[defaults]
recipe = "demo_dense+{overlay}"
processes = 2
[defaults.job]
time = "10"
[defaults.pretrain]
inputs = {{ shards = "shards", mixture = "mixture" }}
job = {{ nodes = 2 }}
[stages]
corpus = {{ run = "import_corpus" }}
clean = {{ run = "clean", inputs = {{ corpus = "corpus" }} }}
tokenizer = {{ run = "train_tokenizer", inputs = {{ corpus = "clean" }} }}
shards = {{ run = "make_shards", inputs = {{ corpus = "clean", tokenizer = "tokenizer" }} }}
mixture = {{ run = "mix", inputs = {{ shards = "shards" }} }}
dense = {{ run = "pretrain" }}
moe = {{ run = "pretrain", recipe = "demo_moe+{overlay}" }}
translate = {{ run = "translate", inputs = {{ checkpoint = "dense", corpus = "clean" }} }}
evaluation = {{ run = "evaluate", inputs.corpus = "clean", inputs.systems.dense = "translate" }}
"""
OVER_MPI = PLAN
for _stage in ("import_corpus", "clean", "make_shards", "evaluate"):
    OVER_MPI = OVER_MPI.replace(
        f'run = "{_stage}"', f'run = "{_stage}", processes = 4, job = {{{{ nodes = 2 }}}}'
    )
SLOW = {"at": "every update", "do": 0.5}
"""Updates that something can come between."""
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=DEFAULT GraceTime=8 PriorityTier=1
"""


class Plan:
    """A plan in a folder of its own, and what a user types for it on a login node."""

    def __init__(self, cluster: Cluster, name: str, *, document: str = PLAN) -> None:
        self.cluster, self.out = cluster, cluster.folder / "runs" / name
        self.folder = cluster.folder / "plans" / name
        overlay = self.folder / "small.toml"
        write(self.folder, {"small.toml": OVERLAY, "plan.toml": document.format(overlay=overlay)})

    def mmnmt(self, command: str, *options: str) -> str:
        """Run a command for the plan and return what it prints."""
        words = [command, f"{self.folder}/plan.toml", f"--out={self.out}", *options]
        ended = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def take_data(self, other: "Plan") -> None:
        """Begin with the shards and the mixture of another plan."""
        for stage in ("corpus", "clean", "tokenizer", "shards", "mixture"):
            shutil.copytree(other.out / stage, self.out / stage)

    def submit(self, *options: str, mischief: Mapping[str, Any] | None = None, **site: Any) -> str:
        environment = {"MISCHIEF": json.dumps([mischief])} if mischief else {}
        document = {
            "partition": "main",
            "options": ["--signal=B:USR1@10"],
            **site,
            "environment": environment,
            "node": {"cpus": 4},
        }
        text = "\n".join(toml_lines(document))
        (self.folder / "site.toml").write_text(text, encoding="utf-8")
        return self.mmnmt("submit", f"--site={self.folder}/site.toml", *options)

    def jobs(self) -> dict[str, str]:
        """Stage → id of its newest job."""
        record = json.loads((self.out / RECORD_NAME).read_text(encoding="utf-8"))
        return {stage: one["id"] for stage, one in record["stages"].items()}

    def log(self) -> str:
        logs = sorted(self.out.glob("*.logs/*.log"))
        return "\n".join(f"{log}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def wait(self, what: Callable[[], object], *, seconds: float = 240) -> None:
        """Wait until something is true; else show the logs."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.5)

    def ends(self) -> dict[str, str]:
        """Wait until every job has ended; return stage → its state."""

        def states() -> dict[str, str]:
            fields = {stage: self.cluster.fields(job) for stage, job in self.jobs().items()}
            return {stage: one["JobState"] for stage, one in fields.items()}

        self.wait(lambda: set(states().values()) <= set(ENDED))
        return states()

    def row(self, stage: str) -> str:
        """The line of a stage in the table of its status."""
        lines = self.mmnmt("status").splitlines()
        return " ".join(next(line for line in lines if line.startswith(f"{stage} ")).split())

    def updates(self, stage: str) -> int:
        """Number of updates in the newest complete state of a stage."""
        states = (self.out / f"{stage}.run" / "states").glob("update-*/manifest.json")
        return max((int(path.parent.name[7:]) for path in states), default=0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, with a partition whose jobs preempt others."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NO CLUSTER, NOTHING TESTED: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with Cluster(folder / "c", extra=PREEMPTION) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def done(cluster: Cluster) -> Plan:
    """A plan that nothing disturbs."""
    plan = Plan(cluster, "done")
    plan.submit()
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()
    return plan


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "weights").iterdir())}


def test_a_plan_goes_from_submit_to_report(done: Plan) -> None:
    assert (done.out / "evaluation" / "report.html").is_file()
    assert len(done.jobs()) == 9
    table = done.mmnmt("status").splitlines()[2:]
    assert all(line.split()[1] == "done" for line in table)
    before = done.jobs()
    assert done.submit().count(": done\n") == 9
    assert done.jobs() == before


def test_pretrainings_that_do_not_need_each_other_wait_for_the_same_jobs(done: Plan) -> None:
    fields = {stage: done.cluster.fields(job) for stage, job in done.jobs().items()}
    assert fields["dense"]["NumNodes"] == "2"
    assert fields["dense"]["Dependency"] == fields["moe"]["Dependency"]


def test_a_failed_stage_is_named_cancels_what_follows_and_a_resubmission_goes_on(
    cluster: Cluster, done: Plan
) -> None:
    plan = Plan(cluster, "failing")
    plan.take_data(done)
    crash = {"at": "update 5", "do": "memory", "rank": 1}
    plan.submit("--until=evaluation", mischief=crash, max_restarts=0)
    states = plan.ends()
    assert states["dense"] == "FAILED"
    assert states["translate"] == states["evaluation"] == "CANCELLED"
    assert "rank 1 on node2: MemoryError: played by a test" in plan.row("dense")
    assert plan.row("translate").endswith("a stage that it needs failed or was canceled")
    assert plan.updates("dense") == 4
    plan.submit("--until=evaluation")
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()
    assert weights(plan.out / "dense") == weights(done.out / "dense"), "it did not go on"


def test_a_preempted_stage_waits_says_so_and_ends_as_if_nothing_had_happened(
    cluster: Cluster, done: Plan
) -> None:
    plan = Plan(cluster, "preempted")
    plan.take_data(done)
    plan.submit("--until=dense", mischief={**SLOW, "restarts": [0]})
    plan.wait(lambda: plan.updates("dense") >= 2)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--time=2"]
    job = cluster.command(*urgent, "--wrap=sleep 5")
    plan.wait(lambda: cluster.fields(plan.jobs()["dense"])["JobState"] == "PENDING")
    assert plan.row("dense").startswith(f"dense waiting {plan.jobs()['dense']}.1")
    assert "preempted" in plan.mmnmt("status")
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()
    assert cluster.end(job) == "COMPLETED"
    first, last = verdicts(plan.out / "dense")
    assert (first.verdict, last.verdict) == ("again", "done")
    assert weights(plan.out / "dense") == weights(done.out / "dense")


def test_two_plans_share_a_queue_and_each_knows_its_own_jobs(cluster: Cluster) -> None:
    plans = [Plan(cluster, "first"), Plan(cluster, "second")]
    for plan in plans:
        plan.submit("--until=clean")
    assert not set(plans[0].jobs().values()) & set(plans[1].jobs().values())
    plans[1].mmnmt("cancel", "--only=corpus", "--only=clean")
    assert plans[1].ends()["clean"] == "CANCELLED"
    assert set(plans[0].ends().values()) == {"COMPLETED"}, plans[0].log()


def test_a_changed_recipe_replaces_waiting_jobs_on_a_real_queue(cluster: Cluster) -> None:
    plan = Plan(cluster, "changed")
    blocker = cluster.command(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--time=2", "--wrap=sleep 600"
    )
    plan.submit("--until=shards")
    before = plan.jobs()
    plan.submit("--until=shards", "--set=tokenizer.vocabulary_size=310")
    after = plan.jobs()
    assert {stage for stage in after if after[stage] == before[stage]} == {"corpus", "clean"}
    assert cluster.end(before["shards"]) == "CANCELLED"
    cluster.cancel(blocker)
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()


def test_a_node_whose_daemon_dies_and_returns_leaves_the_stage_its_result(
    cluster: Cluster, done: Plan
) -> None:
    plan = Plan(cluster, "daemon")
    plan.take_data(done)
    # SLURM gives a node up after 10 to 20 seconds of silence.
    plan.submit("--until=dense", mischief={"at": "every update", "do": 8, "restarts": [0]})
    plan.wait(lambda: plan.updates("dense") >= 2)
    job = plan.jobs()["dense"]
    host = cluster.fields(job)["BatchHost"]
    other = "node2" if host == "node1" else "node1"
    cluster.node("daemon-kill", other)
    plan.wait(lambda: cluster.restarts(job) == 1)
    cluster.node("up", other)
    assert plan.ends()["dense"] == "COMPLETED", plan.log()
    assert weights(plan.out / "dense") == weights(done.out / "dense")
    assert len(verdicts(plan.out / "dense")) == 2


@pytest.fixture(scope="module")
def mpi(cluster: Cluster) -> None:
    """SLURM starts ranks of MPI."""
    tried = subprocess.run(
        ["srun", "--mpi=pmix", "--ntasks=1", sys.executable, "-c", "import mpi4py.MPI"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if tried.returncode != 0:
        pytest.skip(f"NO MPI: apt-get install openmpi-bin libpmix-dev ({tried.stderr})")


def made(folder: Path) -> dict[str, str]:
    """File → its digest; reports tell when they were made."""
    manifest = read_manifest(folder)
    assert manifest is not None
    files = manifest.files.items()
    return {name: str(record) for name, record in files if not name.startswith("report.")}


@pytest.mark.usefixtures("mpi")
def test_data_stages_over_ranks_of_mpi_on_two_nodes_make_what_one_node_makes(
    cluster: Cluster, done: Plan
) -> None:
    plan = Plan(cluster, "mpi", document=OVER_MPI)
    plan.submit("--until=shards")
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()
    job = plan.jobs()["shards"]
    assert (cluster.fields(job)["NumNodes"], cluster.fields(job)["NumTasks"]) == ("2", "4")
    for stage in ("corpus", "clean", "shards"):
        assert made(plan.out / stage) == made(done.out / stage)
    for stage in ("mixture", "dense", "translate"):
        shutil.copytree(done.out / stage, plan.out / stage)
    plan.submit("--only=evaluation")
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()
    compared = [made(one.out / "evaluation") for one in (plan, done)]
    assert all(files.pop("history.json") for files in compared), "it has wall times"
    assert compared[0] == compared[1]


@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize("fault", ["kill", "requeue"])
def test_a_data_stage_over_mpi_goes_on_after_a_lost_rank_or_a_request(
    cluster: Cluster, done: Plan, fault: str
) -> None:
    plan = Plan(cluster, f"mpi-{fault}", document=OVER_MPI)
    for stage in ("corpus", "clean", "tokenizer"):
        shutil.copytree(done.out / stage, plan.out / stage)
    act = "kill" if fault == "kill" else 5
    plan.submit("--only=shards", mischief={"at": "pair", "do": act, "rank": 3, "restarts": [0]})
    job = plan.jobs()["shards"]
    if fault == "requeue":
        plan.wait(lambda: (plan.out / "shards.run").is_dir())
        cluster.command("scontrol", "requeue", job)
    assert set(plan.ends().values()) == {"COMPLETED"}, plan.log()
    first, last = verdicts(plan.out / "shards")
    cause = "preempted or requeued: ended before all ranks had saved"
    if fault == "kill":
        cause = "rank 3 on node2: ended without a word: killed, out of memory, or its node crashed"
    assert (first.verdict, last.verdict) == ("again", "done")
    assert first.cause.partition(";")[0] == cause
    assert made(plan.out / "shards") == made(done.out / "shards")
