"""Run directories of earlier versions resume, evaluate and export; where that would not be exact, they are refused."""

import hashlib
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

OLD = Path(__file__).parent / "old_runs"
EXPECTED: dict[str, Any] = (
    json.loads((OLD / "expected.json").read_text()) if (OLD / "expected.json").exists() else {}
)
TINY = (
    "--model.width=0.03125 --model.projector_hidden=16 --model.projector_out=8 --data.train_size=320 "
    "--eval_data.train_size=64 --train.threads=1 --monitor.log_every=1 --monitor.knn_every=0 --monitor.report=false "
    "--train.batch_size=16 --train.steps=12 --train.checkpoint_every=6 --train.keep=2 --train.device=cpu --train.seed=3"
)
#: In today's words. The loop, the norms of one device and the heads compute what version 0.1.0 did, to the last bit.
RUNS = {
    "pretrain": f"pretrain quickstart-paper {TINY} --out {{here}}/pretrain",
    "split": f"pretrain quickstart-paper {TINY} --method.teacher_norm local --train.devices 4 --train.accumulate 2 "
    "--out {here}/split",
    "batch-devices": f"pretrain quickstart-paper {TINY} --method.student_norm synced --method.teacher_norm local "
    "--train.devices 4 --out {here}/batch-devices",
    "moco": f"pretrain quickstart-paper {TINY} --method.name moco --method.queue_size 32 --method.teacher_norm shuffle "
    "--views.recipe moco_v2 --train.devices 4 --out {here}/moco",
    "two-processes": f"pretrain quickstart-paper {TINY} --out {{here}}/two-processes",
    "linear": "evaluate linear {here}/finished --epochs 2 --batch_size 16 --data.train_size 64 --threads 1 "
    "--device cpu --floors false --out {here}/linear",
}
DETECTOR = (
    "detect {here}/finished --model mask_rcnn --train.steps 8 --train.checkpoint_every 4 --train.keep 2 "
    "--train.threads 1 --train.device cpu --head.fpn_channels 8 --head.box_width 16 --data.train_size 32 "
    "--data.test_size 8 --data.workers 0 --monitor.log_every 1 --train.batch_size 4 --out {here}/detector"
)
PRETRAIN = f"pretrain quickstart-paper {TINY} {{}} --out {{{{here}}}}/RUN"
EXACT = ("pretrain", "two-processes", "linear")
PLAIN = """
import sys, torch
torch.backends.mkldnn.set_flags(False)
from momentum2.__main__ import main
sys.exit(main())
"""


#: The instructions that the old runs were computed with; wider ones add up in another order.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(OLD.parents[1]), "ATEN_CPU_CAPABILITY": "avx2"}


def probe() -> str:
    """Digest of a few steps of plain torch without oneDNN: the same where machines round the same way."""
    torch.manual_seed(0)
    torch.backends.mkldnn.set_flags(False)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten()
    )
    net.append(nn.Linear(1568, 16)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.normalize(net(torch.randn(16, 3, 32, 32)), dim=1).pow(3).sum().backward()
        optimizer.step()
    return digest(net.state_dict())


def rounds_as_then(python: str) -> bool:
    """Whether a process of this machine rounds as the one did that computed the old runs."""
    program = "from tests.test_old_runs import probe; print(probe())"
    done = subprocess.run(
        [python, "-c", program], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == EXPECTED["probe"]


def digest(tensors: dict[str, Tensor]) -> str:
    """Of names, types, shapes and contents."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def unpack(here: Path, *names: str) -> None:
    for name in names:
        with tarfile.open(OLD / f"{name}.tar.xz") as tar:
            tar.extractall(here, filter="data")


def momentum2(python: str, command: str, here: Path, processes: int = 1) -> subprocess.CompletedProcess[str]:
    program = here / "plain.py"
    program.write_text(PLAIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [python, *(torchrun if processes > 1 else []), program, *command.format(here=here).split()],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes"),
    [*((name, 1) for name in RUNS if name != "two-processes"), ("two-processes", 2), ("two-processes", 1)],
)
def test_an_old_run_is_resumed(tmp_path: Path, warm_python: str, name: str, processes: int):
    unpack(tmp_path, name, *(["encoder"] if "finished" in RUNS[name] else []))
    old, config = EXPECTED[name], tmp_path / name / "config.yaml"
    words = config.read_text()
    done = momentum2(warm_python, RUNS[name], tmp_path, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert config.read_text() == words  # in the words of the version that began it
    assert losses(tmp_path / name) == pytest.approx(old["losses"], rel=5e-2)  # fp32 differs by then
    if (name, processes) == ("two-processes", 1):  # and its checkpoint still knows that there are two devices
        again = momentum2(warm_python, RUNS[name], tmp_path)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "devices     2, " in again.stdout
    exact = name in EXACT and (name, processes) != ("two-processes", 1)
    if exact and rounds_as_then(warm_python):
        assert losses(tmp_path / name) == old["losses"]
        last = tmp_path / name / "checkpoints" / f"step-{old['step']:08d}"
        shared = safetensors.torch.load_file(last / "shared.safetensors")
        devices = safetensors.torch.load_file(last / "devices.safetensors")
        statistics = {
            n: t for n, t in shared.items() if n.endswith(("running_mean", "running_var", "_tracked"))
        }
        assert digest({n: t for n, t in shared.items() if n not in statistics}) == old["shared"]
        assert digest(statistics) == old["device 0"]
        if name in ("pretrain", "two-processes"):
            assert digest(devices) == old["histories"]


@pytest.mark.parametrize(
    ("name", "command", "says"),
    [
        ("shared-history", PRETRAIN.format("--train.devices 4"), "shared one history"),
        (
            "old-cut",
            PRETRAIN.format("--method.student_norm synced --train.accumulate 2"),
            "the whole batch is divided",
        ),
        (
            "batch-mixed",
            PRETRAIN.format("--method.teacher_norm local --train.devices 4"),
            "choose local or synced|normalized each process's part",
        ),
        ("detector", DETECTOR, "its detector had different heads and learned from different targets"),
    ],
)
def test_an_old_run_that_cannot_be_resumed_exactly_is_refused(
    tmp_path: Path, warm_python: str, name: str, command: str, says: str
):
    if name == "detector":
        pytest.importorskip("faster_coco_eval")
    unpack(tmp_path, name, *(["encoder"] if "finished" in command else []))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = momentum2(warm_python, command.replace("RUN", name), tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("momentum2: ")]
    assert any(words in sentence for words in says.split("|"))
    assert "Traceback" not in done.stderr
    after = {path: path.read_bytes() for path in before}
    assert after == before
