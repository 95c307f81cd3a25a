"""Declare the stages of the analyses."""

from pipeline.stage import Input, Stage

STAGES = (
    Stage(
        name="analyze_scales",
        command="analyze scales",
        module="pipeline.extensions.analysis.analyze_scales",
        makes="analysis",
        help="count the scales that an Ada-MSHA model chooses, by language and direction",
        sections=(),
        inputs={
            "checkpoint": Input("checkpoint", "model with an Ada-MSHA front"),
            "corpus": Input("corpus", "test sets"),
        },
    ),
    Stage(
        name="analyze_vectors",
        command="analyze vectors",
        module="pipeline.extensions.analysis.analyze_vectors",
        makes="analysis",
        help="score an Ada-MSHA model whose router sees the vector of a wrong language",
        sections=("analysis", "decoding", "evaluation.bleu_tokenizer"),
        inputs={
            "checkpoint": Input("checkpoint", "model with language vectors"),
            "without": Input("checkpoint", "model without, to be scored too", required=False),
            "corpus": Input("corpus", "test sets"),
        },
        needs_recipe=False,
    ),
    Stage(
        name="analyze_languages",
        command="analyze languages",
        module="pipeline.extensions.analysis.analyze_languages",
        makes="analysis",
        help="compare languages inside a model: experts of directions, encoder states of lines",
        sections=(),
        inputs={
            "checkpoint": Input("checkpoint", "model"),
            "corpus": Input("corpus", "test sets, best of one text in all languages"),
            "training": Input("corpus", "training text, if corpus has none", required=False),
        },
    ),
    Stage(
        name="analyze_lengths",
        command="analyze lengths",
        module="pipeline.extensions.analysis.analyze_lengths",
        makes="analysis",
        help="count the bytes that languages need for the same test lines",
        sections=(),
        inputs={
            "corpus": Input("corpus", "test sets, of one text in all languages"),
            "tokenizer": Input(
                "tokenizer", "for pieces a word and the share of unknown ones", required=False
            ),
        },
    ),
)
