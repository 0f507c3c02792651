"""Tests that the documentation has its drawings, and that its links lead to existing files."""

import re

import pytest
from make_drawings import drawings
from programs import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples/README.md",
]


def test_drawings_are_those_of_the_code():
    for path, svg in drawings():
        assert path.read_text() == svg, f"{path} is not current; run scripts/benchmarks/make_drawings.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    files = [link.partition("#")[0] for link in links if not link.startswith(("http:", "https:", "#"))]
    assert not [link for link in files if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_is_linked_from_another_page(page):
    """From the README, or from a page that is."""
    if page.parent != ROOT / "docs":
        return
    others = (other.read_text() for other in PAGES if other != page)
    assert any(re.search(rf"\]\((?:docs/)?{re.escape(page.name)}[)#]", text) for text in others)


def test_keys_in_tables_may_break_at_their_parts_only():
    pytest.importorskip("mkdocs")
    from site_hooks import on_page_content

    html = "<p><code>a.b_c</code></p><table><tr><td>x_y <code>a.b_cd</code></td></tr></table>"
    shown = on_page_content(html, page=None, config=None, files=None)
    assert shown == html.replace("a.b_cd", "a.<wbr>b_<wbr>cd")
