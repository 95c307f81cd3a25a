"""Train massively multilingual translation with mixtures of experts, in stages.

Start with ``registry.py``, the table of all stages; docs/explanation/architecture.md lists
the packages and a reading order. Importing a module has no side effect on the process: entry points
call ``machine.prepare_process``. This module imports nothing, since a signal that comes meanwhile
would end the command without a sentence.
"""
