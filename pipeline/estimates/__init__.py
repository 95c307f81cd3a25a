"""What a run takes, without running it."""
