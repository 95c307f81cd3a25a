"""mmnmt: massively multilingual machine translation with mixtures of experts, in stages.

A verb is a file here, a noun is a folder; ``stages`` is the place to begin. The rooms, and in what
order to read them, are in the README. Importing any of it changes nothing in the process; what an
entry point sets there is in ``entry``.
"""
