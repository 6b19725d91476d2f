"""How steady a teacher's targets are, by the norm that it has: the paper's argument, measured without any accuracy.

The target z of an image, of unit length, depends on its companions (the other images of its device's batch) and on the
history of its device. z* is the target with the statistics of all data. With means E over companions and devices,

    noise    E|z − E(z | history)|²     what companions change
    history  E|E(z | history) − E z|²   what the histories of two devices differ in
    bias     |E z − z*|²                what is wrong with all of them: their age, and few samples
    signal   E|E z − mean of all|²      what distinguishes images

each averaged over images, so that E|z − z*|² = noise + history + bias. All are estimated without bias, from pairs of
draws: two draws of an image with the same history and other companions differ by noise alone, two with different
histories by noise and history, and their errors have the product of the bias.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.augment import Normalization, view_specs
from momentum2.config import Config
from momentum2.data import Dataset, Loader, open_dataset
from momentum2.data.views import ViewBatches
from momentum2.errors import UserError, called
from momentum2.methods import TeacherMethod
from momentum2.methods.method import place_of_student
from momentum2.norms import MomentumBatchNorm, convert_norms, momentum_norms
from momentum2.norms.base import PlainBatchNorm
from momentum2.norms.momentum import commit_all, set_alpha
from momentum2.optim import build_optimizer
from momentum2.seeds import derive
from momentum2.teacher import MomentumTeacher
from momentum2.terminal import progress
from momentum2.training.build import build_method, make_job
from momentum2.training.by_view import choose_threads
from momentum2.training.device import choose_device, keep_large_blocks
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper

#: Mean and variance of every device's history, (devices, c) each, for every norm of a network.
Histories = Sequence[tuple[Tensor, Tensor]]

#: Devices whose histories are kept and measured, where the batch has so many. More would rarely have an image twice.
_HISTORIES = 4
#: How fast torch's running statistics, which EMAN follows, forget: per forward, of which a step has two.
_RUNNING = 1 - 0.9**2


@dataclass(frozen=True)
class Instrument:
    """What is measured, and how precisely.

    Args:
        shares: When: shares of the training.
        alphas: Weights of the batch in Momentum BN, fixed; 1 is BN and always measured.
        samples: Samples per device.
        window: The most steps for which a history has been kept when it is measured.
        pool: Images whose targets are measured.
        reference: Images whose statistics stand for those of all data, the pool among them.
        draws: Random divisions of the pool into devices, at least 3.
    """

    shares: tuple[float, ...]
    alphas: tuple[float, ...]
    samples: tuple[int, ...]
    window: int
    pool: int
    reference: int
    draws: int


@dataclass(frozen=True)
class Stability:
    """The four variances of the module's docstring, and what follows from them."""

    noise: float
    history: float
    bias: float
    signal: float

    @property
    def ratios(self) -> dict[str, float]:
        """What is wrong with a target, in units of the signal, and the sum of it."""
        found = {name: getattr(self, name) / self.signal for name in ("noise", "history", "bias")}
        return {**found, "sum": sum(found.values())}


