"""MkDocs hooks for a site that needs neither a code host nor the network.

Pages may link to any file of the repository. The site has copies of the files outside `docs/` in its folder
`repository/`. The page of commands gets their help.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tools import commands_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
COPIES = "repository/"
LINK = re.compile(
    r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\](?:\([^)]*\))?)*\])\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)"
)
# A style sheet, script or picture of another host, or a Mermaid diagram, whose script comes from a CDN.
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+|class=\"mermaid\""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a copy of each file outside `docs/` that a page or a copied page links to."""
    waiting = [DOCS + file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer((ROOT / page).read_text()):
            target = _target(page, match["path"])
            if (
                target.startswith(DOCS)
                or not (ROOT / target).is_file()
                or files.get_file_from_path(COPIES + target)
            ):
                continue
            copy = File.generated(config, COPIES + target, abs_src_path=str(ROOT / target))
            copy.inclusion = InclusionLevel.INCLUDED  # names that begin with a dot, too
            files.append(copy)
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the links of a page by links to the site's copies; a link to a folder becomes plain text."""
    here = page.file.src_uri
    if here == "commands.md":
        markdown += commands_page.render()
    source = here.removeprefix(COPIES) if here.startswith(COPIES) else DOCS + here

    def replaced(match: re.Match[str]) -> str:
        target = _target(source, match["path"])
        if (ROOT / target).is_dir():
            return match["text"][1:-1]
        uri = target.removeprefix(DOCS) if target.startswith(DOCS) else COPIES + target
        path = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        text = LINK.sub(replaced, match["text"][1:-1])  # a picture may be the text of a link
        return f"[{text}]({path}{match['anchor'] or ''})"

    return LINK.sub(replaced, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page of the site would fetch anything from another host.

    Raises:
        PluginError: a page has a script, style sheet or picture of another host.
    """
    for folder, _, names in os.walk(config.site_dir):
        for path in (Path(folder, name) for name in names if name.endswith(".html")):
            if match := FETCHED.search(path.read_text()):
                raise PluginError(
                    f"{path.relative_to(config.site_dir)} fetches from another host: {match[0]}"
                )


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
