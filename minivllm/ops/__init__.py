"""Named operations with several implementations, and the choice between them.

Source: appendix A6, "The torch runner".
"""
