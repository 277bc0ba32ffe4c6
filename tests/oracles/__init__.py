"""Independent statements of the number rules, to compare the package with. No oracle imports the package or another oracle.

Every oracle has the same functions. Values are numpy uint32 arrays that hold the bits of fp32 values, codes are uint8 arrays,
and an element is named "e4m3", "e5m2" or "e2m1".
"""
