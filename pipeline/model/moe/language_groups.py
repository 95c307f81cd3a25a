"""Read language groups, which a language-group router has experts for.

``groups.json`` has ``groups``: language → number of its language group.
"""

from pipeline.artifacts.artifact import Artifact
from pipeline.config.documents import is_count
from pipeline.config.settings import shown

GROUPS_NAME = "groups.json"


def read_groups(artifact: Artifact) -> dict[str, int]:
    """Return language → group, numbered from 0 without gaps.

    Raises:
        ArtifactError: The file holds something else, or the numbers have gaps.
    """
    document = artifact.read_json(GROUPS_NAME)
    groups = document.get("groups") if isinstance(document, dict) else None
    if not isinstance(groups, dict) or not groups or not all(map(is_count, groups.values())):
        raise artifact.refusal(
            f"{artifact.file(GROUPS_NAME)} does not give each language a group from 0 on"
        )
    numbers = set(groups.values())
    if numbers != set(range(len(numbers))):
        raise artifact.refusal(
            f"{artifact.file(GROUPS_NAME)} numbers its groups {shown(sorted(numbers))}, where 0 "
            f"to {len(numbers) - 1} is wanted"
        )
    return dict(sorted(groups.items()))
