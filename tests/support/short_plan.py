"""A plan with most kinds of stages, the shortest that trains, assembles, tunes and evaluates."""

from pathlib import Path

RECIPE = """
[corpus]
source = "cldr"
[corpus.cldr]
train_pairs = { de = 60, fr = 40 }
valid_phrases = 4
test_phrases = 3
[tokenizer]
kind = "bytes"
[model]
encoder_layers = 2
decoder_layers = 2
width = 16
feed_forward_width = 32
num_heads = 2
max_positions = 256
[batches]
tokens = 600
micro_batches = 2
window_steps = 4
[optimizer]
warmup_updates = 2
[training]
updates = 3
validate_every = 2
checkpoint_every = 1
[decoding]
beam_size = 2
max_length_ratio = 0.2
[evaluation]
language_accuracy = false
"""
MOE_RECIPE = """
parent = "{parent}"
[model.moe]
num_experts = 4
[training]
expert_parallel_size = 2
"""
PLAN = """
[stages.corpus]
run = "import_corpus"
recipe = "{dense}"
[stages.clean]
run = "clean"
recipe = "{dense}"
inputs = {{ corpus = "corpus" }}
[stages.tokenizer]
run = "train_tokenizer"
recipe = "{dense}"
inputs = {{ corpus = "clean" }}
[stages.shards]
run = "make_shards"
recipe = "{dense}"
inputs = {{ corpus = "clean", tokenizer = "tokenizer" }}
[stages.mixture]
run = "mix"
recipe = "{dense}"
inputs = {{ shards = "shards" }}
[stages.dense]
run = "pretrain"
recipe = "{dense}"
inputs = {{ shards = "shards", mixture = "mixture" }}
[stages.assembled]
run = "upcycle"
recipe = "{moe}"
inputs = {{ embeddings = "dense", encoder = "dense", decoder = "dense" }}
[stages.tuned]
run = "finetune"
recipe = "{moe}"
inputs = {{ shards = "shards", mixture = "mixture", checkpoint = "assembled" }}
processes = 2
[stages.translated]
run = "translate"
recipe = "{dense}"
inputs = {{ checkpoint = "tuned", corpus = "clean" }}
[stages.evaluation]
run = "evaluate"
recipe = "{dense}"
[stages.evaluation.inputs]
corpus = "clean"
systems = {{ tuned = "translated" }}
"""
STAGES = [
    line[8:-1] for line in PLAN.split("\n") if line.startswith("[stages.") and "inputs" not in line
]


def write_plan(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    dense, moe, plan = folder / "dense.toml", folder / "moe.toml", folder / "plan.toml"
    dense.write_text(RECIPE, encoding="utf-8")
    names = {name: str(path).replace('"', '\\"') for name, path in (("dense", dense), ("moe", moe))}
    moe.write_text(MOE_RECIPE.format(parent=names["dense"]), encoding="utf-8")
    plan.write_text(PLAN.format(**names), encoding="utf-8")
    return plan
