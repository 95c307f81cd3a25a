"""The rules for training lines, one file per rule that needs more than a line."""
