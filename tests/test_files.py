"""Files: written whole and through nobody's link, read within bounds."""

import os
import subprocess
from pathlib import Path

import pytest

from momentum2 import files
from momentum2.errors import shown


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("as it was")
    return path


def test_a_link_is_replaced_and_its_target_is_not_touched(tmp_path: Path, victim: Path):
    place = tmp_path / "results.json"
    place.symlink_to(victim)
    files.write_whole(place, b"ours")
    assert not place.is_symlink()
    assert (place.read_bytes(), victim.read_text()) == (b"ours", "as it was")


def test_nothing_is_appended_through_a_link(tmp_path: Path, victim: Path):
    place = tmp_path / "metrics.jsonl"
    place.symlink_to(victim)
    with pytest.raises(OSError, match="it is a link"):
        files.append(place)
    with pytest.raises(OSError, match="it is a link"), files.locked(place):
        pass
    assert victim.read_text() == "as it was"


def test_a_new_file_takes_nobodys_place(victim: Path):
    with pytest.raises(FileExistsError):
        files.write_new(victim, "ours")
    assert victim.read_text() == "as it was"


def test_a_pipe_a_device_and_a_huge_file_are_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, why in (
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("huge", "more than"),
    ):
        with pytest.raises(OSError, match=why):
            files.read(tmp_path / name)
    with pytest.raises(OSError, match="not a regular file"):
        files.append(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        files.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5_000, "\ud800"])
def test_what_is_not_json_is_one_kind_of_error(tmp_path: Path, text: str):
    (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r".+"):
        files.read_json(tmp_path / "x.json")


def test_a_lock_is_held_against_other_processes(tmp_path: Path):
    lock = tmp_path / "lock"
    with files.locked(lock):
        tried = subprocess.run(["flock", "--nonblock", lock, "true"], check=False)
    assert tried.returncode == 1
    assert subprocess.run(["flock", "--nonblock", lock, "true"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("photo of a café.jpg", "photo of a café.jpg"),
        ("a\nmomentum2: all is well", r"a\nmomentum2: all is well"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\u202egnp", r"\u202egnp"),
        ("\udcff", r"\udcff"),
        ("x" * 300, "x" * 100 + "..." + "x" * 100),
    ],
)
def test_names_are_shown_without_what_a_terminal_would_obey(text: str, seen: str):
    assert shown(text) == seen
