"""Block-diffusion drafting (DFlash, DFlash 2, D-Loop) beside stock vLLM and SGLang.

This package is the engine-free core. Importing it imports neither torch nor an engine.
"""

__version__ = "0.1.0"
