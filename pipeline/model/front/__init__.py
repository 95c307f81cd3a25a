"""How a sentence becomes states: the way that the encoder goes through its layers.

A front is a module that is given embeddings with their positions, what is known of the sentences
(:class:`~pipeline.model.front.passage.Source`) and the encoder's layers
(:class:`~pipeline.model.front.passage.Passage`), and returns the last layer's states. Between and
in the layers it does what it is there for: it lets queries, keys and values see their neighbours
(MSC, MSHA, Ada-MSHA), fuses n-grams (nCF), or keeps attention within words (WSF).

A new one is a module of that signature in a file of its own, a config type in
``config.FrontConfig`` and a case of :func:`~pipeline.model.front.choice.build_front`. What it has
of parameters bears its name, ``front.…``, so that the layers keep theirs.
"""
