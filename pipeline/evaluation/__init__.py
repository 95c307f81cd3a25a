"""Scores, significance tests and reports of translations.

``scoring`` scores all systems and ``statistics`` compares them; a score implements
``score_slot.Score`` and is chosen in ``scoring``. ``report`` and ``runs_report`` arrange the
sections of reports in the model of ``tables``; ``rendering`` writes them as Markdown and HTML.
Read ``score_slot`` and ``scoring`` first.
"""
