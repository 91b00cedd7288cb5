"""The SGLang plugin says that it does nothing yet, once, with no engine around."""

import sys

from sglang_ext import plugin


def test_it_says_once_that_sglang_is_not_supported_and_imports_nothing(caplog):
    plugin.register.cache_clear()
    before = set(sys.modules)
    plugin.register()
    plugin.register()
    assert [record.getMessage() for record in caplog.records] == [
        "dflash-plugins: SGLang is not yet supported, nothing is registered"
    ]
    assert not [name for name in set(sys.modules) - before if name.partition(".")[0] in ("sglang", "torch")]