def decompose(z: Tensor, full: Tensor, devices: Tensor | None = None) -> Stability:
    """The variances of R draws of N targets.

    Args:
        z: R×N×d, each draw with companions of its own.
        full: N×d, the targets with the statistics of all data.
        devices: R×N, whose history each target was made with; None where there is none, or one for all.
    """
    z, full = z.double(), full.double()
    draws, n = z.shape[:2]
    other = ~torch.eye(draws, dtype=torch.bool)[:, :, None].expand(-1, -1, n)
    # Without a history every draw is independent of every other, as if each had a history of its own.
    own = torch.arange(draws)[:, None].expand(-1, n) if devices is None else devices
    apart = own[:, None] != own[None]  # R×R×N, as all that follows
    alike = other if devices is None else other & ~apart
    products = torch.einsum("rnd,snd->rsn", z, z)
    halves = (z[:, None] - z[None]).square().sum(3) / 2  # and not from products: 0 is 0
    noise = halves[alike].mean()
    error = z - full
    bias = torch.einsum("rnd,snd->rsn", error, error)[apart].mean()

    # Products of different images, of those draws that share nothing: all less those of the same history.
    member = F.one_hot(own).double()  # R×N×G
    sums, counts = torch.einsum("rng,rnd->rgd", member, z), member.sum(1)
    total, size = sums.sum(1), counts.sum(1)
    pairs = other[:, :, 0]
    between = (total @ total.T - torch.einsum("rgd,sgd->rs", sums, sums))[pairs].sum()
    between = between - products[apart].sum()
    count = (size[:, None] * size - counts @ counts.T)[pairs].sum() - apart.sum()
    signal = products[apart].mean() - between / count
    history = 0.0 if devices is None else (halves[apart].mean() - noise).item()
    return Stability(noise.item(), history, bias.item(), signal.item())


def probe(
    network: nn.Module, devices: int, alpha: float = 1.0, histories: Histories | None = None
) -> nn.Module:
    """A network with the very weights of `network` and norms of its own: Momentum BN of so many devices.

    α = 1 is BN of a device's samples, and with all samples on one device synced BN; α = 0 uses the history alone, as
    EMAN does. The given histories go round the devices.
    """
    probing = copy.deepcopy(network, {id(p): p for p in network.parameters()})
    convert_norms(probing, "momentum", devices)
    norms = list(momentum_norms(probing))
    set_alpha(norms, alpha)
    for norm in norms:
        norm.training = True  # not `train`, which would reach the dropout inside some
    if histories is not None:
        turns = torch.arange(devices)
        for norm, (mean, var) in zip(norms, histories, strict=True):
            norm.set_histories(mean[turns % len(mean)], var[turns % len(var)])
            norm.num_batches_tracked.fill_(1)
    return probing


