"""What lies on disk: artifacts and their manifests, where they lie, and one module per kind."""
