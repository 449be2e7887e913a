"""The NumPy twin: the readable decoder, and the oracle for every faster one.

Source: chapter 1, "Naive generation".
"""
