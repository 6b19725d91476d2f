"""One process and two learn the same: from the same samples, by the same losses."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
import numpy as np
import torch
from momentum2 import backbones, distributed
from momentum2.detection.batches import Batches
from momentum2.detection.data import open_data
from momentum2.detection.detector import Detector
from momentum2.detection.models import build_detector
from momentum2.detection.presets import DetectionDataConfig, HeadConfig
from momentum2.detection.sampling import Sampler
from momentum2.distributed.together import joined

out, accumulate, device = sys.argv[1], int(sys.argv[2]), torch.device("cpu")
torch.set_num_threads(1)
found = {}
with joined(device):
    config = DetectionDataConfig(short_edges=[40, 48], test_short_edge=48, max_long_edge=64, train_size=8, workers=0)
    data = open_data(config, training=True, seed=0)
    for name in (*(() if accumulate > 1 else ("mask_rcnn", "cascade_rcnn")), "retinanet", "fcos"):
        torch.manual_seed(0)
        encoder = backbones.build("resnet18", "small", 0.125)
        head = HeadConfig(32, "group", box_width=16, proposals=20, sampled=8)
        detector = Detector(build_detector(name, encoder, 10, head), 48, 64).train()
        sampler = Sampler(np.ones(8), 0, 4)
        samples, losses = [], []
        if "rcnn" in name:
            heads = detector.model.roi_heads
            real = heads.sample
            heads.sample = lambda proposals, targets: [
                samples.append([round(float(v), 2) for v in b.sum(0)]) for b in real(proposals, targets)[0]
            ] and real(proposals, targets)
        with Batches(data, config, sampler, detector.masks, 2, device, accumulate)(0) as batches:
            for batch in batches:
                detector.before_step(batch.step)
                for i in range(accumulate):
                    losses.append({k: float(v) for k, v in detector(*batch.inputs(i, accumulate)).metrics.items()})
                detector.after_step(batch.step)
        mean = [float(v) for k, v in detector.state_dict().items() if k.endswith("positives.mean")]
        found[name] = {"samples": samples, "losses": losses, "mean": mean}
    with open(f"{out}-{distributed.rank()}.json", "w") as file:
        json.dump(found, file)
"""


def run(python: str, folder: Path, processes: int, accumulate: int = 1) -> list[dict[str, Any]]:
    """What each process found."""
    program, out = folder / "program.py", folder / f"{processes}-{accumulate}"
    program.write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [python, *(torchrun if processes > 1 else []), program, out, str(accumulate)]
    subprocess.run(command, env=environment, check=True, timeout=1800)
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
def test_processes_and_micro_batches_change_nothing_that_is_learned(tmp_path: Path, warm_python: str) -> None:
    (alone,) = run(warm_python, tmp_path, 1)
    both = run(warm_python, tmp_path, 2)
    (halves,) = run(warm_python, tmp_path, 1, accumulate=2)
    for name, one in alone.items():
        first = [part[name]["losses"][0] for part in both]
        for loss, value in one["losses"][0].items():
            assert sum(part[loss] for part in first) / 2 == pytest.approx(value, abs=1e-5), (
                name,
                loss,
            )
        if "rcnn" in name:  # each image's sample: four of the first step, in one process or two in each
            assert len(one["samples"]) == 2 * 4
            together = [*both[0][name]["samples"][:2], *both[1][name]["samples"][:2]]
            for sampled, known in zip(together, one["samples"][:4], strict=True):
                assert sampled == pytest.approx(known, abs=0.05)
        else:
            for other in (both[0][name], both[1][name], halves[name]):
                assert other["mean"] == pytest.approx(one["mean"], rel=1e-6)
            assert one["mean"][0] not in (50.0, 150.0)
