"""Output heads and routers of a model, which stay in high precision: their errors are those of the loss and of routing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

OUTPUT_HEAD = "the output head"
ROUTER = "a router"
TIED = "a matrix tied to an embedding"

HEADS = {
    "lm_head": OUTPUT_HEAD,
    "embed_out": OUTPUT_HEAD,
    "head": OUTPUT_HEAD,
    "score": OUTPUT_HEAD,
    "classifier": OUTPUT_HEAD,
    "qa_outputs": OUTPUT_HEAD,
    "router": ROUTER,
    "gate": ROUTER,
}
"""What a module is by the last name in its path."""


def heads_of(model: nn.Module) -> Iterator[tuple[int, str]]:
    """The ``id()`` of modules that turn features into logits, and what they are, by what the model says or by a weight that they
    share with an embedding.
    """
    method = getattr(model, "get_output_embeddings", None)
    head = method() if callable(method) else None
    if isinstance(head, nn.Module):
        yield id(head), OUTPUT_HEAD
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if not isinstance(module, nn.Embedding) and id(module._parameters.get("weight")) in tied:
            yield id(module), TIED
