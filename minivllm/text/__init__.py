"""From text to token ids and back: tokenizer, chat template, streaming.

Invariant: nothing here knows about models or tensors; a token is an integer.

In vLLM: vllm/tokenizers/ and vllm/v1/engine/detokenizer.py.
Source: appendix A2, "Text".
"""
