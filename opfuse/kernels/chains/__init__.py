"""Chains of elementwise ops: their structure, their CUDA text, their launches."""
