"""The encoder–decoder Transformer and its slots: attention, feed-forward, router, experts."""
