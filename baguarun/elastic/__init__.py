"""Elasticity: membership (agent side) and training (worker side)."""
