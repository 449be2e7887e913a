"""Measurements that are made once and kept, with machine, versions and command."""
