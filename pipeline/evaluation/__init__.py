"""Scores, significance tests and reports of translations.

``scoring`` scores all systems, ``statistics`` compares them; a score implements ``score_slot.Score`` and is
chosen in ``chosen_scores``. ``report`` arranges the sections of the report, which ``score_tables``
and ``history_tables`` build from the table model in ``tables``; ``rendering`` writes them as
Markdown and HTML. ``runs_report`` arranges some of these sections, and those of ``routing_tables``,
for runs that ``compared_runs`` opens, evaluated or not. Read ``score_slot`` and ``scoring`` first.
"""
