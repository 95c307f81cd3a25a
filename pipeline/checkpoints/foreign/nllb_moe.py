"""NLLB-MoE, as Hugging Face's NllbMoeForConditionalGeneration keeps it.

M2M-100 with experts: every n-th layer of each stack, two experts per token, their weights
renormalised.
"""

from pipeline.checkpoints.foreign.name_table import NameTable

TABLE = NameTable.parse("""
model.shared.weight                                               embedding.weight
model.encoder.embed_tokens.weight                                 embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight                                 embedding.weight  # tied, saved once more
lm_head.weight                                                    embedding.weight  # tied, saved once more
model.encoder.embed_positions.weights                             -                 # sinusoids: computed
model.decoder.embed_positions.weights                             -                 # sinusoids: computed
model.{stack}.layer_norm.{kind}                                   {stack}.final_norm.{kind}
model.{stack}.layers.{layer}.self_attn_layer_norm.{kind}          {stack}.layers.{layer}.self_attention_norm.{kind}
model.{stack}.layers.{layer}.self_attn.q_proj.{kind}              {stack}.layers.{layer}.self_attention.query.{kind}
model.{stack}.layers.{layer}.self_attn.k_proj.{kind}              {stack}.layers.{layer}.self_attention.key.{kind}
model.{stack}.layers.{layer}.self_attn.v_proj.{kind}              {stack}.layers.{layer}.self_attention.value.{kind}
model.{stack}.layers.{layer}.self_attn.out_proj.{kind}            {stack}.layers.{layer}.self_attention.output.{kind}
model.{stack}.layers.{layer}.cross_attention_layer_norm.{kind}    {stack}.layers.{layer}.cross_attention_norm.{kind}
model.{stack}.layers.{layer}.cross_attention.q_proj.{kind}        {stack}.layers.{layer}.cross_attention.query.{kind}
model.{stack}.layers.{layer}.cross_attention.k_proj.{kind}        {stack}.layers.{layer}.cross_attention.key.{kind}
model.{stack}.layers.{layer}.cross_attention.v_proj.{kind}        {stack}.layers.{layer}.cross_attention.value.{kind}
model.{stack}.layers.{layer}.cross_attention.out_proj.{kind}      {stack}.layers.{layer}.cross_attention.output.{kind}
model.{stack}.layers.{layer}.ff_layer_norm.{kind}                 {stack}.layers.{layer}.feed_forward_norm.{kind}
model.{stack}.layers.{layer}.ffn.fc1.{kind}                       {stack}.layers.{layer}.feed_forward.up.{kind}
model.{stack}.layers.{layer}.ffn.fc2.{kind}                       {stack}.layers.{layer}.feed_forward.down.{kind}
model.{stack}.layers.{layer}.ffn.router.classifier.weight         {stack}.layers.{layer}.feed_forward.router.weight
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc1.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc2.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}
""")  # noqa: E501 (a table)
