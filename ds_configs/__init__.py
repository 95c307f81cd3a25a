"""DeepSpeed configurations that ship with the package."""
