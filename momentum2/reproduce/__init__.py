"""The paper's tables as data, and the runner that fills them."""

from momentum2.reproduce.rows import Row, Scale, Table
from momentum2.reproduce.tables import TABLES

__all__ = ["TABLES", "Row", "Scale", "Table"]
