"""Named recipes: each a whole config, with the command that runs it and the number to expect.

Those of the paper have the published settings. A number says whose it is: the paper's, that of the authors' release
(where the paper does not have it), or measured here.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from momentum2.backbones import TIMM, has_stem
from momentum2.config import (
    OWN,
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from momentum2.data import open_dataset
from momentum2.data.opening import SHAPES, test_split_of, typical_size
from momentum2.errors import SettingError, UserError, hint
from momentum2.optim import READ_BY
from momentum2.settings import is_whole, override, understood
from momentum2.terminal import is_first
from momentum2.training.checks import check, method_class, number_of_views
from momentum2.training.device import choose_device
from momentum2.training.plan import unused_settings

log = logging.getLogger("momentum2")


@dataclass(frozen=True)
class Recipe:
    """A config with its headline.

    `expect` is a number that somebody measured, with its source; `adapt` fits the config to the user's data,
    knowing the names of the settings that the user gave.
    """

    config: Config
    summary: str
    command: str
    expect: str
    adapt: Callable[[Config, frozenset[str]], Config] | None = None


#: What the short recipes depart from the paper in. Its loss only pulls views together; predictor and slow teacher keep
#: outputs apart, and that takes many epochs. Repulsion teaches from the first step and needs no predictor, so the
#: teacher may follow closely. docs/learning.md has the measurements.
FAST = MethodConfig(
    repulsion="batch",
    predictor=False,
    weight_momentum=0.5,
    weight_schedule="constant",
    alpha=0.7,
    temperature=0.1,
)
#: The same for minutes of a CPU, in which a teacher is not worth the time of its forward passes: with one that follows
#: at once, what remains is close to SimCLR. `--method.name byol` brings the teacher back.
FASTEST = replace(FAST, name="simclr")
#: Four views of 64 images instead of two of 128: a contrastive loss gains more from views than from images.
FAST_VIEWS = ViewsConfig(repeat=2)
#: Orthogonalized steps, whose size does not depend on the loss. Without decay, weights grow until such a step changes
#: little. The rate is for two views of so many images, or as many views of fewer.
PAIRS = 128
FAST_OPTIM = OptimConfig("muon", lr=0.08, weight_decay=0.1, nesterov=True, exclude_bias_and_norm=True)
#: One block a stage and half as wide again as a ResNet-18 of the same cost: 24 to 192 channels.
FAST_MODEL = ModelConfig(
    "resnet10", "small", width=0.375, projector_hidden=512, projector_out=128, stem_init="cosines"
)

_DEPARTS = (
    "unlike the paper, to learn fast: repulsion in the batch at temperature 0.1 instead of a predictor, a teacher that "
    "follows closely (constant m and α), Muon"
)


def _decay(steps: int, rate: float) -> float:
    """What takes as much off the weights in `steps` at the learning rate `rate` as the quickstart does in all of its.

    In very short runs less: one step must not take off all of a weight. The most that was measured is 0.195.
    """
    train, optim = quickstart().config.train, quickstart().config.optim
    peak = optim.lr * train.batch_size / 256
    total = optim.weight_decay * train.epochs * (SHAPES["train"] // train.batch_size) * peak
    return round(min(0.2, total / max(steps * rate, 1e-9)), 4)


#: What starts a command on a machine of 8 GPUs, and on several.
MACHINE = "torchrun --nproc-per-node 8"
CLUSTER = "torchrun --nnodes {nodes} --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500"


def _command(name: str, root: str, out: str, nodes: int = 0) -> str:
    """The command of a recipe on labeled images at `root`; `nodes` are machines of 8 GPUs, 0 for one process."""
    start = MACHINE if nodes == 1 else CLUSTER.format(nodes=nodes)
    program = f"{start} -m momentum2" if nodes else "momentum2"
    return f"{program} pretrain {name} --data.root {root} --eval_data.root {root} --out runs/{out}"


def quickstart() -> Recipe:
    data = DataConfig(name="shapes", image_size=32)
    return Recipe(
        Config(
            method=FASTEST,
            model=FAST_MODEL,
            data=data,
            eval_data=data,
            views=FAST_VIEWS,
            train=TrainConfig(epochs=2, batch_size=PAIRS // FAST_VIEWS.repeat, checkpoint_every=156),
            optim=replace(FAST_OPTIM, lr=FAST_OPTIM.lr * FAST_VIEWS.repeat, warmup_epochs=0.1),
            monitor=MonitorConfig(knn_every=1, knn_images=5_000),
        ),
        summary="SimCLR with Muon in a ResNet-10 on the built-in shapes, in minutes on a laptop. It has no teacher: "
        "the paper's has shown no gain here (--method.name byol adds it)",
        command="momentum2 pretrain quickstart --out runs/quickstart",
        expect="measured: kNN 93.0 ± 0.8% (95% interval, five seeds; untrained 24.8%, raw pixels 40.5%, whitened "
        "patches 59.5%), about 2 minutes of one core",
    )


def quickstart_paper() -> Recipe:
    data = DataConfig(name="shapes", image_size=32)
    return Recipe(
        Config(
            method=MethodConfig(weight_momentum=0.03, reference_batch=32),
            model=ModelConfig("resnet18", "small", width=0.25, projector_hidden=512, projector_out=128),
            data=data,
            eval_data=replace(data, train_size=5000),
            train=TrainConfig(epochs=2, batch_size=32, checkpoint_every=250),
            optim=OptimConfig(lr=0.4, warmup_epochs=0.1),
            monitor=MonitorConfig(knn_every=1),
        ),
        summary="Momentum² Teacher with the paper's loss and schedules on the built-in shapes, in a small ResNet-18",
        command="momentum2 pretrain quickstart-paper --out runs/quickstart-paper",
        expect="measured: kNN 39% (42% with one thread; untrained 19%, raw pixels 31%), 5,000 neighbors, seed 0, 3 "
        "minutes on 2 CPU cores",
    )


def cifar10() -> Recipe:
    data = DataConfig(name="cifar10", image_size=32)
    return Recipe(
        Config(
            method=MethodConfig(student_norm="local", weight_momentum=0.03, reference_batch=512),
            model=ModelConfig("resnet18", "cifar", projector_hidden=2048, projector_out=256),
            data=data,
            eval_data=data,
            train=TrainConfig(epochs=400, batch_size=512, devices=16),
            optim=OptimConfig(lr=0.1, warmup_epochs=10, weight_decay=5e-4),
            monitor=MonitorConfig(knn_every=10, knn_images=10_000),
        ),
        summary="Momentum² Teacher, ResNet-18, CIFAR-10, for one GPU",
        command=_command("cifar10", "CIFAR", "cifar10"),
        expect="not measured",
    )


def cifar10_cpu() -> Recipe:
    base = quickstart().config
    data = DataConfig(name="folder", image_size=32)
    train = replace(base.train, epochs=4, checkpoint_every=500)
    steps = train.epochs * (50_000 // train.batch_size)
    return Recipe(
        replace(
            base,
            method=FAST,
            data=data,
            eval_data=data,
            train=train,
            optim=replace(base.optim, weight_decay=_decay(steps, base.optim.lr * train.batch_size / 256)),
            monitor=replace(base.monitor, knn_every=2, knn_images=10_000),
        ),
        summary=f"A Momentum² teacher on CIFAR-10 as image files, for one CPU core; {_DEPARTS}, "
        "a ResNet-10 that starts from cosines",
        command=_command("cifar10-cpu", "CIFAR", "cifar10-cpu"),
        expect="measured: kNN 65.2% (untrained 28.9%, raw pixels 45.5%, whitened patches 58.7%), seed 10, 10 minutes "
        "of one core; SimCLR has 64.1 ± 0.3% after half that time (five seeds, docs/race.md)",
    )


def cifar10_cpu_paper() -> Recipe:
    base = quickstart_paper().config
    data = DataConfig(name="folder", image_size=32)
    return Recipe(
        replace(
            base,
            data=data,
            eval_data=replace(data, train_size=10_000),
            # The quickstart's 32 images and rate of 0.4: kNN 35.6%, linear 40.7% (here 40.0%), seed 0.
            method=replace(base.method, reference_batch=64),
            train=replace(base.train, epochs=4, batch_size=64, checkpoint_every=500),
            optim=replace(base.optim, lr=0.1),
        ),
        summary="Momentum² Teacher with the paper's loss on CIFAR-10 as image files, in a small ResNet-18",
        command=_command("cifar10-cpu-paper", "CIFAR", "cifar10-cpu"),
        expect="measured: kNN 37.8%, below raw pixels (38.6%; untrained 25.9%), 10,000 neighbors, seed 0, 15 minutes "
        "with one thread",
    )


def cifar10_hour() -> Recipe:
    data = DataConfig(name="cifar10", image_size=32)
    return Recipe(
        Config(
            method=MethodConfig(weight_momentum=0.03, reference_batch=256),
            model=ModelConfig("resnet18", "cifar", projector_hidden=2048, projector_out=256),
            data=data,
            eval_data=data,
            train=TrainConfig(epochs=200, batch_size=256),
            optim=OptimConfig(lr=0.1, warmup_epochs=5, weight_decay=5e-4),
            monitor=MonitorConfig(knn_every=20, knn_images=10_000),
        ),
        summary="Momentum² Teacher, ResNet-18, CIFAR-10: an estimated hour on one GPU; the paper's loss, which 200 "
        "epochs give the time that it needs, at 32 px and on one device",
        command=_command("cifar10-hour", "CIFAR", "cifar10-hour"),
        expect="not measured, only estimated",
    )


def tiny_hour() -> Recipe:
    base = cifar10_hour().config
    data = DataConfig(name="folder", image_size=64, workers=4)
    return Recipe(
        replace(
            base,
            method=FAST,
            model=replace(base.model, stem="small"),
            data=data,
            eval_data=replace(data, test_split="val"),
            train=TrainConfig(epochs=100, batch_size=256),
            optim=replace(FAST_OPTIM, lr=0.04, warmup_epochs=1, weight_decay=0.01),
            monitor=MonitorConfig(knn_every=10),
        ),
        summary="A Momentum² teacher, ResNet-18, Tiny ImageNet as image files: an estimated hour on one GPU; "
        + _DEPARTS,
        command=_command("tiny-hour", "TINY", "tiny-hour"),
        expect="not measured, only estimated",
    )


def imagenet100_hour() -> Recipe:
    base = tiny_hour().config
    data = DataConfig(name="folder", image_size=128, workers=8)
    return Recipe(
        replace(
            base,
            model=replace(base.model, stem="imagenet"),
            data=data,
            eval_data=replace(data, test_split="val"),
            train=replace(base.train, epochs=75),
        ),
        summary="A Momentum² teacher, ResNet-18, 100 classes of ImageNet at 128 px: an estimated hour on one GPU, "
        f"if 8 cores decode for it; {_DEPARTS}",
        command=_command("imagenet100-hour", "IMAGENET100", "imagenet100-hour"),
        expect="not measured, only estimated",
    )


def stl10() -> Recipe:
    data = DataConfig(name="stl10", split="train+unlabeled", image_size=96, workers=4)
    return Recipe(
        Config(
            method=MethodConfig(student_norm="local", weight_momentum=0.032, reference_batch=2048),
            model=ModelConfig("resnet18", projector_hidden=512, projector_out=128),
            data=data,
            eval_data=replace(data, split="train"),
            train=TrainConfig(epochs=400, batch_size=2048, devices=64),
            optim=OptimConfig(lr=0.1, warmup_epochs=10),
            monitor=MonitorConfig(knn_every=10),
        ),
        summary="Momentum² Teacher, ResNet-18, STL-10, 64 devices × 32: the paper's Table 1",
        command=_command("stl10", "STL10", "stl10"),
        expect="paper: 88.18% linear top-1",
    )


def imagenet_1node() -> Recipe:
    data = DataConfig(name="imagenet", image_size=224, workers=8)
    return Recipe(
        Config(
            method=MethodConfig(student_norm="local", weight_momentum=0.01, reference_batch=256),
            model=ModelConfig("resnet50"),
            data=data,
            eval_data=replace(data, test_split="val"),
            train=TrainConfig(epochs=100, batch_size=256, devices=8),
            optim=OptimConfig(lr=0.05, warmup_epochs=10),
        ),
        summary="Momentum² Teacher, ResNet-50, ImageNet, 8 GPUs × 32",
        command=_command("imagenet-1node", "IMAGENET", "imagenet", nodes=1),
        expect="paper: 70.4% linear top-1",
    )


def imagenet_1node_1024() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=replace(base.method, reference_batch=1024),  # the same m as at 256
            train=replace(base.train, batch_size=1024),
        ),
        summary="Momentum² Teacher, ResNet-50, ImageNet, 8 GPUs × 128",
        command=_command("imagenet-1node-1024", "IMAGENET", "imagenet-1024", nodes=1),
        expect="paper: 70.7% linear top-1 (200 epochs: 72.7; 300: 73.8)",
    )


def imagenet_128gpu() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=replace(base.method, reference_batch=4096),
            train=replace(base.train, epochs=300, batch_size=4096, devices=128),
            optim=OptimConfig(
                "lars", lr=0.3, weight_decay=1.5e-6, warmup_epochs=10, exclude_bias_and_norm=True
            ),
        ),
        summary="Momentum² Teacher, ResNet-50, ImageNet, LARS, 128 GPUs × 32",
        command=_command("imagenet-128gpu", "IMAGENET", "m2", nodes=16),
        expect="paper: 72.0% linear top-1 (128 per GPU: 72.9; 1000 epochs: 74.5)",
    )


def imagenet_32gpu() -> Recipe:
    base = imagenet_128gpu().config
    return Recipe(
        replace(
            base,
            train=replace(base.train, devices=32),
            optim=replace(base.optim, weight_decay=1e-6),
        ),
        summary="Momentum² Teacher, ResNet-50, ImageNet, LARS, 32 GPUs × 128",
        command=_command("imagenet-32gpu", "IMAGENET", "m2-32", nodes=4),
        expect="release: 73.7% linear top-1",
    )


def byol() -> Recipe:
    base = imagenet_128gpu().config
    return Recipe(
        replace(
            base,
            method=MethodConfig("byol", "synced", "synced", weight_momentum=0.01, export="student"),
            model=replace(base.model, zero_init_residual=True),
            optim=replace(base.optim, weight_decay=1e-6),
        ),
        summary="BYOL: synced BN on both sides, ResNet-50, ImageNet, LARS, batch 4096",
        command=_command("byol", "IMAGENET", "byol", nodes=16),
        expect="paper: 72.5% linear top-1",
    )


def moco_v2() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=MethodConfig(
                "moco",
                student_norm="local",
                alpha=0.064,
                weight_momentum=0.001,
                weight_schedule="constant",
                export="student",
            ),
            model=ModelConfig("resnet50", projector_hidden=2048, projector_out=128),
            views=ViewsConfig("moco_v2"),
            train=replace(base.train, epochs=200, batch_size=1024, devices=32),
            optim=OptimConfig(lr=0.03),
        ),
        summary="MoCo v2 with Momentum BN keys, ResNet-50, ImageNet, 32 GPUs × 32 (--method.teacher_norm shuffle: "
        "the original)",
        command=_command("moco-v2", "IMAGENET", "moco", nodes=4),
        expect="paper: 67.8% linear top-1 (shuffling BN: 66.8)",
    )


def moco_v2_8gpu() -> Recipe:
    base = moco_v2().config
    return Recipe(
        replace(
            base,
            method=replace(base.method, teacher_norm="shuffle"),
            train=replace(base.train, batch_size=256, devices=8),
        ),
        summary="MoCo v2 as published: shuffling BN, ResNet-50, ImageNet, 8 GPUs × 32",
        command=_command("moco-v2-8gpu", "IMAGENET", "moco-8gpu", nodes=1),
        expect="paper: 67.5% linear top-1",
    )


def byol_eman() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=MethodConfig("byol", "local", "ema", weight_momentum=0.02, export="student"),
            views=ViewsConfig("byol", crop_min=0.2),
            train=replace(base.train, epochs=200, batch_size=512),
            optim=OptimConfig(
                "lars", lr=0.9, weight_decay=1e-6, warmup_epochs=10, exclude_bias_and_norm=True
            ),
        ),
        summary="BYOL with EMAN: the teacher's BN statistics follow the student's; ResNet-50, ImageNet, 8 GPUs × 64",
        command=_command("byol-eman", "IMAGENET", "byol-eman", nodes=1),
        expect="EMAN's authors: 72.2% linear top-1",
    )


def moco_eman() -> Recipe:
    base = moco_v2_8gpu().config
    return Recipe(
        replace(
            base,
            method=replace(base.method, teacher_norm="ema"),
            optim=replace(base.optim, warmup_epochs=10),
        ),
        summary="MoCo v2 with EMAN instead of shuffling BN, ResNet-50, ImageNet, 8 GPUs × 32",
        command=_command("moco-eman", "IMAGENET", "moco-eman", nodes=1),
        expect="EMAN's authors: 67.7% linear top-1",
    )


def simsiam() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=MethodConfig("simsiam", student_norm="synced"),
            model=ModelConfig(
                "resnet50",
                projector_hidden=2048,
                projector_out=2048,
                predictor_hidden=512,
                zero_init_residual=True,
            ),
            views=ViewsConfig("simsiam"),
            optim=OptimConfig(lr=0.05),
        ),
        summary="SimSiam, ResNet-50, ImageNet, batch 256",
        command=_command("simsiam", "IMAGENET", "simsiam", nodes=1),
        expect="paper: 68.1% linear top-1",
    )


def simclr() -> Recipe:
    base = imagenet_128gpu().config
    return Recipe(
        replace(
            base,
            method=MethodConfig("simclr", student_norm="synced", temperature=0.1),
            views=ViewsConfig("simclr"),
            model=ModelConfig("resnet50", projector_hidden=2048, projector_out=128, zero_init_residual=True),
            train=replace(base.train, epochs=200),
            optim=replace(base.optim, weight_decay=1e-6),
        ),
        summary="SimCLR, ResNet-50, ImageNet, batch 4096",
        command=_command("simclr", "IMAGENET", "simclr", nodes=16),
        expect="not measured (66.6% linear top-1 is published for batch 8192)",
    )


def dino() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=MethodConfig("dino", "synced", "synced", weight_momentum=0.004, temperature=0.1),
            model=ModelConfig("resnet50", projector_hidden=2048, projector_out=65536),
            views=ViewsConfig("multicrop", small_crops=8),
            train=replace(base.train, batch_size=512),
            optim=OptimConfig(lr=0.03, warmup_epochs=10, clip_norm=3.0, exclude_bias_and_norm=True),
        ),
        summary="DINO with eight small crops, ResNet-50, ImageNet, 8 GPUs × 64",
        command=_command("dino", "IMAGENET", "dino", nodes=1),
        expect="not measured (75.3% linear top-1 is published for 800 epochs and batch 4080)",
    )


def supervised() -> Recipe:
    base = imagenet_1node().config
    return Recipe(
        replace(
            base,
            method=MethodConfig("supervised"),
            views=ViewsConfig("supervised"),
            train=replace(base.train, epochs=90),
            optim=OptimConfig(lr=0.1, warmup_epochs=5),
        ),
        summary="Supervised baseline, ResNet-50, ImageNet",
        command=_command("supervised", "IMAGENET", "supervised", nodes=1),
        expect="not measured",
    )


def folder() -> Recipe:
    return Recipe(
        Config(
            method=FAST,
            model=ModelConfig("resnet18", projector_hidden=1024, projector_out=256),
            train=TrainConfig(epochs=200),
            optim=FAST_OPTIM,
        ),
        summary="Your own images; network, size and length are chosen to fit them and the machine. On a CPU it "
        f"is SimCLR as in quickstart, on a GPU a Momentum² teacher ({_DEPARTS})",
        command="momentum2 pretrain folder --data.root photos --out runs/photos",
        expect="depends on the images",
        adapt=_fit_to_folder,
    )


def adapt() -> Recipe:
    return Recipe(
        Config(
            method=MethodConfig(weight_momentum=0.004, reference_batch=256),
            model=ModelConfig("timm/resnet50.a1_in1k", pretrained=True),
            train=TrainConfig(epochs=20),
            optim=OptimConfig(
                "adamw",
                lr=5e-4,
                weight_decay=0.05,
                warmup_epochs=1,
                clip_norm=3.0,
                exclude_bias_and_norm=True,
                layer_decay=0.75,
                encoder_lr=0.2,
                freeze_encoder_epochs=1,
            ),
        ),
        summary="Published weights, continued on your own images: first only the heads, then everything at a low rate",
        command="momentum2 pretrain adapt --data.root photos --model.backbone timm/resnet50.a1_in1k --out runs/adapted",
        expect="depends on the images and on the weights; measured: no gain after one minute of training a small "
        "network, kNN 46.1% at the start, 44.8% at the end",
        adapt=_fit_to_adapt,
    )


def _fit_to_adapt(config: Config, given: frozenset[str]) -> Config:
    """Size, batch and evaluation by the images; method, network, views and length are as they are."""
    own = {"method.name", "model.backbone", "train.epochs", "views.repeat"}
    fitted = _fit_to_folder(config, given | own)
    optim = config.optim
    if not config.model.backbone.startswith(TIMM) and "optim.layer_decay" not in given:
        optim = replace(optim, layer_decay=None)  # only timm's networks say what their layers are
    model = config.model
    if model.weights and "model.pretrained" not in given:
        model = replace(model, pretrained=False)
    return replace(fitted, model=model, optim=optim)


def _fit_to_folder(config: Config, given: frozenset[str]) -> Config:
    """Choose method, network, size and length by the images and the machine: a CPU gets those of the quickstart."""
    gpu = choose_device(config.train.device).type != "cpu"
    dataset = open_dataset(replace(config.data, cache="off"), seed=config.train.seed)
    n = len(dataset)
    if n < 8:
        raise SettingError(
            "data.root",
            f"{config.data.root} has {n} image{'s' * (n != 1)}. Pretraining needs at least 8, and thousands for good "
            "results.",
        )
    small = quickstart().config
    size = min(typical_size(dataset), 224 if gpu else 64)
    if "data.image_size" in given:
        size = config.data.image_size
    method, views = config.method, config.views
    if not gpu and "method.name" not in given:
        method = replace(method, name=small.method.name)
    if not gpu and "views.repeat" not in given:
        repeated = replace(config, method=method, views=replace(views, repeat=small.views.repeat))
        views = repeated.views if _may_repeat(repeated) else views
    most = max(2, (2 * PAIRS if gpu else PAIRS) // views.repeat)
    batch = 2 ** int(math.log2(min(most, n // 2)))
    if "train.batch_size" in given:
        batch = config.train.batch_size
    epochs = (
        min(800, max(20, round(40_000 * batch / n))) if gpu else min(400, max(1, round(2_000 * batch / n)))
    )
    if "train.epochs" in given:
        epochs = config.train.epochs
    if config.train.steps:
        epochs = max(1, config.train.steps * batch // n)
    if "model.backbone" in given:  # as it is, but for what else was said of it
        model = replace(
            config.model, stem="imagenet", width=1.0, zero_init_residual=False, stem_init="random"
        )
    elif not gpu:
        model = small.model
    elif size > 128 and n >= 50_000:
        model = replace(config.model, backbone="resnet50", projector_hidden=4096)
    else:
        model = replace(config.model, stem="cifar" if size <= 32 else "small" if size <= 64 else "imagenet")
    evaluation = replace(config.data, image_size=size)
    if dataset.labels is None:
        evaluation = replace(evaluation, name="none")
    elif (test := test_split_of(config.data)) is None:
        evaluation = replace(evaluation, split="80%", test_split="-20%")
    else:
        evaluation = replace(evaluation, test_split=test)
    # The rate is given for 256 images and goes with the batch; Muon's should go with the square root of all views.
    rate = config.optim.lr * (1 if "optim.lr" in given else math.sqrt(PAIRS * views.repeat / batch))
    steps = config.train.steps or max(1, epochs * (n // batch))
    optim = replace(
        config.optim,
        lr=rate,
        warmup_epochs=epochs / 20,
        weight_decay=_decay(steps, rate * batch / 256),
    )
    return replace(
        config,
        method=method,
        model=model,
        data=replace(config.data, image_size=size),
        eval_data=evaluation,
        views=views,
        train=replace(config.train, batch_size=batch, epochs=epochs, checkpoint_every=1000 if gpu else 250),
        optim=optim,
        monitor=replace(config.monitor, knn_every=max(1, epochs // 10), knn_images=10_000),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "quickstart": quickstart,
    "folder": folder,
    "adapt": adapt,
    "cifar10-cpu": cifar10_cpu,
    "cifar10-hour": cifar10_hour,
    "tiny-hour": tiny_hour,
    "imagenet100-hour": imagenet100_hour,
    "quickstart-paper": quickstart_paper,
    "cifar10-cpu-paper": cifar10_cpu_paper,
    "cifar10": cifar10,
    "stl10": stl10,
    "imagenet-1node": imagenet_1node,
    "imagenet-1node-1024": imagenet_1node_1024,
    "imagenet-32gpu": imagenet_32gpu,
    "imagenet-128gpu": imagenet_128gpu,
    "byol": byol,
    "moco-v2": moco_v2,
    "moco-v2-8gpu": moco_v2_8gpu,
    "byol-eman": byol_eman,
    "moco-eman": moco_eman,
    "simsiam": simsiam,
    "simclr": simclr,
    "dino": dino,
    "supervised": supervised,
}


def find(name: str) -> Recipe:
    """The recipe called `name`."""
    if name not in RECIPES:
        raise UserError(f"There is no recipe called {name!r}. {hint(name, RECIPES)}")
    return RECIPES[name]()


def configure(
    recipe: Recipe | None, given: Mapping[str, object], copied: Collection[str] = frozenset()
) -> Config:
    """The config of a recipe (None: the defaults) with the given settings, by their dotted names.

    A recipe that looks at the user's data has done so; what was given wins over what it chose. A setting that was given
    and has no effect is named in a warning, unless it is one of those `copied` from a run.
    """
    if is_whole(given):  # it decides everything, and what an older version did not write is as it was then
        recipe = None
    base = Config() if recipe is None else recipe.config
    chosen = understood(base, {name: value for name, value in given.items() if name not in copied})
    given = understood(base, given)
    config = _without_stem(override(base, given), given.keys())
    if recipe and recipe.adapt:
        config = override(recipe.adapt(config, frozenset(given)), given)
    if (
        "optim.name" in given
        and "optim.nesterov" not in given
        and config.optim.name not in READ_BY["nesterov"]
    ):
        # The recipe's, for its own optimizer.
        config = replace(config, optim=replace(config.optim, nesterov=False))
    if "optim.weight_decay" not in given and _decays(config.optim) != _decays(base.optim):
        config = replace(config, optim=replace(config.optim, weight_decay=OptimConfig().weight_decay))
    if not (config.views.repeat == 1 or "views.repeat" in given or _may_repeat(config)):
        config = replace(config, views=replace(config.views, repeat=1))
    if config.views.repeat == 1 < base.views.repeat:
        config = _drawn_once(config, base.views.repeat, given.keys())
    # A network is tested on images of the kind that it is trained on.
    seen = {
        name: getattr(config.data, name)
        for name in ("image_size", "channels", "window", "mean", "std")
        if f"data.{name}" in given and f"eval_data.{name}" not in given
    }
    config = replace(config, eval_data=replace(config.eval_data, **seen))
    if config.method.name != OWN and is_first():
        _tell_unused(config, chosen.keys())
    return config


def _may_repeat(config: Config) -> bool:
    """Whether the `views.repeat` of a recipe suits the method and the views that were chosen: it is for pairs."""
    once = replace(config, views=replace(config.views, repeat=1))
    return number_of_views(once) == 2 and number_of_views(config) in method_class(config).views


def _drawn_once(config: Config, times: int, given: Set[str]) -> Config:
    """A recipe that draws each view several times, for a pair: as many views a step, steps and learning rate."""
    longer = {
        "train": ("batch_size", "epochs"),
        "optim": ("warmup_epochs",),
        "monitor": ("knn_every",),
    }
    sections = {}
    for section, names in longer.items():
        before = getattr(config, section)
        values = {name: getattr(before, name) * times for name in names if f"{section}.{name}" not in given}
        sections[section] = replace(before, **values)
    if "optim.lr" not in given:  # which is for 256 images
        sections["optim"] = replace(sections["optim"], lr=config.optim.lr / times)
    return replace(config, **sections)


def _decays(optim: OptimConfig) -> bool:
    """Whether weight decay is taken off the weights; sgd and lars add it to the gradient, where it is far smaller."""
    return optim.name in ("adamw", "muon")


def _without_stem(config: Config, given: Set[str]) -> Config:
    """Take off what a recipe chose for its own ResNet where the user named a network that has none of it."""
    names = ("stem", "width", "zero_init_residual", "stem_init")
    plain = {name: getattr(ModelConfig(), name) for name in names if f"model.{name}" not in given}
    bare = replace(config.model, **plain)
    if "model.backbone" not in given or bare == config.model or has_stem(bare.backbone):
        return config
    return replace(config, model=bare)


def _tell_unused(config: Config, given: Set[str]) -> None:
    """Name those of the given settings that have no effect; where one is refused, that is all there is to say."""
    kind = method_class(config)
    with suppress(UserError):
        check(config, kind)
        if unused := sorted(given & unused_settings(config, kind)):
            has = "has" if len(unused) == 1 else "have"
            log.warning("%s %s no effect in this run.", " and ".join(unused), has)
