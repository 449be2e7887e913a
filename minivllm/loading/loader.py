"""Build a decoder from the folder of a checkpoint.

Invariant: a decoder is returned with every weight in its place, or not at all; each
weight is in memory once. Called by the command line and by the chapters.

In vLLM: vllm/model_executor/model_loader/default_loader.py (DefaultModelLoader).
Source: appendix A3, "Loading"; appendix A23, "Reading families".
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from minivllm.errors import BackendUnavailable, ConfigError, CorruptFile
from minivllm.json_files import read_json
from minivllm.loading.checkpoint import (
    DTYPES,
    StoredTensor,
    match_tensors,
    stored_tensors,
)
from minivllm.loading.tensors import read_safetensors
from minivllm.models.families import family_of
from minivllm.models.spec import ModelSpec
from minivllm.reference.decoder import NumpyDecoder

if TYPE_CHECKING:
    import torch

    from minivllm.models.decoder import Decoder


def load_spec(folder: Path) -> ModelSpec:
    """Read what kind of decoder a folder holds, without its weights.

    Raises:
        ModelNotFound: There is no config.json.
        CorruptFile: It cannot be read.
        ConfigError: It asks for something that is not supported.
    """
    config = read_json(Path(folder) / "config.json")
    return family_of(config).read_spec(config)


def by_file(tensors: dict[str, StoredTensor]) -> dict[Path, dict[str, StoredTensor]]:
    """Group by file, so that each is opened once: path, our name, the tensor."""
    files: dict[Path, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.path, {})[name] = tensor
    return files


def numpy_decoder(
    spec: ModelSpec, tensors: dict[str, StoredTensor], dtype: str, device: str
) -> NumpyDecoder:
    """Read the tensors into float32 arrays and build the NumPy decoder."""
    if dtype not in ("auto", "float32"):
        raise ConfigError(
            f"dtype is {dtype!r}, but the numpy backend computes in float32 only: "
            "leave it 'auto', or use the torch backend"
        )
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"device is {device!r}, but the numpy backend runs on the CPU only: leave "
            "it 'auto', or use the torch backend"
        )
    weights = {}
    for path, places in by_file(tensors).items():
        arrays = read_safetensors(path, {tensor.name for tensor in places.values()})
        weights |= {name: arrays[t.name][t.part] for name, t in places.items()}
    return NumpyDecoder(spec, weights)


def torch_decoder(
    spec: ModelSpec, tensors: dict[str, StoredTensor], dtype: str, device: str
) -> "Decoder":
    """Read the tensors one by one onto the device and build the torch decoder."""
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(
            f"the torch backend needs PyTorch ({error}): install torch, or "
            "use the numpy backend"
        ) from error
    from safetensors import SafetensorError, safe_open

    from minivllm.models.decoder import Decoder

    if dtype not in ("auto", *DTYPES.values()):
        raise ConfigError(
            f"dtype is {dtype!r}, but must be one of auto, {', '.join(DTYPES.values())}"
        )
    if dtype == "auto":
        dtype = choose_dtype(spec, tensors)
    options = {"dtype": getattr(torch, dtype), "device": choose_device(device)}
    weights = {}
    for path, places in by_file(tensors).items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, place in places.items():
                    if place.part:
                        tensor = file.get_slice(place.name)[place.part]
                    else:
                        tensor = file.get_tensor(place.name)
                    # A copy, even on the CPU: what safe_open returns is the file
                    # itself, and would change or crash with it.
                    weights[name] = tensor.to(**options, copy=True)
        except SafetensorError as error:
            raise CorruptFile(
                f"{path} cannot be read ({error}): fetch it again"
            ) from error
    decoder = Decoder(spec)
    decoder.load_weights(weights)
    return decoder


def choose_dtype(spec: ModelSpec, tensors: dict[str, StoredTensor]) -> str:
    """Return what the config says, else the stored type, else float32."""
    stored = {DTYPES[tensor.dtype] for tensor in tensors.values()}
    return spec.dtype or (stored.pop() if len(stored) == 1 else "float32")


def choose_device(device: str) -> "torch.device":
    """Turn the name of a device into one that is there.

    Raises:
        ConfigError: There is no such kind of device.
        BackendUnavailable: There is, but not on this machine.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(
            f"device is {device!r}, but must be auto, cpu, cuda, cuda:N or mps"
        )
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (chosen.index or 0) >= counts[chosen.type]:
        raise BackendUnavailable(
            f"device is {device!r}, but this PyTorch ({torch.__version__}) sees "
            f"{counts[chosen.type]} devices of that kind: use 'cpu', or install the "
            "build of PyTorch for your GPU"
        )
    return chosen


def load_model(
    folder: Path,
    *,
    backend: Literal["numpy", "torch"] = "torch",
    dtype: str = "auto",
    device: str = "auto",
) -> "NumpyDecoder | Decoder":
    """Build the decoder of a folder with its weights.

    Args:
        folder: A model in the Hugging Face layout, as `resolve_model` returns it.
        backend: "torch", or "numpy" (float32 on the CPU; never imports torch).
        dtype: "float32", "bfloat16", "float16", or "auto": with torch what config.json
            says, else the type of the stored weights (float32 if they differ), but
            bfloat16 for float16 where that overflows; float32 with numpy.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto": the GPU if torch sees one.

    Returns:
        A `NumpyDecoder` or a `Decoder`, ready to run.

    Raises:
        ModelNotFound: A file is missing.
        CorruptFile: A file is damaged, or the index does not fit the files.
        WeightMismatch: The weights are not the ones that config.json needs.
        ConfigError: An option or a setting in config.json is not supported.
        BackendUnavailable: PyTorch or the device is not there.

    Cost:
        The weights are in memory once, plus one tensor while it is converted.
    """
    builders = {"numpy": numpy_decoder, "torch": torch_decoder}
    if backend not in builders:
        raise ConfigError(f"backend is {backend!r}, but must be 'numpy' or 'torch'")
    folder = Path(folder)
    config = read_json(folder / "config.json")
    family = family_of(config)
    spec = family.read_spec(config)
    if dtype in family.overflows:
        raise ConfigError(
            f"dtype is {dtype!r}, whose numbers are too small for what the layers of "
            f"{spec.architecture} compute: use bfloat16 or float32"
        )
    tensors = match_tensors(spec, family, stored_tensors(folder))
    if backend == "torch" and dtype == "auto":
        dtype = choose_dtype(spec, tensors)
        dtype = "bfloat16" if dtype in family.overflows else dtype
    return builders[backend](spec, tensors, dtype, device)
