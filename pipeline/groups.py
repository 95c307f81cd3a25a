"""Language groups, as a language-group router uses them."""

from pipeline.artifacts import Artifact
from pipeline.errors import ArtifactError

GROUPS_NAME = "groups.json"


def read_groups(artifact: Artifact) -> dict[str, int]:
    """Language → group, numbered from 0 without gaps.

    Raises:
        ArtifactError: the numbers have gaps.
    """
    groups: dict[str, int] = artifact.read_json(GROUPS_NAME)["groups"]
    numbers = set(groups.values())
    if numbers != set(range(len(numbers))):
        raise ArtifactError(
            f"{artifact.file(GROUPS_NAME)} numbers its groups {sorted(numbers)}, where 0 to "
            f"{len(numbers) - 1} is wanted: run stage 'group_languages' again."
        )
    return dict(sorted(groups.items()))
