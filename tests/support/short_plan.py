"""A plan with most kinds of stages, the shortest that trains, assembles, tunes and evaluates."""

from pathlib import Path

RECIPE = """
tokenizer = { kind = "bytes" }
batches = { tokens = 600, micro_batches = 2, window_steps = 4 }
optimizer = { warmup_updates = 2 }
training = { updates = 3, validate_every = 2, checkpoint_every = 1 }
decoding = { beam_size = 2, max_length_ratio = 0.2 }
evaluation = { language_accuracy = false }
[corpus]
source = "cldr"
cldr = { train_pairs = { de = 60, fr = 40 }, valid_phrases = 4, test_phrases = 3 }
[model]
encoder_layers = 2
decoder_layers = 2
width = 16
feed_forward_width = 32
num_heads = 2
max_positions = 256
"""
MOE_RECIPE = """
parent = "{parent}"
model = {{ moe = {{ num_experts = 4 }} }}
training = {{ expert_parallel_size = 2 }}
"""
DATA = 'shards = "shards", mixture = "mixture"'
INPUTS = {
    "corpus": ("import_corpus", ""),
    "clean": ("clean", 'corpus = "corpus"'),
    "tokenizer": ("train_tokenizer", 'corpus = "clean"'),
    "shards": ("make_shards", 'corpus = "clean", tokenizer = "tokenizer"'),
    "mixture": ("mix", 'shards = "shards"'),
    "dense": ("pretrain", DATA),
    "assembled": ("upcycle", 'embeddings = "dense", encoder = "dense", decoder = "dense"'),
    "tuned": ("finetune", f'{DATA}, checkpoint = "assembled"'),
    "translated": ("translate", 'checkpoint = "tuned", corpus = "clean"'),
    "evaluation": ("evaluate", 'corpus = "clean", systems = { tuned = "translated" }'),
}
"""Stage → what it runs, and its inputs."""
STAGES = [*INPUTS]
WITH_EXPERTS = ("assembled", "tuned")


def write_plan(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    dense, moe, plan = folder / "dense.toml", folder / "moe.toml", folder / "plan.toml"
    dense.write_text(RECIPE, encoding="utf-8")
    named, named_moe = (str(path).replace('"', '\\"') for path in (dense, moe))
    moe.write_text(MOE_RECIPE.format(parent=named), encoding="utf-8")
    stages = [
        f'[stages.{name}]\nrun = "{stage}"\ninputs = {{ {inputs} }}\n'
        f'recipe = "{named_moe if name in WITH_EXPERTS else named}"\n'
        f"processes = {2 if name == 'tuned' else 1}\n"
        for name, (stage, inputs) in INPUTS.items()
    ]
    plan.write_text("".join(stages), encoding="utf-8")
    return plan
