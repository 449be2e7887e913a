"""A small LLM inference engine, built chapter by chapter.

A reading order:

1. `models/spec.py`: what a decoder is, as data.
2. `reference/attention.py` and `reference/decoder.py`: the decoder in NumPy.
3. `models/layers.py` and `models/decoder.py`: the same in torch.
4. `generation.py`: the loops that write a text, without an engine.
5. `request.py`, `outputs.py` and `sampling/params.py`: what travels through the engine.
6. `engine/block_manager.py` and `runners/attention_metadata.py`: the paged KV cache.
7. `engine/scheduler.py` and `engine/engine.py`: what each step computes, and the step.
8. `runners/numpy_runner.py`, then `runners/torch_runner.py`: the arithmetic.
9. `llm.py`: the door to all of it.
10. `text/`: from text to token ids and back.
11. `loading/`: from the name of a model to its weights.
12. `cli/`: the command line.

`import minivllm` is light: a public name is imported from its module at first use,
so neither NumPy nor torch is loaded before something needs it.

In vLLM: vllm/__init__.py (MODULE_ATTRS), which is lazy in the same way.
Source: appendix A4, "The command line"; appendix A7, "LLM"; appendix A8, "Traces".
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
    "CompletionOutput": "minivllm.outputs",
    "FakeRunner": "minivllm.runners.fake_runner",
    "LLM": "minivllm.llm",
    "LLMEngine": "minivllm.engine.engine",
    "Policy": "minivllm.engine.scheduler",
    "RequestMetrics": "minivllm.outputs",
    "RequestOutput": "minivllm.outputs",
    "SamplingParams": "minivllm.sampling.params",
    "StepCost": "minivllm.runners.fake_runner",
    "TwinReport": "minivllm.twin",
    "read_trace": "minivllm.engine.trace",
    "replay": "minivllm.twin",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted([*globals(), *_MODULES])
