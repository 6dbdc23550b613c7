"""The configuration: quantities, schema, validation, and composition with Hydra."""
