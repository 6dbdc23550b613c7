"""Decoupled DiLoCo as a command-line program. Imports nothing heavy."""

__version__ = "0.1.0"
