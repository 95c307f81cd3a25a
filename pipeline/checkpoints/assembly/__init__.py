"""Models assembled from the modules of others: declared, planned, written tensor by tensor."""
