"""A small LLM inference engine, built chapter by chapter.

A reading order:

1. `models/spec.py`: what a decoder is, as data.
2. `reference/attention.py` and `reference/decoder.py`: the decoder in NumPy.
3. `models/layers.py` and `models/decoder.py`: the same in torch.
4. `generation.py`: the loop that writes a text, the slow way.
5. `text/`: from text to token ids and back.
6. `loading/`: from the name of a model to its weights.
7. `cli/`: the command line over all of it.

`import minivllm` is light: a public name is imported from its module at first use,
so neither NumPy nor torch is loaded before something needs it.

In vLLM: vllm/__init__.py (MODULE_ATTRS), which is lazy in the same way.
Source: appendix A4, "The command line".
"""

import importlib

__version__ = "0.1.0"

# Public name: the module it comes from.
_MODULES = {
    "BackendUnavailable": "minivllm.errors",
    "ConfigError": "minivllm.errors",
    "CorruptFile": "minivllm.errors",
    "DEFAULT_MODEL": "minivllm.config",
    "MinivllmError": "minivllm.errors",
    "ModelNotFound": "minivllm.errors",
    "ModelSpec": "minivllm.models.spec",
    "RequestError": "minivllm.errors",
    "ShapeError": "minivllm.errors",
    "Tokenizer": "minivllm.text.tokenizer",
    "WeightMismatch": "minivllm.errors",
    "generate_naive": "minivllm.generation",
    "load_model": "minivllm.loading.loader",
    "load_spec": "minivllm.loading.loader",
    "resolve_model": "minivllm.loading.hub",
    "stream_naive": "minivllm.generation",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted([*globals(), *_MODULES])
