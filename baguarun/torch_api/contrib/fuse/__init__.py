"""Bagua's `contrib.fuse` package."""
