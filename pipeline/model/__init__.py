"""The encoder–decoder Transformer and its parts: attention, feed-forward, router, experts."""
