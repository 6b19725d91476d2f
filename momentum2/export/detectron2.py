"""For detectron2: its names for a ResNet, a config for each table of the paper, and what trains them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from momentum2.export.tool import Tool, plain, require_resnet, require_usual
from momentum2.files import write_new
from momentum2.runs.card import EncoderCard
from momentum2.runs.encoder import LoadedEncoder
from momentum2.weights import RESNETS

_NAMES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^(conv1|bn1)\.", r"stem.\1."),
    (r"^layer(\d)\.", lambda match: f"res{int(match[1]) + 1}."),
    (r"\.downsample\.0\.", ".shortcut."),
    (r"\.downsample\.1\.", ".shortcut.norm."),
    (r"\.bn(\d)\.", r".conv\1.norm."),
)

#: detectron2's own config of each table, and the length in steps of 16 images where it is not that config's.
_COCO = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
_CASCADE = "Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml"
_RETINANET = "COCO-Detection/retinanet_R_50_FPN_1x.yaml"
_LVIS = "LVISv0.5-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
_VOC = "PascalVOC-Detection/faster_rcnn_R_50_C4.yaml"
_FCOS = "COCO-Detection/fcos_R_50_FPN_1x.py"


def _steps(length: int, *milestones: int) -> dict[str, Any]:
    return {"SOLVER": {"MAX_ITER": length, "STEPS": list(milestones)}}


_1X, _2X = _steps(90_000, 60_000, 80_000), _steps(180_000, 120_000, 160_000)
_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "mask_rcnn_1x": (_COCO, _1X),
    "mask_rcnn_2x": (_COCO, _2X),
    "cascade_rcnn_1x": (_CASCADE, _1X),
    "cascade_rcnn_2x": (_CASCADE, _2X),
    "retinanet_1x": (_RETINANET, _1X),
    "retinanet_2x": (_RETINANET, _2X),
    # 25 epochs of LVIS, which the paper calls 2x
    "lvis": (_LVIS, _1X),
    # MoCo's: trained on 2007 and 2012, with one more norm behind res5 and precise statistics
    "voc_c4_24k": (
        _VOC,
        {
            **_steps(24_000, 18_000, 22_000),
            "MODEL": {"ROI_HEADS": {"NAME": "Res5ROIHeadsExtraNorm"}},
            "TEST": {"PRECISE_BN": {"ENABLED": True}},
        },
    ),
}
_FCOS_STEPS = {"fcos_1x": 90_000, "fcos_2x": 180_000}


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ResNet's tensors by the names of detectron2's backbone, whose norms do not count batches."""
    result = {}
    for name, tensor in state.items():
        if not name.endswith(".num_batches_tracked"):
            new = name
            for pattern, replacement in _NAMES:
                new = re.sub(pattern, replacement, new)
            result[new] = tensor
    return result


def settings(card: EncoderCard) -> dict[str, Any]:
    """What these weights decide in detectron2's config, and the paper's protocol: all is trained, norms are synced."""
    kind = RESNETS[plain(card)]
    return {
        "MODEL": {
            "PIXEL_MEAN": _pixels(card.mean),
            "PIXEL_STD": _pixels(card.std),
            "BACKBONE": {"FREEZE_AT": 0},
            "RESNETS": {
                "DEPTH": _depth(card),
                "NUM_GROUPS": kind.groups,
                "WIDTH_PER_GROUP": int(kind.width_per_group * card.width),
                "STEM_OUT_CHANNELS": int(64 * card.width),
                "RES2_OUT_CHANNELS": int((256 if kind.bottleneck else 64) * card.width),
                "STRIDE_IN_1X1": False,
                "NORM": "SyncBN",
            },
            "FPN": {"NORM": "SyncBN"},
        },
        "INPUT": {"FORMAT": "RGB"},
        "VERSION": 2,
    }


def configs(card: EncoderCard) -> dict[str, dict[str, Any]]:
    """The config of each table: `BASE`, detectron2's own, and what is changed in it.

    FCOS is there for ResNets of width 1 only: detectron2's config of it, which is written in Python, takes no other.
    """
    found = {name: {"BASE": base, **_merged(settings(card), more)} for name, (base, more) in _TABLES.items()}
    kind = RESNETS[plain(card)]
    if (card.width, kind.width_per_group, kind.groups) == (1, 64, 1):
        found |= {name: {"BASE": _FCOS, "OVERRIDES": _fcos(card, n)} for name, n in _FCOS_STEPS.items()}
    return found


def _fcos(card: EncoderCard, steps: int) -> list[str]:
    body = "model.backbone.bottom_up"
    return [
        f"{body}.freeze_at=0",
        f"{body}.stem.norm=SyncBN",
        f"{body}.stages.norm=SyncBN",
        f"{body}.stages.stride_in_1x1=False",
        f"{body}.stages.depth={_depth(card)}",
        "model.backbone.norm=SyncBN",
        f"model.pixel_mean={_pixels(card.mean)}",
        f"model.pixel_std={_pixels(card.std)}",
        "dataloader.train.mapper.image_format=RGB",
        "dataloader.train.mapper.augmentations.0.short_edge_length=[800]",
        f"train.max_iter={steps}",
        f"lr_multiplier.warmup_length={1000 / steps}",
    ]


def _depth(card: EncoderCard) -> int:
    kind = RESNETS[plain(card)]
    return 2 + sum(kind.blocks) * (3 if kind.bottleneck else 2)


