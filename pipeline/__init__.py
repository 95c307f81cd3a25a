"""Train massively multilingual translation with mixtures of experts, in stages.

Start with ``registry.py``, the table of all stages; docs/explanation/architecture.md lists
the packages and a reading order. Importing a module has no side effect on the process: entry points
call ``machine.prepare_process``.
"""

from importlib import metadata


def installed_version() -> str:
    """Return the installed version of mmnmt; a clone can also be used without installing it."""
    try:
        return metadata.version("mmnmt")
    except metadata.PackageNotFoundError:
        return "(not installed)"
