"""Files of the repository that are pages of the site too, and links that lead out of docs/ (see mkdocs.yml)."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Pages that are not in docs/, by their name on the site.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
}
LINK = re.compile(r"\[([^]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    folder = (ROOT / PAGES.get(page.file.src_path, f"docs/{page.file.src_path}")).parent
    names = {source: name for name, source in PAGES.items()}

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        place = os.path.relpath(os.path.normpath(folder / target), ROOT)
        if place in names:
            return f"[{text}]({names[place]}{anchor})"
        if place.startswith("docs/") and (ROOT / place).is_file():
            return f"[{text}]({place.removeprefix('docs/')}{anchor})"
        if (ROOT / place).exists():  # source, or a folder: on a site there is nothing to show
            return text
        return link.group(0)  # mkdocs says what is wrong with it

    return LINK.sub(moved, markdown)
