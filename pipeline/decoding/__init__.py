"""From a checkpoint to translations."""
