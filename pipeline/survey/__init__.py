"""A page about a corpus: its contents, the lines that cleaning dropped, and the training ahead."""
