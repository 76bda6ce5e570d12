"""A long random attack on hpcdist: see tests/chaos.py."""
