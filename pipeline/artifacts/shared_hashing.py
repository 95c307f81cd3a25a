"""TODO: docstring."""

from collections.abc import Iterable

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.digests import Check, Chunk, Stamp, remembered
from pipeline.distributed.collectives import from_rank_zero, gather_objects, rank
from pipeline.errors import ArtifactError


def check_together(artifact: Artifact, names: Iterable[str]) -> None:
    """``artifact.check`` by all ranks of the open process group, which all call this.

    Chunks not known to rank 0 are dealt out. A rank that sees other files than rank 0 (a copy on
    its own machine's disk) checks its own. Rank 0 remembers for later processes.

    Raises:
        ArtifactError: the same on all ranks.
    """
    check, problem = _look(artifact, list(names))
    found = gather_objects((problem, check.stamps if check else {}))
    _raise_first([entry for entry, _ in found])
    assert check is not None
    stamps = [entry for _, entry in found]
    _raise_first(gather_objects(_problem_of_share(artifact, check, stamps)))
    artifact.remember(check.stamps, on_disk=rank() == 0)


def _look(artifact: Artifact, names: list[str]) -> tuple[Check | None, str | None]:
    try:
        return artifact.to_check(names), None
    except ArtifactError as error:
        return None, str(error)


def _problem_of_share(
    artifact: Artifact, check: Check, stamps: list[dict[str, Stamp]]
) -> str | None:
    unknown = check.without(remembered(artifact.directory, artifact.digest)).chunks()
    dealt: list[Chunk] = from_rank_zero(unknown)
    together = [number for number, seen in enumerate(stamps) if seen == stamps[0]]
    if rank() in together:
        unknown = dealt[together.index(rank()) :: len(together)]
    return check.problem(unknown)


def _raise_first(problems: list[str | None]) -> None:
    problem = next((entry for entry in problems if entry is not None), None)
    if problem is not None:
        raise ArtifactError(problem)
