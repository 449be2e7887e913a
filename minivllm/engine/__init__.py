"""The bookkeeping: which request computes how many tokens in which blocks, and when.

Ids, counts and times only; no array library is imported here.

Source: chapter 3, "Paging".
"""
