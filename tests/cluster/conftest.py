"""A cluster and the inputs of a tiny training, for as long as the tests run."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm_cluster import Cluster, why_not

from pipeline.config.documents import toml_lines


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes. The kernel limits paths of sockets to 108 characters, so the folder's is short."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NO CLUSTER, NOTHING TESTED: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with Cluster(folder / "c") as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def training(cluster: Cluster) -> list[str]:
    """The command line of a tiny training, except for its output."""
    from support.tiny_training import make_inputs, make_recipe

    data = cluster.folder / "data"
    inputs = make_inputs(data)
    recipe = make_recipe(updates=12)
    settings = recipe.model_dump(mode="json", exclude_unset=True)
    (data / "tiny.toml").write_text("\n".join(toml_lines(settings)))
    (data / "site.sh").write_text(
        # What `module` of many sites does: it reads a variable that need not be set.
        'module() { [ -z "$LOADEDMODULES_OF_NO_SITE" ] && export LOADED="$*"; }\n'
        f"module load cuda\nexport PATH={Path(sys.executable).parent}:$PATH\n"
    )
    options = {"shards": inputs.shards, "mixture": inputs.mixture, "groups": inputs.groups}
    named = [f"--{name}={artifact.directory}" for name, artifact in options.items()]
    return ["pretrain", f"--recipe={data}/tiny.toml", "--ds-config=cpu_fp32", *named]
