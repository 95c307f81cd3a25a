"""Settings of the analyses: the section ``[analysis]`` of a recipe."""

from pipeline.config.settings import Settings


class AnalysisConfig(Settings):
    """Translation with wrong source-language vectors by the stage analyze_vectors."""

    directions: tuple[str, ...] = ()
    """Directions to translate, for example ``ro-en``; empty: all test directions."""
    router_languages: tuple[str, ...] = ()
    """Languages: the router is given the vector of each; empty: all that the model knows."""
