"""Files: written whole and through nobody's link, read within bounds."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from momentum2 import files
from momentum2.errors import SettingError, shown


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


def test_what_is_written_takes_the_place_of_no_pipe_or_device(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.write_whole(tmp_path / "pipe", b"x")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(SettingError, match="not a regular file"), files.asked_for("out", tmp_path / "link"):
        files.write_whole(tmp_path / "link", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("text", ["9" * 19, '{"a": ' + "9" * 400 + "}", "[-" + "9" * 30 + "]"])
def test_a_number_of_too_many_digits_is_not_json(text: str):
    with pytest.raises(ValueError, match="too many digits"):
        files.parse_json(text)
    with pytest.raises(ValueError, match="too many digits"):
        files.parse_json(text.encode())


def test_other_long_numbers_are_json():
    assert files.parse_json("[9223372036854775807, 0.12345678901234567890123]") == [
        2**63 - 1,
        0.12345678901234568,
    ]


def test_folders_are_walked_however_deep(tmp_path: Path):
    here, depth = os.getcwd(), 1500
    (tmp_path / "b.tar").touch()
    os.chdir(tmp_path)
    try:
        for _ in range(depth):
            os.mkdir("a")
            os.chdir("a")
        Path("b.TAR").touch()
        (tmp_path / "a" / "c.tar").symlink_to("nowhere")
        assert [path.name for path in files.files_below(tmp_path, ".tar")] == ["b.tar", "b.TAR"]
    finally:  # pytest, which removes the folders of earlier runs, could not remove this one
        os.remove("b.TAR")
        for _ in range(depth):
            os.chdir("..")
            shutil.rmtree("a")
        os.chdir(here)
