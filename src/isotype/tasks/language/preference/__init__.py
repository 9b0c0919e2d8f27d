"""Objectives that learn from pairs of a chosen and a rejected answer."""
