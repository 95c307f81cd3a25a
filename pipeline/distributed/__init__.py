"""Ranks: how they find each other, agree, and end."""
