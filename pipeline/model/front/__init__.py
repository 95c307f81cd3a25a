"""How a sentence becomes the states that the encoder's layers take.

A front is given ids, their embeddings with positions, where sentences begin and end (the packing)
and what is known of every token, its languages included; it returns states, one per token. A new
one is a module of that signature in a file of its own, a config type in ``config.FrontConfig`` and
a case of :func:`~pipeline.model.front.choice.build_front`.
"""
