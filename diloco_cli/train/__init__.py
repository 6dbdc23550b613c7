"""Torch inside one island: model, data, optimizer, step, export."""
