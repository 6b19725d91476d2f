"""Every setting of a run, typed and frozen. A run is a pure function of one `Config`.

One line per field: it is the help text of the command line. Fields that decide *what* is computed are
separate from those that only decide *how fast* or *how often we look* (`MAY_CHANGE_ON_RESUME`).
Numbers have their limits in their types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass(frozen=True)
class Limits:
    """Smallest and largest value of a number, or length of a list; `settings.py` keeps to them.

    Every number has a largest value, far above what anybody needs: a slip of the finger gets a sentence, not the
    machine's memory.
    """

    low: float
    high: float = 10**9


Count = Annotated[int, Limits(1)]
CountOrZero = Annotated[int, Limits(0)]
Share = Annotated[float, Limits(0, 1)]
Positive = Annotated[float, Limits(1e-6, 10**6)]
NotNegative = Annotated[float, Limits(0, 10**6)]
Width = Annotated[float, Limits(1e-3, 64)]
Layer = Annotated[int, Limits(1, 2**18)]  # numbers in the output of a layer
Side = Annotated[int, Limits(8, 4096)]  # of an image, in pixels
Bands = Annotated[int, Limits(1, 10_000)]  # of an image
Batch = Annotated[int, Limits(1, 10**6)]
Processes = Annotated[int, Limits(1, 2**16)]
Workers = Annotated[int, Limits(0, 512)]
Threads = Annotated[int, Limits(0, 1024)]
Strength = Annotated[float, Limits(0, 10**4)]  # a multiplier of an augmentation

#: One number for all views, or one for each.
PerView = Strength | Annotated[list[Strength], Limits(1, 100)]
SharePerView = Share | Annotated[list[Share], Limits(1, 100)]
#: The name of a method, a backbone or a data set that was passed from Python as an object.
OWN: Literal["own"] = "own"
MethodName = Literal["byol", "moco", "simsiam", "simclr", "dino", "supervised", "own"]
NormName = Literal["local", "synced", "momentum"]
TeacherNormName = Literal["local", "synced", "momentum", "ema", "shuffle"]
History = Literal["local", "global"]
WeightSchedule = Literal["cosine", "constant"]
Compat = Literal["paper", "official"]
Stem = Literal["imagenet", "cifar", "small"]
StemInit = Literal["random", "cosines"]
DataName = Literal[
    "shapes",
    "folder",
    "cifar10",
    "cifar100",
    "stl10",
    "imagenet",
    "archive",
    "list",
    "shards",
    "table",
    "hf",
    "own",
    "none",
]
ExactOrder = Literal["exact", "feistel"]
Order = Literal["auto", "exact", "feistel"]
ViewRecipe = Literal["byol", "moco_v2", "simsiam", "simclr", "supervised", "evaluation", "multicrop"]
Cache = Literal["auto", "on", "off"]
Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
Repulsion = Literal["none", "batch"]
OptimName = Literal["sgd", "lars", "muon", "adamw"]
Resume = Literal["auto", "never", "must"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Network = Literal["teacher", "student"]


@dataclass(frozen=True)
class MethodConfig:
    """What is learned, and which statistics normalize it.

    Args:
        name: The method; Momentum² Teacher is byol with a momentum teacher_norm. own is a class passed from Python.
        student_norm: The student's BN statistics: of each device (local), of all devices (synced), or momentum.
        teacher_norm: The teacher's BN: the same, or the student's running statistics (ema), or MoCo's shuffling BN.
        alpha: Weight of the current batch in Momentum BN's statistics: cosine (alpha_base to 0), auto (chosen by each
            norm) or a number.
        alpha_base: Where the cosine schedule of alpha starts.
        weight_momentum: m_base, the share of the student that enters the teacher each step (0.01, not 0.99).
        weight_schedule: cosine lowers m from m_base to 0; constant keeps it (MoCo).
        reference_batch: Batch size for which weight_momentum is given; it scales with the batch (default: no scaling).
        history: The teacher's momentum statistics: one per device (local, the paper) or their mean (global).
        compat: paper for the paper's formulas, official for the arithmetic of the authors' code.
        repulsion: byol's loss: none (the paper's), or batch: contrast the teacher's output for the same image with its
            outputs for the rest of the batch and with the student's own outputs for other images.
        predictor: byol's predictor behind the student's projector; with repulsion it can be left out.
        temperature: Softmax temperature of the contrastive methods and of repulsion, and of DINO's student.
        queue_size: Number of negatives that MoCo keeps.
        teacher_temperature: Softmax temperature of DINO's teacher.
        teacher_temperature_start: Where its linear warm-up starts.
        teacher_temperature_warmup: Share of the run that its warm-up takes.
        center_momentum: Share of DINO's center that is kept each step; the rest is the mean of the teacher's outputs.
        freeze_last_layer: Share of the run, at its start, in which the last layer of DINO's projector is frozen.
        projector_norm: Batch norms in DINO's projector.
        freeze_encoder: Train only the classifier (method supervised).
        classifier_norm: Normalize the outputs of a frozen encoder's classifier by BN, as the paper does.
        export: The encoder to export and score: teacher or student (default: the teacher, if there is one).
    """

    name: MethodName = "byol"
    student_norm: NormName = "local"
    teacher_norm: TeacherNormName = "momentum"
    alpha: Literal["cosine", "auto"] | Share = "cosine"
    alpha_base: Share = 1.0
    weight_momentum: Share = 0.01
    weight_schedule: WeightSchedule = "cosine"
    reference_batch: Count | None = None
    history: History = "local"
    compat: Compat = "paper"
    repulsion: Repulsion = "none"
    predictor: bool = True
    temperature: Positive = 0.2
    queue_size: Annotated[int, Limits(1, 10**8)] = 65536
    teacher_temperature: Positive = 0.04
    teacher_temperature_start: Positive = 0.04
    teacher_temperature_warmup: Share = 0.0
    center_momentum: Share = 0.9
    freeze_last_layer: Share = 0.01
    projector_norm: bool = False
    freeze_encoder: bool = False
    export: Network | None = None
    classifier_norm: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        backbone: A torchvision network (resnet50), resnet10, or a timm network (timm/convnext_tiny); the
            command backbones lists them.
        stem: First layers of torchvision's ResNets: imagenet (7x7/2 and pooling), cifar (3x3/1) or small (3x3/2).
        width: Multiplier of such a ResNet's channels.
        projector_hidden: Hidden width of the projector.
        projector_out: Output width of projector and predictor.
        predictor_hidden: Hidden width of the predictor (default: that of the projector).
        weights: State dict (.safetensors or .pth) to start from.
        stem_init: Initialization of a ResNet's first layer: random, or cosines of rising frequency in opponent colors.
        zero_init_residual: Start a ResNet's residual branches at zero: the last BN weight of every block is 0.
        pretrained: Start from the weights that timm has published for this network; they are downloaded once.
        options: Arguments of the network's constructor, such as patch_size=4,drop_path_rate=0.1 (default: none).
    """

    backbone: str = "resnet50"
    stem: Stem = "imagenet"
    width: Width = 1.0
    projector_hidden: Layer = 4096
    projector_out: Layer = 256
    predictor_hidden: Layer | None = None
    weights: str | None = None
    zero_init_residual: bool = False
    stem_init: StemInit = "random"
    pretrained: bool = False
    options: list[str] | None = None


