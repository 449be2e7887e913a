"""From the name of a model to its arrays.

`hub` turns a name into a local folder; `gguf_file` and `gguf` convert a GGUF file into
such a folder, with its tokenizer from `gguf_vocabulary`, `pre_tokenizers` and
`gguf_tokenizer`; `tensors` reads and writes weights, `atomic` whatever must be whole;
`checkpoint` and `loader` build a decoder from a folder.

Source: appendix A1, "Files".
"""
