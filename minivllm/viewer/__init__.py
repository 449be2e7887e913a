"""A trace as a page with a time slider; it needs no network and no engine.

Source: appendix A8, "Traces".
"""
