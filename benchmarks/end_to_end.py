"""CPU seconds from a folder of image files to a trained network, against lightly as its example has it.

    python benchmarks/end_to_end.py --images FOLDER [--epochs 2] [--repeats 3]

Both train BYOL's networks of one size (`--backbone`, `--width`) on the same files at `--size` pixels, with the same
batch and number of epochs, one thread, no worker processes, everything included: reading, decoding, augmentation,
training and saving. *momentum2* is `pretrain` as it is. *lightly* is its documented BYOL example: `BYOLTransform`,
`LightlyDataset`, a `DataLoader`, its heads and loss, plain SGD. Every run is a process of its own; they take turns;
the median of their CPU time (user and system) counts. lightly comes with the `benchmark` extra.
"""

import argparse
import copy
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

CANDIDATES = ("momentum2", "lightly")


def momentum2(options: argparse.Namespace, out: Path) -> None:
    from momentum2.api import pretrain
    from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, MonitorConfig, TrainConfig

    pretrain(
        Config(
            method=MethodConfig("byol"),
            model=ModelConfig(
                options.backbone, "small", options.width, projector_hidden=1024, projector_out=256
            ),
            data=DataConfig("folder", options.images, image_size=options.size, cache_dir=str(out / "cache")),
            train=TrainConfig(epochs=options.epochs, batch_size=options.batch, threads=1, precision="fp32"),
            monitor=MonitorConfig(report=False),
        ),
        out / "run",
    )


def lightly(options: argparse.Namespace, out: Path) -> None:
    import torch

    from momentum2 import backbones  # first: with it torchvision can be imported beside a CPU build of torch

    # isort: split
    from lightly.data import LightlyDataset
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.transforms.byol_transform import BYOLTransform, BYOLView1Transform, BYOLView2Transform
    from lightly.utils.scheduler import cosine_schedule

    torch.set_num_threads(1)
    backbone = backbones.build(options.backbone, "small", options.width)
    projector = BYOLProjectionHead(backbone.feature_dim, 1024, 256)
    predictor = BYOLPredictionHead(256, 1024, 256)
    teacher, teacher_projector = copy.deepcopy(backbone), copy.deepcopy(projector)
    deactivate_requires_grad(teacher)
    deactivate_requires_grad(teacher_projector)
    transform = BYOLTransform(
        view_1_transform=BYOLView1Transform(input_size=options.size),
        view_2_transform=BYOLView2Transform(input_size=options.size),
    )
    dataset = LightlyDataset(options.images, transform=transform)
    loader = torch.utils.data.DataLoader(dataset, batch_size=options.batch, shuffle=True, drop_last=True)
    criterion = NegativeCosineSimilarity()
    trained = torch.nn.ModuleList([backbone, projector, predictor])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.06)
    for epoch in range(options.epochs):
        m = cosine_schedule(epoch, options.epochs, 0.996, 1)
        for batch in loader:
            v0, v1 = batch[0]
            update_momentum(backbone, teacher, m=m)
            update_momentum(projector, teacher_projector, m=m)
            p0, p1 = predictor(projector(backbone(v0))), predictor(projector(backbone(v1)))
            with torch.no_grad():
                z0, z1 = teacher_projector(teacher(v0)), teacher_projector(teacher(v1))
            loss = 0.5 * (criterion(p0, z1) + criterion(p1, z0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(backbone.state_dict(), out / "backbone.pth")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", required=True, help="a folder of images")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.candidate:
        with tempfile.TemporaryDirectory() as folder:
            globals()[options.candidate](options, Path(folder))
        return
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in range(options.repeats):
        for name, found in seconds.items():
            before = cpu_seconds()
            words = [sys.executable, __file__, *sys.argv[1:], "--candidate", name]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            found.append(cpu_seconds() - before)
            print(f"{name}: {found[-1]:.1f} CPU seconds", flush=True)
    ours, theirs = (median(seconds[name]) for name in CANDIDATES)
    print(f"momentum2 {ours:.1f}, lightly {theirs:.1f} CPU seconds: {theirs / ours:.2f} times ours")


if __name__ == "__main__":
    main()
