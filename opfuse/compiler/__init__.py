"""From a list of ops to a plan: the lowered graph, patterns and rules over it, and which of them compute what."""
