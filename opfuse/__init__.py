import opfuse.ops
