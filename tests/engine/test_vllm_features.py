"""What works beside the drafters on vLLM's V1 runner and what is refused: one test for each line of docs/vllm.md."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tiny
import torch
import trained
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.engine, pytest.mark.heavy]

METHODS = ("dflash", "dflash2", "dloop-selector")
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
SCHEDULE = [[1, 2, 7], [3, 4, 3], [5, 8, 0]]


def drafters(*more):
    return {name: str(trained.pair(name)[1]) for name in METHODS} | dict.fromkeys(more, "")


def requests():
    """Six, two of which fill whole blocks of the cache, ending one after the other."""
    prompts = trained.prompts(6, seed=4, lengths=(70, 9, 64, 5, 33, 7))
    return [{"prompt": p, "max_tokens": n} for p, n in zip(prompts, (60, 24, 40, 16, 60, 28), strict=True)]


def connector(role, store):
    own = {"shared_storage_path": f"{store}/{{drafter}}"}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": own}
    return {"kv_transfer_config": transfer, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def features(run_job):
    """``features(variants, **other)``: the job of that name, on the trained pairs and our requests unless told."""

    def run(variants, **other):
        common = {"target": trained.pair("dflash")[0], "drafters": drafters(), "requests": requests()}
        return run_job("features", script="feature_jobs.py", variants=variants, **(common | other))

    return run


@pytest.fixture(scope="module")
def served(features, tmp_path_factory):
    """Everything that fits into one process, every method with every feature."""
    store = tmp_path_factory.mktemp("store")
    variants = {
        "default": {},
        "dynamic": {"speculation": {"num_speculative_tokens_per_batch_size": SCHEDULE}},
        "lora": {"enable_lora": True},
        "produce": connector("kv_producer", store),
        "consume": connector("kv_consumer", store),
    }
    plain = features({"default": {}}, drafters={"plain": ""})
    return features(variants) | {"plain": plain["default"]["plain"]["waves"][0]}


def by_place(wave):
    """{(prompt, place of the anchor): draft} of one rank."""
    return {(tuple(prompt), place): draft for prompt, place, draft in wave}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_prefix_caching_is_hit_and_changes_neither_text_nor_drafts(served, method):
    found = served["default"][method]
    assert found["waves"] == [served["plain"]] * 2
    assert found["hits"] > 0
    first, second = (by_place(wave[0]) for wave in found["drafts"])
    assert first == second
    assert found["accepted"] > len(first)  # more than one of a draft


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_fewer_proposals_by_batch_size_cut_what_is_drafted(served, method):
    """Ours are the first ones of the whole block. The engine's own DFlash runs fewer masks, and proposes otherwise."""
    found, whole = served["dynamic"][method], by_place(served["default"][method]["drafts"][0][0])
    assert found["waves"] == [served["plain"]] * 2
    drafts = by_place(found["drafts"][0][0])
    assert {len(draft) for draft in drafts.values()} == {0, 3, 7}
    same = [draft == whole[key][: len(draft)] for key, draft in drafts.items() if draft and key in whole]
    assert len(same) > 5
    assert method == "dflash" or all(same)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_adapters_are_refused(served, method):
    assert "[lora] enable_lora" in served["lora"][method]["said"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_transferred_prompt_is_drafted_after_as_one_computed_here(served, method):
    """The producer writes target and drafter layers; the consumer computes what is left of the prompt and drafts."""
    whole = by_place(served["default"][method]["drafts"][0][0])
    for role in ("produce", "consume"):
        assert served[role][method]["waves"] == [served["plain"]] * 2
        assert [by_place(wave[0]) for wave in served[role][method]["drafts"]] == [whole] * 2
    # The prompts of 70, 64 and 33 tokens hold whole blocks of 32: read by the producer's second wave and by the other.
    assert served["log"].count("Inject KV cache of 64 tokens") == 3 * len(METHODS)
    assert served["log"].count("[kv-connector]") >= 2 * len(METHODS)


@pytest.mark.slow
def test_asynchronous_scheduling_changes_nothing(served, features):
    """The engine's CPU platform switches it off whatever is asked for; here its runner is made to do it."""
    assert served["async when asked for"] is False
    done = features({"on": {"async_scheduling": True}}, forced_async=True)
    for method in METHODS:
        assert done["on"][method]["async"] is True
        assert served["default"][method]["async"] is False
        assert done["on"][method]["waves"] == [served["plain"]] * 2
        for wave, one in zip(done["on"][method]["drafts"], served["default"][method]["drafts"], strict=True):
            # One step ahead, it also drafts for requests that have just ended.
            assert by_place(one[0]).items() <= by_place(wave[0]).items()


@pytest.mark.slow
def test_two_ranks_write_and_draft_what_one_does(served, features):
    done = features({"two": {"tensor_parallel_size": 2}}, environment=TWO_RANKS)["two"]
    for method in METHODS:
        assert done[method]["waves"] == [served["plain"]] * 2
        for wave, one in zip(done[method]["drafts"], served["default"][method]["drafts"], strict=True):
            assert len(wave) == 2
            assert wave == one * 2


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A target whose head holds every row twice, once on each of two ranks, and two random drafters for it."""
    base = tmp_path_factory.mktemp("tied")
    target = tiny.write_target(base / "target", max_position_embeddings=4096)
    weights = load_file(target / "model.safetensors")
    head = weights["lm_head.weight"]
    head[tiny.VOCAB // 2 :] = head[: tiny.VOCAB // 2]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    loop = {"dloop": {"mode": "refine", "prefix_lengths": [1, 3]}}
    raws = {
        "dflash": tiny.raw_config("dflash", max_position_embeddings=4096),
        "dloop-selector": tiny.raw_config("dflash2", draft=loop, max_position_embeddings=4096)
        | {"architectures": ["DLoopDraftModel"]},
    }
    drafters = {name: tiny.write_drafter(base / name, raw, own_weights(raw)) for name, raw in raws.items()}
    return {"target": target, "drafters": drafters}


def own_weights(raw):
    """Random ones, whose selector scores a token and its twin alike: the walk meets ties, too."""
    weights = tiny.tensors(raw)
    for name, rows in weights.items():
        if name.endswith("codebook"):
            rows[tiny.VOCAB // 2 :] = rows[: tiny.VOCAB // 2]
    return weights


@pytest.mark.slow
def test_ties_go_to_the_lowest_id_on_every_rank(tied, features):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in (5, 9, 20)]
    asked = [{"prompt": prompt, "max_tokens": 8} for prompt in prompts]
    ranks = {}
    for count in (1, 2):
        where = TWO_RANKS if count == 2 else None
        variants = {"tied": {"tensor_parallel_size": count}}
        ranks[count] = features(variants, **tied, requests=asked, environment=where)["tied"]
    for name in tied["drafters"]:
        one, two = ranks[1][name], ranks[2][name]
        assert two["waves"] == one["waves"]
        assert [wave[0] for wave in two["drafts"]] == [wave[0] for wave in one["drafts"]]
        assert [wave[1] for wave in two["drafts"]] == [wave[0] for wave in one["drafts"]]
        ids = {token for wave in one["drafts"] for _, _, draft in wave[0] for token in draft}
        assert max(ids) < tiny.VOCAB // 2
        assert len(ids) > 5


@pytest.mark.slow
def test_pipeline_ranks_are_refused(features):
    only = {"dloop-selector": str(trained.pair("dloop-selector")[1])}
    done = features({"two": {"pipeline_parallel_size": 2}}, drafters=only, environment=TWO_RANKS)
    assert "said" in done["two"]["dloop-selector"]
    assert "[pipeline-parallel] pipeline_parallel_size = 2" in done["log"]


@pytest.mark.slow
def test_data_parallel_ranks_are_engines_of_their_own_that_draft(served, tmp_path):
    import http_server
    from conftest import write_distribution

    target, drafter = trained.pair("dloop-selector")
    options = ("--data-parallel-size", "2", "--enforce-eager")
    log, site = tmp_path / "server.log", write_distribution(tmp_path / "site")
    server = http_server.start(target, drafter, log, site=site, options=options)
    try:
        server.wait()
        asked = [one | {"ignore_eos": True, "return_token_ids": True} for one in requests()]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda one: server.complete(**one)["token_ids"], asked))
        assert answers == served["plain"]
        for engine in ("0", "1"):
            accepted = server.metric("spec_decode_num_accepted_tokens_total", engine=engine)
            assert accepted > server.metric("spec_decode_num_drafts_total", engine=engine) > 0
    finally:
        server.stop()


def config(**changes):
    """What the findings look at in a ``VllmConfig`` without any of these features."""
    parts = {
        "parallel_config": {
            "pipeline_parallel_size": 1, "data_parallel_size": 1,
            "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1,
        },
        "model_config": {"is_multimodal_model": False, "architecture": "Qwen3ForCausalLM"},
    }  # fmt: skip
    for key, value in changes.items():
        parts[key] = parts.get(key, {}) | value
    optional = dict.fromkeys(("lora_config", "kv_transfer_config"))
    return SimpleNamespace(**(optional | {key: SimpleNamespace(**fields) for key, fields in parts.items()}))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, [("pipeline-parallel", "error")]),
        ({"parallel_config": {"data_parallel_size": 2}}, [("data-parallel", "error")]),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, [("context-parallel", "error")]),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, [("context-parallel", "error")]),
        ({"model_config": {"is_multimodal_model": True}}, [("multimodal", "error")]),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, [("kv-connector", "warning")]),
        ({"kv_transfer_config": {"kv_connector": None}}, []),
        (
            {"lora_config": {"max_loras": 1}, "model_config": {"is_multimodal_model": True}},
            [("lora", "error"), ("multimodal", "error")],
        ),
    ],
)
def test_features_not_served_are_found_all_at_once(changes, found):
    from vllm_ext.features import feature_findings

    assert [(one.code, one.severity) for one in feature_findings(config(**changes))] == found
