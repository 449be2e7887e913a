"""How the next token is chosen from its scores.

Source: appendix A5, "Records".
"""
