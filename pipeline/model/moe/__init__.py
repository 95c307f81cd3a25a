"""The mixture of experts: layer, router, dispatch, experts and expert parallelism."""
