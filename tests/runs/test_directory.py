"""The run directory: one job, one config."""

import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from momentum2.config import MAY_CHANGE_ON_RESUME, Config
from momentum2.errors import UserError
from momentum2.runs.directory import open_run

CONFIG = Config()


def changed(config: Config, name: str, value: object) -> Config:
    section, field = name.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{field: value})})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with one checkpoint."""
    with open_run(tmp_path / "run", CONFIG, "auto") as run:
        assert not (tmp_path / "run" / "config.yaml").exists()  # a mistake that is found now leaves nothing
        run.begin()
        run.checkpoints.save(5, {"w": torch.ones(1)}, {}, {})
    return tmp_path / "run"


def test_the_config_is_written_whole(out: Path):
    assert yaml.safe_load((out / "config.yaml").read_text()) == asdict(CONFIG)


def test_the_config_is_accepted_by_the_command_line(out: Path):
    from momentum2.cli.commands import COMMANDS

    words = COMMANDS["pretrain"].options().parse("pretrain", ["--config", str(out / "config.yaml")])
    assert words.override(changed(CONFIG, "train.seed", 7)) == CONFIG


def test_it_is_resumed_with_the_same_config(out: Path):
    for resume in ("auto", "must"):
        with open_run(out, CONFIG, resume) as run:
            found = run.checkpoints.load()
            assert found is not None
            assert found.step == 5


@pytest.mark.parametrize(
    ("name", "value"), [("optim.lr", 0.5), ("train.seed", 1), ("method.alpha", 0.1), ("train.steps", 3)]
)
def test_another_config_is_refused_and_the_fields_are_named(out: Path, name: str, value: object):
    both = changed(changed(CONFIG, name, value), "data.workers", 3)
    section, field = name.split(".")
    old = getattr(getattr(CONFIG, section), field)
    with pytest.raises(UserError) as error, open_run(out, both, "auto"):
        pass
    assert f"({name} was {old}, now {value})" in str(error.value)
    assert yaml.safe_load((out / "config.yaml").read_text()) == asdict(CONFIG)


ALLOWED = [name for name in MAY_CHANGE_ON_RESUME if "." in name] + ["monitor.log_every"]


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_what_does_not_change_the_numbers_may_change(out: Path, name: str):
    section, field = name.split(".")
    old = getattr(getattr(CONFIG, section), field)
    new = changed(CONFIG, name, {int: 3, bool: not old, str: "off", type(None): "elsewhere"}[type(old)])
    assert new != CONFIG
    with open_run(out, new, "must") as run:
        assert run.checkpoints.load() is not None
        run.begin()
    assert yaml.safe_load((out / "config.yaml").read_text()) == asdict(new)


def test_never_refuses_an_existing_run_and_deletes_nothing(out: Path):
    before = sorted(str(p) for p in out.rglob("*"))
    with (
        pytest.raises(UserError, match=r"^resume is never, but .* already contains a run"),
        open_run(out, CONFIG, "never"),
    ):
        pass
    assert sorted(str(p) for p in out.rglob("*")) == before


def test_never_and_auto_start_where_nothing_is(tmp_path: Path):
    for resume in ("never", "auto"):
        with open_run(tmp_path / resume, CONFIG, resume) as run:
            assert run.checkpoints.load() is None


def test_must_needs_a_checkpoint(tmp_path: Path):
    with (
        pytest.raises(UserError, match=r"^resume is must, but there is no checkpoint"),
        open_run(tmp_path / "x", CONFIG, "must"),
    ):
        pass


def test_checkpoints_without_a_config_are_not_mixed_with_new_ones(out: Path):
    (out / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"checkpoints but no config.yaml"), open_run(out, CONFIG, "auto"):
        pass


def test_a_finished_run_without_checkpoints_is_not_overwritten(out: Path):
    shutil.rmtree(out / "checkpoints")
    (out / "encoder.safetensors").write_bytes(b"weeks of work")
    with pytest.raises(UserError, match="finished encoder but no checkpoints"), open_run(out, CONFIG, "auto"):
        pass
    assert (out / "encoder.safetensors").read_bytes() == b"weeks of work"


@pytest.mark.parametrize("text", ["- a list", "train: 3", "{", "\xff"])
def test_a_config_that_is_none(out: Path, text: str):
    (out / "config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.yaml"), open_run(out, CONFIG, "auto"):
        pass


def test_a_file_in_the_way(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"), open_run(tmp_path / "file", CONFIG, "auto"):
        pass
    with (
        pytest.raises(UserError, match="cannot be written to"),
        open_run(tmp_path / "file" / "x", CONFIG, "auto"),
    ):
        pass


TWO_PROCESSES = """
import os, signal, sys
from pathlib import Path
from momentum2.config import Config
from momentum2.runs.directory import open_run
from momentum2.errors import UserError

def try_to_open():
    try:
        with open_run(Path(sys.argv[1]), Config(), "auto"):
            print("opened", flush=True)
    except UserError as error:
        print(error, flush=True)

told, tell = os.pipe()
ours_ends, ours = os.pipe()  # nobody writes to it: it ends when this process does
first = os.fork()
if first == 0:
    os.close(ours)
    with open_run(Path(sys.argv[1]), Config(), "auto"):
        worker = os.fork()
        if worker == 0:
            os.read(ours_ends, 1)
            os._exit(0)
        os.write(tell, str(worker).encode())
        os.read(ours_ends, 1)
worker = int(os.read(told, 20))
print(first, flush=True)
try_to_open()
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
try_to_open()
os.kill(worker, signal.SIGKILL)
"""


def test_a_second_process_is_refused_until_the_first_is_dead_even_if_a_worker_outlives_it(
    out: Path, warm_python: str
):
    command = [warm_python, "-c", TWO_PROCESSES, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    first, while_alive, after = done.stdout.splitlines()
    assert f"{out} is in use by process {first} on " in while_alive
    assert after == "opened"


def test_no_room_for_the_checkpoints(out: Path):
    huge = nn.Linear(1, 1, device="meta")
    huge.weight = nn.Parameter(torch.empty(shutil.disk_usage(out).free // 4, 1, device="meta"))
    with open_run(out, CONFIG, "auto") as run:
        run.check_space(nn.Linear(10, 10))
        with pytest.raises(UserError, match=r"Checkpoints need .* GB but only .* GB is free"):
            run.check_space(huge)
