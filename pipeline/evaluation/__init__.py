"""Scores, significance tests and reports of translations.

``scoring`` scores all systems and ``statistics`` compares them; a score implements
``scores.Score`` and is chosen in ``scoring``. ``report`` and ``runs_report`` arrange the sections
of reports in the model of ``tables``, which writes them as Markdown and HTML. Read ``scores`` and
``scoring`` first.
"""
