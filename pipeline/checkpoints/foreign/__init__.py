"""Read and write checkpoints of other software.

``hugging_face`` opens folders and ``fairseq`` files as models of ours, both read by ``files``;
``tensor_names`` has their names of tensors and ours. ``hugging_face_tokenizer`` and
``fairseq_dictionary`` number a SentencePiece model as they do. ``export_to_hugging_face`` writes
folders and model cards, ``export_to_ctranslate2`` what CTranslate2 loads.
"""
