"""The methods, by name. To add one: write its file, add its line here and its name to `config.MethodName`."""

from momentum2.config import MethodName
from momentum2.methods.byol import BYOL
from momentum2.methods.dino import DINO
from momentum2.methods.method import Method, Output, TeacherMethod, ViewByView
from momentum2.methods.moco import MoCo
from momentum2.methods.simclr import SimCLR
from momentum2.methods.simsiam import SimSiam
from momentum2.methods.supervised import Supervised

METHODS: dict[MethodName, type[Method]] = {
    "byol": BYOL,
    "moco": MoCo,
    "simsiam": SimSiam,
    "simclr": SimCLR,
    "dino": DINO,
    "supervised": Supervised,
}

__all__ = [
    "BYOL",
    "DINO",
    "METHODS",
    "Method",
    "MoCo",
    "Output",
    "SimCLR",
    "SimSiam",
    "Supervised",
    "TeacherMethod",
    "ViewByView",
]
