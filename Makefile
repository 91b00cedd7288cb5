# Every target creates the environments it needs (ci/in-env) and can be run again.
.PHONY: demo test lint accept

# A real model decodes through stock vLLM on this CPU, plain and with a drafter: same text, fewer steps.
demo:
	ci/in-env vllm -- dflash-plugins demo

# One thread: tiny models gain nothing from more, and threads that wait for each other starve beside other work.
test: export OMP_NUM_THREADS = 1
test: lint
	ci/in-env core -- python -m pytest -m "not engine and not slow"
	ci/in-env vllm -- python -m pytest -m "engine and not heavy" --ignore-glob "*sglang*" tests/engine
	ci/in-env sglang -- python -m pytest -m "engine and not heavy" $(wildcard tests/engine/test_sglang_*.py)

lint:
	ci/in-env core -- ruff check .
	ci/in-env core -- mypy

# Every cell of everything that must be true. Hours; stops and goes on where it was.
accept:
	ci/accept
