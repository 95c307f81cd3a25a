"""From translations to scores, and from scores to reports."""
