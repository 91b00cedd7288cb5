"""Drafters for the embedded target of dflash-plugins, one folder each: ``config.json``, ``model.safetensors``, ``README.md``."""
