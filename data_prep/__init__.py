"""Raw corpora into the artifacts that training reads."""
