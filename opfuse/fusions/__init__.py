"""The built-in fusion rules, in the order in which they claim: the more particular before the more general."""

from opfuse.compiler.registry import RuleSet
from opfuse.fusions.backward import (
    BACKWARD_ACTIVATION_BIAS,
    BACKWARD_ADD_RMS_NORM,
    BACKWARD_ELEMENTWISE,
    BACKWARD_GROUPS,
    BACKWARD_LINEAR_ADD,
    BACKWARD_LINEAR_SCALE,
)
from opfuse.fusions.dispatch import BACKWARD_COMBINE, DISPATCH_CAST, DISPATCH_EXCHANGE
from opfuse.fusions.epilogue import ELEMENTWISE, EPILOGUE, EPILOGUE_GROUPS, LINEAR_ADD, LINEAR_SCALE_ADD

__all__ = [
    "BACKWARD_ACTIVATION_BIAS",
    "BACKWARD_ADD_RMS_NORM",
    "BACKWARD_COMBINE",
    "BACKWARD_ELEMENTWISE",
    "BACKWARD_GROUPS",
    "BACKWARD_LINEAR_ADD",
    "BACKWARD_LINEAR_SCALE",
    "DISPATCH_CAST",
    "DISPATCH_EXCHANGE",
    "ELEMENTWISE",
    "EPILOGUE",
    "EPILOGUE_GROUPS",
    "LINEAR_ADD",
    "LINEAR_SCALE_ADD",
    "RULES",
]

RULES = RuleSet(
    (
        LINEAR_SCALE_ADD,
        LINEAR_ADD,
        EPILOGUE_GROUPS,
        EPILOGUE,
        ELEMENTWISE,
        DISPATCH_CAST,
        DISPATCH_EXCHANGE,
        BACKWARD_LINEAR_ADD,
        BACKWARD_LINEAR_SCALE,
        BACKWARD_ADD_RMS_NORM,
        BACKWARD_COMBINE,
        BACKWARD_GROUPS,
        BACKWARD_ACTIVATION_BIAS,
        BACKWARD_ELEMENTWISE,
    )
)
"""Forward rules first, then backward rules."""
