"""Serve models over HTTP with the API of LibreTranslate: ``mmnmt serve``.

Read :mod:`api` first: it turns a request into lines and waits for their translations.
:mod:`worker` translates the waiting lines of all requests in batches, :mod:`bodies` reads what
clients send, :mod:`systems` chooses the model, and :mod:`server` owns the port and the signals.
"""
