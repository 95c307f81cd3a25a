"""When and where stages run."""