@dataclass(frozen=True)
class DataConfig:
    """Where images come from.

    Args:
        name: Kind of data set; shapes is drawn on the fly and needs no files, own is passed from Python.
        root: The folder, archive, list, table or shards: a path, a URL (s3://..., https://...) or a name on the Hub.
        split: The split to train on, also for classifiers; 80% is a share of all images, -20% the rest.
        test_split: The split to test on (used in eval_data only).
        train_size: Use only the first n images of a seeded order.
        image_size: Side in pixels of the square crops that the network sees.
        workers: Decoding processes; 0 decodes in the training process (default: 0 on a CPU, most cores beside a GPU).
        cache: Keep the decoded images in one memory-mapped file: auto (if they fit), on or off.
        cache_dir: Folder of the caches (default: the user's cache folder).
        download: Allow torchvision, or the Hugging Face Hub, to download the data set.
        max_bad_fraction: Stop if more than this share of the images cannot be read.
        channels: Channels of every image: 3 for colors, 1 for gray, or the number of bands.
        window: Values that become black and white in images of more than 8 bits: 0,4095, or one pair per channel.
        mean: Mean of each channel in [0, 1], subtracted before the network (default: ImageNet's).
        std: Standard deviation of each channel, by which it is then divided (default: ImageNet's).
        order: Shuffle all images at once (exact) or compute each position (feistel); auto: exact up to 10 million.
        revision: Commit of a data set on the Hugging Face Hub, 40 digits.
        image_column: Column of the images in a table (default: path, file, image or a similar name).
        label_column: Column of the labels in a table (default: label, class or a similar name, if there is one).
    """

    name: DataName = "folder"
    root: str | None = None
    split: str = "train"
    test_split: str = "test"
    train_size: Count | None = None
    image_size: Side = 224
    workers: Workers | None = None
    cache: Cache = "auto"
    cache_dir: str | None = None
    download: bool = False
    max_bad_fraction: Share = 0.01
    channels: Bands = 3
    window: list[float] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    order: Order = "auto"
    revision: str | None = None
    image_column: str | None = None
    label_column: str | None = None


