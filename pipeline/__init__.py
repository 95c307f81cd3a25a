"""mmnmt: massively multilingual machine translation with mixtures of experts, in stages.

Start with ``stages``, the table of all stages; docs/explanation/architecture.md lists the packages
and a reading order. Importing a module changes nothing in the process; ``entry`` holds what an
entry point sets there.
"""
