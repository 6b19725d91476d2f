"""The contact sheet shows originals and views, and complains in one sentence."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from momentum2.config import Config, DataConfig, ViewsConfig
from momentum2.data.contact_sheet import write_views
from momentum2.errors import UserError


def test_rows_of_originals_and_views(tmp_path: Path) -> None:
    """The evaluation view of a square image is its middle, enlarged: both can be found on the sheet."""
    Image.fromarray(np.full((64, 64, 3), [200, 30, 90], np.uint8)).save(tmp_path / "flat.png")
    config = Config(
        data=DataConfig(root=str(tmp_path), image_size=32), views=ViewsConfig(recipe="evaluation")
    )
    write_views(config, tmp_path / "views.png", count=8)  # there is one image only
    with Image.open(tmp_path / "views.png") as image:
        sheet = np.asarray(image)
    tile, gap = 96, 4
    assert sheet.shape == (tile + 2 * gap, 2 * tile + 3 * gap, 3)
    assert (sheet[:gap] == 255).all()
    for left in (gap, 2 * gap + tile):
        assert (sheet[gap : gap + tile, left : left + tile] == [200, 30, 90]).all()
    assert (sheet[:, gap + tile : 2 * gap + tile] == 255).all()


def test_every_view_has_a_column(make_folder: Callable[..., Path], tmp_path: Path, own_cache: Path) -> None:
    views = ViewsConfig(recipe="multicrop", small_crops=2, small_size=20)
    config = Config(data=DataConfig(root=str(make_folder(5)), image_size=48), views=views)
    write_views(config, tmp_path / "views.png", count=3)
    with Image.open(tmp_path / "views.png") as image:
        assert image.size == (5 * 100 + 4, 3 * 100 + 4)
    assert not own_cache.exists()  # three images are no reason to decode all


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    config = Config(data=DataConfig(name="shapes", image_size=8))
    for path in (tmp_path / "no" / "views.png", tmp_path / "views.unknown"):
        with pytest.raises(UserError, match=r"Choose a \.png in a folder that exists"):
            write_views(config, path)
