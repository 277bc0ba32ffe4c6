"""A model one has, converted in place: :func:`fuse_`, :func:`unfuse_`, and the report of what became of each module."""

from opfuse.convert.fuse import fuse_, unfuse_
from opfuse.convert.report import Conversion, Report

__all__ = ["Conversion", "Report", "fuse_", "unfuse_"]
