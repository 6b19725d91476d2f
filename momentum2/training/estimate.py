"""What a run will need: memory from its shapes, time from a few steps. Trains nothing that is kept."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from momentum2.augment import Normalization, draw, render, view_specs
from momentum2.backbones import published
from momentum2.config import Config
from momentum2.data import Dataset, Loader, open_dataset
from momentum2.data.loader import default_workers
from momentum2.errors import UserError
from momentum2.machine import memory
from momentum2.methods.method import place_of_student
from momentum2.optim import build_optimizer
from momentum2.runs.card import inspect
from momentum2.training.build import build_method
from momentum2.training.by_view import choose_threads
from momentum2.training.checks import check_encoder
from momentum2.training.device import autocast_dtype, choose_device, keep_large_blocks
from momentum2.training.plan import Plan, describe, describe_images, resolve
from momentum2.training.step import Stepper

#: Training images of the data sets that are the same everywhere, for planning without having them.
KNOWN_IMAGES = {
    ("imagenet", "train"): 1_281_167,
    ("cifar10", "train"): 50_000,
    ("cifar100", "train"): 50_000,
    ("stl10", "train"): 5_000,
    ("stl10", "unlabeled"): 100_000,
    ("stl10", "train+unlabeled"): 105_000,
}


#: Images that are decoded to learn how long one takes.
_DECODED = 32


def planned(config: Config, images: int | None, processes: int, probe: bool) -> list[tuple[str, str]]:
    """The plan of `config` as (what, value) lines; `images` spares opening the data."""
    classes, dataset, known = 1000, None, list[tuple[str, str]]()
    if images is None and config.data.root is None:
        images = KNOWN_IMAGES.get((config.data.name, config.data.split))
        if images is not None and config.data.train_size:
            images = min(images, config.data.train_size)
    if images is None:
        dataset = open_dataset(replace(config.data, cache="off"), seed=config.train.seed)
        images, classes = len(dataset), len(dataset.class_names or ())
        known = describe_images(config, dataset)
    plan = resolve(config, images, processes)
    encoder = inspect(config)
    check_encoder(config, encoder)
    lines = describe(config, plan, encoder)
    if config.model.pretrained:
        repository, license = published.describe(config.model.backbone)
        lines.insert(2, ("weights", f"{repository}, license {license}, fetched when the run starts"))
    lines += known
    fixed, activations = memory_bytes(config, plan, classes)
    needs = f"{fixed / 1e9:.3g} GB for weights and optimizer, {activations / 1e9:.3g} GB for activations"
    lines.append(("memory", f"about {(fixed + activations) / 1e9:.3g} GB per process: {needs}"))
    seconds = step_seconds(config, plan, classes) if probe else None
    if dataset is not None and not dataset.in_memory:
        lines.append(("feeding", feeding(config, plan, dataset, seconds)))
    if seconds is not None:
        total = seconds * plan.steps
        lines.append(
            (
                "time",
                f"{seconds:.3g} s per step, {_hours(total)} in total, if loading data is not the bottleneck",
            )
        )
    else:
        lines.append(("time", "not measured (probe times a few steps)"))
    return lines


def feeding(config: Config, plan: Plan, dataset: Dataset, step: float | None) -> str:
    """How many images per second a core decodes, what the workers of a process give, and what its steps ask for."""
    specs = view_specs(config.views, config.data.image_size, Normalization.of(config.data))
    n = min(_DECODED, len(dataset))
    start = time.perf_counter()
    with Loader(dataset, specs, seed=config.train.seed, batch_size=n, stop=1, workers=0) as loader:
        for _ in loader:
            pass
    rate = n / (time.perf_counter() - start)
    chosen = config.data.workers
    workers = default_workers(choose_device(config.train.device)) if chosen is None else chosen
    given = rate * max(1, workers)
    who = (
        f"{workers} workers give about {given:.0f}"
        if workers
        else "there are no workers: the process itself does it"
    )
    words = f"one core prepares about {rate:.0f} images/s (measured on {n}); {who}"
    if step is None:
        return words
    asked = plan.micro_batch * config.train.accumulate / step
    words += f", a step asks for {asked:.0f}"
    return words if asked <= given else f"{words}: raise data.workers, or set data.cache to on"


def _hours(seconds: float) -> str:
    hours = f"{seconds / 3600:.3g}"
    return f"{hours} hour{'s' * (hours != '1')}"


def check_memory(config: Config, plan: Plan, classes: int) -> None:
    """Raise a `UserError` if a process would need more memory than this machine has, before any of it is taken.

    A GPU has memory of its own, and says itself when there is not enough.
    """
    if choose_device(config.train.device).type != "cpu" or _at_most(config, plan) < memory():
        return
    needs = sum(memory_bytes(config, plan, classes))
    if needs > memory():
        raise UserError(
            f"This run needs about {needs / 1e9:,.0f} GB of memory per process, but the machine has "
            f"{memory() / 1e9:,.0f} GB. Lower train.batch_size, data.image_size or the width of the network."
        )


def _at_most(config: Config, plan: Plan) -> float:
    """More bytes than a process can need, from a few numbers: usually enough to know that there is no problem."""
    model, specs = config.model, view_specs(config.views, config.data.image_size)
    pixels = plan.micro_batch * sum(spec.size**2 for spec in specs)
    widest = max(model.projector_hidden, model.projector_out, model.predictor_hidden or 0, 2048 * model.width)
    weights = 2e8 * model.width**2 + 8 * widest**2 + config.method.queue_size * model.projector_out
    return 16 * weights + 8000 * pixels * max(1.0, model.width)


def memory_bytes(config: Config, plan: Plan, classes: int) -> tuple[int, int]:
    """Bytes of a process for weights, gradients and optimizer, and for the activations of one micro-batch.

    The forward pass is traced with tensors that have shapes but no content, counting what it keeps for backward.
    """
    with torch.device("meta"):
        file = None if config.model.weights is None else Path(config.model.weights)
        method = build_method(config, plan, classes, weights=file)
    state = sum(t.numel() * t.element_size() for t in method.state_dict().values())
    parameters = [p for p in method.parameters() if p.requires_grad]
    student = place_of_student(method)
    optimizer = build_optimizer(method.named_parameters(), config.optim, lr=0.0, encoder=student)
    for p in parameters:
        p.grad = torch.empty_like(p)
    optimizer.step()  # without content too: it makes the optimizer's tensors
    kept_by_optimizer = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
    trained = sum(t.numel() * t.element_size() for t in [*parameters, *kept_by_optimizer])
    weights = {p.untyped_storage()._cdata for p in method.parameters()}
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return x

    views = [
        torch.empty(plan.micro_batch, config.data.channels, s.size, s.size, device="meta")
        for s in view_specs(config.views, config.data.image_size)
    ]
    labels = torch.zeros(plan.micro_batch, dtype=torch.long, device="meta")
    device = choose_device(config.train.device)
    half = autocast_dtype(config.train.precision, device) is not None
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        method.train()(views, labels)
    return state + trained, sum(kept.values()) // (2 if half else 1)


def step_seconds(config: Config, plan: Plan, classes: int, steps: int = 4) -> float:
    """Median seconds of an optimizer step of one process, without waiting for data; the first step is left out."""
    device = choose_device(config.train.device)
    keep_large_blocks()
    step = make_step(config, plan, classes, device)
    seconds = []
    for k in range(steps):
        start = time.perf_counter()
        step(k)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def make_step(config: Config, plan: Plan, classes: int, device: torch.device) -> Callable[[int], None]:
    """A function that takes optimizer step k on random images, with the threads of a run, and waits for its end.

    Augmentation is included; reading images and what is logged are not. The learning rate is 0.
    """
    method = build_method(config, plan, classes)
    method.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    encoder = place_of_student(method)
    optimizer = build_optimizer(method.train().named_parameters(), config.optim, lr=0.0, encoder=encoder)
    threads = choose_threads(method, config.train, device, None)
    take_step = Stepper(method, optimizer, config.train, config.optim, device, threads)
    specs = view_specs(config.views, config.data.image_size, Normalization.of(config.data))
    n, side = plan.micro_batch, config.data.image_size
    images = torch.randint(0, 256, (n, config.data.channels, side, side), dtype=torch.uint8, device=device)
    labels = torch.zeros(n, dtype=torch.long, device=device)

    def step(k: int) -> None:
        def inputs(i: int) -> tuple[list[Tensor], Tensor]:
            draws = [draw(spec, config.train.seed, k, v, n) for v, spec in enumerate(specs)]
            return render(images, draws, specs, channels_last=True), labels

        take_step(k, 0.0, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step
