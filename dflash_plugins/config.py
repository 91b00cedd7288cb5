"""One frozen description of a drafter, whatever layout its checkpoint was published in.

Parts: ``config_models`` (the descriptions), ``config_places`` (where keys stand), ``config_reader``, ``config_read``,
``config_rope`` and ``config_target`` (reading), ``config_write``.
"""

from dflash_plugins.config_models import (
    ConvConfig,
    DraftConfig,
    DraftReading,
    LoopConfig,
    MethodName,
    SelectorConfig,
    TargetConfig,
)
from dflash_plugins.config_read import ARCHITECTURE_OF, OUR_ARCHITECTURES, read_draft_config
from dflash_plugins.config_target import read_target_config
from dflash_plugins.config_write import to_flat, to_nested

__all__ = [
    "ARCHITECTURE_OF",
    "OUR_ARCHITECTURES",
    "ConvConfig",
    "DraftConfig",
    "DraftReading",
    "LoopConfig",
    "MethodName",
    "SelectorConfig",
    "TargetConfig",
    "read_draft_config",
    "read_target_config",
    "to_flat",
    "to_nested",
]
