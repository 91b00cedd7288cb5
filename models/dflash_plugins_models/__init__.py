"""Drafters for the embedded target of dflash-plugins, one folder each: configuration, weights and model card."""
