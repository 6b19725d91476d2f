"""Checkpoints: whole or absent, verified, never unpickled."""

import errno
import hashlib
import json
import logging
import os
import pickle
import resource
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from momentum2.errors import UserError
from momentum2.norms import convert_norms
from momentum2.runs.checkpoint import Checkpoint, Checkpoints, parse_tensors, read_files
from momentum2.runs.state import collect, restore
from momentum2.weights import safetensors_parts

FILES = ("state.json", "shared.safetensors", "devices.safetensors", "manifest.json")


def state(value: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    return {"w": torch.full((3, 2), float(value))}, {"mean": torch.tensor([float(value)])}, {"threads": 1}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2, config_hash="abc")


@pytest.fixture
def saved(checkpoints: Checkpoints) -> Checkpoints:
    for step in (10, 20):
        checkpoints.save(step, *state(step))
    return checkpoints


def test_round_trip(saved: Checkpoints):
    found = saved.load()
    assert found is not None
    assert (found.step, found.info) == (20, {"threads": 1})
    assert torch.equal(found.shared["w"], torch.full((3, 2), 20.0))
    assert torch.equal(found.devices["mean"], torch.tensor([20.0]))


def test_none_yet(checkpoints: Checkpoints):
    assert checkpoints.load() is None
    assert checkpoints.steps() == []


def test_the_newest_are_kept(saved: Checkpoints):
    saved.save(30, *state(30))
    assert saved.steps() == [20, 30]
    assert sorted(p.name for p in saved.directory.iterdir()) == ["step-00000020", "step-00000030"]


def test_the_manifest_is_sha256(saved: Checkpoints):
    folder = saved.directory / "step-00000020"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.keys() == set(FILES) - {"manifest.json"}
    for name, digest in manifest.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # of a number, of the JSON's last value or of a hash
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_noticed_and_the_previous_one_taken(saved: Checkpoints, name: str, damage, caplog):
    damage(saved.directory / "step-00000020" / name)
    with caplog.at_level(logging.WARNING, "momentum2"):
        found = saved.load()
    assert found is not None
    assert found.step == 10
    assert torch.equal(found.shared["w"], torch.full((3, 2), 10.0))
    assert len(caplog.messages) == 1
    assert "step-00000020 is corrupt" in caplog.messages[0]


def test_a_damaged_one_is_replaced_and_never_counts_as_kept(saved: Checkpoints):
    truncate(saved.directory / "step-00000020" / "shared.safetensors")
    saved.save(15, *state(15))  # stopped by a signal on the way
    assert saved.steps() == [10, 15, 20]
    saved.save(20, *state(21))
    found = saved.load()
    assert found is not None
    assert found.step == 20
    assert torch.equal(found.devices["mean"], torch.tensor([21.0]))
    assert saved.steps() == [15, 20]


def test_an_undamaged_one_is_not_written_again(saved: Checkpoints):
    """A run that is resumed at 20 and stopped at once must not put its only good checkpoint at risk."""
    before = (saved.directory / "step-00000020" / "shared.safetensors").stat().st_mtime_ns
    saved.save(20, *state(20))
    assert (saved.directory / "step-00000020" / "shared.safetensors").stat().st_mtime_ns == before


def test_all_damaged_is_not_a_new_start(saved: Checkpoints):
    for step in saved.steps():
        empty(saved.directory / f"step-{step:08d}" / "state.json")
    with pytest.raises(UserError, match=r"All checkpoints .* are corrupt"):
        saved.load()


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("forged", [False, True], ids=["old manifest", "forged manifest"])
def test_a_pickle_is_refused_and_not_executed(saved: Checkpoints, tmp_path: Path, forged: bool):
    folder = saved.directory / "step-00000020"
    payload = pickle.dumps(Trap(tmp_path / "executed"))
    (folder / "shared.safetensors").write_bytes(payload)
    if forged:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["shared.safetensors"] = hashlib.sha256(payload).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))
    found = saved.load()
    assert found is not None
    assert found.step == 10
    assert not (tmp_path / "executed").exists()
    pickle.loads(payload)  # the trap works
    assert (tmp_path / "executed").exists()


