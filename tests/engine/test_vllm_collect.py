"""Training data through vLLM: what the recorder takes is what a plain forward of the target computes."""

import pytest
import tiny
import torch

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS = [0, 2]


def test_recorded_rows_are_the_targets_features(run_job, tmp_path):
    target = tiny.write_target(tmp_path / "target")
    result = run_job("features", target=target, layers=LAYERS, vocab=tiny.VOCAB)
    model = tiny.target()
    taps = {}
    for index in LAYERS:
        model.model.layers[index].register_forward_hook(
            lambda module, args, out, index=index: taps.__setitem__(index, out[0] if isinstance(out, tuple) else out)
        )
    assert result["left"] == 0
    assert len(result["found"]) == 8
    for request in result["found"]:
        with torch.no_grad():
            final = model.model(torch.tensor([request["ids"][:-1]])).last_hidden_state
        expected = torch.cat([*(taps[index].view(1, -1, tiny.HIDDEN) for index in LAYERS), final], dim=-1)[0]
        # fp32 against fp32: a row of another token or layer would be off by about one.
        assert torch.allclose(torch.tensor(request["rows"]), expected, atol=2e-3, rtol=1e-3)
