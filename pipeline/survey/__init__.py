"""One page about a corpus: what is in it, what cleaning dropped, and how it will be trained on."""
