"""The methods on D devices once more, in plain torch and by the formulas alone: the judge of momentum2.

Nothing here calls momentum2's arithmetic. Of a method it takes over the start: the layers, which are torch's
and torchvision's own, their weights and MoCo's queue. Every batch norm is replaced by `Norm`, which keeps the
statistics of each device apart. Convolutions, linear layers, ReLU and pooling treat each sample alone, so all
devices go through one network together, and one autograd graph has the gradients between them.

Micro-batch i of A is rows [iB/A, (i+1)B/A) of the batch; device d has n = B/(A·D) consecutive rows of it.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.seeds import derive


@dataclass(frozen=True)
class Settings:
    """What a run is decided by; `alpha` None is the cosine from `alpha_base` to 0."""

    method: str
    steps: int
    lr: Callable[[int], float]
    student_norm: str = "local"  # local, synced
    teacher_norm: str = "momentum"  # local, synced, momentum, shuffle, ema
    devices: int = 1
    accumulate: int = 1
    alpha: float | None = None
    alpha_base: float = 1.0
    m_base: float = 0.01
    m_constant: bool = False
    history: str = "local"
    temperature: float = 0.2
    sgd_momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0


class Norm(nn.Module):
    """Batch norm by formula. Row d of `means` and `vars`, (D, c) each, is what device d keeps, for itself.

    `kind` says which statistics normalize a device's samples: "local" their own; "synced" those of all samples;
    "momentum" α · own + (1 − α) · history, or their own while there is no history; "ema" the kept ones.
    """

    def __init__(self, start: "_BatchNorm | Norm", kind: str, devices: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = start.weight, start.bias, start.eps
        self.kind, self.alpha = kind, 1.0
        if isinstance(start, Norm):
            mean, var, self.has_history = start.means[0], start.vars[0], start.has_history
        else:
            mean, var, self.has_history = (
                start.running_mean,
                start.running_var,
                bool(start.num_batches_tracked),
            )
        self.means, self.vars = (torch.stack([statistic] * devices) for statistic in (mean, var))
        self.seen: list[tuple[Tensor, Tensor]] = []  # since the last commit

    def forward(self, x: Tensor) -> Tensor:
        together, devices = x.shape, len(self.means)
        assert len(x) % devices == 0
        x = x.view(devices, len(x) // devices, *x.shape[1:])  # (D, n, c, ...)
        if self.kind == "ema":
            return self._normalized(x, self.means, self.vars).view(together)
        mean, var = moments(x, over_devices=self.kind == "synced")
        if self.kind == "momentum":
            self.seen.append((mean.detach(), var.detach()))
            if self.has_history:
                mean, var = self._moved(mean, var)
        else:  # torch's rule for the running statistics: a tenth of the mean and of the unbiased variance
            values = x.numel() // x.shape[2] // (1 if self.kind == "synced" else devices)
            self.means = 0.9 * self.means + 0.1 * mean.detach()
            self.vars = 0.9 * self.vars + 0.1 * var.detach() * values / (values - 1)
        return self._normalized(x, mean, var).view(together)

    def _normalized(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = (1.0 if self.weight is None else self.weight) / (var + self.eps).sqrt()
        y = (x - spread(mean, x)) * spread(scale, x)
        return y if self.bias is None else y + spread(self.bias, x)

    def _moved(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return (
            self.alpha * mean + (1 - self.alpha) * self.means,
            self.alpha * var + (1 - self.alpha) * self.vars,
        )

    def commit(self, history: str = "local") -> None:
        """Move each device's history by the mean of all that it saw in this step."""
        mean = sum(m for m, _ in self.seen) / len(self.seen)
        var = sum(v for _, v in self.seen) / len(self.seen)
        self.means, self.vars = self._moved(mean, var) if self.has_history else (mean, var)
        if history == "global":
            self.means, self.vars = (s.mean(0).expand_as(s) for s in (self.means, self.vars))
        self.has_history = True
        self.seen.clear()


def moments(x: Tensor, over_devices: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the channels of x (D, n, c, ...): of each device, or of all, (D, c) each."""
    dims = [1, *range(3, x.dim())] + [0] * over_devices
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    return tuple(s.flatten(1).expand(len(x), x.shape[2]) for s in (mean, var))


def spread(values: Tensor, x: Tensor) -> Tensor:
    """(D, c) or (c,) in the shape in which it meets x (D, n, c, ...)."""
    return values.view(-1, 1, x.shape[2], *[1] * (x.dim() - 3))


def with_norms(network: nn.Module, kind: str, devices: int) -> nn.Module:
    """A copy of `network` whose batch norms are `Norm`s; nothing in it is momentum2's."""
    network = copy.deepcopy(network)
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm | Norm):
                setattr(parent, name, Norm(child, kind, devices))
    assert not [m for m in network.modules() if type(m).__module__.startswith("momentum2")]
    return network


def norms(network: nn.Module) -> dict[str, Norm]:
    return {name: m for name, m in network.named_modules() if isinstance(m, Norm)}


def cosine_schedule(base: float, k: int, steps: int) -> float:
    return base * (math.cos(math.pi * k / steps) + 1) / 2


def follow(teacher: nn.Module, student: nn.Module, m: float) -> None:
    """ξ ← (1 − m)·ξ + m·θ, by name."""
    theirs = dict(student.named_parameters())
    with torch.no_grad():
        for name, p in teacher.named_parameters():
            p.copy_((1 - m) * p + m * theirs[name])


