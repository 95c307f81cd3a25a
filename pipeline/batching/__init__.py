"""Which lines an update sees, and how they become the tensors of a batch."""
