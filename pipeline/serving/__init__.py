"""Serve models over HTTP with the API of LibreTranslate: ``mmnmt serve``.

Read :mod:`api` first: it turns a request into lines and waits for their translations.
:mod:`worker` chooses the model and translates the waiting lines of all requests in batches, and
:mod:`requests` reads what clients send, within limits.
"""
