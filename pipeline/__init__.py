"""mmnmt: massively multilingual machine translation with mixtures of experts, in stages."""
