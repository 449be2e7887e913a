"""The same workloads on other engines, each in a virtual environment of its own."""
