import threading

import pytest

from minivllm.loading.atomic import atomic_file, atomic_folder, lock, remove_leftovers


def test_a_file_is_replaced_only_at_the_end(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"newer")
        raise ZeroDivisionError
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_only_at_the_end(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(ZeroDivisionError), atomic_folder(path) as folder:
        (folder / "a").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(path) as folder:
        (folder / "a").touch()
        assert not path.exists()
    assert list(tmp_path.rglob("*")) == [path, path / "a"]


def test_a_folder_that_is_there_is_never_overwritten(tmp_path):
    path = tmp_path / "x"
    path.mkdir()
    (path / "theirs").touch()
    with pytest.raises(OSError), atomic_folder(path) as folder:
        (folder / "ours").touch()
    assert list(tmp_path.rglob("*")) == [path, path / "theirs"]


def test_only_ones_own_leftovers_are_removed(tmp_path):
    for name in (".[x].1.tmp", ".[x].2.tmp", ".x.1.tmp", ".[x].lock", "[x]"):
        (tmp_path / name).mkdir()
    (tmp_path / ".[x].3.tmp").touch()
    remove_leftovers(tmp_path / "[x]")
    assert {path.name for path in tmp_path.iterdir()} == {
        ".x.1.tmp",
        ".[x].lock",
        "[x]",
    }


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
    waits, order = [], []

    def second() -> None:
        with lock(tmp_path / "lock", lambda: waits.append(1)):
            order.append("second")

    with lock(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        while not waits:
            pass
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
