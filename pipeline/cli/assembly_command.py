"""``mmnmt upcycle ASSEMBLY.toml``: a declared assembly, checked whole, then made or only shown."""

import argparse

from pipeline.artifacts.places import refuse_run_folder, run_dir, sole_writer
from pipeline.cli.ending import say
from pipeline.distributed.signals import interruptible


def declared_command(options: argparse.Namespace) -> int:
    """Print the plan, and make the checkpoint unless it is a dry run."""
    from pipeline.checkpoints.assembly.declaration import read_assembly
    from pipeline.checkpoints.assembly.declared import make_declared, plan_declared
    from pipeline.checkpoints.assembly.making import plan_lines

    assembly = read_assembly(options.assembly)
    if options.dry_run:
        print("\n".join(plan_lines(plan_declared(assembly))))
        return 0
    refuse_run_folder(run_dir(options.out), work="assembly")
    with interruptible(), sole_writer(options.out):
        summary = make_declared(
            assembly,
            out_dir=options.out,
            processes=options.processes or 1,
            overwrite=options.overwrite,
        )
    for line in summary:
        say(f"mmnmt upcycle: {line}")
    return 0
