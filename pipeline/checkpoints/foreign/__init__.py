"""Checkpoints of other software, read as ours and written as theirs: one file per family."""
