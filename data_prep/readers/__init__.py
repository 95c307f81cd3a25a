"""Readers: one file per place raw text comes from."""
