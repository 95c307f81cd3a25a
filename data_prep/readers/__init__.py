"""Readers of raw text, one module per form of it; all of them return a ``raw_text.RawText``."""
