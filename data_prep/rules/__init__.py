"""Rules for training lines; ``pair_rules`` applies them in their order."""
