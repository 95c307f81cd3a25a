"""The mixture of experts: layer, router, dispatch, experts, and how they are spread over ranks."""
