"""The built-in fusion rules, in the order in which they claim."""

from opfuse.compiler.registry import RuleSet

RULES = RuleSet(())
