"""A quantization plug-in of vLLM: linear layers of FP8 checkpoints in blocks of 128 x 128 multiply by opfuse."""

NAME = "opfuse"
"""What ``vllm serve --quantization`` gets."""


def register() -> None:
    """What vLLM calls in each of its processes, by the entry point ``vllm.general_plugins``."""
    import opfuse_vllm.config
