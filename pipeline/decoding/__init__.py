"""Translate text with a checkpoint.

Read :mod:`translator` first: it turns lines into sources, searches, and joins the results.
:mod:`beam_search` and :mod:`sampling` find hypotheses, ``line_filter`` serves standard input.
"""
