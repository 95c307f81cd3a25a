"""What tests share: pools of ranks, tiny models and plans, peers, broken files."""