def test_a_checkpoint_of_other_settings_is_refused(saved: Checkpoints):
    with pytest.raises(UserError, match="different settings"):
        Checkpoints(saved.directory, 2, "def").load()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_only_finite_numbers_are_saved(saved: Checkpoints, value: float, where: int):
    parts = state(30)
    next(iter(parts[where].values()))[0] = value
    with pytest.raises(UserError, match="not finite"):
        saved.save(30, *parts)
    assert saved.steps() == [10, 20]


def test_leftovers_of_a_kill_are_removed(saved: Checkpoints):
    leftover = saved.directory / ".tmp-step-00000025"
    leftover.mkdir()
    (leftover / "shared.safetensors").write_bytes(b"half")
    found = saved.load()
    assert found is not None
    assert found.step == 20
    saved.save(30, *state(30))
    assert not leftover.exists()


def large() -> dict[str, Tensor]:
    return {"w": torch.zeros(1 << 20)}  # 4 MiB


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path):
    """A real ENOSPC, on a small file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a file system needs privileges")
    try:
        small = Checkpoints(disk / "checkpoints", 2, "")
        small.save(1, large(), {}, {})
        with pytest.raises(UserError, match=f"step 2 .*{os.strerror(errno.ENOSPC)}.*step 1 is intact"):
            small.save(2, large(), {}, {})
        assert [p.name for p in small.directory.iterdir()] == ["step-00000001"]
        found = small.load()
        assert found is not None
        assert found.step == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_that_cannot_grow_is_one_sentence(saved: Checkpoints):
    """The same with a limit on file sizes, for which nobody needs privileges."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=f"step 30 .*{os.strerror(errno.EFBIG)}.*step 20 is intact"):
            saved.save(30, large(), {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved.steps() == [10, 20]


KILLED_WHILE_SAVING = """
import os, signal, sys, torch
from itertools import count
from pathlib import Path
from momentum2.runs.checkpoint import Checkpoints

def save_twice_and_die_before(operation, directory):
    seen = count(1)
    def before(event, arguments):
        changes = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if changes and directory in str(arguments[0]) and next(seen) == operation:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints = Checkpoints(Path(directory), 1, "")
    for step in (1, 2):
        if step == 2:
            sys.addaudithook(before)
        checkpoints.save(step, {"w": torch.full((10,), float(step))}, {"m": torch.ones(1)}, {})

for operation in count(1):
    pid = os.fork()
    if pid == 0:
        save_twice_and_die_before(operation, f"{sys.argv[1]}/{operation}")
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break  # there are no more operations to die before
"""


def test_a_kill_before_any_of_the_file_operations_loses_nothing(tmp_path: Path, warm_python: str):
    """With keep=1 there is no second chance: at each moment one whole checkpoint must be there."""
    command = [warm_python, "-c", KILLED_WHILE_SAVING, str(tmp_path)]
    subprocess.run(command, check=True, env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=600)
    outcomes = []
    for operation in range(1, 1 + len(list(tmp_path.iterdir()))):
        found = Checkpoints(tmp_path / str(operation), 1, "").load()
        assert found is not None
        assert torch.equal(found.shared["w"], torch.full((10,), float(found.step)))
        outcomes.append(found.step)
    assert len(outcomes) > 12
    assert outcomes == sorted(outcomes)  # from "not saved yet" to "saved", at one operation
    assert set(outcomes) == {1, 2}


class Network(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
        self.register_buffer("queue", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def trained(steps: int) -> tuple[Network, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    network = Network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        network(torch.randn(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return network, optimizer


def test_what_is_shared_and_what_is_the_devices():
    network, optimizer = trained(1)
    shared, devices = collect(network, optimizer)
    assert devices == {}
    assert {"method/queue", "method/body.1.weight", "method/body.1.running_mean"} <= shared.keys()
    convert_norms(network, "momentum", devices=2)
    _, devices = collect(network, optimizer)
    assert {name: t.shape for name, t in devices.items()} == {
        f"method/body.1.{n}": (2, 4) for n in ("running_mean", "running_var")
    }
    assert "optimizer/body.0.weight/momentum_buffer" in shared


def test_restore_gives_the_same_next_step(checkpoints: Checkpoints):
    network, optimizer = trained(3)
    shared, own = collect(network, optimizer)
    checkpoints.save(3, shared, own, {})
    found = checkpoints.load()
    assert found is not None
    other, other_optimizer = trained(1)
    restore(other, other_optimizer, found)
    x = torch.randn(4, 3, 8, 8)
    for n, o in ((network, optimizer), (other, other_optimizer)):
        n(x).square().sum().backward()
        o.step()
    assert other_optimizer.state[other.body[0].weight]["momentum_buffer"].is_contiguous(
        memory_format=torch.channels_last
    )
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_restore_says_what_does_not_match():
    network, optimizer = trained(0)
    shared, own = collect(network, optimizer)
    shared["method/queue"] = torch.zeros(6)
    shared["method/extra"] = torch.zeros(1)
    del shared["method/body.1.running_var"]
    with pytest.raises(UserError) as error:
        restore(network, optimizer, Checkpoint(7, shared, own, {}))
    assert str(error.value) == (
        "The checkpoint at step 7 does not match this network: body.1.running_var is missing, extra is unknown, "
        "queue is float32[6] instead of float32[5]."
    )
    convert_norms(network, "momentum", devices=2)
    shared, devices = collect(network, optimizer)
    convert_norms(network, "momentum", devices=3)
    with pytest.raises(UserError, match=r"body\.1 has no histories of 3 devices"):
        restore(network, optimizer, Checkpoint(7, shared, devices, {}))


def test_what_is_being_written_is_the_state_that_was_handed_over(tmp_path: Path):
    """On a CPU the next step changes the very tensors; and a new checkpoint waits for the one before."""
    go = threading.Event()
    checkpoints, weight = Checkpoints(tmp_path, 2, "hash"), torch.ones(3)
    write = checkpoints._write

    def late(*args: Any) -> None:
        assert go.wait(600)
        write(*args)

    checkpoints._write = late  # type: ignore[method-assign]
    checkpoints.begin(1, {"method/w": weight}, {"method/n": weight[None]}, {})
    weight.fill_(2)
    assert not list(tmp_path.iterdir())
    go.set()
    checkpoints.begin(2, {"method/w": weight}, {"method/n": weight[None]}, {})
    weight.fill_(3)
    assert checkpoints.steps() == [1, 2]  # it waits too
    checkpoints.finish()
    for step in (1, 2):
        files = read_files(checkpoints.path(step))
        assert [t.tolist() for part in parse_tensors(files) for t in part.values()] == [
            [step] * 3,
            [[step] * 3],
        ]


def test_a_disk_that_fills_while_the_run_goes_on_is_told_at_the_next_checkpoint(tmp_path: Path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 2, "hash")
    checkpoints.save(1, {"method/w": torch.ones(3)}, {}, {})

    def full(path: Path, parts: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("momentum2.runs.checkpoint.write_parts", full)
    checkpoints.begin(2, {"method/w": torch.ones(3)}, {}, {})
    with pytest.raises(
        UserError, match=r"step 2 cannot be written .*No space.* The checkpoint at step 1 is intact"
    ):
        checkpoints.begin(3, {"method/w": torch.ones(3)}, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoints.finish()  # told once


def test_tensors_are_written_as_safetensors_reads_them():
    kinds = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    tensors = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    tensors |= {"number": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned": torch.rand(3, 2).T}
    tensors["ä"] = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    found = safetensors.torch.load(b"".join(bytes(part) for part in safetensors_parts(tensors)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
