"""What the training loop asks of a method, and nothing else."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import ClassVar, NamedTuple, cast

from torch import Tensor, nn

from momentum2.backbones import Encoder
from momentum2.config import Config, Network, TeacherNormName
from momentum2.norms import convert_norms, momentum_norms
from momentum2.norms.momentum import Alpha, alphas_of, commit_all, set_alpha
from momentum2.schedules import Schedule
from momentum2.teacher import MomentumTeacher, TeacherNorm

#: What methods with a projector read of the model.
PROJECTOR = frozenset({"model.projector_hidden", "model.projector_out"})


class Output(NamedTuple):
    """Result of one micro-batch.

    The loss; N×d outputs if their spread should be watched for collapse; numbers to log; and what `keep` should keep.
    """

    loss: Tensor
    z: Tensor | None
    metrics: dict[str, Tensor]
    kept: Tensor | None = None


class Method(nn.Module, ABC):
    """A network that turns the views of a batch into a loss.

    For step k the loop calls `before_step(k)`, then `forward` and `keep` once per micro-batch, then the optimizer,
    then `after_step(k)`. Everything that must survive a restart is in parameters and persistent buffers.
    """

    #: Whether it has a teacher: its m, its norms and their α are then shown, logged and checked.
    has_teacher: ClassVar[bool] = False
    #: The norms that its teacher may have.
    teacher_norms: ClassVar[frozenset[TeacherNormName]] = frozenset({"local", "synced", "momentum", "ema"})
    #: Whether it learns from labels.
    needs_labels: ClassVar[bool] = False
    #: Whether it can leave the encoder as it is (`method.freeze_encoder`).
    can_freeze: ClassVar[bool] = False
    #: How many views of an image it may be given.
    views: ClassVar[range] = range(2, 3)
    #: The settings that it reads, of those that not all methods do.
    reads: ClassVar[frozenset[str]] = frozenset()
    #: Parameters whose names start so keep the peak learning rate for the whole run.
    constant_lr: tuple[str, ...] = ()

    @classmethod
    def norms_in_heads(cls, config: Config) -> bool:
        """Whether there are batch norms after the encoder."""
        return True

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise a `SettingError` for settings that do not work with the method."""

    @classmethod
    def idle(cls, config: Config) -> set[str]:
        """The settings that this method, or every method, reads and that have no effect with this config."""
        method = config.method
        if "momentum" not in {method.student_norm, method.teacher_norm if cls.has_teacher else None}:
            return {"method.alpha", "method.alpha_base", "method.compat"}
        return set() if method.alpha == "cosine" else {"method.alpha_base"}

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule

    def before_step(self, k: int) -> None:
        """Set the α of step k in every Momentum BN, of the teacher and of the student, or have them choose it."""
        set_alpha(list(momentum_norms(self)), self.schedule.alpha(k))

    @abstractmethod
    def forward(self, views: list[Tensor], labels: Tensor | None) -> Output:
        """Loss of one micro-batch; each view is N×3×S×S, normalized."""

    def keep(self, output: Output) -> None:
        """Keep what `after_step` needs to know about a micro-batch.

        `forward` may be compiled, and a growing list in it would cause recompilation.
        """

    def after_step(self, k: int) -> None:
        """Commit the statistics of every Momentum BN but a teacher's, whose own `update` commits them."""
        for part in self.children():
            if not isinstance(part, MomentumTeacher):
                commit_all(list(momentum_norms(part)))

    @abstractmethod
    def encoders(self) -> dict[Network, Encoder]:
        """The encoders by name, `student` and, if there is one, `teacher`; the one to export comes first."""

    def watch(self, k: int) -> dict[str, float | Tensor]:
        """Values of step k to log, taken before `after_step`: where there is Momentum BN, its α."""
        return _logged(self, self.schedule.alpha(k))


def _logged(network: nn.Module, alpha: Alpha) -> dict[str, float | Tensor]:
    """The α of a network's Momentum BN as it is logged; none without."""
    norms = list(momentum_norms(network))
    if not norms:
        return {}
    if alpha != "auto":
        return {"alpha": alpha}
    found = alphas_of(norms)
    values = {"alpha": found.mean(), "alpha_min": found.min(), "alpha_max": found.max()}
    return {**values, "alpha_first": found[0], "alpha_last": found[-1]}


def places_of(method: Method) -> dict[Network, str]:
    """Where in the method each of its encoders is, by name, the one to export first."""
    names = {id(module): name for name, module in method.named_modules()}
    return {network: names[id(encoder)] for network, encoder in method.encoders().items()}


def place_of_student(method: Method) -> tuple[str, Encoder] | None:
    """Where in the method the encoder that is trained is, by name, and itself; None where there is none."""
    encoder = method.encoders().get("student")
    return None if encoder is None else (places_of(method)["student"], encoder)


class ViewByView(Method):
    """A method whose views meet in the loss alone, so that a CPU may work on several of them at a time.

    `forward` is made of `encode` and `meet`, and so is the step of `momentum2.training.by_view`. A subclass with a
    `forward` of its own is asked for that.
    """

    @abstractmethod
    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        """What the networks make of view i (N×3×S×S), with or without gradient; it changes only their buffers."""

    @abstractmethod
    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        """The loss of the micro-batch, from what `encode` made of each view."""

    def forward(self, views: list[Tensor], labels: Tensor | None) -> Output:
        return self.meet([self.encode(i, view) for i, view in enumerate(views)], labels)


def encoder_of(network: nn.Module) -> Encoder:
    """The encoder in a network that has a head behind it."""
    return cast(Encoder, network.get_submodule("encoder"))


class TeacherMethod(Method):
    """A method whose student (encoder, then projector) has a teacher that follows it."""

    has_teacher = True
    reads = PROJECTOR | {
        *("method.teacher_norm", "method.history", "method.export"),
        *("method.weight_momentum", "method.weight_schedule", "method.reference_batch"),
    }

    @classmethod
    def idle(cls, config: Config) -> set[str]:
        history = {"method.history"} if config.method.teacher_norm != "momentum" else set()
        return super().idle(config) | history

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, g: nn.Module, devices: int) -> None:
        super().__init__(schedule)
        method = config.method
        self.student = nn.Sequential(OrderedDict(encoder=f, projector=g))
        norms = convert_norms(self.student, method.student_norm, devices, method.compat)
        # Shuffling BN is a permutation around a teacher with local statistics. Without any batch norm there are no
        # statistics, and the teacher follows the weights alone.
        norm: TeacherNorm = "local" if method.teacher_norm == "shuffle" else method.teacher_norm
        norm = norm if norms else "ema"
        self.teacher = MomentumTeacher(self.student, norm, method.history, devices, method.compat)
        self.exported: Network = method.export or "teacher"

    def after_step(self, k: int) -> None:
        """ξ ← (1−m)ξ + mθ, and the commit of the statistics, with the α that `before_step` set."""
        super().after_step(k)  # first: an EMA of the statistics follows the student's newest
        self.teacher.update(self.student, weight=self.schedule.m(k))

    def encoders(self) -> dict[Network, Encoder]:
        both: dict[Network, Encoder] = {
            "teacher": encoder_of(self.teacher.network),
            "student": encoder_of(self.student),
        }
        return {self.exported: both.pop(self.exported), **both}

    def watch(self, k: int) -> dict[str, float | Tensor]:
        drift = {"statistics_drift": self.teacher.drift()} if any(momentum_norms(self.teacher)) else {}
        return {"m": self.schedule.m(k), **_logged(self.teacher, self.schedule.alpha(k)), **drift}
