"""Writes the pictures of docs/cli.md, reports as Chromium shows them: ``python -m docs.screenshots``. It must be on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from opfuse.cli.app import main as opfuse

DOCS = Path(__file__).resolve().parent
SHOWN = ("quickstart", "moe")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--window-size=1200,1150")
COLOURS = 96
"""Of a picture, which has few."""


def browser() -> str | None:
    """A Chromium on PATH, if there is one."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def opened(page: Path, *flags: str) -> tuple[str, list[str]]:
    """What a browser makes of a page: its DOM, if the flags ask for it, and what it wrote to the console."""
    found = browser()
    if found is None:
        raise SystemExit(f"wants one of {', '.join(BROWSERS)} on PATH")
    done = subprocess.run(
        [found, *FLAGS, *flags, page.absolute().as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def main() -> None:
    """Write each picture; SystemExit with what a console says, if it does."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        for name in SHOWN:
            page, picture = Path(folder, f"{name}.html"), DOCS / f"report_{name}.png"
            opfuse(["report", os.path.relpath(DOCS.parent / "configs" / f"{name}.yaml"), "--out", str(page)])
            _, said = opened(page, f"--screenshot={picture}")
            if said:
                raise SystemExit("\n".join(said))
            with Image.open(picture) as image:
                image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    main()
