"""The models: what a checkpoint is (spec, families) and the torch decoder.

Source: chapter 1, "Naive generation".
"""
