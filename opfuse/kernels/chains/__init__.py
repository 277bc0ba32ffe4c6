"""Chains of elementwise ops as the library calls them: their structure, their CUDA text, their launches."""
