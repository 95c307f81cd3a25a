"""What an artifact was made from, as far as it can still be found.

An input counts only if it is still at the recorded path with the recorded digest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifacts.artifact import Artifact, InputRecord, read_manifest
from pipeline.artifacts.manifest import digest_of_part
from pipeline.errors import ArtifactError

Follow = Callable[[InputRecord], bool]


@dataclass
class Lineage:
    """Artifacts by path, inputs before what was made from them, and what could not be found."""

    found: dict[Path, Artifact] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Names of folders that are no longer there, or have changed since."""

    def add(self, artifact: Artifact, *, follow: Follow) -> None:
        """Add an artifact after everything it was made from, by the inputs that are followed."""
        path = artifact.directory.resolve()
        if path in self.found:
            return
        for record in filter(follow, artifact.manifest.inputs.values()):
            parent = open_recorded(record)
            if parent is None:
                self.missing.add(Path(record.path).name)
            else:
                self.add(parent, follow=follow)
        self.found[path] = artifact


def open_recorded(record: InputRecord) -> Artifact | None:
    """The artifact a manifest names as an input; None if it is gone or another one."""
    path = Path(record.path)
    try:
        manifest = read_manifest(path)
    except (ArtifactError, ValueError):  # a NUL in the path
        return None
    if manifest is None or digest_of_part(manifest, record.splits) != record.digest:
        return None
    return Artifact(directory=path, manifest=manifest)
