"""All that opfuse uses of torch that torch does not promise to keep, and all reading of Python's stack.

Each name stands here once, with its use, the versions of torch it was tried on and what breaks if it changes (``names.py``). The
rest of the package imports from here. ``opfuse doctor`` and ``tests/test_torch_private.py`` try them all, so that what a new
torch has changed is found here and mended here.
"""
