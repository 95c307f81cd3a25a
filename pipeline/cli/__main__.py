"""``python -m pipeline.cli``: the command where it is not installed, and what launchers start."""

from pipeline.cli import command

if __name__ == "__main__":
    command()