class Oracle:
    """A run. `step` takes the whole batch's views, (B, 3, s, s) each, and gives the loss of that step."""

    def __init__(self, method: nn.Module, settings: Settings) -> None:
        """Start where `method`, a fresh momentum2 method in fp64, starts; it is not touched."""
        self.s, self.k = settings, 0
        first, second = ("f", "h") if settings.method == "simsiam" else ("student", "predictor")
        self.student = with_norms(method.get_submodule(first), settings.student_norm, settings.devices)
        self.trained = {first: self.student}
        if hasattr(method, second):
            self.predictor = with_norms(method.get_submodule(second), settings.student_norm, settings.devices)
            self.trained[second] = self.predictor
        if settings.method in ("byol", "moco"):
            kind = "local" if settings.teacher_norm == "shuffle" else settings.teacher_norm
            self.teacher = with_norms(self.student, kind, settings.devices).requires_grad_(False)
        if settings.method == "moco":
            self.queue, self.end = method.get_buffer("queue").clone(), 0
        self.velocity: dict[str, Tensor] = {}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained ones, by their names in the method."""
        for prefix, network in self.trained.items():
            for name, p in network.named_parameters():
                if p.requires_grad:
                    yield f"{prefix}.{name}", p

    def step(self, views: list[Tensor]) -> float:
        s, k = self.s, self.k
        alpha = cosine_schedule(s.alpha_base, k, s.steps) if s.alpha is None else s.alpha
        m = s.m_base if s.m_constant else cosine_schedule(s.m_base, k, s.steps)
        if s.method in ("byol", "moco"):
            for norm in norms(self.teacher).values():
                norm.alpha = alpha
        self.order = torch.Generator().manual_seed(derive(s.seed, k, "shuffle"))
        self.keys: list[Tensor] = []

        rows = len(views[0]) // s.accumulate
        micro_batches = [[v[i * rows : (i + 1) * rows] for v in views] for i in range(s.accumulate)]
        loss = torch.stack([getattr(self, s.method)(*micro) for micro in micro_batches]).mean()
        self._sgd(loss, s.lr(k))
        if s.method in ("byol", "moco"):
            self._teach(m)
        if s.method == "moco":
            for key in torch.cat(self.keys):
                self.queue[self.end] = key
                self.end = (self.end + 1) % len(self.queue)
        self.k += 1
        return loss.item()

    def _sgd(self, loss: Tensor, lr: float) -> None:
        trained = ((name, p) for name, p in self.parameters() if p.requires_grad)  # SimCLR's last bias is not
        names, parameters = zip(*trained, strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for name, p, g in zip(names, parameters, gradients, strict=True):
                g = g + self.s.weight_decay * p
                self.velocity[name] = self.s.sgd_momentum * self.velocity.get(name, 0) + g
                # SimSiam's predictor keeps the first learning rate.
                p -= (self.s.lr(0) if name.startswith("h.") else lr) * self.velocity[name]

    def _teach(self, m: float) -> None:
        follow(self.teacher, self.student, m)
        theirs = norms(self.student)
        for name, norm in norms(self.teacher).items():
            if norm.kind == "momentum":
                norm.commit(self.s.history)
            elif norm.kind == "ema":  # the student's of device 0, on all devices
                norm.means = (1 - m) * norm.means + m * theirs[name].means[0]
                norm.vars = (1 - m) * norm.vars + m * theirs[name].vars[0]

    def _over_devices(self, loss: Callable[..., Tensor], *outputs: Tensor) -> Tensor:
        """The mean of the losses of the devices, each of its own rows of the outputs."""
        parts = zip(*(x.chunk(self.s.devices) for x in outputs), strict=True)
        return torch.stack([loss(*of_device) for of_device in parts]).mean()

    def byol(self, v: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            zv, zw = self.teacher(v), self.teacher(w)
        qv, qw = self.predictor(self.student(v)), self.predictor(self.student(w))
        return self._over_devices(
            lambda qv, qw, zv, zw: (2 - 2 * cosines(qv, zw)).mean() + (2 - 2 * cosines(qw, zv)).mean(),
            *(qv, qw, zv, zw),
        )

    def simsiam(self, v: Tensor, w: Tensor) -> Tensor:
        zv, zw = self.student(v), self.student(w)
        pv, pw = self.predictor(zv), self.predictor(zw)
        return self._over_devices(
            lambda pv, pw, zv, zw: -cosines(pv, zw).mean() / 2 - cosines(pw, zv).mean() / 2,
            *(pv, pw, zv.detach(), zw.detach()),
        )

    def moco(self, v: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            if self.s.teacher_norm == "shuffle":
                order = torch.randperm(len(w), generator=self.order)
                keys = torch.empty(len(w), self.queue.shape[1], dtype=w.dtype)
                keys[order] = self.teacher(w[order])
            else:
                keys = self.teacher(w)
        keys, queue = unit(keys), self.queue.clone()
        self.keys.append(keys)

        def contrast(q: Tensor, key: Tensor) -> Tensor:
            positive = (q * key).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ queue.T], 1) / self.s.temperature
            return (logits.logsumexp(1) - logits[:, 0]).mean()

        return self._over_devices(contrast, unit(self.student(v)), keys)

    def simclr(self, v: Tensor, w: Tensor) -> Tensor:
        z = torch.cat([unit(self.student(v)), unit(self.student(w))])
        similar = z @ z.T / self.s.temperature
        n = len(v)
        terms = []
        for i in range(2 * n):
            others = torch.cat([similar[i, :i], similar[i, i + 1 :]])
            terms.append(others.logsumexp(0) - similar[i, (i + n) % (2 * n)])
        return torch.stack(terms).mean()


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return (unit(a) * unit(b)).sum(1)
