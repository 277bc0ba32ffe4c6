"""What an op is: its protocol, its spec, its parameters and states, and the casts of its operands."""
