"""A model one has, converted in place: :func:`fuse_`, :func:`unfuse_`, and the report of what became of each module.

One idea. A forward is read by running it: its calls of torch are written into a graph, in every mode in which it may be called,
and put together to expressions. An expression that is a chain of ops opfuse has becomes a pipeline over the module's parameters.
The pipeline runs for the calls that the recordings speak for, as long as nothing is changed that they have read. Any other call
runs the module's own forward.

======================================  ============================================================================
step, in reading order                  files
======================================  ============================================================================
which modules, under which recipe       ``fuse.py`` visits them, ``policy.py`` decides, ``report.py`` tells the outcome
may the forward run at all              ``code.py``: what it reaches may change nothing that others notice
what does it do                         ``record.py``: the graph; ``forms.py``: its expressions; ``chain.py``: these as steps
which op is a module                    ``leaves.py``, by its expression; ``experts.py``, by numbers
the pipeline                            ``build.py``: from steps to ops; ``weights.py``: their parameters; ``pipeline.py``
products of one tensor                  ``siblings.py``; ``method_calls.py``: the code of the module around them
does a call have what was recorded      ``guards.py``
the new forward, also in a graph        ``given.py``, and its copies; ``converted.py``; ``states.py``: its delayed scales
the same bits in rollout and training   ``invariant.py``, with ``row_tiles.py`` and ``invariant_attention.py``
the loss without logits                 ``head_loss.py``: of causal language models, around their own forward
experts by transformers' interface      ``experts_interface.py``: each converted as it is first called
what Accelerate prepares                ``accelerate.py``: converted by a handler's recipe; ``evaluation.py``
======================================  ============================================================================
"""

from opfuse.convert.experts_interface import register_experts
from opfuse.convert.fuse import fuse_, report, unfuse_
from opfuse.convert.invariant import invariant
from opfuse.convert.report import Conversion, Report

__all__ = ["Conversion", "Report", "fuse_", "invariant", "register_experts", "report", "unfuse_"]
