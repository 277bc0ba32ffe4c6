"""The interface of the one tensor subclass, for modules that it imports and that so cannot import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch

from opfuse.tensors.storage import Plane, QuantizedStorage

if TYPE_CHECKING:
    from opfuse.tensors.quantizers import Quantizer


class Quantized(torch.Tensor):
    """Base of :class:`~opfuse.tensors.tensor.QuantizedTensor`, which documents each of these names."""

    if TYPE_CHECKING:
        _storage: QuantizedStorage
        ranks: Any
        alternates: bool | None
        plane_records: Any
        row_span: Any
        partial_rows: Mapping[int, tuple[int, QuantizedStorage]]

        @property
        def record(self) -> QuantizedStorage: ...

        @property
        def held(self) -> QuantizedStorage: ...

        @property
        def quantizer(self) -> Quantizer | None: ...

        @property
        def readonly(self) -> str: ...

        @property
        def usages(self) -> tuple[str, ...]: ...

        def plane(self, usage: str) -> Plane: ...

        def dequantize(self, dtype: torch.dtype | None = None, usage: str | None = None) -> torch.Tensor: ...

        def quantize_(
            self, source: torch.Tensor, noop_flag: torch.Tensor | None = None, *, amax: torch.Tensor | None = None
        ) -> Self: ...

        def check_writable(self, operation: str, *, casting: bool = True) -> Any: ...

        def hold(self, usage: str) -> None: ...

        def over(self, storage: QuantizedStorage, *, readonly: str = "", quantizer: Quantizer | None = None) -> Self: ...
