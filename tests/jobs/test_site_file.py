"""Site files, and what a stage asks of a cluster's nodes."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.jobs.plan import Task, load_plan, num_bytes, resolve_plan, seconds_of
from pipeline.jobs.site import Site, allocate, load_site

EXAMPLE = Path(__file__).parents[2] / "slurm" / "site.example.toml"
PLAN = """
[stages.corpus]
run = "import_corpus"
recipe = "demo_dense"
[stages.tokenizer]
run = "train_tokenizer"
recipe = "demo_dense"
inputs = { corpus = "corpus" }
[stages.shards]
run = "make_shards"
recipe = "demo_dense"
inputs = { corpus = "corpus", tokenizer = "tokenizer" }
processes = 6
threads = 2
[stages.mixture]
run = "mix"
recipe = "demo_dense"
inputs = { shards = "shards" }
[stages.dense]
run = "pretrain"
recipe = "demo_dense"
inputs = { shards = "shards", mixture = "mixture" }
processes = 12
threads = 4
"""


def task(tmp_path: Path, name: str, job: str = "") -> Task:
    path = tmp_path / "plan.toml"
    path.write_text(f"{PLAN}\n[stages.{name}.job]\n{job}\n", encoding="utf-8")
    resolved = resolve_plan(load_plan(str(path)), out_dir=tmp_path / "run")
    return next(one for one in resolved.tasks if one.name == name)


def site(**node: object) -> Site:
    return Site.model_validate({"node": {"cpus": 32, **node}})


@pytest.mark.parametrize(
    ("gpus", "job", "nodes", "per_node", "gpus_per_node"),
    [
        (8, "", 2, 6, 6),  # 12 ranks on nodes of 8 GPUs: 6 on each of 2, not 8 and 4
        (8, "nodes = 3", 3, 4, 4),
        (4, "", 3, 4, 4),
        (16, "", 2, 6, 6),  # 32 cores hold 8 ranks of 4 threads
        (16, "cpus_per_process = 1", 1, 12, 12),
        (0, "", 2, 6, 0),
        (8, "gpus_per_process = 0", 2, 6, 0),
    ],
)
def test_ranks_are_spread_evenly_over_the_fewest_nodes_that_hold_them(
    tmp_path: Path, gpus: int, job: str, nodes: int, per_node: int, gpus_per_node: int
) -> None:
    found = allocate(task(tmp_path, "dense", job), site(gpus=gpus))
    assert (found.nodes, found.tasks_per_node) == (nodes, per_node)
    assert found.gpus_per_node == gpus_per_node
    assert found.tasks == 12
    assert found.threads == 4


@pytest.mark.parametrize(
    "options", [["--gres=gpu:a100:4"], ["--gpus-per-node", "a100:4"], ["--gpus-per-node=4", "-x"]]
)
def test_a_node_holds_no_more_ranks_than_a_site_s_options_ask_gpus_for(
    tmp_path: Path, options: list[str]
) -> None:
    of_four = site(gpus=8).model_copy(update={"options": options})
    assert allocate(task(tmp_path, "dense"), of_four).nodes == 3
    with pytest.raises(ConfigError, match="each holds at most 4"):
        allocate(task(tmp_path, "dense", "nodes = 2"), of_four)


@pytest.mark.parametrize(("job", "sizes"), [("", (1, 1, 12)), ("nodes = 2", (2, 6, 2))])
def test_a_stage_of_workers_is_one_task_with_the_cores_of_all_or_a_rank_for_each_process(
    tmp_path: Path, job: str, sizes: tuple[int, int, int]
) -> None:
    found = allocate(task(tmp_path, "shards", job), site(gpus=8))
    assert (found.nodes, found.tasks, found.cpus_per_task) == sizes
    assert (found.gpus_per_node, found.threads) == (0, 2)


def test_stages_without_gpus_run_where_the_site_says(tmp_path: Path) -> None:
    gpu = {"partition": "gpu", "time": "24:00:00", "node": {"cpus": 8, "gpus": 4}}
    cpu = {"partition": "cpu", "time": "30", "node": {"cpus": 64}}
    both = Site.model_validate({**gpu, "cpu": cpu})
    shards = allocate(task(tmp_path, "shards"), both)
    dense = allocate(task(tmp_path, "dense", 'time = "1:00:00"\ncpus_per_process = 1'), both)
    assert (shards.queue.partition, shards.time) == ("cpu", "30")
    assert (dense.queue.partition, dense.time) == ("gpu", "1:00:00")


@pytest.mark.parametrize(
    ("name", "job", "node", "told"),
    [
        ("dense", "nodes = 5", {}, "over 5 nodes, of which each holds at most 8"),
        ("dense", "nodes = 1", {"gpus": 4}, "Set job.nodes to one of 3, 4, 6, 12"),
        ("dense", "cpus_per_process = 33", {}, "33 cores in one task, where a node has 32"),
        ("shards", "", {"cpus": 8}, "12 cores in one task, where a node has 8"),
        ("shards", "", {"cpus": 8}, "set job.nodes to spread them"),
        ("shards", "nodes = 4", {}, "Set job.nodes to one of 1, 2, 3, 6"),
        ("shards", "gpus_per_process = 1", {}, "a GPU, where a node has none"),
        ("dense", 'memory = "600G"', {"memory": "512G"}, "600G of memory per node"),
        ("dense", 'memory = "much"', {}, 'job.memory is "much". Write a size of memory'),
        ("dense", 'time = "a day"', {}, 'job.time is "a day". Write a time limit, for example'),
    ],
)
def test_what_a_node_cannot_hold_is_refused_in_one_sentence(
    tmp_path: Path, name: str, job: str, node: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        allocate(task(tmp_path, name, job), site(**node))
    assert told in str(refused.value)
    assert name in str(refused.value)


def test_time_limits_are_read_as_sbatch_reads_them() -> None:
    limits = {"6": 360, "30": 1800, "30:15": 1815, "1:30:15": 5415, "2-12": 216_000}
    limits |= {"2-12:30": 217_800, "1-0:0:1": 86_401}
    assert {text: seconds_of(text) for text in limits} == limits


def test_sizes_are_read_as_sbatch_reads_them() -> None:
    assert num_bytes("512") == 512 * 2**20
    assert num_bytes("80G") == num_bytes("80gb") == 80 * 2**30
    assert num_bytes(None) is None


def test_the_example_is_a_site_file_and_names_every_setting() -> None:
    found = load_site(EXAMPLE)
    assert found.auto_ds_config == "zero1_bf16"
    text = EXAMPLE.read_text(encoding="utf-8")
    for name in (*Site.model_fields, *Site.model_fields["node"].annotation.model_fields):  # type: ignore[union-attr]
        assert name in text, name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("partition = 'x'", "node is missing"),
        ("[node]\ncpus = 8\ngpu = 2", "Did you mean 'gpus'?"),
        ("[node]\ncpus = 8\nmemory = 'x'", 'node.memory is "x". Write a size of memory'),
        (
            "container = 'apptainer exec \"a b.sif\"'\n[node]\ncpus = 8",
            'Write a list of words, ["apptainer", "exec", "a b.sif"].',
        ),
        ("container = ['srun x']\n[node]\ncpus = 8", 'list of words, ["srun", "x"].'),
        ("container = ['']\n[node]\ncpus = 8", "container is ['']. Write a list of words, []."),
        ('container = "it\'s on"\n[node]\ncpus = 8', 'list of words, ["it\'s", "on"].'),
        ("options = ['-p gpu -A x']\n[node]\ncpus = 8", 'list of words, ["-p", "gpu", "-A", "x"].'),
        ("options = '--a=1 --b'\n[node]\ncpus = 8", 'Write a list of words, ["--a=1", "--b"].'),
        ("[node]\ncpus = 8\n[cpu]\noptions = '-x'\nnode = 3", 'list of words, ["-x"].'),
        ("container = { a = 1 }\n[node]\ncpus = 8", "container is {'a': 1}. Write a list"),
        ("environment = ['A=1']\n[node]\ncpus = 8", "Write it as a table, [environment]"),
        *(
            (f"time = '{time}'\n[node]\ncpus = 8", f'time is "{time}". {told}Write a time limit')
            for time, told in (
                *(("\u0662", ""), ("1-\u0662:00", "")),
                *(("1:99:00", ""), ("1:00:60", ""), ("9:60", ""), ("1-24", "")),
                *((zero, "sbatch takes 0 as no limit. ") for zero in ("00:00:00", "0", "0-0")),
            )
        ),
        *(
            (f"environment = {{ {name} = '1' }}\n[node]\ncpus = 8", f"submit sets {name} itself.")
            for name in (
                *("MMNMT_SETUP", "MMNMT_MAX_RESTARTS", "SBATCH_EXPORT", "SBATCH_OPEN_MODE"),
                "SBATCH_TIMELIMIT",
            )
        ),
        *(
            (f"environment = {{ {name} = '1' }}\n[node]\ncpus = 8", f"environment: {told}")
            for name, told in (
                ("OMP_NUM_THREADS", "a job sets OMP_NUM_THREADS by `threads` of the stage."),
                ("MASTER_PORT", "a job sets MASTER_PORT itself. Leave it out."),
                ("RANK", "a job sets RANK itself. Leave it out."),
                ("PATH", "sbatch itself would be looked for in that PATH. Export it in setup."),
            )
        ),
        *(
            (
                f"environment = {{ TMPDIR = '{value}' }}\n[node]\ncpus = 8",
                f'no shell expands "{value}" of TMPDIR. Write what it stands for, or export TMPDIR',
            )
            for value in ("/scratch/$USER", "${SCRATCH}/x", "/a/`whoami`")
        ),
        *(
            (
                f"{name} = ['{words[0]}', '{words[1]}']\n[node]\ncpus = 8",
                f'{name} (item 2) is "{words[1]}". No shell expands it.',
            )
            for name, words in (
                ("container", ("apptainer", "$HOME/image.sif")),
                ("container", ("apptainer", "~/image.sif")),
                ("options", ("--exclusive", "--reservation=$(whoami)")),
            )
        ),
        ("environment = { 'A B' = '1' }\n[node]\ncpus = 8", 'environment: "A B" is no name of a'),
        ("environment = { 'X;touch Y' = '1' }\n[node]\ncpus = 8", '"X;touch Y" is no name of a'),
        ("environment = { 1A = '1' }\n[node]\ncpus = 8", 'environment: "1A" is no name of a'),
        *(
            (f"{name} = {value}\n[node]\ncpus = 8", "Write a line of text, or leave it out")
            for name in ("partition", "account", "qos", "interface")
            for value in ('""', '"a\\nb"', '" "', '"\\u001b"')
        ),
        ('options = ["--a", ""]\n[node]\ncpus = 8', 'options (item 2) is "". Write a line of text'),
        *(
            (f"options = ['--x', '{word}']\n[node]\ncpus = 8", f"sets {word} itself. Leave it out")
            for word in (
                *("-N2", "--job-name", "--requeue", "-Mx", "--wait", "--export=NONE"),
                *("--time=5", "-t5"),
            )
        ),
        *(
            (f"options = {words}\n[node]\ncpus = 8", f"{word} is no option of sbatch.")
            for words, word in (
                (["constraint=h100"], "constraint=h100"),
                (["--gres=gpu:8", "exclusive"], "exclusive"),
                (["-C", "h100", "x"], "x"),
                (["-"], "-"),
                (["--x=1", "--"], "--"),
            )
        ),
        ('container = ["a\\n", "b"]\n[node]\ncpus = 8', "Write a line of text"),
        ('[node]\ncpus = 8\n[cpu]\nqos = ""\nnode = { cpus = 8 }', 'cpu.qos is "". Write a line'),
        ("time = 'x'\n[node]\ncpus = 8", 'time is "x". Write a time limit, for example 24:00:00.'),
    ],
)
def test_a_wrong_site_file_is_named_with_its_mistake(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_site(path)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)


def test_white_space_around_a_limit_does_not_reach_sbatch() -> None:
    node = {"cpus": 8, "memory": "64G\n"}
    found = Site.model_validate({"time": " 1:00:00\n", "node": node})
    assert (found.time, found.node.memory) == ("1:00:00", "64G")


def test_an_option_of_sbatch_and_a_path_may_hold_spaces(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    words = 'options = ["--reservation=a b"]\ncontainer = ["run", "a b.sif"]\n[node]\ncpus = 8'
    path.write_text(words, encoding="utf-8")
    found = load_site(path)
    assert (found.options, found.container) == (("--reservation=a b",), ("run", "a b.sif"))
    program = tmp_path / "my tools"
    program.touch()
    path.write_text(f'container = ["{program}"]\n[node]\ncpus = 8', encoding="utf-8")
    assert load_site(path).container == (str(program),)
