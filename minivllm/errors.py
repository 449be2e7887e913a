"""The errors a user can meet: each says what, the value, the limit, and the way out.

Invariant: whatever goes wrong because of an option, a request, a file or the
machine is one of these; any other exception is a bug of ours. Raised everywhere;
caught by the command line and the server, which print the message without a
traceback.

In vLLM: vllm/exceptions.py (most of its checks raise ValueError).
Source: appendix A1, "Files"; appendix A15, "A GPU in one header"; chapter 9, "Serving".
"""


class MinivllmError(Exception):
    """Base of every error that is meant for the user."""


class ConfigError(MinivllmError, ValueError):
    """An option or a model's configuration asks for something we do not have."""


class RequestError(MinivllmError, ValueError):
    """A request is wrong or can never be served; the engine goes on."""


class ShapeError(MinivllmError, ValueError):
    """An array has the wrong shape or type."""


class WeightMismatch(MinivllmError):
    """The tensors of a checkpoint are not the ones its configuration needs."""


class BackendUnavailable(MinivllmError):
    """A package or a device that was asked for is not there."""


class ModelNotFound(MinivllmError):
    """A model cannot be found, fetched or put into the cache."""


class CorruptFile(MinivllmError):
    """A model file is damaged or incomplete."""


class KernelError(MinivllmError):
    """A CUDA kernel does not compile, is called wrongly, or breaks a rule."""


class EngineOverloaded(MinivllmError):
    """Too many requests wait already; `retry_after_s` says when to come again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineClosing(MinivllmError):
    """The engine finishes what it has and takes no more."""


class EngineDead(MinivllmError):
    """The engine has stopped because of a mistake of ours; nothing will come."""


class RequestTimeout(MinivllmError):
    """A request took longer than it was allowed to, and was aborted."""
