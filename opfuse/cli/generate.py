"""``opfuse generate``: text by the model that a run has trained."""

from __future__ import annotations

from pathlib import Path

from opfuse.cli.output import echo, echo_json
from opfuse.train import usable
from opfuse.train.generate import restored, written


def generate(run: Path, *, prompt: str, length: int, temperature: float, seed: int, device: str, as_json: bool) -> None:
    """Print the prompt and what the model wrote behind it; bytes that are no UTF-8 as replacement characters."""
    model, config, step = restored(run, usable(device))
    made = written(model, config, prompt.encode(), length=length, temperature=temperature, seed=seed).decode(errors="replace")
    if as_json:
        echo_json({"run": str(run), "step": step, "prompt": prompt, "text": made})
    else:
        echo(prompt + made)
