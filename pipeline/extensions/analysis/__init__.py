"""What byte-level models do with their bytes: scales, lengths, language vectors.

Each analysis is a stage that makes an artifact of kind ``analysis``: data as JSON, and the picture
of it as SVG. ``report_section`` shows them beside the scores.
"""
