"""The model that is trained: embeddings of the last bytes, concatenated, and a pipeline of ops that predicts the next byte."""

from __future__ import annotations

import torch
from torch import nn

from opfuse import ops
from opfuse.errors import PipelineError, describe
from opfuse.train.data import BYTES


class ByteModel(nn.Module):
    """p(next byte | the ``context`` bytes before it), by a table of embeddings and a pipeline.

    pipeline: takes (samples, context * embedding) in ``dtype`` and gives (samples, classes). The table is fp32. classes: tokens,
    where a file of them stands in for bytes.
    """

    def __init__(self, pipeline: ops.Sequential, *, embedding: int, dtype: torch.dtype, classes: int = BYTES) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.pipeline = pipeline
        self.dtype = dtype

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Logits, fp32 (samples, classes), for bytes or tokens, int64 (samples, context).

        PipelineError if the pipeline gives another shape.
        """
        columns = self.embedding(context).flatten(1).to(self.dtype)
        logits = self.pipeline(columns)
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else f"{len(logits)} outputs"
        if got != (wanted := (len(context), self.embedding.num_embeddings)):
            cure = f"end the pipeline with an op of {wanted[1]} features and no extra outputs"
            raise PipelineError(describe("pipeline of a byte model", wanted=f"one output of shape {wanted}", got=got, cure=cure))
        logits32: torch.Tensor = logits.float()
        return logits32
