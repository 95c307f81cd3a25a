"""Settings of the analyses: the section ``[analysis]`` of a recipe."""

from pipeline.config.settings import Settings


class AnalysisConfig(Settings):
    """Directions and vectors of the stage analyze_vectors."""

    directions: tuple[str, ...] = ()
    """Directions to translate, as in ``ro-en``; empty: all test directions."""
    router_languages: tuple[str, ...] = ()
    """Languages whose vectors are shown to the router; empty: all that the model knows."""
