"""Attention over the current placement: one file per scheme, one registry."""
