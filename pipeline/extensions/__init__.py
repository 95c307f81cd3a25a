"""Systems of other papers than MMNMT, which the core does without.

``tasks`` labels text with an XLM-R (LMS/FD); ``analysis`` analyzes byte-level models (MoCE and
LOBEF).
"""
