"""Weights of languages' own: low-rank (LMS), whole feed-forwards, or gated projections (CLSR)."""