@torch.no_grad()
def draw_targets(
    network: nn.Module,
    images: Tensor,
    orders: Tensor,
    samples: int,
    alpha: float = 1.0,
    histories: Histories | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The outputs (R×N×d) of N images in each of R orders, and whose history each was made with (R×N).

    In each order, every `samples` consecutive images are on one device; what changes the network is forgotten.
    """
    devices = len(images) // samples
    probing = probe(network, devices, alpha, histories)
    z = torch.stack([probing(images[order])[order.argsort()] for order in orders])
    kept = 1 if histories is None else len(histories[0][0])
    if kept == 1:
        return z, None
    turns = torch.arange(devices).repeat_interleave(samples) % kept
    return z, torch.stack([turns[order.argsort()] for order in orders])


def measure(
    network: nn.Module,
    images: Tensor,
    full: Tensor,
    orders: Tensor,
    samples: int,
    alpha: float = 1.0,
    histories: Histories | None = None,
) -> dict[str, Any]:
    """`Stability` of the targets of `images`, and the standard errors of its signal and ratios.

    They come from the jackknife over draws and are those of this training: another seed may differ by more.
    """
    z, devices = draw_targets(network, images, orders, samples, alpha, histories)
    if not z.isfinite().all():
        raise UserError("The targets became NaN or infinite. This training has diverged; leave its seed out.")
    z = F.normalize(z.double(), dim=2)
    # Companions are drawn from a pool without replacement, which takes (N−n)/(N−1) of the variance of their mean.
    share = (len(images) - samples) / (len(images) - 1)

    def found(kept: Tensor) -> Stability:
        parts = decompose(z[kept], full, None if devices is None else devices[kept])
        return replace(parts, noise=parts.noise / share)

    every = torch.arange(len(z))
    if found(every).signal < 1e-9:
        raise UserError(
            "The targets of all images are the same. This training has collapsed; leave its seed out."
        )
    whole, without = found(every), [found(every[every != i]) for i in every]
    errors = {name: _jackknife([parts.ratios[name] for parts in without]) for name in whole.ratios}
    errors["signal"] = _jackknife([parts.signal for parts in without])
    return {**asdict(whole), "errors": errors}


def _jackknife(values: list[float]) -> float:
    n, mean = len(values), sum(values) / len(values)
    return math.sqrt((n - 1) / n * sum((v - mean) ** 2 for v in values))


def aged(age: float, alpha: float) -> float:
    """The mean age of a history in steps, at the forward after a commit with α; for a fixed α it goes to 1/α.

    What is committed then is one step old, and what was there before one step older.
    """
    return 1 + (1 - alpha) * age


class _Shadow:
    """A teacher with the weights of another and histories of its own, for a device's samples and a fixed α."""

    def __init__(self, network: nn.Module, alpha: float, samples: int, batch: int) -> None:
        self.alpha, self.samples = alpha, samples
        devices = min(_HISTORIES, batch // samples)
        self.images = samples * devices  # of a batch: a device's history comes from its own samples alone
        self.network = probe(network, devices)
        self.norms = list(momentum_norms(self.network))
        self.commits, self.age = 0, 0.0

    @torch.no_grad()
    def follow(self, views: Sequence[Tensor]) -> None:
        """A step: its forwards and its commit.

        Until there are 1/α commits, the history is their plain mean: it then varies as one that is as old as the run.
        """
        alpha = max(self.alpha, 1 / (self.commits + 1))
        set_alpha(self.norms, alpha)
        for view in views:
            self.network(view[: self.images])
        commit_all(self.norms)
        self.commits, self.age = self.commits + 1, aged(self.age, alpha)


class _Watched:
    """A training's own teacher, one that follows as EMAN does, and their ages."""

    def __init__(self, method: TeacherMethod) -> None:
        self.method, self.eman = method, MomentumTeacher(method.student, "ema")
        self.age = self.running_age = self.eman_age = 0.0

    def follow(self, k: int) -> None:
        """After step k."""
        m = self.method.schedule.m(k)
        self.eman.update(self.method.student, weight=m)
        self.age = aged(self.age, _alpha(self.method, k) if k else 1.0)
        self.running_age = aged(self.running_age, _RUNNING)
        self.eman_age = (1 - m) * (self.eman_age + 1) + m * self.running_age

    def eman_histories(self) -> Histories:
        norms = [m for m in self.eman.network.modules() if isinstance(m, PlainBatchNorm)]
        return [(norm.running_mean[None], norm.running_var[None]) for norm in norms]


def _alpha(method: TeacherMethod, k: int) -> float:
    """Of step k, by the schedule that every training here has."""
    alpha = method.schedule.alpha(k)
    assert alpha != "auto"
    return alpha


def _histories(norms: Sequence[MomentumBatchNorm]) -> Histories:
    """Those of the first few devices."""
    return [(mean[:_HISTORIES], var[:_HISTORIES]) for mean, var in (norm.histories() for norm in norms)]


def run_seed(config: Config, instrument: Instrument, folder: Path) -> dict[str, Any]:
    """Train as `config` says and measure along the way; returns what is known of this seed."""
    began = time.process_time()
    keep_large_blocks()
    seed, device = config.train.seed, choose_device(config.train.device)
    with called({"data.root": "data"}):
        dataset = open_dataset(config.data, seed=seed)
    if len(dataset) < instrument.reference:
        raise UserError(
            f"The statistics of all data are those of {instrument.reference:,} images, but there are only "
            f"{len(dataset):,}. Use a larger data set."
        )
    plan = resolve(config, len(dataset))
    method = build_method(config, plan, len(dataset.class_names or ()))
    assert isinstance(method, TeacherMethod)
    method.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    job = make_job(config, plan, method, dataset, folder, device, None)
    named = method.named_parameters()
    optimizer = build_optimizer(
        named, config.optim, job.lr_peak, method.constant_lr, place_of_student(method)
    )
    threads = choose_threads(method, config.train, device, None)
    take_step = Stepper(method.train(), optimizer, config.train, config.optim, device, threads)
    reference = _images(config, dataset, instrument.reference)
    ends = {max(1, round(share * plan.steps)): share for share in instrument.shares}
    shadows: dict[int, list[_Shadow]] = {}
    watched, points = _Watched(method), list[dict[str, Any]]()
    with progress(f"Seed {seed}", plan.steps, "steps") as advance, job.batches(0) as batches:
        for batch in batches:
            k, inputs = batch.step, batch.inputs(0, 1)
            for end in ends:
                if k == max(0, end - instrument.window):
                    shadows[end] = list(_shadows(method.teacher.network, instrument, config.train.batch_size))
            for shadow in (each for of_end in shadows.values() for each in of_end):
                shadow.follow(inputs[0])  # before the step: with the weights of this one
            take_step(k, job.lr(k), _always(inputs))
            watched.follow(k)
            advance(1)
            if k + 1 in ends:
                found = _measure_all(config, instrument, watched, shadows.pop(k + 1), reference, k + 1)
                points += [{"share": ends[k + 1], "step": k + 1, **point} for point in found]
            if k + 1 == max(ends):
                break
    return {
        "seed": seed,
        "images": len(dataset),
        "steps": plan.steps,
        "cpu_seconds": round(time.process_time() - began, 1),
        "points": points,
    }


def _always(inputs: tuple[Any, ...]) -> Callable[[int], tuple[Any, ...]]:
    return lambda i: inputs


def _shadows(network: nn.Module, instrument: Instrument, batch: int) -> Iterator[_Shadow]:
    return (_Shadow(network, a, n, batch) for a in instrument.alphas for n in instrument.samples)


def _images(config: Config, dataset: Dataset, count: int) -> Tensor:
    """Images in a view that stays: one half as the first view of a training has them, the other as the second."""
    specs = view_specs(config.views, config.data.image_size, Normalization.of(config.data))
    loader = Loader(dataset, specs, seed=derive(config.train.seed, "pool"), batch_size=count, stop=1)
    with ViewBatches(loader, specs) as batches:
        (views,) = (batch.inputs(0, 1)[0] for batch in batches)
    images = views[0].clone()
    images[1::2] = views[1][1::2]
    return images


def _measure_all(
    config: Config,
    instrument: Instrument,
    watched: _Watched,
    shadows: Sequence[_Shadow],
    reference: Tensor,
    done: int,
) -> Iterator[dict[str, Any]]:
    """Every norm after `done` steps."""
    method, batch = watched.method, config.train.batch_size
    network = method.teacher.network
    pool = reference[: instrument.pool]
    generator = torch.Generator().manual_seed(derive(config.train.seed, "orders", done))
    # The same for all norms, so that they differ in nothing else.
    orders = torch.stack([torch.randperm(len(pool), generator=generator) for _ in range(instrument.draws)])
    with torch.no_grad():
        full = F.normalize(probe(network, 1)(reference)[: len(pool)].double(), dim=1)

    def point(
        norm: str,
        samples: int,
        alpha: float,
        histories: Histories | None,
        age: float,
        shown: int | None,
    ) -> dict[str, Any]:
        found = measure(network, pool, full, orders, samples, alpha, histories)
        return {"norm": norm, "alpha": alpha, "samples": shown, "age": (1 - alpha) * age, **found}

    for n in instrument.samples:
        yield point("local", n, 1.0, None, 0.0, n)
    for shadow in shadows:
        yield point(
            "momentum", shadow.samples, shadow.alpha, _histories(shadow.norms), shadow.age, shadow.samples
        )
    yield point("synced", batch, 1.0, None, 0.0, batch)
    yield point("ema", batch, 0.0, watched.eman_histories(), watched.eman_age, None)
    own = batch // config.train.devices if isinstance(config.train.devices, int) else batch
    teacher = _histories(list(momentum_norms(method.teacher)))
    yield point("scheduled", own, _alpha(method, min(done, method.schedule.K - 1)), teacher, watched.age, own)
