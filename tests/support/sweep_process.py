"""The sweep of broken files, in a process of its own whose memory is bounded."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


class Sweep:
    """One running sweep, its messages in a file, so that no pipe fills up."""

    def __init__(self, folder: Path, *, one_in: int) -> None:
        self.one_in = one_in
        self.results_path = folder / "results.json"
        self._errors_path = folder / "errors.txt"
        files = str(folder / "files")
        arguments = ["-m", "support.readers_sweep", files, str(self.results_path), str(one_in)]
        (folder / "files").mkdir()
        with self._errors_path.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Begun in the root: from the tests' folder, tests/data_prep would be data_prep.
                cwd=TESTS.parent,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )

    def wait(self, *, timeout_seconds: float) -> str:
        """Until it ends; what it said on standard error."""
        self.process.wait(timeout=timeout_seconds)
        return self._errors_path.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait()
