"""Plan the lines of every update, and turn them into the tensors of a batch."""
