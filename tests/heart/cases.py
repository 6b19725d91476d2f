"""What the tests of this folder run: each case as momentum2's config and as the oracle's settings."""

from dataclasses import dataclass, fields

from oracle import Settings, cosine_schedule

from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
)

DEVICES = 4
M, SEED, TEMPERATURE = 0.3, 3, 0.2


@dataclass(frozen=True)
class Case:
    """One run; `alpha` None is the cosine from `alpha_base`."""

    method: str
    student: str
    teacher: str = "momentum"
    alpha: float | None = None
    alpha_base: float = 1.0
    history: str = "local"
    accumulate: int = 1
    steps: int = 10
    backbone: str = "resnet18"

    def __str__(self) -> str:
        """What is not as usual, such as `byol-local-momentum-alpha=0.5`."""
        norms = [self.student, self.teacher] if self.has_teacher else [self.student]
        values = {
            f.name: getattr(self, f.name) for f in fields(self)[3:7] if getattr(self, f.name) != f.default
        }
        return "-".join([self.method, *norms, *(f"{name}={value}" for name, value in values.items())])

    @property
    def has_teacher(self) -> bool:
        return self.method in ("byol", "moco")

    @property
    def batch(self) -> int:
        """A device has 8 images of each micro-batch: with fewer, training soon makes much of the last bit."""
        return 8 * DEVICES * self.accumulate

    def config(self) -> Config:
        return Config(
            method=MethodConfig(
                self.method,
                student_norm=self.student,
                teacher_norm=self.teacher,
                alpha="cosine" if self.alpha is None else self.alpha,
                alpha_base=self.alpha_base,
                weight_momentum=M,
                weight_schedule="constant" if self.method == "moco" else "cosine",
                reference_batch=self.batch,
                history=self.history,
                temperature=TEMPERATURE,
                queue_size=self.batch * 3 // 2,  # every other step's keys go round its end
            ),
            model=ModelConfig(self.backbone, "small", 0.0625, projector_hidden=24, projector_out=16),
            data=DataConfig("shapes", split="test", train_size=5 * self.batch, image_size=16, cache="off"),
            train=TrainConfig(
                steps=self.steps,
                batch_size=self.batch,
                accumulate=self.accumulate,
                devices=DEVICES,
                precision="fp32",
                seed=SEED,
                checkpoint_every=7,
                keep=3,  # all: after 7, 14 and 20 steps
                device="cpu",
                threads=1,
            ),
            optim=OptimConfig(lr=0.02 * 256 / self.batch),
            monitor=MonitorConfig(log_every=1, report=False),
        )

    def settings(self) -> Settings:
        return Settings(
            method=self.method,
            steps=self.steps,
            lr=lambda k: cosine_schedule(0.02, k, self.steps),
            student_norm=self.student,
            teacher_norm=self.teacher,
            devices=DEVICES,
            accumulate=self.accumulate,
            alpha=self.alpha,
            alpha_base=self.alpha_base,
            m_base=M,
            m_constant=self.method == "moco",
            history=self.history,
            temperature=TEMPERATURE,
            seed=SEED,
        )
