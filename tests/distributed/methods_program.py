"""What every process of tests/distributed/test_methods.py runs: `python methods_program.py RESULTS_DIRECTORY`.

It finds the other processes by torchrun's environment and saves what it computed; the test judges.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.backbones import Encoder, build
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
)
from momentum2.evaluate.online import online_knn
from momentum2.methods import DINO, MoCo
from momentum2.methods.byol import contrast as repulsion
from momentum2.methods.simclr import nt_xent
from momentum2.norms import momentum_norms
from momentum2.optim import build_optimizer
from momentum2.schedules import Schedule
from momentum2.training.step import Stepper

STEPS, MICRO_BATCHES = 3, 2


def data(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(x: Tensor) -> Tensor:
    """This process's samples of the global batch."""
    return x.chunk(distributed.world_size())[distributed.rank()]


def contrast(repulsion: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """NT-Xent and repulsion of a linear map of three views; the gradient as the mean over the processes."""
    weight = nn.Parameter(data((6, 5), 0))
    outputs = [F.normalize(part(data((8, 6), seed)) @ weight, dim=1) for seed in (1, 2, 4)]
    target = part(data((8, 5), 3))
    loss = nt_xent(outputs, 0.5) if repulsion is None else repulsion(outputs[0], target, outputs, 0.5)
    loss.backward()
    mean = [loss.detach().clone(), weight.grad]
    distributed.all_reduce_mean_(mean)
    return {"own_loss": loss.detach(), "loss": mean[0], "gradient": mean[1]}


def queue() -> dict[str, Tensor]:
    """MoCo's queue after some steps of 8 images, and the keys of those images by the encoder alone."""
    config = Config(MethodConfig("moco", queue_size=10), ModelConfig(projector_hidden=16, projector_out=8))
    torch.manual_seed(0)
    schedule = Schedule(K=STEPS, lr_base=0.1, m_base=0.5, alpha_fixed=0.0)
    method = MoCo(config, schedule, build("resnet18", "small", 0.125), devices=1, classes=0).train()
    # With alpha = 0 and a history that stays, a key depends on its own image alone.
    for norm in momentum_norms(method):
        norm.num_batches_tracked.fill_(1)
    images = [data((8, 3, 16, 16), step) for step in range(STEPS)]
    with torch.no_grad():
        keys = [F.normalize(method.teacher.eval()(x), dim=1) for x in images]
    method.train()
    start = method.queue.clone()
    for k in range(STEPS):
        method.before_step(k)
        for micro in images[k].chunk(MICRO_BATCHES):
            method.keep(method([-part(micro), part(micro)], None))
        method.after_step(k)
    return {"start": start, "keys": torch.cat(keys), "queue": method.queue, "pointer": method.pointer}


def center(micro_batches: int) -> dict[str, Tensor]:
    """DINO's center after some steps of 8 images, and the teacher's outputs of both views of those images."""
    config = Config(MethodConfig("dino"), ModelConfig(projector_hidden=16, projector_out=12))
    torch.manual_seed(0)
    schedule = Schedule(K=STEPS, lr_base=0.1, m_base=0.5, alpha_fixed=0.0)
    method = DINO(config, schedule, build("resnet18", "small", 0.125), devices=1, classes=0).train()
    # With alpha = 0 and a history that stays, an output depends on its own image alone.
    for norm in momentum_norms(method):
        norm.num_batches_tracked.fill_(1)
    images = [data((8, 3, 16, 16), step) for step in range(STEPS)]
    with torch.no_grad():
        outputs = [torch.cat([method.teacher.eval()(s * x) for s in (-1, 1)]) for x in images]
    method.train()
    for k in range(STEPS):
        method.before_step(k)
        for micro in images[k].chunk(micro_batches):
            method.keep(method([-part(micro), part(micro)], None))
        method.after_step(k)
    return {"outputs": torch.stack(outputs), "center": method.center}


def steps_of_dino() -> dict[str, Tensor]:
    """DINO in fp64 after the real optimizer steps of two devices; in the first, its last layer is frozen."""
    config = Config(
        MethodConfig("dino", freeze_last_layer=0.4, projector_norm=True),
        ModelConfig(projector_hidden=16, projector_out=12),
        train=TrainConfig(accumulate=MICRO_BATCHES, precision="fp32"),
        optim=OptimConfig(lr=0.1),
    )
    torch.manual_seed(0)
    schedule = Schedule(K=STEPS, lr_base=0.1, m_base=0.5)
    devices = 2 // distributed.world_size()
    method = DINO(config, schedule, build("resnet18", "small", 0.125), devices, classes=0).double().train()
    start = method.student.projector.prototypes.weight.detach().clone()
    optimizer = build_optimizer(method.named_parameters(), config.optim, 0.1)
    take_step = Stepper(method, optimizer, config.train, config.optim, torch.device("cpu"))
    turned = []
    for k in range(STEPS):
        views = [data((16, 3, 16, 16), 10 * k + v).double().chunk(MICRO_BATCHES) for v in range(2)]
        take_step(k, 0.1, lambda i, views=views: ([part(v[i]) for v in views], None))
        now = method.student.projector.prototypes.weight.detach()
        turned.append(1 - F.cosine_similarity(now, start).min())
    return {**method.state_dict(), "turned": torch.stack(turned)}


def encoder() -> Encoder:
    """The same weights on every process, and statistics of its own."""
    torch.manual_seed(0)
    network = build("resnet18", "small", 0.125)
    for i, norm in enumerate(m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
        seed = 100 * distributed.rank() + i
        norm.running_mean.copy_(data(norm.running_mean.shape, seed))
        norm.running_var.copy_(data(norm.running_var.shape, seed).exp())
    return network.train()


def knn(network: Encoder) -> dict[str, Any]:
    """The score, and whether the encoder is as it was."""
    score = online_knn(
        Config(
            eval_data=DataConfig("shapes", test_split="2%", image_size=16, train_size=100, cache="off"),
            monitor=MonitorConfig(knn_every=1),
            train=TrainConfig(precision="fp32", batch_size=40),
            model=ModelConfig("resnet18", "small", width=0.125),
        ),
        Path("nowhere"),
        steps=10,
    )
    assert score is not None
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    value = score({"student": network}, 5)
    kept = all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    return {"value": value, "kept": kept and all(m.training for m in network.modules())}


def main() -> None:
    distributed.setup(torch.device("cpu"))
    rank, network = distributed.rank(), encoder()
    results = {
        "contrast": contrast(),
        "repulsion": contrast(repulsion),
        "queue": queue(),
        "knn": knn(network),
    }
    results["centers"] = {count: center(count) for count in (1, MICRO_BATCHES)}
    results["dino"] = steps_of_dino()
    distributed.teardown()
    results["dino alone"] = steps_of_dino()
    results["knn alone"] = knn(network)
    torch.save(results, f"{sys.argv[1]}/{rank}.pt")


if __name__ == "__main__":
    main()
