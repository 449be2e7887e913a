"""The arithmetic behind one interface: what the scheduler decided, computed.

Source: chapter 2, "The KV cache".
"""
