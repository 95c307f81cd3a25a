"""List the stages of the core in the order data flows, then the stages of the installed extensions.

Plans, the command line and launchers know stages only by this table: inputs, output, settings, and
the module of each.
"""

from pipeline.config.recipe import DECIDE_NOTHING
from pipeline.extensions.installed import INSTALLED
from pipeline.stage import Input, Stage

_TRAINING_SECTIONS = ("model", "batches", "optimizer", "loss", "training")
_TRAINING_INPUTS = {
    "shards": Input("shards", "tokenized sentences"),
    "mixture": Input("mixture", "sampling probabilities per pair"),
}
_SIZE_OF_BATCHES = ("decoding.tokens",)  # decides only with model.moe.evaluation_capacity_factor

_CORE = (
    Stage(
        name="import_corpus",
        module="data_prep.import_corpus",
        makes="corpus",
        help="import raw text, or phrases of CLDR, as a corpus",
        sections=("corpus",),
        inputs={
            "raw": Input(
                "raw",
                "raw text as corpus.source reads it: OPUS-100-like trees of pair folders, "
                "folders of TMX files, …, or hub:OWNER/NAME@REVISION",
                required=False,
            )
        },
        parallel="workers",
    ),
    Stage(
        name="import_tests",
        module="data_prep.import_tests",
        makes="corpus",
        help="import test sets (FLORES-200, NTREX-128, pairs of files) as a corpus",
        sections=("tests", "corpus.pivot", "corpus.regions"),
        inputs={"raw": Input("raw", "folder with one file per language, or pairs of files")},
        needs_recipe=False,
    ),
    Stage(
        name="add_translations",
        module="data_prep.add_translations",
        makes="corpus",
        help="add lines and their machine translations to a corpus",
        sections=("synthetic",),
        inputs={
            "corpus": Input("corpus", "corpus that gets them"),
            "translations": Input(
                "translated_text", "NAME=DIR, output of translate --text", many=True
            ),
            "back": Input(
                "translated_text",
                "NAME=DIR, its translations translated back; NAME@LANGUAGE=DIR for each of several "
                "languages",
                required=False,
                many=True,
            ),
        },
        needs_recipe=False,
    ),
    Stage(
        name="clean",
        module="data_prep.clean",
        makes="corpus",
        help="drop bad, repeated and held-out training lines",
        sections=("clean", "corpus.pivot"),
        inputs={
            "corpus": Input("corpus", "imported corpus"),
            "tests": Input(
                "corpus",
                "NAME=DIR, further corpora whose held-out lines are not to be trained on",
                required=False,
                many=True,
            ),
        },
        parallel="workers",
    ),
    Stage(
        name="train_tokenizer",
        module="data_prep.train_tokenizer",
        makes="tokenizer",
        help="train a vocabulary on a temperature-balanced sample, and add language tokens",
        sections=("tokenizer",),
        inputs={
            "corpus": Input("corpus", "clean corpus", splits=("train",)),
            "base": Input(
                "tokenizer",
                "vocabulary to extend by pieces and tokens of the languages that it lacks",
                required=False,
            ),
        },
    ),
    Stage(
        name="make_shards",
        module="data_prep.make_shards",
        makes="shards",
        help="convert text into memory-mapped token ids",
        sections=("shards",),
        inputs={
            "corpus": Input("corpus", "clean corpus", splits=("train", "valid")),
            "tokenizer": Input("tokenizer", "vocabulary"),
        },
        parallel="workers",
    ),
    Stage(
        name="mix",
        module="data_prep.mix",
        makes="mixture",
        help="compute sampling probabilities and expected epochs per pair, by temperature",
        sections=("mixture",),
        inputs={"shards": Input("shards", "tokenized sentences")},
    ),
    Stage(
        name="group_languages",
        module="data_prep.group_languages",
        makes="groups",
        help="group languages by family, by family and embeddings, or by the paper's table",
        sections=("groups", "languages", "corpus.pivot"),
        inputs={
            "shards": Input("shards", "for the corpus sizes"),
            "checkpoint": Input(
                "checkpoint", "dense model, for its language embeddings", required=False
            ),
        },
    ),
    Stage(
        name="pretrain",
        module="pipeline.stages.pretrain",
        makes="checkpoint",
        help="train a dense, MoE or MoE-LGR model from scratch",
        sections=_TRAINING_SECTIONS,
        inputs={
            **_TRAINING_INPUTS,
            "groups": Input("groups", "for a language-group router", required=False),
        },
        parallel="ranks",
        trains=True,
        undeciding=DECIDE_NOTHING,
    ),
    Stage(
        name="upcycle",
        module="pipeline.stages.upcycle",
        makes="checkpoint",
        help="assemble an MoE model from modules of trained models",
        command="upcycle --embeddings",  # as plans start it; a user declares the assembly in a file
        sections=("model", "upcycling"),
        inputs={
            "embeddings": Input("checkpoint", "source of the embeddings"),
            "encoder": Input("checkpoint", "source of the encoder; none: fresh", False),
            "decoder": Input("checkpoint", "source of the decoder; none: fresh", False),
            "groups": Input("groups", "for a fresh language-group router", required=False),
        },
        parallel="workers",
    ),
    Stage(
        name="finetune",
        module="pipeline.stages.finetune",
        makes="checkpoint",
        help="train a model further with a new optimizer",
        sections=_TRAINING_SECTIONS,
        inputs={**_TRAINING_INPUTS, "checkpoint": Input("checkpoint", "where to start")},
        parallel="ranks",
        trains=True,
        undeciding=DECIDE_NOTHING,
    ),
    Stage(
        name="translate",
        module="pipeline.stages.translate",
        makes="translations",
        help="translate a corpus's test sets, standard input or, with --text, files and folders",
        sections=("decoding",),
        inputs={
            "checkpoint": Input("checkpoint", "model to translate with"),
            "corpus": Input("corpus", "test sets", splits=("test",)),
        },
        parallel="ranks",
        undeciding=_SIZE_OF_BATCHES,
    ),
    Stage(
        name="translate_text",
        module="pipeline.stages.translate_text",
        makes="translated_text",
        help="translate files and folders of text",
        sections=("text", "decoding"),
        inputs={
            "checkpoint": Input("checkpoint", "model to translate with"),
            "text": Input(
                "raw", "files, or folders of .txt, .jsonl, .gz, .zst, .parquet and .arrow files"
            ),
        },
        parallel="ranks",
        undeciding=_SIZE_OF_BATCHES,
        needs_recipe=False,
        command="translate --text",
    ),
    Stage(
        name="evaluate",
        module="pipeline.stages.evaluate",
        makes="evaluation",
        help="score systems side by side; JSON, Markdown and HTML reports",
        sections=("evaluation", "training.resource_thresholds"),
        inputs={
            "corpus": Input("corpus", "references"),
            "systems": Input(
                "translations",
                "NAME=DIR, one per system; NAME@SEED=DIR for each of several runs of one",
                many=True,
            ),
            "given": Input(
                "checkpoint",
                "NAME=DIR, what existed already; the report shows what systems cost beyond it",
                required=False,
                many=True,
            ),
            "training": Input(
                "corpus",
                "what the systems were trained on, if the references have only test sets",
                required=False,
            ),
            "tokenizer": Input(
                "tokenizer", "for word accuracy by number of subwords", required=False
            ),
            "comet": Input("raw", "folder of a COMET model, for the score comet", required=False),
            "analyses": Input(
                "analysis", "NAME=DIR, shown in the reports", required=False, many=True
            ),
        },
        parallel="workers",
    ),
)

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (*_CORE, *(added for one in INSTALLED for added in one.load_stages()))
}
