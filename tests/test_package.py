"""The package as it is installed, not as it lies in the source tree."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_an_installed_copy_is_complete(tmp_path: Path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*install, "--no-build-isolation", "--no-index", "--target", str(tmp_path), str(ROOT)], check=True
    )
    source = {p.relative_to(ROOT / "momentum2") for p in (ROOT / "momentum2").rglob("*.py")}
    installed = {p.relative_to(tmp_path / "momentum2") for p in (tmp_path / "momentum2").rglob("*.py")}
    assert installed == source
    assert (tmp_path / "momentum2" / "py.typed").exists()
    assert (tmp_path / "bin" / "momentum2").exists()
    code = "import momentum2; print(momentum2.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()).parent == tmp_path / "momentum2"