def _pixels(values: tuple[float, ...]) -> list[float]:
    return [round(255 * value, 3) for value in values]


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(one)
    for name, value in other.items():
        result[name] = _merged(result.get(name, {}), value) if isinstance(value, dict) else value
    return result


#: Trains one of the configs, on what detectron2 calls its datasets.
_TRAIN = '''"""Train a detector of the paper on detectron2. Written by momentum2.

python train.py --config-file configs/mask_rcnn_1x.yaml --num-gpus 8 [--resume] [NAME VALUE ...]

Images are where detectron2 looks for them (DETECTRON2_DATASETS). To start from random weights, append
MODEL.WEIGHTS '' (FCOS: train.init_checkpoint=''). Results go to output/CONFIG, or to OUTPUT_DIR (train.output_dir).
"""

import os

import yaml
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.data import MetadataCatalog
from detectron2.engine import (
    DefaultTrainer,
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
    launch,
)
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import (
    COCOEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    inference_on_dataset,
    print_csv_format,
)
from detectron2.layers import get_norm
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from detectron2.utils import comm

HERE = os.path.dirname(os.path.abspath(__file__))
WEIGHTS = os.path.join(HERE, "model.pth")


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """The C4 head with a norm behind res5, as MoCo fine-tunes it: the head has none of its own."""

    @classmethod
    def _build_res5_block(cls, cfg):
        block, channels = super()._build_res5_block(cfg)
        block.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
        return block, channels


class Trainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_folder=None):
        folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
        kind = MetadataCatalog.get(dataset_name).evaluator_type
        if kind == "pascal_voc":
            return PascalVOCDetectionEvaluator(dataset_name)
        evaluator = LVISEvaluator if kind == "lvis" else COCOEvaluator
        return evaluator(dataset_name, output_dir=folder)


def load(path, changes=()):
    """The config in a file of configs/: a CfgNode, or for FCOS a lazy config."""
    with open(path) as file:
        settings = yaml.safe_load(file)
    name = os.path.splitext(os.path.basename(path))[0]
    cfg = model_zoo.get_config(settings.pop("BASE"))
    if "OVERRIDES" in settings:
        cfg.train.init_checkpoint = WEIGHTS
        cfg.train.output_dir = os.path.join("output", name)
        return LazyConfig.apply_overrides(cfg, settings["OVERRIDES"] + list(changes))
    cfg.merge_from_other_cfg(CfgNode(settings))
    cfg.MODEL.WEIGHTS = WEIGHTS
    cfg.OUTPUT_DIR = os.path.join("output", name)
    cfg.merge_from_list(list(changes))
    return cfg


def main(args):
    cfg = load(args.config_file, args.opts)
    default_setup(cfg, args)
    if isinstance(cfg, CfgNode):
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        return trainer.train()
    return train_lazily(cfg, args.resume)


def train_lazily(cfg, resume):
    """What `Trainer` does, for a lazy config."""
    model = instantiate(cfg.model).to(cfg.train.device)
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    model = create_ddp_model(model, **cfg.train.ddp)
    trainer = SimpleTrainer(model, instantiate(cfg.dataloader.train), optimizer)
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)

    def test():
        found = inference_on_dataset(
            model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator)
        )
        print_csv_format(found)
        return found

    used = [
        hooks.IterationTimer(),
        hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
        hooks.EvalHook(cfg.train.eval_period, test),
    ]
    if comm.is_main_process():
        used.insert(2, hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer))
        writers = default_writers(cfg.train.output_dir, cfg.train.max_iter)
        used.append(hooks.PeriodicWriter(writers, period=cfg.train.log_period))
    trainer.register_hooks(used)
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    start = trainer.iter + 1 if resume and checkpointer.has_checkpoint() else 0
    trainer.train(start, cfg.train.max_iter)


if __name__ == "__main__":
    arguments = default_argument_parser(epilog=__doc__).parse_args()
    launch(
        main,
        arguments.num_gpus,
        num_machines=arguments.num_machines,
        machine_rank=arguments.machine_rank,
        dist_url=arguments.dist_url,
        args=(arguments,),
    )
'''


def check(card: EncoderCard) -> None:
    require_resnet(card, "detectron2")
    # Of bottlenecks it can be told the channels.
    kind = RESNETS.get(plain(card))
    require_usual(card, "detectron2", any_width=kind is not None and kind.bottleneck)


def write(loaded: LoadedEncoder, folder: Path) -> None:
    card = loaded.card
    state = {name: tensor.contiguous() for name, tensor in renamed(loaded.encoder.state_dict()).items()}
    # Tensors, not arrays: a pickle of NumPy 2's arrays cannot be read by NumPy 1.
    torch.save({"model": state, "__author__": "momentum2", "matching_heuristics": True}, folder / "model.pth")
    _write_yaml(folder / "detectron2.yaml", settings(card))
    (folder / "configs").mkdir()
    for name, content in configs(card).items():
        _write_yaml(folder / "configs" / f"{name}.yaml", content)
    write_new(folder / "train.py", _TRAIN)


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    write_new(path, yaml.safe_dump(content, sort_keys=False))


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    path = folder.as_posix()
    return (
        "from detectron2 import model_zoo\n"
        'cfg = model_zoo.get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml")\n'
        f'cfg.merge_from_file("{path}/detectron2.yaml"); cfg.MODEL.WEIGHTS = "{path}/model.pth"\n'
    )


TOOL = Tool(check, write, lines)
