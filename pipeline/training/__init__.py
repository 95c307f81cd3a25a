"""The loop, the engine behind it, and what a run keeps."""