@dataclass(frozen=True)
class ViewsConfig:
    """How one image becomes several views.

    Args:
        recipe: The named set of augmentations.
        repeat: How many times each view of the recipe is drawn: with 2, two views become four.
        crop_min: Smallest area of a random crop, as a share of the image (default: the recipe's).
        color: Multiplier of the strength of the recipe's color jitter. A multiplier or probability may also be one
            number per view, such as 1,0; the last one applies to all further views. 0 turns it off.
        blur: Multiplier of the recipe's blur probability.
        solarize: Multiplier of the recipe's solarize probability.
        small_crops: Number of small crops added by multicrop.
        small_size: Side in pixels of those small crops.
        flip: Multiplier of the recipe's probability of a horizontal flip.
        jitter: Multiplier of the recipe's probability of color jitter.
        gray: Multiplier of the recipe's probability of losing all color.
        vertical_flip: Probability of a vertical flip.
        rotate90: Probability of a rotation by 90, 180 or 270 degrees.
        channel_drop: Probability of losing one channel.
    """

    recipe: ViewRecipe = "byol"
    repeat: Annotated[int, Limits(1, 100)] = 1
    crop_min: Annotated[float, Limits(1e-6, 1)] | None = None
    color: PerView = 1.0
    blur: PerView = 1.0
    solarize: PerView = 1.0
    small_crops: Annotated[int, Limits(0, 100)] = 0
    small_size: Annotated[int, Limits(1, 4096)] = 96
    flip: PerView = 1.0
    jitter: PerView = 1.0
    gray: PerView = 1.0
    vertical_flip: SharePerView = 0.0
    rotate90: SharePerView = 0.0
    channel_drop: SharePerView = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large and on what.

    Args:
        epochs: Passes over the data.
        steps: Optimizer steps; overrides epochs.
        batch_size: Images per optimizer step, over all processes.
        accumulate: Micro-batches per optimizer step.
        devices: Number of devices of the algorithm, each with its own BN statistics and history. They run on any
            number of processes that divides it. auto is the number of processes at the first start, and is kept.
        precision: auto is bf16 on GPUs that have it, fp16 on older GPUs with tensor cores, else fp32. tf32 rounds the
            inputs of products on recent GPUs; fp32 does not.
        compile: Compile the networks with torch.compile.
        seed: Seed of every random draw.
        checkpoint_every: Steps between checkpoints.
        keep: Number of checkpoints to keep.
        device: auto, cpu, cuda, cuda:1, mps.
        threads: CPU threads per process; 0 uses the free cores.
        deterministic: On a GPU, use only algorithms that give the same bits every time (slower).
        recompute: Recompute the student's activations in the backward pass: less memory, more time. Not for batch norm.
    """

    epochs: Count = 100
    steps: Count | None = None
    batch_size: Batch = 256
    accumulate: Batch = 1
    devices: Literal["auto"] | Processes = "auto"
    precision: Precision = "auto"
    compile: bool = False
    seed: int = 0
    checkpoint_every: Count = 1000
    keep: Count = 2
    device: str = "auto"
    threads: Threads = 0
    deterministic: bool = False
    recompute: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule (after a linear warm-up, a cosine or milestones).

    Args:
        name: sgd, lars, adamw, or muon: orthogonalized momentum for matrices and convolutions, AdamW for all else.
        lr: Learning rate per 256 images of batch size.
        weight_decay: L2 decay; with adamw and muon, decay of the weights themselves.
        sgd_momentum: Momentum of the gradient.
        warmup_epochs: Epochs of linear warm-up.
        warmup_start: Share of the learning rate at the first step of the warm-up.
        clip_norm: Largest norm of the gradient (default: no clipping).
        exclude_bias_and_norm: Keep biases and norm parameters out of weight decay and LARS adaptation.
        lars_eta: Trust coefficient of LARS.
        nesterov: Nesterov's momentum (sgd, muon).
        milestones: Shares of the run after which the learning rate drops to a tenth: [0.6,0.8] (default: cosine).
        weight_decay_end: Where the cosine schedule of weight_decay ends, for adamw (default: no change).
        layer_decay: Multiplier of the learning rate from each layer to the one before it, for timm (default: none).
        encoder_lr: Multiplier of the encoder's learning rate.
        freeze_encoder_epochs: Epochs at the start in which only the heads learn.
    """

    name: OptimName = "sgd"
    lr: NotNegative = 0.05
    weight_decay: NotNegative = 1e-4
    sgd_momentum: Share = 0.9
    warmup_epochs: NotNegative = 0.0
    warmup_start: Share = 0.001
    clip_norm: Annotated[float, Limits(1e-12, 10**9)] | None = None
    exclude_bias_and_norm: bool = False
    lars_eta: NotNegative = 1e-3
    nesterov: bool = False
    milestones: Annotated[list[float], Limits(0, 1000)] | None = None
    weight_decay_end: NotNegative | None = None
    layer_decay: Annotated[float, Limits(1e-3, 1)] | None = None
    encoder_lr: Share = 1.0
    freeze_encoder_epochs: NotNegative = 0.0


