"""Training a byte-level language model around a configuration's pipeline, on text that every Python carries."""

from opfuse.train.checkpoints import Checkpoints
from opfuse.train.comparison import Comparison, OnNamedStep, compare, usable
from opfuse.train.exact import exact_gradients
from opfuse.train.files import writable
from opfuse.train.loop import Curve, Interrupted, TrainStep, evaluate, fit
from opfuse.train.model import ByteModel
from opfuse.train.report import bits, to_dict, write_plot, write_report, write_values
from opfuse.train.study import Study, study_overrides

__all__ = [
    "ByteModel",
    "Checkpoints",
    "Comparison",
    "Curve",
    "Interrupted",
    "OnNamedStep",
    "Study",
    "TrainStep",
    "bits",
    "compare",
    "evaluate",
    "exact_gradients",
    "fit",
    "study_overrides",
    "to_dict",
    "usable",
    "writable",
    "write_plot",
    "write_report",
    "write_values",
]
