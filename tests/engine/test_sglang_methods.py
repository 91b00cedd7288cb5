"""A real SGLang on a CPU with tiny trained pairs: every method drafts what it should, and the text is the plain one."""

import pytest
import trained

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_smoke(run_sglang):
    target, drafter = trained.pair("dloop-selector")
    given = [{"prompt": p, "max_new_tokens": 24} for p in trained.prompts(6)]
    plain = run_sglang("texts", target=target, requests=given)["waves"][0]
    got = run_sglang("texts", target=target, drafter=drafter, requests=given, watch=True)
    assert [o["ids"] for o in got["waves"][0]] == [o["ids"] for o in plain]
    assert len(got["rounds"]) > 6
    print(got["rounds"][:2], [o["rounds"] for o in got["waves"][0]])
