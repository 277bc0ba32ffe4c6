"""From a .cu file to work on a GPU: text, compiler, cache, launch, and the registry that joins launch and definition."""