@dataclass(frozen=True)
class MonitorConfig:
    """What is logged and watched during training.

    Args:
        log_every: Steps between two lines of metrics.jsonl.
        knn_every: Epochs between online kNN evaluations on eval_data; 0 for none.
        knn_images: Training images that are searched for neighbors before the last step (default: all of eval_data).
        knn_k: Number of neighbors that vote.
        knn_temperature: Temperature of the votes.
        tensorboard: Also write TensorBoard events (needs the tensorboard extra).
        wandb: Also send what is logged to Weights & Biases (needs the wandb extra).
        mlflow: Also send what is logged to MLflow (needs the mlflow extra).
        report: Write report.html at the end of the run.
        collapse_std: Alarm when the std of the unit-length outputs times sqrt(width) falls below this.
        collapse_rank: Alarm when their effective rank falls below this.
        collapse_steps: Number of consecutive logged steps before the collapse alarm.
        wait_fraction: Alarm when more than this share of the time is spent waiting for data.
        slow_step: Alarm when a step takes this many times the run's median.
    """

    log_every: Count = 10
    knn_every: CountOrZero = 0
    knn_images: Count | None = None
    knn_k: Count = 20
    knn_temperature: Positive = 0.07
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
    report: bool = True
    collapse_std: NotNegative = 0.1
    collapse_rank: NotNegative = 2.0
    collapse_steps: Count = 5
    wait_fraction: Share = 0.3
    slow_step: Annotated[float, Limits(1)] = 5.0


@dataclass(frozen=True)
class ObjectsConfig:
    """Objects passed to a run from Python, by class and digest. It is a record; nothing is imported from it.

    Args:
        method: Class of the method.
        encoder: The network.
        dataset: The images.
    """

    method: str | None = None
    encoder: str | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class Config:
    """A whole run.

    Args:
        method: What is learned.
        model: The network.
        data: The images to train on.
        eval_data: Labeled images for kNN and linear evaluation.
        views: Augmentation.
        train: Length, batch and device.
        optim: Optimizer.
        monitor: Logging and alarms.
        objects: Objects from Python.
    """

    method: MethodConfig = field(default_factory=MethodConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval_data: DataConfig = field(default_factory=lambda: DataConfig(name="none"))
    views: ViewsConfig = field(default_factory=ViewsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    objects: ObjectsConfig = field(default_factory=ObjectsConfig)


#: Fields that change speed, places or logging, and at most the order of sums in what is computed.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "data.root",
        "data.workers",
        "data.cache_dir",
        "data.download",
        "eval_data.root",
        "eval_data.workers",
        "eval_data.cache",
        "eval_data.cache_dir",
        "eval_data.download",
        "method.export",
        "train.checkpoint_every",
        "train.keep",
        "train.device",
        "train.threads",
        "train.deterministic",
        "train.recompute",
        "monitor",
    }
)
