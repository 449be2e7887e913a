"""Measure the engine: fixed work, on the reader's machine, beside the machine's limits.

`workloads` and `measure` need the standard library only, so that the scripts that
measure other engines use the very same code in environments of their own.

Source: appendix A9, "Measuring".
"""
