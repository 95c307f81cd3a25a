"""Rules for training lines; ``judge`` applies them in their order."""
