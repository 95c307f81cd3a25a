"""Settings of the analyses: the section ``[analysis]`` of a recipe."""

from pipeline.config.settings import Settings


class AnalysisConfig(Settings):
    """analyze_vectors: what is translated with wrong source-language vectors."""

    directions: tuple[str, ...] = ()
    """``ro-en``; empty: all test directions."""
    router_languages: tuple[str, ...] = ()
    """Languages whose vectors the router is shown; empty: all that the model knows."""
