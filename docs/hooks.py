"""What the documentation site makes of pages: the README as its first one, examples as code, docstrings as a reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import opfuse
from opfuse import ops, recipes, tensors

ROOT = Path(__file__).resolve().parent.parent


def on_config(config: Any, **_: Any) -> Any:
    """The version stands below each page."""
    config.copyright = f"opfuse {opfuse.__version__}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, as mkdocs asks for it before it is read."""
    make = PAGES.get(page.file.src_uri)
    return _outside(make(markdown) if make else markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Roles of docstrings, such as :func:, are no words of Markdown; nor is the backslash of a bar in a table's code."""
    without = re.sub(r":(?:func|class|data|meth|attr|mod|exc):(?=<code>)", "", html)
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), without)


def readme(_: str) -> str:
    """README.md, whose links lead from the folder above."""
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")


def examples(markdown: str) -> str:
    """Each link to an example that stands alone becomes its text."""

    def text(match: re.Match[str]) -> str:
        code = (ROOT / "examples" / match[1]).read_text(encoding="utf-8")
        return f'```python title="examples/{match[1]}"\n{code}```'

    return re.sub(r"^\[`examples/(\w+\.py)`\]\(.*\)$", text, markdown, flags=re.MULTILINE)


def reference(markdown: str) -> str:
    """The docstring of every public name, in the place of the tables of names."""
    parts = [markdown.partition("<!-- table: names -->")[0]]
    for title, group in opfuse.GROUPS.items():
        parts += [f"## {title}", *(_entry(getattr(opfuse, name)) for name in group)]
    for module in (recipes, ops, tensors):
        own = [getattr(module, name) for name in module.__all__ if name not in opfuse.__all__]
        parts += [f"## {module.__name__}", *(_entry(value) for value in own)]
    return "\n\n".join(part for part in parts if part)


def _entry(value: Any) -> str:
    """mkdocstrings' word for an object of this package, by the name that it is defined under."""
    defined = getattr(value, "__module__", "") or ""
    return f"::: {defined}.{value.__qualname__}" if defined.startswith("opfuse.") and hasattr(value, "__qualname__") else ""


def _outside(markdown: str) -> str:
    """Links to files that the site has not, as their words alone."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|examples/|CONTRIBUTING|SECURITY|CHANGELOG)[^)]*\)", r"\1", markdown)


PAGES = {"index.md": readme, "howto.md": examples, "api.md": reference}
"""Pages that are made, by their file."""
