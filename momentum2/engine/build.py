"""From a config to the objects that the loop turns."""

import torch

from momentum2 import backbones
from momentum2.config import Config
from momentum2.data import Dataset
from momentum2.engine.plan import Plan
from momentum2.errors import UserError
from momentum2.methods import METHODS, Method
from momentum2.seeds import derive


def build_method(config: Config, plan: Plan, dataset: Dataset, device: torch.device) -> Method:
    """The method with its initial weights, which depend on the seed alone, on `device` in channels_last."""
    if config.method.name == "supervised" and dataset.labels is None:
        raise UserError("Method supervised needs labels; put the images of each class into a folder of its own.")
    torch.manual_seed(derive(config.train.seed, "initial weights"))
    encoder = backbones.build(config.model.backbone, config.model.stem, config.model.width)
    if config.model.weights:
        backbones.load_weights(encoder, config.model.weights)
    classes = len(dataset.class_names or ())
    method: Method = METHODS[config.method.name](config, plan.schedule, encoder, plan.devices, classes)
    return method.to(device, memory_format=torch.channels_last)
