"""Hooks of mkdocs that adapt the repository's pages, which link to its files, to the site.

README.md becomes the first page. Other linked Markdown files become pages, as do linked source files and directories
(under source/). Links are rewritten; broken links are kept, so that mkdocs warns about them.
"""

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import make_version_table

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)(?=[)#])")
CODE = re.compile(r"`[^`]+`")
CELL, HTML_CODE = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"(?<=<code>)[^<]+")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for everything outside docs/ that can be reached by links from README.md and docs/."""
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.is_relative_to(ROOT / "docs"):
            text = path.read_text() if path.suffix == ".md" else source_page(path)
            inclusion = InclusionLevel.INCLUDED if path.suffix == ".md" else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, str(place(path)), content=text, inclusion=inclusion))
        for target in linked(path) - seen:
            seen.add(target)
            waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page in the form that mkdocs reads: links to pages of the site, file names as titles of code."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    if page.file.src_uri == "versions.md":
        markdown = make_version_table.with_table(markdown, make_version_table.records())
    # In code in a table, GitHub reads \| as |, but mkdocs reads it unchanged.
    markdown = re.sub(
        r"^\|.*", lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown, flags=re.M
    )
    markdown = re.sub(r"^```(\w+) ([\w.]+)$", r'```\1 title="\2"', markdown, flags=re.M)
    return LINK.sub(lambda link: rewritten(link[1], origin_of(page.file.src_uri), page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with places where keys in tables may break: after dots and underscores, never within a word."""
    return CELL.sub(
        lambda cell: HTML_CODE.sub(lambda code: re.sub(r"(?<=[._])(?=\w)", "<wbr>", code[0]), cell[0]), html
    )


def origin_of(uri: str) -> Path:
    """Return the file of the repository from which a page of the site is made."""
    in_docs = ROOT / "docs" / uri
    return ROOT / "README.md" if uri == "index.md" else in_docs if in_docs.exists() else ROOT / uri


def rewritten(link: str, origin: Path, here: str) -> str:
    """Return a link of the file `origin`, rewritten for the page `here` of the site."""
    target = Path(os.path.normpath(origin.parent / link))
    return os.path.relpath(place(target), Path(here).parent) if target.exists() else link


def place(path: Path) -> Path:
    """Return the path on the site of a file or a directory of the repository, as a source path of mkdocs."""
    inside = path.relative_to(ROOT)
    if inside == Path("README.md"):
        return Path("index.md")
    if inside.parts[0] == "docs":
        return inside.relative_to("docs")
    return inside if path.suffix == ".md" else Path("source", f"{inside}.md")


def linked(path: Path) -> set[Path]:
    """Return the files and directories that a Markdown file links to, or that a directory contains."""
    if path.is_dir():
        return {child for child in path.iterdir() if child.suffix in LANGUAGES}
    if path.suffix != ".md":
        return set()
    targets = {Path(os.path.normpath(path.parent / link)) for link in LINK.findall(path.read_text())}
    return {target for target in targets if target.exists() and target.is_relative_to(ROOT)}


def source_page(path: Path) -> str:
    """Return the page of a source file (its code) or of a directory (a list of its files)."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "\n".join(f"- [{child.name}]({path.name}/{child.name}.md)" for child in sorted(linked(path)))
    return f"{title}``````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n``````\n"
